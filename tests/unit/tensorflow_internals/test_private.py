"""What the library uses of TensorFlow, Keras and Horovod without their promise to keep it is still
there.

What it replaces in them is held in test_replaced.py, with parameters.
"""

import ast
import importlib
import inspect
import os
from pathlib import Path

import horovod.tensorflow as hvd
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.checkpoint import checkpoint
from tensorflow.python.client import session as session_lib
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.feature_column import feature_column
from tensorflow.python.framework import indexed_slices
from tensorflow.python.ops import control_flow_ops, resource_variable_ops, variable_scope, variables
from tensorflow.python.trackable import base
from tensorflow.python.training import checkpoint_utils, monitored_session, optimizer
from tensorflow.python.training import saver as saver_lib
from tensorflow.python.util import deprecation, tf_export

from collective.tensorflow_internals import keras
from collective.tensorflow_internals.estimators import estimator as estimator_lib
from collective.tensorflow_internals.estimators import exporter, run_config, training

ROOT = Path(__file__).resolve().parents[3]


def files():
    """Returns the files of all parts that work with TensorFlow, without the links and GPU code."""
    links = {ROOT / "collective" / name for name in ("launch", "ops", "strategies")}
    aside = {*links, ROOT / "ops" / "gpu", ROOT / "ops" / "binding_checks"}
    found = [
        file
        for folder in ("collective", "strategies", "ops")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [file for file in found if not set(file.parents) & aside]


def used():
    """Returns {attribute: where} of all that begin with one underscore and aren't the product's."""
    own, found = {"_asdict", "_replace"}, {}  # of named tuples
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files()}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                own.add(node.attr)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith(("__", "_collective"))
                and node.attr not in own
            ):
                found.setdefault(node.attr, f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def probes():
    """Pairs of an object and the attributes that it must have."""
    variable = tf.get_variable("v", [2], use_resource=True)
    yield (
        tf.get_default_graph(),
        [
            "_attr_scope",
            "_attr_scope_map",
            "_current_control_dependencies",
            "_unsafe_unfinalize",
            "_get_control_flow_context",
            "_set_control_flow_context",
        ],
    )
    yield (
        tf.constant(1).op,
        [
            "_add_control_input",
            "_add_control_inputs",
            "_control_outputs",
            "_get_control_flow_context",
            "_id",
            "_original_op",
            "_remove_all_control_inputs",
            "_clear_attr",
            "_set_attr",
            "_set_device",
            "_set_func_attr",
            "_set_func_list_attr",
            "_update_input",
        ],
    )
    yield os, ["_exit"]
    yield distribute_lib, ["_DefaultReplicaContext"]
    yield (
        tf.train.CheckpointSaverHook("", save_steps=1),
        ["_checkpoint_dir", "_get_saver", "_listeners"],
    )
    yield tf.train.SecondOrStepTimer(every_steps=1), ["_last_triggered_step"]
    yield tf.float32, ["_is_ref_dtype"]
    yield variable, ["_initial_value", "_initializer_op", "_shared_name"]
    yield variable, ["_save_slice_info", "_set_save_slice_info"]
    yield variable_scope, ["_get_default_variable_store", "_PartitionInfo"]
    yield variable_scope._get_default_variable_store(), ["_vars"]
    yield variables, ["_all_saveable_objects"]
    yield deprecation, ["_PRINT_DEPRECATION_WARNINGS"]
    yield tf_export, ["_Attributes"]
    yield resource_variable_ops, ["_GatherGrad", "_variable_handle_from_shape_and_dtype"]
    yield resource_variable_ops, ["_UnreadVariable"]
    yield control_flow_ops.WhileContext(), ["_parallel_iterations"]
    yield indexed_slices, ["_indexed_slices_to_tensor"]
    yield feature_column, ["_CategoricalColumn"]
    yield session_lib, ["_FetchMapper"]
    yield monitored_session, ["_MonitoredSession", "_RecoverableSession"]
    yield tf.errors.ResourceExhaustedError(None, None, ""), ["_message"]
    yield tf2.data.Dataset.range(1), ["_variant_tensor"]
    yield tf.data.Dataset.range(1), ["_dataset"]
    yield tf2.data.Dataset.range(1).shuffle(1), ["_seed2"]
    parallel = {"num_parallel_calls": 2, "deterministic": False}
    yield tf2.data.Dataset.range(1).map(lambda x: x, **parallel), ["_deterministic"]
    saver = tf.train.Saver([variable])
    yield (
        saver,
        [
            "_builder",
            "_check_saver_def",
            "_checkpoints_to_be_deleted",
            "_filename",
            "_is_built",
            "_is_empty",
            "_keep_checkpoint_every_n_hours",
            "_last_checkpoints",
            "_max_to_keep",
            "_next_checkpoint_time",
            "_pad_step_number",
            "_reshape",
            "_restore_sequentially",
            "_save_relative_paths",
            "_sharded",
            "_var_list",
            "_write_version",
        ],
    )
    yield saver_lib.BulkSaverBuilder(), ["_build_internal"]
    yield checkpoint_utils, ["_get_checkpoint_filename"]
    yield tf.train.SessionManager(), ["_recovery_wait_secs"]
    yield optimizer, ["_OptimizableVariable"]
    adam = tf.train.AdamOptimizer(0.1)
    adam.apply_gradients([(tf.ones([2]), variable)])
    yield (
        adam,
        [
            "_beta1",
            "_beta1_t",
            "_beta2",
            "_beta2_t",
            "_epsilon",
            "_epsilon_t",
            "_lr",
            "_get_beta_accumulators",
            "_get_or_make_slot",
            "_get_or_make_slot_with_initializer",
            "_lr_t",
            "_resource_apply_sparse_duplicate_indices",
        ],
    )
    adagrad = tf.train.AdagradOptimizer(0.1)
    adagrad._prepare()
    yield adagrad, ["_learning_rate_tensor"]
    adagrad_da = tf.train.AdagradDAOptimizer(0.1, tf.train.get_or_create_global_step())
    adagrad_da._prepare()
    yield (
        adagrad_da,
        [
            "_global_step_on_worker",
            "_l1_regularization_strength",
            "_l2_regularization_strength",
            "_learning_rate_tensor",
        ],
    )
    proximal = tf.train.ProximalGradientDescentOptimizer(0.1)
    proximal._prepare()
    yield (
        proximal,
        [
            "_l1_regularization_strength_tensor",
            "_l2_regularization_strength_tensor",
            "_learning_rate_tensor",
        ],
    )
    ftrl = tf.train.FtrlOptimizer(0.1)
    ftrl._prepare()
    yield (
        ftrl,
        [
            "_adjusted_l2_regularization_strength_tensor",
            "_l1_regularization_strength_tensor",
            "_l2_shrinkage_regularization_strength_tensor",
            "_learning_rate_power_tensor",
        ],
    )
    rmsprop = tf.train.RMSPropOptimizer(0.1)
    rmsprop._prepare()
    yield rmsprop, ["_centered", "_decay_tensor", "_epsilon_tensor", "_momentum_tensor"]
    yield tf.train.MomentumOptimizer(0.1, 0.9), ["_use_nesterov"]
    yield keras.optimizer, ["_BaseOptimizer"]
    yield keras.Model, ["_flatten_layers"]
    yield keras.package.layers.Layer(), ["_non_trainable_weights", "_trainable_weights"]
    yield variable, ["_in_graph_mode", "_unique_id"]
    yield (
        tf.keras.optimizers.SGD(0.1),
        [
            "_create_all_weights",
            "_create_hypers",
            "_get_hyper",
            "_hyper",
            "_initial_decay",
            "_iterations",
            "_resource_scatter_add",
            "_resource_scatter_update",
        ],
    )
    yield keras.package.optimizers.AdamW(0.1), ["_apply_weight_decay", "_learning_rate"]
    adagrad = keras.package.optimizers.Adagrad(0.1)
    adagrad.build([variable])
    yield adagrad, ["_index_dict", "_var_key"]
    yield (
        tf2.function(lambda: 0),
        ["_autograph", "_experimental_autograph_options", "_jit_compile", "_python_function"],
    )
    loop = tf2.function(lambda x: tf2.while_loop(lambda y: y < 2.0, lambda y: y + 1.0, [x]))
    operations = loop.get_concrete_function(tf2.TensorSpec([])).graph.get_operations()
    loop = next(op for op in operations if "While" in op.type)
    yield loop, ["_body_graph", "_cond_graph", "_is_stateful"]
    yield keras.backend, ["_SEED_GENERATOR"]
    yield checkpoint, ["_execute_callbacks"]
    yield tf2.train.Checkpoint()._saver, ["_graph_view"]
    yield base.Trackable, ["_update_uid"]
    yield hvd, ["_DistributedAdasumOptimizer", "_DistributedOptimizer"]
    yield hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.1)), ["_allreduce_grads"]
    yield estimator_lib, ["_load_global_step_from_checkpoint_dir"]
    yield keras.LossesContainer, ["_conform_to_outputs"]
    yield estimator_lib.Estimator, ["_extract_batch_length"]
    yield estimator_lib.Estimator(lambda features: None), ["_warm_start_settings"]
    yield run_config.RunConfig, ["_init_distributed_setting_from_environment_var"]
    yield training, ["_NewCheckpointListenerForEvaluate", "_TrainingExecutor"]
    yield training._TrainingExecutor, ["_Evaluator"]
    listener = training._NewCheckpointListenerForEvaluate(None, None, None)
    yield listener, ["_evaluator"]
    yield exporter.BestExporter("a", lambda: None), ["_get_best_eval_result"]


# Found in the source of what makes them, since no object is at hand without running it.
WRITTEN = {
    "_inferred_steps": importlib.import_module(f"{keras.PACKAGE}.src.engine.data_adapter"),
    "_loss_fn": importlib.import_module(f"{keras.PACKAGE}.src.engine.training_v1"),
    "_training_endpoints": importlib.import_module(f"{keras.PACKAGE}.src.engine.training_v1"),
    "_training_state": importlib.import_module(f"{keras.PACKAGE}.src.engine.training"),
    "_loss_scale": keras.loss_scale_optimizer,
    "_steps_per_execution": importlib.import_module(f"{keras.PACKAGE}.src.engine.training"),
    "_eval_spec": training._TrainingExecutor,
    "_max_training_steps": training._TrainingExecutor._Evaluator,
    "_sess": tf.train.MonitoredSession,
    "_coordinated_creator": tf.train.MonitoredSession,
}


@pytest.mark.slow
def test_what_is_used_is_there():
    """If this fails after an upgrade: see what the new release has in its place, where the library
    uses it.
    """
    where, known = used(), {}
    with tf.Graph().as_default():
        for thing, names in probes():
            known.update({name: hasattr(thing, name) for name in names})
    for name, made_in in WRITTEN.items():
        known[name] = f"self.{name} =" in inspect.getsource(made_in) + inspect.getsource(
            inspect.getmodule(made_in)
        )
    gone = {name: where.get(name) for name, there in known.items() if not there}
    assert not gone, f"TensorFlow {tf.__version__} and Horovod {hvd.__version__} have no {gone}"
    new = {name: place for name, place in where.items() if name not in known}
    assert not new, f"say in probes() what has {new}"
    unused = sorted(set(known) - set(where))
    assert not unused, f"nothing uses {unused} any more"
