"""Lists everything that scope() replaces in TensorFlow and Keras, and why.

TensorFlow has no extension points for these. `collective.interception.patching` applies the list
when the first scope() opens, and undoes it when the last one closes. To find a row, search for the
name that it replaces. Each row's reason says what would go wrong without it.
`collective.job.training_apart.REPLACED` lists what is replaced before a scope opens, in ranks that
may never load this library. `collective.interception.checkpoint_patches` lists what saves and
restores, `distribution_patches` what is replaced of `tf.distribute`, `horovod_patches` what is
replaced in Horovod, if it is installed.
"""

from __future__ import annotations

import functools

import tensorflow
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import feature_column
from collective.checkpoint.saving import increments
from collective.coordination import session_ends, session_making, session_runs
from collective.coordination.clock import Clock
from collective.coordination.functions import first_values
from collective.estimator import python_random, refusal
from collective.gradients import clipping, loss_scaling, reduction, row_scatters
from collective.interception import hooks, rank0_output, traced_functions
from collective.interception.checkpoint_patches import CHECKPOINTS
from collective.interception.distribution_patches import DISTRIBUTION
from collective.interception.loss_patches import LOSSES
from collective.interception.patching import Patch, ReplacedValue
from collective.ops.communication.horovod_library import hvd
from collective.ops.graph import control_flow, nested_calls
from collective.plan import eager_plan
from collective.replication import assignments, eager_states, metrics, moving_averages
from collective.tables import dense_view, variable_getter
from collective.tables.table import Sharded
from collective.tables.updates import fused_updates, optimizer_slots
from collective.tensorflow_internals.estimators import estimator as estimator_lib
from collective.tensorflow_internals.feature_columns import feature_column_v2
from collective.tensorflow_internals.graphs import (
    ConcreteFunction,
    Function,
    StructuredFunctionWrapper,
    cond_v2,
    func_graph,
    gradients_util,
    while_v2,
)
from collective.tensorflow_internals.keras import (
    KERAS_3,
    BatchNormalizationBase,
    DenseFeatures,
    Embedding,
    GraphModel,
    LossScaleOptimizer,
    Metric,
    Model,
    OptimizerV2,
    PreprocessingLayer,
    TerminateOnNaN,
    backend,
    legacy_optimizer,
    loss_scale_optimizer,
    metrics_utils,
    pickle_utils,
    savers,
)
from collective.tensorflow_internals.keras import optimizer as keras_optimizer
from collective.tensorflow_internals.metrics import metrics_impl
from collective.tensorflow_internals.optimizers import clip_ops, loss_scale, optimizer
from collective.tensorflow_internals.sessions import (
    BaseSession,
    basic_session_run_hooks,
    monitored_session,
)
from collective.tensorflow_internals.sessions import writer as writer_lib
from collective.tensorflow_internals.variables import (
    BaseResourceVariable,
    VariableScope,
    slot_creator,
    state_ops,
)
from collective.tensorflow_internals.variables import moving_averages as averages_lib
from collective.tensorflow_internals.variables import resource_variable_ops as resources
from collective.train import composed_rules
from collective.wrappers import (
    horovod,
    keras,
    keras_callbacks,
    keras_fit,
    keras_functions,
    keras_layers,
    keras_loops,
    keras_metrics,
    keras_saving,
    keras_updates,
)

if hvd:
    from collective.interception import horovod_patches

# ---- Variables become tables

MISSED = "A getter in the open scope misses scope objects captured before, and other graphs."
MADE_BY_KERAS = "Keras makes weights without tf.get_variable: they would be no tables."
OPEN_ENDED = "An indicator of an open-ended column would need its number of keys."
VARIABLES = (
    Patch(VariableScope, "VariableScope.get_variable", variable_getter.get_variable, MISSED),
    *(
        Patch(kind, f"{layer}.{method}", replacement, MADE_BY_KERAS)
        for kind, layer in (
            (Embedding, "tf.keras.layers.Embedding"),
            (DenseFeatures, "keras.layers.DenseFeatures"),
        )
        for method, replacement in (
            ("__init__", keras.make_layer),
            ("add_weight", keras.add_weight),
        )
    ),
    *(
        Patch(owner, name, feature_column.indicator_column, OPEN_ENDED)
        for owner, name in (
            (feature_column_v2, "feature_column_v2.indicator_column"),
            (tf.feature_column, "tf.feature_column.indicator_column"),
            (tf2.feature_column, "tf2.feature_column.indicator_column"),
        )
    ),
)

# ---- Gradients are reduced where they are taken, and applied to the shard

NOT_REDUCED = "Gradients would be this rank's only, and lookups not grouped."
WHOLE_TABLE = "Slots and updates would be those of a whole table, not of the shard."
NO_TRAINING = "Keras's new optimizers train nothing in a graph of TensorFlow 1, without an error."
OWN_MODEL = "Eagerly each rank would train a model of its own."
OWN_LOOP = "Ranks would make different numbers of steps, and decide by losses of their own records."
OWN_FILES = "All ranks would write one file, or a SavedModel that only they can run."
TAKEN_APART = "Eagerly they are a rank's own, and a wrapper of Horovod's reduces them once more."
EARLY_OVERFLOW = "A rank's gradients would be N times as large, and overflow before one process's."
TWO_SCALES = "The loss would be scaled twice, and overflow."
NO_WORKERS = "It would wait for workers, which don't exist here."
GRADIENTS = (
    Patch(gradients_util, "gradients_util._GradientsHelper", hooks.take_gradients, NOT_REDUCED),
    Patch(tf2.GradientTape, "tf.GradientTape.gradient", hooks.take_taped_gradients, NOT_REDUCED),
    Patch(
        tf2.autodiff.ForwardAccumulator,
        "tf.autodiff.ForwardAccumulator.__init__",
        hooks.watch_forward,
        NOT_REDUCED,
    ),
    Patch(tf2.GradientTape, "tf.GradientTape.jacobian", reduction.refuse_jacobian, NOT_REDUCED),
    Patch(
        tf.train.Optimizer,
        "tf.train.Optimizer.compute_gradients",
        reduction.compute_gradients,
        OWN_MODEL,
    ),
    Patch(
        tf.train.Optimizer,
        "tf.train.Optimizer.apply_gradients",
        loss_scaling.apply_gradients,
        WHOLE_TABLE,
    ),
    Patch(
        tf.train.experimental.MixedPrecisionLossScaleOptimizer,
        "tf.train.experimental.MixedPrecisionLossScaleOptimizer.compute_gradients",
        loss_scaling.refuse_second_scale,
        TWO_SCALES,
    ),
    Patch(
        OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer.apply_gradients",
        keras.apply_gradients,
        WHOLE_TABLE,
    ),
    Patch(
        OptimizerV2,
        "tf.keras.optimizers.legacy.Optimizer.add_slot",
        keras_updates.add_slot,
        WHOLE_TABLE,
    ),
    *(
        Patch(owner, f"{name}.{method}", replacement, why)
        for owner, name in (
            (LossScaleOptimizer, "tf.keras.mixed_precision.LossScaleOptimizer"),
            (loss_scale_optimizer.LossScaleOptimizerV3, "keras.LossScaleOptimizerV3"),
        )
        for method, replacement, why in (
            ("apply_gradients", keras_updates.apply_unscaled, TWO_SCALES),
            ("get_scaled_loss", keras_updates.scaled_loss, EARLY_OVERFLOW),
            ("get_unscaled_gradients", keras_updates.unscaled_gradients, EARLY_OVERFLOW),
        )
    ),
    *(
        Patch(keras_optimizer._BaseOptimizer, f"tf.keras.optimizers.Optimizer.{name}", new, why)
        for name, new, why in (
            ("compute_gradients", keras_updates.compute_gradients, NO_TRAINING),
            ("apply_gradients", keras_updates.apply_gradients, WHOLE_TABLE),
            ("add_variable_from_reference", keras_updates.add_slot, WHOLE_TABLE),
            ("finalize_variable_values", keras_updates.finalize, WHOLE_TABLE),
        )
    ),
    *(
        Patch(kind, f"tf.keras.optimizers.{kind.__name__}.build", keras_updates.build, WHOLE_TABLE)
        for kind in sorted(keras_updates.BY_ROW, key=lambda kind: str(kind.__name__))
        if "build" in vars(kind)
    ),
    *(
        Patch(OptimizerV2, name, horovod.compute_gradients, TAKEN_APART)
        for name in (
            "tf.keras.optimizers.legacy.Optimizer.get_gradients",
            "tf.keras.optimizers.legacy.Optimizer._compute_gradients",
        )
    ),
    *(
        Patch(
            Model,
            f"tf.keras.Model.make_{kind}_function",
            functools.partial(keras_functions.make, kind),
            OWN_MODEL,
        )
        for kind in ("train", "test", "predict")
    ),
    *(
        Patch(Model, f"tf.keras.Model.{method}", replacement, OWN_LOOP)
        for method, replacement in (
            ("fit", keras_loops.fit),
            ("evaluate", keras_loops.evaluate),
            ("predict", keras_loops.predict),
            ("summary", eager_plan.summary),
            ("save", keras_saving.save),
            ("save_weights", keras_saving.save),
            ("get_metrics_result", keras_metrics.metrics_result),
            ("_validate_and_get_metrics_result", keras_metrics.epoch_logs),
        )
    ),
    Patch(
        TerminateOnNaN,
        "tf.keras.callbacks.TerminateOnNaN.on_batch_end",
        keras_callbacks.end_batch,
        OWN_LOOP,
    ),
    *(
        Patch(saver, "tf.keras.models.save_model", keras_saving.save_model, OWN_FILES)
        for saver in savers
    ),
    Patch(
        pickle_utils,
        "keras.pickle_utils.serialize_model_as_bytecode",
        keras_saving.to_bytes,
        OWN_FILES,
    ),
    *(
        Patch(GraphModel, f"tf.keras.Model.{method}", replacement, OWN_LOOP)
        for method, replacement in (
            ("_make_train_function", keras_fit.make_function),
            ("_make_test_function", keras_fit.make_function),
            ("fit", keras_fit.fit),
            ("evaluate", keras_fit.evaluate),
        )
    ),
    *(
        Patch(owner, f"keras.{owner.__name__}.{method}", keras.refuse_keras_3, OWN_MODEL)
        for owner, method in KERAS_3
    ),
    Patch(
        tf.train.SyncReplicasOptimizer,
        "tf.train.SyncReplicasOptimizer.apply_gradients",
        horovod.sync_replicas,
        NO_WORKERS,
    ),
)

# ---- Norms over tables count every rank's shard once

ONE_SHARD = "It would see only this rank's shard."
CLIPPING = (
    Patch(clip_ops, "clip_ops.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf, "tf.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf.linalg, "tf.linalg.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tf2.linalg, "tf2.linalg.global_norm", clipping.global_norm, ONE_SHARD),
    *(
        Patch(owner, f"{name}.clip_by_global_norm", clipping.clip_by_global_norm, ONE_SHARD)
        for owner, name in (
            (clip_ops, "clip_ops"),
            (tf, "tf"),
            (tf2, "tf2"),
            (tensorflow, "tensorflow"),
        )
    ),
    Patch(tensorflow.linalg, "tensorflow.linalg.global_norm", clipping.global_norm, ONE_SHARD),
    Patch(tensorflow, "tensorflow.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(tensorflow, "tensorflow.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(tf, "tf.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(tf2, "tf2.clip_by_norm", clipping.clip_by_norm, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(tf, "tf.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(tf2, "tf2.clip_by_value", clipping.clip_by_value, ONE_SHARD),
    Patch(clip_ops, "clip_ops.clip_by_average_norm", clipping.clip_by_average_norm, ONE_SHARD),
    Patch(tf, "tf.clip_by_average_norm", clipping.clip_by_average_norm, ONE_SHARD),
    Patch(loss_scale, "loss_scale._is_all_finite", clipping.is_all_finite, ONE_SHARD),
    Patch(
        loss_scale_optimizer,
        "keras.loss_scale_optimizer._is_all_finite",
        clipping.is_all_finite,
        ONE_SHARD,
    ),
)

# ---- Slots and sparse updates of tables

FIXED_SLOTS = "A dynamic table's slots would not grow with the table."
ALL_ROWS = "An update would go over all possible rows of a dynamic table."
TWICE_UNIQUE = "Rows that an exchange has already made unique would be made unique again."
NO_KERNEL = "TensorFlow couldn't update tables that are on a GPU."
MANY_UPDATES = "Each table would be updated by several operations of its own."
SPARSELY = "_resource_apply_sparse"
OPTIMIZERS = (
    Patch(
        slot_creator, "slot_creator._create_slot_var", optimizer_slots.create_slot_var, FIXED_SLOTS
    ),
    Patch(optimizer, "optimizer._get_processor", optimizer_slots.get_processor, ALL_ROWS),
    *(
        Patch(owner, "optimizer._deduplicate_indexed_slices", reduction.deduplicated, TWICE_UNIQUE)
        for owner in (optimizer, legacy_optimizer)
    ),
    Patch(
        keras_optimizer.Optimizer,
        "tf.keras.optimizers.Optimizer._deduplicate_sparse_grad",
        reduction.deduplicate_each,
        TWICE_UNIQUE,
    ),
    *(
        Patch(owner, f"tf.train.{owner.__name__}.{method}", update, MANY_UPDATES)
        for owner, method, update in (
            (
                tf.train.GradientDescentOptimizer,
                "_resource_apply_sparse_duplicate_indices",
                fused_updates.gradient_descent_update,
            ),
            (tf.train.MomentumOptimizer, SPARSELY, fused_updates.momentum_update),
            (tf.train.AdagradOptimizer, SPARSELY, fused_updates.adagrad_update),
            (tf.train.AdamOptimizer, "_apply_sparse_shared", fused_updates.adam_update),
            (tf.train.FtrlOptimizer, SPARSELY, fused_updates.ftrl_update),
            (tf.train.RMSPropOptimizer, SPARSELY, fused_updates.rmsprop_update),
        )
    ),
    *(
        Patch(owner, f"tf.train.{owner.__name__}.{method}", update, NO_KERNEL)
        for owner, update in composed_rules.UPDATES.items()
        for method in ("_resource_apply_sparse", "_resource_apply_dense")
    ),
)

# ---- Replicated variables stay equal

THIS_RANK_ONLY = "Averages and statistics would be of this rank's batches only."
PLAIN_AVERAGE = "A table's average would be a plain variable, not sharded as the table is."
TOO_LATE = "An assignment in a branch or a function could not be synced later."
WHOLE_VALUE = "A whole value would be assigned to a shard, which must take its own rows of it."
OWN_RECORDS = "A metric's value would be of this rank's records only."
OWN_RECORDS_LEARNED = "A vocabulary or a mean would be that of this rank's records only."
OWN_START = "A tape would record what a rank computes with first values of its own."
REPLICATION = (
    Patch(
        resources.ResourceVariable,
        "ResourceVariable._init_from_args",
        first_values.make,
        OWN_START,
    ),
    Patch(tf2.GradientTape, "tf.GradientTape.__enter__", first_values.start, OWN_START),
    Patch(tf2.GradientTape, "tf.GradientTape.__exit__", first_values.stop, OWN_START),
    *(
        Patch(owner, name, moving_averages.assign_moving_average, THIS_RANK_ONLY)
        for owner, name in (
            (averages_lib, "averages_lib.assign_moving_average"),
            (tf2.__internal__.train, "tf2.__internal__.train.assign_moving_average"),
        )
    ),
    Patch(
        tf.train.ExponentialMovingAverage,
        "tf.train.ExponentialMovingAverage.apply",
        moving_averages.apply_average,
        PLAIN_AVERAGE,
    ),
    *(
        Patch(BatchNormalizationBase, name, moving_averages.of_layer, THIS_RANK_ONLY)
        for name in (
            "BatchNormalizationBase._assign_moving_average",
            "BatchNormalizationBase._assign_new_value",
        )
    ),
    *(
        Patch(BatchNormalizationBase, f"BatchNormalizationBase.{name}", replacement, THIS_RANK_ONLY)
        for name, replacement in (
            ("_sync_calculate_mean_and_var", keras_layers.synchronized_moments),
            ("_no_sync_calculate_mean_and_var", keras_layers.moments),
            ("_fused_batch_norm", keras_layers.fused_batch_norm),
        )
    ),
    Patch(
        PreprocessingLayer,
        "tf.keras.layers.PreprocessingLayer.adapt",
        keras_layers.adapt,
        OWN_RECORDS_LEARNED,
    ),
    *(
        Patch(owner, f"{name}.{method}", assignments.assign, TOO_LATE)
        for owner, name in (
            (resources.ResourceVariable, "ResourceVariable"),
            (BaseResourceVariable, "BaseResourceVariable"),
            (resources._UnreadVariable, "_UnreadVariable"),
            (state_ops, "state_ops"),
            (tf, "tf"),
        )
        for method in ("assign", "assign_add", "assign_sub")
    ),
    Patch(Sharded, "Sharded.assign", hooks.assign_table, WHOLE_VALUE),
    Patch(Sharded, "Sharded.assign_add", hooks.assign_table, WHOLE_VALUE),
    Patch(Sharded, "Sharded.assign_sub", hooks.assign_table, WHOLE_VALUE),
    *(
        Patch(owner, f"{where}.scatter_{kind}{how}", row_scatters.scatter, ONE_SHARD)
        for owner, where in ((state_ops, "state_ops"), (tf, "tf"), (Sharded, "Sharded"))
        for kind, hows in (("", row_scatters.HOWS), ("nd_", ("update", "add", "sub")))
        for how in hows
    ),
    Patch(state_ops, "state_ops.assign_add", metrics.updated, OWN_RECORDS),
    Patch(state_ops, "state_ops.scatter_add", metrics.updated, OWN_RECORDS),
    Patch(Metric, "tf.keras.metrics.Metric.add_weight", metrics.add_weight, OWN_RECORDS),
    Patch(
        metrics_utils,
        "keras.metrics_utils.result_wrapper",
        keras_metrics.result_wrapper,
        OWN_RECORDS,
    ),
    Patch(resources.ResourceVariable, "ResourceVariable.assign", eager_states.assign, OWN_RECORDS),
    Patch(
        metrics_impl,
        "metrics_impl._aggregate_across_replicas",
        metrics.aggregate_across_replicas,
        OWN_RECORDS,
    ),
)

# ---- Two launches give the same results

PYTHONS_NUMBERS = "Initial values of Keras's and tf.layers' weights would differ between launches."
DRAWS = "A generator that draws would give each rank records in another order."
DETERMINISM = (
    Patch(
        backend.RandomGenerator,
        "keras.backend.RandomGenerator._create_seed",
        keras.create_seed,
        PYTHONS_NUMBERS,
    ),
    Patch(tf2.data.Dataset, "tf.data.Dataset.from_generator", python_random.from_generator, DRAWS),
)

# ---- Collectives in branches and loops

AT_ONCE = "Iterations with collectives inside would run at the same time."
NOT_SEEN = "An assignment could not tell that it is in a loop."
NO_DECIDER = "A branch would not know which operation decides about it."
CONTROL_FLOW = (
    Patch(while_v2, "while_v2._build_while_op", control_flow.build_while_op, AT_ONCE),
    Patch(while_v2, "while_v2.while_loop", traced_functions.loop, NOT_SEEN),
    Patch(cond_v2, "cond_v2.cond_v2", traced_functions.branch, NO_DECIDER),
    Patch(cond_v2, "cond_v2.indexed_case", traced_functions.branch, NO_DECIDER),
)

# ---- Ranks agree on runs

ALL_OF_GPU = "A process would use all GPUs, and take all of their memory at once."
NO_AGREEMENT = "A run would start its collectives before the ranks have agreed on it."
SEEN = "A graph would be prepared too late: a session accepts no change of what it has seen."
WHOLE_RUNS = "A part of a run would start collectives, but ranks agree on whole runs only."
LEFT_SILENTLY = "Peers would wait for a rank that has left."
RECOVERS_ALONE = "After some errors a rank would resume from the last checkpoint without its peers."
NOT_ALIKE = "At the end, some ranks would run what their hooks run, and others would not."
ONE_CHIEF = "Only one rank would be a chief; each is the chief of its own process."
INIT_FN = "An init_fn could give variables values that differ between ranks."
NO_CHIEF = "A worker would wait for a chief that shares no variables with it."
OWN_CLOCK = "Its threads would save by each rank's own clock."
SAME_STEP = "Hooks that act every so many seconds would do so at different steps."
ALL_WRITE = "Every rank would write summaries."
OUTSIDE = "Checks would execute the error that a table is to sessions outside of scope()."
SAME_INPUT = "Every rank would train on the same input, and every record would count N times."
MANAGER = tf.train.SessionManager
MONITORED = monitored_session._MonitoredSession
RECOVERABLE = monitored_session._RecoverableSession
SESSIONS = (
    Patch(BaseSession, "tf.Session.__init__", session_making.make_session, ALL_OF_GPU),
    Patch(BaseSession, "tf.Session.run", hooks.run, NO_AGREEMENT),
    Patch(BaseSession, "tf.Session._extend_graph", hooks.extend, SEEN),
    Patch(BaseSession, "tf.Session.make_callable", session_runs.make_callable, NO_AGREEMENT),
    Patch(
        BaseSession,
        "tf.Session._make_callable_from_options",
        session_runs.make_callable_from_options,
        NO_AGREEMENT,
    ),
    Patch(BaseSession, "tf.Session.partial_run_setup", session_runs.partial_run_setup, WHOLE_RUNS),
    Patch(BaseSession, "tf.Session.close", session_ends.close, LEFT_SILENTLY),
    Patch(tf.Session, "tf.Session.__exit__", session_ends.leave, LEFT_SILENTLY),
    Patch(MONITORED, "_MonitoredSession._close_internal", session_ends.end, NOT_ALIKE),
    Patch(RECOVERABLE, "_RecoverableSession.run", session_ends.run_once, RECOVERS_ALONE),
    Patch(RECOVERABLE, "_RecoverableSession.run_step_fn", session_ends.step_once, RECOVERS_ALONE),
    Patch(
        monitored_session,
        "monitored_session.MonitoredTrainingSession",
        increments.training_session,
        ONE_CHIEF,
    ),
    Patch(tf.train, "tf.train.MonitoredTrainingSession", increments.training_session, ONE_CHIEF),
    Patch(
        MANAGER, "tf.train.SessionManager.prepare_session", session_making.prepare_session, INIT_FN
    ),
    Patch(
        MANAGER,
        "tf.train.SessionManager.wait_for_session",
        session_making.wait_for_session,
        NO_CHIEF,
    ),
    Patch(tf.train.Supervisor, "tf.train.Supervisor.__init__", session_making.supervise, OWN_CLOCK),
    Patch(tf, "tf.add_check_numerics_ops", dense_view.check_numerics, OUTSIDE),
    ReplacedValue(basic_session_run_hooks, "basic_session_run_hooks.time", Clock(), SAME_STEP),
    ReplacedValue(
        writer_lib,
        "writer_lib.EventFileWriter",
        rank0_output.SilentEventWriter,
        ALL_WRITE,
        rank0_output.is_silent,
    ),
    Patch(
        estimator_lib.Estimator,
        "tf.estimator.Estimator._call_model_fn",
        refusal.call_model_fn,
        SAME_INPUT,
    ),
)

# ---- Ranks agree on calls of functions

NOT_GROUPED = "A function's lookups would not be exchanged, and its calls not be agreed on."
EACH_CALLS = "Ranks would call functions with collectives at different times, and hang."
BEFOREHAND = "Threads of TensorFlow's would make exchanges, in the middle of what ranks agree on."
NESTED = "A function that another one calls would have lookups on which no rank agrees."
FUNCTIONS = (
    Patch(func_graph, "func_graph.func_graph_from_py_func", traced_functions.trace, NOT_GROUPED),
    Patch(ConcreteFunction, "ConcreteFunction._call_flat", traced_functions.call, EACH_CALLS),
    Patch(Function, "tf.function.__call__", nested_calls.call, NESTED),
    Patch(
        StructuredFunctionWrapper,
        "StructuredFunctionWrapper.__init__",
        traced_functions.make_for_dataset,
        BEFOREHAND,
    ),
)

PATCHES = (
    *VARIABLES,
    *GRADIENTS,
    *DISTRIBUTION,
    *LOSSES,
    *CLIPPING,
    *OPTIMIZERS,
    *(horovod_patches.HOROVOD if hvd else ()),
    *REPLICATION,
    *DETERMINISM,
    *CONTROL_FLOW,
    *SESSIONS,
    *FUNCTIONS,
    *CHECKPOINTS,
)
