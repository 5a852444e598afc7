"""Every name of the frameworks' published pages is in their tables, with the arguments there."""

from __future__ import annotations

import inspect

import pytest

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK

PYTHON = "tensorflow.python"
PARQUET = f"{PYTHON}.data.experimental.ops.parquet_dataset_ops"
CONTRIB = "tf.contrib.layers.python.layers"
STRATEGY = f"{PYTHON}.distribute.group_embedding_collective_strategy.CollectiveStrategy"
READ = "fields partition_count partition_index drop_remainder num_parallel_reads"
READ += " num_sequential_reads"
ADAM = "learning_rate beta1 beta2 epsilon use_locking"
# DeepRec's documentation in English (docs/docs_en), page by page: names with their arguments.
DEEPRECS = {
    "Embedding-Variable": {
        "tf.get_embedding_variable": "name embedding_dim key_dtype value_dtype initializer "
        "regularizer trainable collections caching_device partitioner validate_shape custom_getter "
        "constraint init_data_source ev_option",
        "tf.feature_column.categorical_column_with_embedding": "key dtype partition_num ev_option",
        f"{CONTRIB}.feature_column.sparse_column_with_embedding": "column_name dtype partition_num "
        "steps_to_live init_data_source ht_partition_num evconfig ev_option",
        f"{CONTRIB}.feature_column.embedding_column": "sparse_id_column dimension initializer",
        f"{CONTRIB}.feature_column_ops.input_from_feature_columns": "columns_to_tensors "
        "feature_columns",
        f"{PYTHON}.feature_column.sequence_feature_column."
        "sequence_categorical_column_with_embedding": "key dtype",
        "tf.contrib.feature_column.sequence_input_layer": "features feature_columns",
        "tf.InitializerOption": "initializer default_value_dim default_value_no_permission",
        "tf.EmbeddingVariableOption": "init_option filter_option evict_option storage_option",
    },
    "Feature-Filter": {
        "tf.CounterFilter": "filter_freq",
        "tf.CBFFilter": "filter_freq max_element_size false_positive_probability counter_type",
        "tf.contrib.framework.python.framework.checkpoint_utils.list_variables": "",
        "tf.contrib.framework.python.framework.checkpoint_utils.load_variable": "",
    },
    "Feature-Eviction": {
        "tf.GlobalStepEvict": "steps_to_live",
        "tf.L2WeightEvict": "l2_weight_threshold",
    },
    "Group-Embedding": {
        "tf.nn.group_embedding_lookup_sparse": "params sp_ids combiners partition_strategy "
        "sp_weights name",
        "tf.feature_column.group_embedding_column_scope": "name",
        "tf.config.experimental.enable_distributed_strategy": "strategy",
    },
    "Collective-Training": {STRATEGY: ""},
    "AdamAsync-Optimizer": {"tf.train.AdamAsyncOptimizer": f"{ADAM} apply_sparse_rmsprop name"},
    "AdamW-Optimizer": {"tf.train.AdamWOptimizer": f"weight_decay {ADAM} name"},
    "AdagradDecay-Optimizer": {
        "tf.train.AdagradDecayOptimizer": "learning_rate global_step initial_accumulator_value "
        "accumulator_decay_step accumulator_decay_rate use_locking name",
    },
    "Incremental-Checkpoint": {
        "tf.train.MonitoredTrainingSession(save_incremental_checkpoint_secs=)": "",
        "tf.train.Saver(incremental_save_restore=)": "",
        "tf.train.Scaffold(incremental_save_restore=)": "",
        "tf.train.CheckpointSaverHook(incremental_save_secs=)": "",
        "tf.estimator.Estimator.export_saved_model(save_incr_model=)": "",
    },
    "Stage and Smart-Stage": {
        "tf.staged": "",
        "tf.make_prefetch_hook": "",
        "tf.train.mark_target_node": "",
        "tf.ConfigProto.session_stage_subgraph_thread_pool": "",
        "tf.OptimizerOptions.do_smart_stage": "",
        "tf.OptimizerOptions.do_smart_stage_gpu": "",
        "tf.OptimizerOptions.stage_multi_stream": "",
        "tf.RewriterConfig.use_multi_stream": "",
        "tf.RewriterConfig.multi_stream_opts": "",
    },
    "Async-Embedding-Stage": {
        "tf.OptimizerOptions.do_async_embedding": "",
        "tf.OptimizerOptions.async_embedding_options": "",
        "tf.contrib.layers.safe_embedding_lookup_sparse": "",
        "tf.contrib.layers.input_from_feature_columns": "",
        "tf.contrib.layers.sequence_input_from_feature_columns": "",
    },
    "WorkQueue": {
        f"{PYTHON}.ops.work_queue.WorkQueue": "works num_epochs shuffle seed prefix num_slices "
        "name",
        "tf.TableRecordReader": "",
    },
    "ParquetDataset": {
        f"{PARQUET}.ParquetDataset": f"filenames batch_size {READ}",
        f"{PARQUET}.read_parquet": f"batch_size {READ}",
        f"{PARQUET}.DataFrame": "",
    },
    "KafkaDataset": {"tf.data.KafkaDataset": "", "tf.data.KafkaGroupIODataset": ""},
    "Fused-Embedding": {
        "tf.feature_column.embedding_column(do_fusion=)": "",
        f"{CONTRIB}.feature_column.embedding_column": "do_fusion",
        f"{CONTRIB}.embedding_ops.fused_safe_embedding_lookup_sparse": "embedding_weights "
        "sparse_ids sparse_weights combiner default_id name partition_strategy max_norm prune",
        f"{PYTHON}.ops.embedding_ops.fused_safe_embedding_lookup_sparse": "prune",
        "tf.nn.fused_embedding_lookup_sparse": "params sp_ids sparse_weights partition_strategy "
        "name combiner max_norm default_id prune_invalid_ids blocknums",
    },
    "Multi-Hash-Variable and Adaptive-Embedding": {
        "tf.get_multihash_variable": "",
        f"{PYTHON}.feature_column.feature_column_v2.categorical_column_with_multihash": "",
        "tf.feature_column.categorical_column_with_adaptive_embedding": "",
        "tf.feature_column.input_layer(adaptive_mask_tensors=)": "",
    },
    "Executor-Optimization, GPU-MultiStream, Device-Placement": {
        "tf.ConfigProto.executor_policy": "",
        "tf.ExecutorPolicy": "",
        "tf.stream": "",
        "tf.OptimizerOptions.device_placement_optimization": "",
    },
    "Sample-awared-Graph-Compression": {
        "tf.graph_optimizer.enable_sample_awared_graph_compression": "",
    },
}
# The API references in HybridBackend's docs/, and what its packages export.
HYBRIDBACKENDS = {
    "data": {
        "hb.data.DataFrame": "",
        "hb.data.Dataset": "",
        "hb.data.ParquetDataset": f"filenames batch_size {READ}",
        "hb.data.read_parquet": f"batch_size {READ}",
        "hb.data.deduplicate": "key_idx_field_names value_field_names fields",
        "hb.data.parse": "num_parallel_calls pad",
        "hb.data.populate_defaults": "all_fields batch_size num_parallel_calls",
        "hb.data.unbatch_and_to_sparse": "",
        "hb.data.rebatch": "batch_size drop_remainder fields",
        "hb.data.RebatchDataset": "",
        "hb.data.SyncReplicasDataset": "",
        "hb.data.Iterator": "",
        "hb.data.make_one_shot_iterator": "",
        "hb.data.make_initializable_iterator": "",
    },
    "distributed": {
        "hybridbackend.run": "",
        "hb.context": "",
        "hb.Context": "",
        "hb.scope": "sharding",
        "hb.embedding_scope": "",
        "hb.metrics.accuracy": "",
        "hb.metrics.auc": "labels predictions name",
        "hb.metrics.gauc": "",
        "hb.train.EvaluationHook": "fn steps every_n_iter summary_dir history",
        "hb.train.export": "export_dir_base checkpoint_path signature_def_fn",
        "hb.train.export_all": "",
    },
    "high_level_api": {
        "hb.estimator.Estimator": "model_fn",
        "hb.estimator.EstimatorSpec": "",
        "hb.estimator.RunConfig": "",
        "hb.estimator.train_and_evaluate": "",
        "hb.wraps": "",
        "hb.keras.Model": "",
    },
    "exported": {
        f"hb.{name}": ""
        for name in (
            "function get_session_config wraps_session_config enable_optimization __version__ "
            "disable_optimization distribute.Collective distribute.allreduce distribute.alltoall "
            "distribute.allgather distribute.broadcast distribute.partition "
            "keras.layers.dense_features keras.layers.DenseFeatures pipeline.compute_pipeline "
            "train.EvaluationSpec train.Policy train.StepStatHook train.Saver train.Server "
            "train.SyncReplicasOptimizer train.monitored_session train.replace_default_saver "
            "train.target train.wraps_monitored_training_session train.wraps_server "
            "train.AdagradDAOptimizer train.AdagradOptimizer train.AdamOptimizer "
            "train.FtrlOptimizer train.GradientDescentOptimizer train.MomentumOptimizer "
            "train.ProximalAdagradOptimizer train.ProximalGradientDescentOptimizer "
            "train.RMSPropOptimizer train.AdadeltaOptimizer"
        ).split()
    },
}
# The API reference of SparseOperationKit, and DeepRec's page on its first API.
SOKS = {
    "api": {
        "sok.init": "comm_tool use_legacy_optimizer",
        "sok.Variable": "",
        "sok.DistributedVariable": "",
        "sok.LocalizedVariable": "",
        "sok.DynamicVariable": "dimension initializer var_type name constraint trainable key_type "
        "dtype mode",
        "sok.assign": "",
        "sok.export": "",
        "sok.OptimizerWrapper": "optimizer",
        "sok.SGD": "lr",
        "sok.lookup_sparse": "params sp_ids sp_weights combiners use_low_frequency_filter",
        "sok.all2all_dense_embedding": "param indices",
        "sok.sparse_read_and_evict": "",
        "sok.dump": "path dump_vars optimizer",
        "sok.load": "path load_vars optimizer",
        "sok.incremental_model_dump": "",
        "sok.filter_variables": "",
        "sok.set_comm_tool": "",
        "sok.raw_ops": "",
    },
    "first API": {
        "sok.Init": "",
        "sok.DistributedEmbedding": "",
        "sok.All2AllDenseEmbedding": "",
        "sok.tf.keras.optimizers.Adam": "",
        "sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer": "",
        "sok.split_embedding_variable_from_others": "variables",
    },
}
PAGES = [
    pytest.param(framework, names, id=f"{framework.name}: {page}")
    for framework, pages in ((DEEPREC, DEEPRECS), (HYBRIDBACKEND, HYBRIDBACKENDS), (SOK, SOKS))
    for page, names in pages.items()
]
# What a script calls of the objects that names lead to.
MEMBERS = {
    STRATEGY: "scope embedding_scope world_size rank estimator export_saved_model",
    f"{PYTHON}.ops.work_queue.WorkQueue": "take input_dataset input_producer add_summary",
    f"{PARQUET}.DataFrame": "Field",
    "hb.data.Dataset": "from_parquet from_orc",
    "hb.context": "rank world_size is_chief options",
}


@pytest.mark.parametrize("framework, names", PAGES)
def test_a_page(framework, names):
    known = {name.theirs: name for name in framework.names}
    missing = [theirs for theirs in names if theirs not in known]
    assert not missing, f"collective.compat has no row of {', '.join(missing)}"
    for theirs, arguments in names.items():
        name = known[theirs]
        if name.kind == "works" and arguments:
            parameters = inspect.signature(name.resolve()).parameters
            lacking = [argument for argument in arguments.split() if argument not in parameters]
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            assert not lacking or takes_any, f"{theirs} doesn't take {', '.join(lacking)}"


@pytest.mark.parametrize("theirs", MEMBERS)
def test_an_objects_members(theirs):
    name = next(n for n in (*DEEPREC.names, *HYBRIDBACKEND.names) if n.theirs == theirs)
    found = name.resolve()
    kind = found if isinstance(found, type) else type(found)
    assert [word for word in MEMBERS[theirs].split() if not hasattr(kind, word)] == []
