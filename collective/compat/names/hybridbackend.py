"""The table of HybridBackend's names.

Source: the packages of `hybridbackend.tensorflow` and its tutorials.
"""

from __future__ import annotations

from collective.compat.framework import Framework, no_effect, refused, same_numbers, works
from collective.compat.names.contrib import CONTRIB
from collective.compat.names.deeprec import OF_BATCH, READS, WHOLE_ROWS

_HERE = "collective.compat.hybridbackend_functions"
_DATA = "collective.compat.hybridbackend_data"
_KERAS = "collective.compat.hybridbackend_keras.model"
_EVALUATION = "collective.compat.hybridbackend_evaluation"
_RULES = "collective.compat.deeprec_optimizers"
_NO_EFFECT = "collective.compat.no_effect"
_TF = "tensorflow.compat.v1"
_OPTIMIZERS = (
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
)

HYBRIDBACKEND = Framework(
    "hybridbackend",
    "HybridBackend",
    marks=("hybridbackend",),
    aliases=(("hb.training", "hb.train"),),
    names=(
        works("hb.scope", f"{_HERE}.scope", "scope(), or with sharding=True embedding_scope()"),
        works("hb.embedding_scope", f"{_HERE}.embedding_scope"),
        works("hb.function", f"{_HERE}.function"),
        works("hb.context", f"{_HERE}.CONTEXT"),
        works("hb.Context", f"{_HERE}.Context"),
        no_effect("hb.wraps", "every optimizer and Estimator works.", f"{_NO_EFFECT}.first"),
        *(
            no_effect(f"hb.{name}", "it tunes HybridBackend.", f"{_NO_EFFECT}.nothing")
            for name in ("enable_optimization", "disable_optimization")
        ),
        works("hb.__version__", "collective.__version__", "this library's"),
        works("hb.get_session_config", "collective.compat.session_config.config_proto"),
        no_effect(
            "hb.wraps_session_config", "scope() places what is computed.", f"{_NO_EFFECT}.first"
        ),
        refused("hybridbackend.run", "start ranks by collective launch."),
        *(
            refused(f"hb.distribute.{name}", "use horovod.tensorflow's of this name.")
            for name in ("allreduce", "allgather", "alltoall", "broadcast")
        ),
        refused("hb.distribute.Collective", "use the functions of horovod.tensorflow."),
        *(
            refused(f"hb.distribute.{name}", "tables deal keys to ranks by themselves.")
            for name in (
                "partition",
                "partition_by_modulo",
                "partition_by_dual_modulo_stage_one",
                "partition_by_dual_modulo_stage_two",
            )
        ),
        works(
            "hb.pipeline.compute_pipeline",
            f"{_HERE}.compute_pipeline",
            "the function as it is; a data_batch_count above 1 is refused",
        ),
        same_numbers("hb.estimator.Estimator", f"{_HERE}.estimator"),
        works("hb.estimator.EstimatorSpec", "collective.estimator.EstimatorSpec"),
        works("hb.estimator.RunConfig", "collective.estimator.RunConfig"),
        works("hb.estimator.train_and_evaluate", f"{_HERE}.train_and_evaluate"),
        works("hb.metrics.accuracy", f"{_TF}.metrics.accuracy", "of all ranks' records"),
        works("hb.metrics.auc", f"{_TF}.metrics.auc", "of all ranks' records"),
        refused("hb.metrics.gauc", "predict(gather=True) gives rank 0 all predictions."),
        *(works(f"hb.train.{name}", f"{_TF}.train.{name}") for name in _OPTIMIZERS),
        same_numbers("hb.train.AdamOptimizer", f"{_RULES}.AdamOptimizer", OF_BATCH),
        same_numbers("hb.train.FtrlOptimizer", f"{_RULES}.FtrlOptimizer", WHOLE_ROWS),
        works("hb.train.Saver", f"{_TF}.train.Saver"),
        works("hb.train.export", f"{_HERE}.export"),
        refused("hb.train.export_all", "call hb.train.export for each signature."),
        works("hb.train.EvaluationHook", f"{_EVALUATION}.EvaluationHook"),
        refused("hb.train.SyncReplicasOptimizer", "training is synchronous: use the optimizer."),
        refused("hb.train.Server", "there are no servers: use tf.train.MonitoredTrainingSession."),
        works("hb.train.monitored_session", f"{_TF}.train.MonitoredTrainingSession"),
        no_effect(
            "hb.train.wraps_monitored_training_session",
            "scope() makes sessions those of all ranks.",
            f"{_NO_EFFECT}.first",
        ),
        refused("hb.train.wraps_server", "there are no servers: leave it out."),
        refused("hb.train.target", "there are no servers: leave a session's master out."),
        no_effect(
            "hb.train.replace_default_saver",
            "every saver saves tables whole.",
            f"{_NO_EFFECT}.nothing",
        ),
        no_effect(
            "hb.train.StepStatHook",
            "tf.train.StepCounterHook counts steps, scope(profile=…) says where time goes.",
            f"{_NO_EFFECT}.hook",
        ),
        refused("hb.train.Policy", "use a tf.train.SessionRunHook."),
        refused("hb.train.EvaluationSpec", "give hb.train.EvaluationHook its arguments."),
        works("tf.data.make_one_shot_iterator", f"{_EVALUATION}.make_one_shot_iterator"),
        works("tf.data.make_initializable_iterator", f"{_EVALUATION}.make_initializable_iterator"),
        works("hb.data.make_one_shot_iterator", f"{_EVALUATION}.make_one_shot_iterator"),
        works("hb.data.make_initializable_iterator", f"{_EVALUATION}.make_initializable_iterator"),
        no_effect("hb.data.Iterator", "datasets prefetch by `prefetch()`.", f"{_NO_EFFECT}.first"),
        works(
            "hb.data.Dataset",
            f"{_DATA}.Dataset",
            "`from_parquet`: reads as `collective.data.parquet` does, what each rank names",
        ),
        *(
            works(f"hb.data.{name}", f"collective.compat.parquet.{name}", READS)
            for name in ("ParquetDataset", "read_parquet")
        ),
        works("hb.data.DataFrame", "collective.compat.parquet.DataFrame"),
        *(
            works(f"hb.data.{name}", f"{_DATA}.{name}")
            for name in ("parse", "rebatch", "deduplicate", "populate_defaults")
        ),
        refused("hb.data.unbatch_and_to_sparse", "use hb.data.parse, then dataset.unbatch()."),
        refused("hb.data.RebatchDataset", "batch by hb.data.rebatch."),
        refused("hb.data.SyncReplicasDataset", "ranks end together: use the dataset."),
        same_numbers(
            "hb.keras.Model",
            f"{_KERAS}.Model",
            "`fit`, `evaluate` and `predict` take datasets, and count every record of all ranks",
        ),
        works("hb.keras.layers.DenseFeatures", f"{_TF}.keras.layers.DenseFeatures"),
        refused("hb.keras.layers.dense_features", "use tf.feature_column.input_layer."),
        *CONTRIB,
    ),
)
