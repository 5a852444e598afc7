"""Lists everything that scope() replaces in TensorFlow, Keras and Horovod, and why.

There is no extension point for these. `collective.patching` applies the list when the first scope()
opens, and restores the originals when the last one closes. To find a row, search for the name of
what it replaces.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from horovod.tensorflow import functions as hvd_functions
from horovod.tensorflow import gradient_aggregation as hvd_aggregation
from horovod.tensorflow import mpi_ops
from keras.src.layers.core import embedding
from keras.src.layers.normalization import batch_normalization
from keras.src.optimizers import optimizer as keras_optimizer
from keras.src.optimizers.legacy import optimizer_v2
from tensorflow.python.client import session as session_lib
from tensorflow.python.eager import backprop
from tensorflow.python.feature_column import feature_column_v2
from tensorflow.python.ops import (
    clip_ops,
    cond_v2,
    gradients_util,
    metrics_impl,
    state_ops,
    variable_scope,
    while_v2,
)
from tensorflow.python.ops import resource_variable_ops as resources
from tensorflow.python.saved_model import builder_impl
from tensorflow.python.summary.writer import writer as writer_lib
from tensorflow.python.training import (
    adagrad,
    adam,
    basic_session_run_hooks,
    checkpoint_utils,
    ftrl,
    gradient_descent,
    momentum,
    monitored_session,
    optimizer,
    rmsprop,
    session_manager,
    slot_creator,
    supervisor,
    sync_replicas_optimizer,
    training_util,
    warm_starting_util,
)
from tensorflow.python.training import moving_averages as averages_lib
from tensorflow.python.training import saver as saver_lib
from tensorflow_estimator.python.estimator import estimator as estimator_lib

from collective import feature_column, hooks, rank0_output
from collective.checkpoint import restoring, saver, saving, warm_start
from collective.compat import horovod, keras
from collective.coordination import session_runs
from collective.estimator import refusal
from collective.gradients import clipping, reduction
from collective.ops import control_flow
from collective.patching import Patch, ReplacedValue
from collective.replication import assignments, metrics, moving_averages
from collective.serving import export
from collective.tables import fused_updates, optimizer_slots, variable_getter
from collective.tables.table import Sharded

# Which variables become tables.
OPEN_ENDED = "An indicator of an open-ended column would need its number of keys."
VARIABLES = (
    Patch(
        variable_scope.VariableScope,
        "VariableScope.get_variable",
        variable_getter.get_variable,
        "A getter in the open scope misses scope objects that were captured before, and other graphs.",
    ),
    Patch(
        embedding.Embedding,
        "tf.keras.layers.Embedding.add_weight",
        keras.add_weight,
        "Keras makes weights without tf.get_variable.",
    ),
    Patch(
        feature_column_v2,
        "feature_column_v2.indicator_column",
        feature_column.indicator_column,
        OPEN_ENDED,
    ),
    Patch(
        tf.feature_column,
        "tf.feature_column.indicator_column",
        feature_column.indicator_column,
        OPEN_ENDED,
    ),
    Patch(
        tf2.feature_column,
        "tf2.feature_column.indicator_column",
        feature_column.indicator_column,
        OPEN_ENDED,
    ),
)

# Gradients are reduced where they are taken, and applied to the shard.
TRAINS_NOTHING = (
    "Keras's new optimizers train nothing in a graph of TensorFlow 1, and say nothing of it."
)
GRADIENTS = (
    Patch(
        gradients_util,
        "gradients_util._GradientsHelper",
        hooks.take_gradients,
        "Every tf.gradients and compute_gradients ends there.",
    ),
    Patch(
        backprop.GradientTape,
        "tf.GradientTape.gradient",
        hooks.take_taped_gradients,
        "A tape computes gradients by itself.",
    ),
    Patch(
        optimizer.Optimizer,
        "tf.train.Optimizer.apply_gradients",
        reduction.apply_to_shards,
        "Slots and updates are those of the shard.",
    ),
    Patch(
        optimizer_v2.OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer.apply_gradients",
        keras.apply_gradients,
        "Keras's legacy optimizers make slots by methods of their own.",
    ),
    Patch(
        keras_optimizer._BaseOptimizer,
        "tf.keras.optimizers.Optimizer.compute_gradients",
        keras.trains_nothing,
        TRAINS_NOTHING,
    ),
    Patch(
        keras_optimizer._BaseOptimizer,
        "tf.keras.optimizers.Optimizer.apply_gradients",
        keras.trains_nothing,
        TRAINS_NOTHING,
    ),
    Patch(
        sync_replicas_optimizer.SyncReplicasOptimizer,
        "tf.train.SyncReplicasOptimizer.apply_gradients",
        horovod.sync_replicas,
        "It waits for workers that there are none of.",
    ),
)

# Norms over tables count every rank's shard once.
ONE_SHARD = "It would see this rank's shard only."
CLIPPING = (
    Patch(clip_ops, "clip_ops.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf, "tf.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf.linalg, "tf.linalg.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf2.linalg, "tf2.linalg.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(tf, "tf.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(tf2, "tf2.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(tf, "tf.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(tf2, "tf2.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_average_norm", clipping.clip_by_average_norm, ONE_SHARD),
    Patch(tf, "tf.clip_by_average_norm", clipping.clip_by_average_norm, ONE_SHARD),
)

# Slots and sparse updates of tables.
ONE_UPDATE = "Kernels update all tables in one operation."
OPTIMIZERS = (
    Patch(
        slot_creator,
        "slot_creator._create_slot_var",
        optimizer_slots.create_slot_var,
        "A dynamic table's slots are as open-ended as the table.",
    ),
    Patch(
        optimizer,
        "optimizer._get_processor",
        optimizer_slots.get_processor,
        "Nothing goes over all rows that a dynamic table could have.",
    ),
    Patch(
        optimizer,
        "optimizer._deduplicate_indexed_slices",
        reduction.deduplicated,
        "An exchange's gradient names each row once already.",
    ),
    Patch(
        gradient_descent.GradientDescentOptimizer,
        "tf.train.GradientDescentOptimizer._resource_apply_sparse_duplicate_indices",
        fused_updates.gradient_descent_update,
        ONE_UPDATE,
    ),
    Patch(
        momentum.MomentumOptimizer,
        "tf.train.MomentumOptimizer._resource_apply_sparse",
        fused_updates.momentum_update,
        ONE_UPDATE,
    ),
    Patch(
        adagrad.AdagradOptimizer,
        "tf.train.AdagradOptimizer._resource_apply_sparse",
        fused_updates.adagrad_update,
        ONE_UPDATE,
    ),
    Patch(
        adam.AdamOptimizer,
        "tf.train.AdamOptimizer._apply_sparse_shared",
        fused_updates.adam_update,
        ONE_UPDATE,
    ),
    Patch(
        ftrl.FtrlOptimizer,
        "tf.train.FtrlOptimizer._resource_apply_sparse",
        fused_updates.ftrl_update,
        ONE_UPDATE,
    ),
    Patch(
        rmsprop.RMSPropOptimizer,
        "tf.train.RMSPropOptimizer._resource_apply_sparse",
        fused_updates.rmsprop_update,
        ONE_UPDATE,
    ),
)

# What a script does with Horovod. These are functions that Horovod looks up as it needs them: a script may have
# made a wrapper, or imported its functions, before.
REDUCED_TWICE = "Gradients would be reduced once more."
REDUCED_IN_KERAS = "Horovod's Keras wrapper reduces in it."
NO_ADASUM = "Adasum of gradients that are reduced already is no Adasum."
SHARDS_OF_RANK_0 = "A broadcast would give all ranks rank 0's shards."
BEHIND_AGREEMENT = "A script's own collective must wait for the ranks' agreement, too."
HOROVOD = (
    Patch(hvd, "hvd._allreduce_cond", horovod.allreduce, REDUCED_TWICE),
    Patch(hvd, "hvd._grouped_allreduce_cond", horovod.allreduce, REDUCED_TWICE),
    Patch(
        hvd._DistributedOptimizer,
        "hvd.DistributedOptimizer.compute_gradients",
        horovod.compute_gradients,
        REDUCED_TWICE,
    ),
    Patch(
        optimizer_v2.OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer.get_gradients",
        horovod.compute_gradients,
        REDUCED_IN_KERAS,
    ),
    Patch(
        optimizer_v2.OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer._compute_gradients",
        horovod.compute_gradients,
        REDUCED_IN_KERAS,
    ),
    Patch(
        hvd._DistributedAdasumOptimizer,
        "hvd._DistributedAdasumOptimizer.compute_gradients",
        horovod.adasum,
        NO_ADASUM,
    ),
    Patch(
        hvd._DistributedAdasumOptimizer,
        "hvd._DistributedAdasumOptimizer.apply_gradients",
        horovod.adasum,
        NO_ADASUM,
    ),
    Patch(
        hvd_aggregation.LocalGradientAggregationHelper,
        "hvd_aggregation.LocalGradientAggregationHelper.compute_gradients",
        horovod.aggregate,
        "It sums gradients over batches before it reduces them.",
    ),
    Patch(
        hvd_functions,
        "hvd_functions._make_broadcast_group_fn",
        horovod.broadcast_group,
        SHARDS_OF_RANK_0,
    ),
    Patch(
        hvd_functions,
        "hvd_functions._make_inplace_broadcast_group_fn",
        horovod.broadcast_groups,
        SHARDS_OF_RANK_0,
    ),
    Patch(
        mpi_ops.MPI_LIB, "mpi_ops.MPI_LIB.horovod_allreduce", horovod.behind_gate, BEHIND_AGREEMENT
    ),
    Patch(
        mpi_ops.MPI_LIB,
        "mpi_ops.MPI_LIB.horovod_grouped_allreduce",
        horovod.behind_gate,
        BEHIND_AGREEMENT,
    ),
    Patch(
        mpi_ops.MPI_LIB, "mpi_ops.MPI_LIB.horovod_allgather", horovod.behind_gate, BEHIND_AGREEMENT
    ),
    Patch(
        mpi_ops.MPI_LIB,
        "mpi_ops.MPI_LIB.horovod_grouped_allgather",
        horovod.behind_gate,
        BEHIND_AGREEMENT,
    ),
    Patch(
        mpi_ops.MPI_LIB, "mpi_ops.MPI_LIB.horovod_broadcast", horovod.behind_gate, BEHIND_AGREEMENT
    ),
    Patch(
        mpi_ops.MPI_LIB, "mpi_ops.MPI_LIB.horovod_alltoall", horovod.behind_gate, BEHIND_AGREEMENT
    ),
    Patch(
        mpi_ops.MPI_LIB,
        "mpi_ops.MPI_LIB.horovod_reducescatter",
        horovod.behind_gate,
        BEHIND_AGREEMENT,
    ),
    Patch(
        mpi_ops.MPI_LIB,
        "mpi_ops.MPI_LIB.horovod_grouped_reducescatter",
        horovod.behind_gate,
        BEHIND_AGREEMENT,
    ),
)

# Replicated variables stay equal.
OF_ALL_RANKS = "Averages and statistics must be of what all ranks see."
NOT_LATER = "Nothing can be put in front of an assignment in a branch or a function later."
WHOLE_VALUE = "A whole value is assigned, of which each rank takes its rows."
ALL_RECORDS = "The value of a metric is that of all ranks' records."
REPLICATION = (
    Patch(
        averages_lib,
        "averages_lib.assign_moving_average",
        moving_averages.assign_moving_average,
        OF_ALL_RANKS,
    ),
    Patch(
        tf2.__internal__.train,
        "tf2.__internal__.train.assign_moving_average",
        moving_averages.assign_moving_average,
        OF_ALL_RANKS,
    ),
    Patch(
        averages_lib.ExponentialMovingAverage,
        "tf.train.ExponentialMovingAverage.apply",
        moving_averages.apply_average,
        "A table's average is sharded as the table is.",
    ),
    Patch(
        batch_normalization.BatchNormalizationBase,
        "BatchNormalizationBase._assign_moving_average",
        moving_averages.of_layer,
        OF_ALL_RANKS,
    ),
    Patch(
        batch_normalization.BatchNormalizationBase,
        "BatchNormalizationBase._assign_new_value",
        moving_averages.of_layer,
        OF_ALL_RANKS,
    ),
    Patch(
        resources.ResourceVariable,
        "resources.ResourceVariable.assign",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources.ResourceVariable,
        "resources.ResourceVariable.assign_add",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources.ResourceVariable,
        "resources.ResourceVariable.assign_sub",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources.BaseResourceVariable,
        "resources.BaseResourceVariable.assign",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources.BaseResourceVariable,
        "resources.BaseResourceVariable.assign_add",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources.BaseResourceVariable,
        "resources.BaseResourceVariable.assign_sub",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources._UnreadVariable, "resources._UnreadVariable.assign", assignments.assign, NOT_LATER
    ),
    Patch(
        resources._UnreadVariable,
        "resources._UnreadVariable.assign_add",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(
        resources._UnreadVariable,
        "resources._UnreadVariable.assign_sub",
        assignments.assign,
        NOT_LATER,
    ),
    Patch(state_ops, "state_ops.assign", assignments.assign, NOT_LATER),
    Patch(state_ops, "state_ops.assign_add", assignments.assign, NOT_LATER),
    Patch(state_ops, "state_ops.assign_sub", assignments.assign, NOT_LATER),
    Patch(tf, "tf.assign", assignments.assign, NOT_LATER),
    Patch(tf, "tf.assign_add", assignments.assign, NOT_LATER),
    Patch(tf, "tf.assign_sub", assignments.assign, NOT_LATER),
    Patch(Sharded, "Sharded.assign", assignments.assign_table, WHOLE_VALUE),
    Patch(Sharded, "Sharded.assign_add", assignments.assign_table, WHOLE_VALUE),
    Patch(Sharded, "Sharded.assign_sub", assignments.assign_table, WHOLE_VALUE),
    Patch(state_ops, "state_ops.assign_add", metrics.updated, ALL_RECORDS),
    Patch(state_ops, "state_ops.scatter_add", metrics.updated, ALL_RECORDS),
    Patch(
        metrics_impl,
        "metrics_impl._aggregate_across_replicas",
        metrics.aggregate_across_replicas,
        ALL_RECORDS,
    ),
)

# Collectives in branches and loops.
NO_DECIDER = "A branch doesn't know who decides about it."
CONTROL_FLOW = (
    Patch(
        while_v2,
        "while_v2._build_while_op",
        control_flow.build_while_op,
        "Iterations with collectives inside must not run at the same time.",
    ),
    Patch(
        while_v2,
        "while_v2.while_loop",
        control_flow.loop,
        "Assignments ask whether they are in a loop.",
    ),
    Patch(cond_v2, "cond_v2.cond_v2", control_flow.branch, NO_DECIDER),
    Patch(cond_v2, "cond_v2.indexed_case", control_flow.branch, NO_DECIDER),
)

# Runs are agreed on by all ranks.
AGREED = "Ranks agree before a run."
TOLD = "Peers are told that this rank leaves."
OWN_CHIEF = "Each rank is the chief of its own process."
SESSIONS = (
    Patch(
        session_lib.BaseSession,
        "tf.Session.__init__",
        session_runs.with_own_gpu,
        "Memory of a GPU is taken as it is needed, and a process uses one GPU.",
    ),
    Patch(session_lib.BaseSession, "tf.Session.run", hooks.run, AGREED),
    Patch(
        session_lib.BaseSession,
        "tf.Session._extend_graph",
        hooks.extend,
        "A session takes no change of what it has seen.",
    ),
    Patch(session_lib.BaseSession, "tf.Session.make_callable", session_runs.make_callable, AGREED),
    Patch(
        session_lib.BaseSession,
        "tf.Session._make_callable_from_options",
        session_runs.make_callable_from_options,
        AGREED,
    ),
    Patch(
        session_lib.BaseSession,
        "tf.Session.partial_run_setup",
        session_runs.partial_run_setup,
        "Ranks agree on whole runs only.",
    ),
    Patch(session_lib.BaseSession, "tf.Session.close", session_runs.close, TOLD),
    Patch(session_lib.Session, "tf.Session.__exit__", session_runs.leave, TOLD),
    Patch(
        monitored_session._MonitoredSession,
        "monitored_session._MonitoredSession._close_internal",
        session_runs.end,
        "What hooks run at the end, all ranks run.",
    ),
    Patch(
        monitored_session,
        "monitored_session.MonitoredTrainingSession",
        session_runs.every_rank_for_itself,
        OWN_CHIEF,
    ),
    Patch(
        tf.train, "tf.train.MonitoredTrainingSession", session_runs.every_rank_for_itself, OWN_CHIEF
    ),
    Patch(
        session_manager.SessionManager,
        "tf.train.SessionManager.prepare_session",
        session_runs.prepare_session,
        "An init_fn may give variables values of its own.",
    ),
    Patch(
        session_manager.SessionManager,
        "tf.train.SessionManager.wait_for_session",
        session_runs.wait_for_session,
        "A worker would wait for a chief that shares no variables with it.",
    ),
    Patch(
        supervisor.Supervisor,
        "tf.train.Supervisor.__init__",
        session_runs.supervise,
        "Its threads save by each rank's own clock.",
    ),
    ReplacedValue(
        basic_session_run_hooks,
        "basic_session_run_hooks.time",
        session_runs.Clock(),
        "Hooks that act every so many seconds must do so at the same step on every rank.",
    ),
    ReplacedValue(
        writer_lib,
        "writer_lib.EventFileWriter",
        rank0_output.SilentEventWriter,
        "Rank 0 alone writes summaries.",
        rank0_output.is_silent,
    ),
    Patch(
        estimator_lib.Estimator,
        "tf.estimator.Estimator._call_model_fn",
        refusal.call_model_fn,
        "It would train every rank on the same input, and count every record N times.",
    ),
)

# Every rank writes and reads its shards; all take the same checkpoint for the latest.
CHECKPOINTS = (
    Patch(
        saver_lib.Saver,
        "tf.train.Saver._build",
        saver.build,
        "Shards are saved beside what TensorFlow saves.",
    ),
    Patch(saver_lib.Saver, "tf.train.Saver.save", saving.save, "All ranks write at the same step."),
    Patch(
        saver_lib.Saver,
        "tf.train.Saver.restore",
        restoring.restore,
        "All ranks read the same checkpoint.",
    ),
    Patch(
        session_manager.SessionManager,
        "tf.train.SessionManager._restore_checkpoint",
        saver.restore_latest,
        "All ranks take the same checkpoint for the latest.",
    ),
    Patch(
        checkpoint_utils,
        "checkpoint_utils._init_from_checkpoint",
        warm_start.init_from_checkpoint,
        "Rows of a shard come from a whole table.",
    ),
    Patch(
        warm_starting_util,
        "warm_starting_util._infer_var_name",
        warm_start.infer_name,
        "A table's name isn't that of a partitioned variable.",
    ),
    Patch(training_util, "training_util.write_graph", saver.write_graph, "Rank 0 alone writes it."),
    Patch(
        builder_impl.SavedModelBuilder,
        "tf.saved_model.Builder.add_meta_graph_and_variables",
        export.add_graph,
        "A graph of shards can not be served.",
    ),
)

PATCHES = (
    *VARIABLES,
    *GRADIENTS,
    *CLIPPING,
    *OPTIMIZERS,
    *HOROVOD,
    *REPLICATION,
    *CONTROL_FLOW,
    *SESSIONS,
    *CHECKPOINTS,
)
