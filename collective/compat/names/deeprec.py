"""The table of DeepRec's names.

Source: DeepRec's documentation (docs/docs_en) and its modelzoo.
"""

from __future__ import annotations

from collective.compat.framework import Framework, no_effect, refused, same_numbers, works
from collective.compat.names.contrib import CONTRIB, MOVED
from collective.compat.names.estimator import DNN_DTYPE, ESTIMATORS, INCREMENTS

_HERE = "collective.compat.deeprec_functions"
_STRATEGY = "tensorflow.python.distribute.group_embedding_collective_strategy"
_RULES = "collective.compat.deeprec_optimizers"
OF_BATCH = "on embedding variables `collective.train.LazyAdamOptimizer`: rows of the batch move"
WHOLE_ROWS = "on embedding variables `collective.train.GroupLassoFtrlOptimizer`, of whole rows"
_FUSED = "lookups share exchanges and are compiled operations anyway."
_STAGE = (
    "datasets prefetch by `prefetch()`; scope(prefetch_keys=True) overlaps the exchange of keys."
)
_OPS = "tensorflow.python.data.experimental.ops"
_STREAMS = "TensorFlow chooses the streams of a GPU."
_BY_SESSION = "`MonitoredTrainingSession(save_incremental_checkpoint_secs=)` saves increments."
_RESTORED = "every Saver restores a checkpoint with its increments."
READS = "reads as `collective.data.parquet` does, what each rank names; lists are ragged tensors"

DEEPREC = Framework(
    "deeprec",
    "DeepRec",
    marks=(
        "CollectiveStrategy",
        "enable_distributed_strategy",
        "hybridbackend",
        "sparse_operation_kit",
        "horovod",
    ),
    names=(
        same_numbers(
            f"{_STRATEGY}.CollectiveStrategy",
            f"{_HERE}.CollectiveStrategy",
            "`collective.CollectiveStrategy`; an Estimator's train_and_evaluate evaluates every "
            "`eval_every_n_iter` steps, or not at all",
        ),
        works(
            "tf.config.experimental.enable_distributed_strategy",
            f"{_HERE}.enable_distributed_strategy",
            "opens scope(embedding_gradients='sum'), as sok.init does",
        ),
        # Embedding variables and their options.
        *(
            works(f"tf.{option}", f"collective.{option}")
            for option in (
                "EmbeddingVariableOption",
                "InitializerOption",
                "CounterFilter",
                "CBFFilter",
                "GlobalStepEvict",
                "L2WeightEvict",
                "StorageOption",
            )
        ),
        works(
            "tf.CheckpointOption",
            "collective.CheckpointOption",
            "rows start from it, slots fresh, unless a session restores the job's own checkpoint",
        ),
        works(
            "tensorflow.core.framework.embedding.config_pb2.StorageType", "collective.StorageType"
        ),
        works(
            "tensorflow.core.framework.embedding.config_pb2.CacheType",
            "collective.CacheType",
            "rows go to files by their last use, as with LRU; a warning says so of LFU",
        ),
        *(
            works(f"tensorflow.python.ops.variables.{option}", f"collective.{option}")
            for option in ("EmbeddingVariableOption", "StorageOption")
        ),
        works(
            "tf.get_embedding_variable",
            f"{_HERE}.get_embedding_variable",
            "random initial values are those of (seed, table, key), by default of deviation 1; "
            "Glorot's scale by default_value_dim",
        ),
        *(
            works(f"{keys}.{key}", f"{_HERE}.{key}", "an empty collection, as none is needed")
            for keys in ("tf.GraphKeys", "tensorflow.python.framework.ops.GraphKeys")
            for key in ("EV_INIT_VAR_OPS", "EV_INIT_SLOT_OPS")
        ),
        refused("tf.hash_table.DistributedHashTable", "use tf.get_embedding_variable."),
        refused("tf.hash_table.FixedSizeHashTablePartitioner", "use tf.get_embedding_variable."),
        refused(
            "tf.get_dynamic_dimension_embedding_variable",
            "rows of a table have one dimension: use tf.get_embedding_variable.",
        ),
        refused(
            "tf.get_multihash_variable",
            "use tf.get_embedding_variable, which has a row for each key, or two tables of the "
            "quotient and the remainder.",
        ),
        works("tf.variable_scope", f"{_HERE}.variable_scope", "with keep_weights, for bfloat16"),
        # Columns.
        same_numbers(
            "tf.feature_column.categorical_column_with_embedding",
            f"{_HERE}.categorical_column_with_embedding",
            "dtype is tf.string by default, as there",
        ),
        works(
            "tf.feature_column.sequence_categorical_column_with_embedding",
            f"{_HERE}.sequence_categorical_column_with_embedding",
        ),
        works(
            "tensorflow.python.feature_column.sequence_feature_column."
            "sequence_categorical_column_with_embedding",
            f"{_HERE}.sequence_categorical_column_with_embedding",
        ),
        *(
            works(f"{module}.sparse_column_with_embedding", f"{_HERE}.sparse_column_with_embedding")
            for module in (
                "tf.contrib.feature_column",
                "tf.contrib.layers",
                "tf.contrib.layers.python.layers.feature_column",
            )
        ),
        *(
            refused(
                f"{module}.categorical_column_with_multihash",
                "use categorical_column_with_embedding, which has a row for each key.",
            )
            for module in (
                "tf.feature_column",
                "tensorflow.python.feature_column.feature_column_v2",
            )
        ),
        refused(
            "tf.feature_column.categorical_column_with_adaptive_embedding",
            "use categorical_column_with_embedding, or categorical_column_with_hash_bucket.",
        ),
        works(
            "tf.feature_column.group_embedding_column_scope",
            "collective.feature_column.group_embedding_column_scope",
            "all embedding columns are looked up together anyway",
        ),
        no_effect("tf.feature_column.embedding_column(do_fusion=)", _FUSED),
        no_effect("tf.feature_column.shared_embedding_columns(do_fusion=)", _FUSED),
        no_effect("tf.feature_column.linear_model(do_fusion=)", _FUSED),
        refused(
            "tf.feature_column.input_layer(adaptive_mask_tensors=)",
            "there are no adaptive embeddings; leave it out.",
        ),
        # Lookups.
        same_numbers("tf.nn.group_embedding_lookup", "collective.group_embedding_lookup"),
        same_numbers(
            "tf.nn.group_embedding_lookup_sparse", "collective.group_embedding_lookup_sparse"
        ),
        same_numbers(
            "tf.nn.fused_embedding_lookup_sparse", f"{_HERE}.fused_embedding_lookup_sparse"
        ),
        *(
            same_numbers(
                f"{module}.fused_safe_embedding_lookup_sparse",
                f"{_HERE}.fused_safe_embedding_lookup_sparse",
            )
            for module in (
                "tf.nn",
                "tensorflow.python.ops.embedding_ops",
                "tf.contrib.layers.python.layers.embedding_ops",
            )
        ),
        *(
            refused(
                f"tf.nn.{lookup}(blocknums=)", "rows of a table have one dimension; leave it out."
            )
            for lookup in ("embedding_lookup", "embedding_lookup_sparse")
        ),
        refused(
            "tf.nn.adaptive_embedding_lookup_sparse",
            "use tf.nn.embedding_lookup_sparse on a table of either kind.",
        ),
        # Optimizers.
        *(
            same_numbers(f"{module}.{optimizer}", f"{_RULES}.{optimizer}", note)
            for name, optimizer, note in (
                ("adam", "AdamOptimizer", OF_BATCH),
                ("ftrl", "FtrlOptimizer", WHOLE_ROWS),
                ("weight_decay_optimizers", "AdamWOptimizer", f"{OF_BATCH}, and all of them decay"),
            )
            for module in ("tf.train", f"tensorflow.python.training.{name}")
        ),
        *(
            same_numbers(f"{module}.{optimizer}", f"collective.train.{optimizer}")
            for name, optimizer in (
                ("adam_async", "AdamAsyncOptimizer"),
                ("adagrad_decay", "AdagradDecayOptimizer"),
                ("adagrad_decay_v2", "AdagradDecayOptimizerV2"),
            )
            for module in ("tf.train", f"tensorflow.python.training.{name}")
        ),
        # Pipelines.
        no_effect("tf.staged", _STAGE, f"{_HERE}.staged"),
        no_effect("tf.make_prefetch_hook", _STAGE, "collective.compat.no_effect.hook"),
        no_effect("tf.train.mark_target_node", _STAGE, "collective.compat.no_effect.nothing"),
        *(
            no_effect(f"tf.OptimizerOptions.{field}", why)
            for field, why in {
                "do_smart_stage": _STAGE,
                "do_smart_stage_gpu": _STAGE,
                "do_async_embedding": _STAGE,
                "async_embedding_options": _STAGE,
                "stage_subgraph_on_cpu": _STAGE,
                "stage_multi_stream": _STREAMS,
                "do_op_fusion": "TensorFlow's own graph optimizer fuses what it can.",
            }.items()
        ),
        no_effect("tf.ConfigProto.session_stage_subgraph_thread_pool", _STAGE),
        works("tf.ExecutorPolicy", "collective.compat.no_effect.ExecutorPolicy"),
        no_effect("tf.ConfigProto.executor_policy", "TensorFlow has one executor."),
        no_effect(
            "tf.OptimizerOptions.device_placement_optimization",
            "tables and their lookups have their device: `strategy.plan()` says which.",
        ),
        no_effect("tf.stream", _STREAMS, "collective.compat.no_effect.scope"),
        no_effect("tf.RewriterConfig.use_multi_stream", _STREAMS),
        no_effect("tf.RewriterConfig.multi_stream_opts", _STREAMS),
        refused(
            "tf.OptimizerOptions.micro_batch_num",
            "it changes the batch of an update: scope(local_steps=k) makes one of k batches.",
        ),
        refused(
            "tf.graph_optimizer.enable_sample_awared_graph_compression",
            "repeat a user's features for each of its items, by tf.repeat.",
        ),
        # Data.
        works(
            "tensorflow.python.ops.work_queue.WorkQueue",
            f"{_HERE}.WorkQueue",
            "`collective.data.WorkQueue`: item i goes to rank i mod N",
        ),
        *(
            refused(
                f"tf.data.{name}",
                "read messages by a client of Kafka, in tf.data.Dataset.from_generator.",
            )
            for name in ("KafkaDataset", "KafkaGroupIODataset")
        ),
        refused(
            "tf.TableRecordReader",
            "it reads tables of a cloud's service: read files, by tf.data or Parquet's names.",
        ),
        *(
            works(f"{_OPS}.parquet_dataset_ops.{name}", f"collective.compat.parquet.{name}", READS)
            for name in ("ParquetDataset", "read_parquet")
        ),
        *(
            works(f"{_OPS}.{module}.DataFrame", "collective.compat.parquet.DataFrame")
            for module in ("parquet_dataset_ops", "dataframe")
        ),
        # Checkpoints.
        works(
            "tensorflow.python.training.incremental_saver._get_incremental_saver",
            "collective.compat.deeprec_increments.get_incremental_saver",
            "`collective.checkpoint.save_increment`: next to the checkpoint that it follows",
        ),
        no_effect("tf.train.Saver(incremental_save_restore=)", _RESTORED),
        no_effect("tf.train.Scaffold(incremental_save_restore=)", _RESTORED),
        no_effect("tf.train.CheckpointSaverHook(incremental_save_secs=)", _BY_SESSION),
        *(
            works(
                f"tf.train.MonitoredTrainingSession(save_incremental_checkpoint_{unit}=)",
                "collective.checkpoint.save_increment",
                "in scope()",
            )
            for unit in ("secs", "steps")
        ),
        INCREMENTS,
        DNN_DTYPE,
        works(
            "tf.estimator.RunConfig",
            "collective.RunConfig",
            "takes save_incremental_checkpoint_secs",
        ),
        works(
            "pkg_resources.get_distribution",
            f"{_HERE}.get_distribution",
            "TensorFlow's version has the word deeprec in it, by which scripts know it",
        ),
        works("tf.ConfigProto", "collective.compat.session_config.config_proto"),
        *ESTIMATORS,
        *CONTRIB,
        *MOVED,
    ),
)
