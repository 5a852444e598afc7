"""Defines SparseOperationKit's functions for its variables, with its names and signatures."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective import group_embedding
from collective.compat.sok_variables import DynamicVariable
from collective.strategy import CollectiveStrategy
from collective.tables import lookups
from collective.tables.table import Table
from collective.tensorflow_internals.keras import Adam as KerasAdam
from collective.tensorflow_internals.keras import OptimizerV2
from collective.train import LazyAdamOptimizer

_scope: list[Any] = []


def open_scope() -> None:
    """Opens scope() until the process ends: such scripts have none, and sum their gradients."""
    if not _scope:
        _scope.append(CollectiveStrategy().scope(embedding_gradients="sum"))
        _scope[0].__enter__()
        atexit.register(lambda: _scope.pop().__exit__(None, None, None))


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Opens scope(embedding_gradients='sum') until the process ends.

    Raises:
        ValueError: comm_tool isn't 'horovod'.
    """
    del use_legacy_optimizer
    if comm_tool != "horovod":
        raise ValueError(f"sok.init(comm_tool={comm_tool!r}): ranks exchange by 'horovod' here.")
    open_scope()


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
            "sok.lookup_sparse(use_low_frequency_filter=True) is not supported: every "
            "key is admitted."
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

    Returns None for any other variable.
    """
    return var.exported() if isinstance(var, DynamicVariable) else None


def assign(var: Any, indices: Any, values: Any) -> tf.Operation | None:
    """Returns an operation that gives keys [b] of a dynamic variable the rows [b, D].

    All ranks run it; each may give its own keys, or all the same keys. Returns None for any other
    variable.
    """
    return var.imported(indices, values) if isinstance(var, DynamicVariable) else None


def OptimizerWrapper(optimizer: Any) -> Any:  # noqa: N802 (SparseOperationKit's name)
    """Returns an optimizer that updates only the rows of a batch.

    It is the optimizer itself, except for Adam, which would move all rows: that becomes a
    `LazyAdamOptimizer` with the same rates. A Keras Adam becomes one that counts its own steps,
    too.

    Raises:
        NotImplementedError: it is Keras's Adam with a decay, or with amsgrad.
    """
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
    optimizer._create_hypers()
    wrapped = copy.copy(optimizer)
    wrapped._slots, wrapped._weights, wrapped._iterations = {}, [], None
    return wrapped


class SGD(tf.train.GradientDescentOptimizer):
    """Gradient descent with a rate that is a variable, `lr`.

    Args:
        lr: its initial value.
    """

    def __init__(self, lr: float):
        self.lr = tf.Variable(lr, trainable=False, use_resource=True, name="lr")
        super().__init__(self.lr)


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


def dump(path: str, dump_vars: Any, optimizer: Any = None) -> None:
    """Saves tables and an optimizer's variables as `path`/sok, a TensorFlow checkpoint.

    All ranks call it, in a session that is the default session.

    Raises:
        ValueError: there is no default session.
    """
    saver, session = _saver(dump_vars, optimizer)
    saver.save(session, f"{path}/sok", write_meta_graph=False)


def load(path: str, load_vars: Any, optimizer: Any = None) -> None:
    """Restores what `dump` has saved, on any number of ranks.

    Raises:
        ValueError: there is no default session.
    """
    saver, session = _saver(load_vars, optimizer)
    saver.restore(session, f"{path}/sok")
