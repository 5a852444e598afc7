"""Defines SparseOperationKit's functions for its variables, with its names and signatures."""

from __future__ import annotations

import atexit
import copy
import importlib
import os
import types
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective import group_embedding
from collective.checkpoint.functions import restores
from collective.checkpoint.functions.entries import Entry
from collective.checkpoint.functions.saves import ModelSaver
from collective.compat import script_modules
from collective.compat.sok_rows import exported, imported
from collective.compat.sok_variables import DynamicVariable
from collective.gradients import eager_table_gradient
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.strategy import CollectiveStrategy
from collective.tables import lookups
from collective.tables.table import Table
from collective.tables.updates.slots import Slot
from collective.tensorflow_internals.keras import Adam as KerasAdam
from collective.tensorflow_internals.keras import OptimizerV2, gradient_descent
from collective.tensorflow_internals.keras import optimizer as keras_optimizer
from collective.train import LazyAdamOptimizer
from collective.wrappers import keras_names, keras_rules

_scope: list[Any] = []


def __getattr__(name: str) -> Any:
    """Returns `tf_version`: the numbers of the TensorFlow that scripts see, as integers."""
    if name != "tf_version":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed = script_modules.INSTALLATION
    of_version_1 = bool(installed.frameworks) and not installed.has_version_2
    version = script_modules.VERSION if of_version_1 else tf.__version__
    return [int(number) for number in version.split("-")[0].split(".")[:2]]


def open_scope() -> None:
    """Opens scope() until the process ends: such scripts have none, and sum their gradients."""
    if not _scope:
        _scope.append(CollectiveStrategy().scope(embedding_gradients="sum"))
        _scope[0].__enter__()
        atexit.register(lambda: _scope.pop().__exit__(None, None, None))


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Opens scope(embedding_gradients='sum') until the process ends.

    Args:
        comm_tool: 'horovod'; on one rank also 'single', by which SparseOperationKit's tests for
            one process say that they exchange nothing.
        use_legacy_optimizer: whether `tf.keras.optimizers` and `tf.optimizers` name Keras's legacy
            optimizers from now on, in a script of TensorFlow 2.

    Raises:
        ValueError: comm_tool is neither of them, or is 'single' on several ranks.
    """
    collectives.init()
    ranks = collectives.size()
    if comm_tool != "horovod" and (comm_tool != "single" or ranks > 1):
        raise ValueError(
            f"sok.init(comm_tool={comm_tool!r}): {counted(ranks, 'rank')} here exchange by "
            "'horovod'."
        )
    if use_legacy_optimizer and tf.executing_eagerly_outside_functions():
        _use_legacy_optimizers()
    open_scope()


class _LegacyOptimizers(types.ModuleType):
    """Has Keras's legacy optimizers by their names, and whatever else the module has."""

    def __init__(self, module: Any):
        super().__init__(module.__name__)
        self._original = module

    def __getattr__(self, name: str) -> Any:
        module = self._original
        return getattr(module.legacy if hasattr(module.legacy, name) else module, name)


def _use_legacy_optimizers() -> None:
    tensorflow: Any = importlib.import_module("tensorflow")
    for module in (tensorflow, tensorflow.keras):
        legacy = getattr(module.optimizers, "legacy", None)
        # Keras 3 has none of them, and names only what replaced them.
        is_keras_2 = getattr(legacy, "Optimizer", None) is OptimizerV2
        if is_keras_2 and not isinstance(module.optimizers, _LegacyOptimizers):
            module.optimizers = _LegacyOptimizers(module.optimizers)


def Init(**options: Any) -> tf.Operation:  # noqa: N802 (SparseOperationKit's name)
    """Opens scope() like `init`, and returns an operation for a session that does nothing."""
    del options  # batch sizes, from which buffers are made
    open_scope()
    return tf.no_op("sok_init")


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
) -> Any:
    """Looks up rows and combines them, in one table or several; the default combiner is 'mean'.

    Raises:
        NotImplementedError: use_low_frequency_filter is given.
    """
    if use_low_frequency_filter:
        raise NotImplementedError(
            "sok.lookup_sparse(use_low_frequency_filter=True) is not supported: every key is "
            "admitted. Leave it out."
        )
    is_list = isinstance(sp_ids, (list, tuple)) or isinstance(sp_weights, tuple)
    tables = list(params) if isinstance(params, (list, tuple)) else [params]
    count = len(tables)

    def listed(value: Any, default: Any = None) -> list[Any]:
        if value is None:
            return [default] * count
        return list(value) if isinstance(value, (list, tuple)) else [value] * count

    ids = list(sp_ids) if isinstance(sp_ids, (list, tuple)) else [sp_ids]
    rows = group_embedding.group_embedding_lookup_sparse(
        tables, ids, listed(combiners, "mean"), listed(sp_weights)
    )
    return rows if is_list else rows[0]


def all2all_dense_embedding(param: Any, indices: Any) -> tf.Tensor:
    """Looks up rows for a dense tensor of ids."""
    return group_embedding.group_embedding_lookup([param], [indices])[0]


def sparse_read_and_evict(
    var: DynamicVariable, indices: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks up rows like `tf.nn.embedding_lookup`, and evicts none: the table grows.

    Args:
        var: a dynamic variable, 'hybrid'.
        indices: keys [K].
        name: the name scope.

    Returns:
        The rows [K, D], no keys [0], and no rows [0, D].

    Raises:
        TypeError: it is another kind of variable.
    """
    if not isinstance(var, DynamicVariable) or var.backend_type != "hybrid":
        raise TypeError(
            "sok.sparse_read_and_evict reads sok.DynamicVariable(var_type='hybrid'), "
            f"not '{getattr(var, 'name', var)}'."
        )
    rows = lookups.lookup_rows(var, indices, None, name)
    return rows, tf.zeros([0], var.key_type), tf.zeros([0, var.dim], var.handle_dtype)


def export(var: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns the keys of a dynamic variable on this rank, [R], and their rows, [R, D].

    For an optimizer's slot of one, these are the slot's rows. Returns None for any other variable.
    """
    if isinstance(var, Slot):
        return exported(var.table, var)
    return var.exported() if isinstance(var, DynamicVariable) else None


def assign(var: Any, indices: Any, values: Any) -> tf.Operation | None:
    """Returns an operation that gives keys [b] of a dynamic variable the rows [b, D].

    All ranks run it; each may give its own keys, or all the same keys. Eagerly it is done at once,
    and None is returned. A slot of a variable takes rows of the variable's keys. Returns None for
    any other variable.
    """
    if isinstance(var, Slot):
        return imported(var.table, var, indices, values)
    return var.imported(indices, values) if isinstance(var, DynamicVariable) else None


def OptimizerWrapper(optimizer: Any) -> Any:  # noqa: N802 (SparseOperationKit's name)
    """Returns an optimizer that updates only the rows of a batch.

    It is the optimizer itself, except for Adam, which would move all rows: that becomes a
    `LazyAdamOptimizer` with the same rates. A Keras Adam becomes one that counts its own steps,
    too. In eager code an optimizer of Keras becomes one that counts its own steps, has the same
    learning rate, and moves only the rows of a dynamic variable that a batch looks up.

    Raises:
        NotImplementedError: it is Keras's Adam with a decay, or with amsgrad, for sessions.
    """
    if tf.executing_eagerly_outside_functions():
        return _wrapped_eagerly(optimizer)
    if type(optimizer) is tf.train.AdamOptimizer:
        return LazyAdamOptimizer(
            optimizer._lr, optimizer._beta1, optimizer._beta2, optimizer._epsilon
        )
    if not isinstance(optimizer, OptimizerV2):
        return optimizer
    if type(optimizer) is KerasAdam:
        if optimizer.amsgrad or optimizer._initial_decay:
            raise NotImplementedError(
                "sok.OptimizerWrapper(tf.keras.optimizers.Adam(amsgrad=, decay=)) is not "
                "supported: leave them out, or give tf.train.AdamOptimizer a decayed learning rate."
            )
        rate, beta1, beta2 = map(optimizer._get_hyper, ("learning_rate", "beta_1", "beta_2"))
        return LazyAdamOptimizer(rate, beta1, beta2, optimizer.epsilon)
    return _copied(optimizer)


def _copied(optimizer: Any) -> Any:
    """Returns a legacy optimizer of Keras that shares rates and slots, and counts its own steps."""
    optimizer._create_hypers()
    wrapped = copy.copy(optimizer)
    wrapped._weights, wrapped._iterations = [], None
    eager_table_gradient.forget_functions(wrapped)
    return wrapped


def _wrapped_eagerly(optimizer: Any) -> Any:
    if isinstance(optimizer, OptimizerV2):
        wrapped = _copied(optimizer)
    elif isinstance(optimizer, keras_optimizer.Optimizer):
        wrapped = type(optimizer).from_config(optimizer.get_config())
        wrapped._learning_rate = optimizer._learning_rate
    else:
        return optimizer
    keras_rules.leave_other_rows(wrapped)
    return wrapped


class _SessionSGD(tf.train.GradientDescentOptimizer):
    def __init__(self, lr: float):
        self.lr = tf.Variable(lr, trainable=False, use_resource=True, name="lr")
        super().__init__(self.lr)


def SGD(lr: float) -> Any:  # noqa: N802 (SparseOperationKit's name)
    """Returns gradient descent with a rate that is a variable, `lr`.

    Args:
        lr: its initial value.
    """
    if not tf.executing_eagerly_outside_functions():
        return _SessionSGD(lr)
    optimizer = gradient_descent.SGD(lr)
    optimizer._create_hypers()
    return optimizer


def filter_variables(vars: Sequence[Any]) -> tuple[list[Any], list[Any]]:  # noqa: A002 (sok's)
    """Returns (tables, other variables)."""
    return [v for v in vars if isinstance(v, Table)], [v for v in vars if not isinstance(v, Table)]


def split_embedding_variable_from_others(
    variables: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Returns (tables, other variables)."""
    return filter_variables(variables)


def _saver(variables: Any, optimizer: Any) -> tuple[Any, Any]:
    session = tf.get_default_session()
    if session is None:
        raise ValueError("sok.dump and sok.load need a session: with session.as_default(): …")
    tables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    slots = [] if optimizer is None else optimizer.variables()
    return tf.train.Saver([*tables, *slots], max_to_keep=None), session


def _entries(variables: Any, optimizer: Any) -> list[Entry]:
    """Returns what a dump has of eager code: tables, and the variables of an optimizer."""
    tables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    entries = [Entry(table.op.name, table) for table in tables]
    if optimizer is not None:
        keras_names.build(optimizer, tables)
        entries += keras_names.entries_of_optimizer(optimizer, tables)
    return entries


def dump(path: str, dump_vars: Any, optimizer: Any = None) -> None:
    """Saves tables and an optimizer's variables as `path`/sok, a TensorFlow checkpoint.

    All ranks call it, in eager code or in a session that is the default session.

    Raises:
        ValueError: there is no default session.
    """
    if tf.executing_eagerly():
        saver = ModelSaver(os.path.join(path, "sok"), max_to_keep=None)
        saver.save(_entries(dump_vars, optimizer), None, {})
        saver.release()
        return
    saver, session = _saver(dump_vars, optimizer)
    saver.save(session, f"{path}/sok", write_meta_graph=False)


def load(path: str, load_vars: Any, optimizer: Any = None) -> None:
    """Restores what `dump` has saved, on any number of ranks.

    All ranks call it, in eager code or in a session that is the default session.

    Raises:
        ValueError: there is no default session.
        FileNotFoundError: eager code finds no dump there.
    """
    if tf.executing_eagerly():
        latest = restores.find_latest(path)
        if latest is None:
            raise FileNotFoundError(f"sok.load('{path}'): sok.dump has saved nothing there.")
        restores.restore(latest, _entries(load_vars, optimizer), ())
        return
    saver, session = _saver(load_vars, optimizer)
    saver.restore(session, f"{path}/sok")
