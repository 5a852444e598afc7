"""Defines SparseOperationKit's functions, by its names and signatures, on tables.

Where SparseOperationKit shows a rank its shard of a variable, a table shows the whole: its shape,
`eval`, fetching it, saving it. Rows that lookups give, gradients and updates are the same.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective import embedding_variable, group_embedding
from collective.compat.framework import say_once
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy
from collective.tables.table import Table

_numbers = itertools.count()
_scope: list[Any] = []


def open_scope() -> None:
    """Opens scope() until the process ends: a script for it has none, and sums its gradients."""
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
    """Opens scope() as `init` does, and returns an operation for a session, which does nothing."""
    del options  # Sizes of batches, by which buffers are made.
    open_scope()
    return tf.no_op("sok_init")


def Variable(  # noqa: N802 (SparseOperationKit's name)
    initial_value: Any = None,
    trainable: bool = True,
    name: str | None = None,
    dtype: Any = None,
    mode: str | None = None,
    shape: Any = None,
    initializer: Any = None,
    collections: Any = None,
    constraint: Any = None,
    **ignored: Any,
) -> Any:
    """Makes a static table, sharded by rows.

    Raises:
        ValueError: it is no matrix of floating-point numbers, or has no initial value.
    """
    if mode is not None and mode.startswith("localized"):
        say_once(f"sok.Variable(mode={mode!r}) has no effect here: a table's rows are on all ranks")
    if initial_value is None and (shape is None or initializer is None):
        raise ValueError("sok.Variable is given an initial_value, or a shape and an initializer.")
    if initial_value is None:
        dtype = dtype or tf.float32
    else:
        if not isinstance(initial_value, tf.Tensor):
            initial_value = np.asarray(initial_value)
        dtype = tf.as_dtype(dtype or initial_value.dtype)
        if not dtype.is_floating:
            say_once(f"sok.Variable of {dtype.name} becomes float32: rows are trained")
            dtype = tf.float32
        initial_value = (
            tf.cast(initial_value, dtype)
            if isinstance(initial_value, tf.Tensor)
            else initial_value.astype(dtype.as_numpy_dtype)
        )
        initial_value = initial_value[None] if len(initial_value.shape) == 1 else initial_value
        if len(initial_value.shape) != 2:
            raise ValueError(f"sok.Variable is a matrix, not of shape {initial_value.shape}.")
    SCOPES.enter_embedding({})
    try:
        return tf.get_variable(
            name or f"sok_static_Variable_{next(_numbers)}",
            shape=shape if initial_value is None else None,
            dtype=dtype if initial_value is None else None,
            initializer=initializer if initial_value is None else initial_value,
            trainable=trainable is not False,
            collections=collections,
            constraint=constraint,
        )
    finally:
        SCOPES.leave_embedding()


def DynamicVariable(  # noqa: N802 (SparseOperationKit's name)
    dimension: int,
    initializer: Any = None,
    var_type: str | None = None,
    name: str | None = None,
    constraint: Any = None,
    trainable: bool = True,
    key_type: Any = None,
    dtype: Any = None,
    mode: str | None = None,
    **tuning: Any,
) -> Any:
    """Makes a dynamic table. An initializer is None, 'random', or a number as text.

    Raises:
        NotImplementedError: it is given a constraint.
    """
    del mode
    if constraint is not None:
        raise NotImplementedError(
            "sok.DynamicVariable(constraint=…) is not supported: bound weights by "
            "collective.TablePolicy(weight_bound=…)."
        )
    idle = [*(["var_type"] if var_type else []), *sorted(tuning)]
    if idle:
        say_once(
            f"sok.DynamicVariable({', '.join(idle)}) has no effect here: a table lies in the GPU's "
            "memory where tables are on a GPU, and grows"
        )
    if isinstance(initializer, str):
        is_random = initializer in ("", "random")
        initializer = None if is_random else tf.constant_initializer(float(initializer))
    return embedding_variable.get_embedding_variable(
        name or f"sok_dynamic_Variable_{next(_numbers)}",
        dimension,
        key_type or tf.int64,
        dtype or tf.float32,
        initializer,
        trainable,
    )


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
) -> Any:
    """Looks rows up and combines them, in one table or in several; default combiner 'mean'.

    Raises:
        NotImplementedError: use_low_frequency_filter is given.
    """
    if use_low_frequency_filter:
        raise NotImplementedError(
            "sok.lookup_sparse(use_low_frequency_filter=True) is not supported: every "
            "key is admitted."
        )
    is_list = isinstance(params, (list, tuple))
    tables = list(params) if is_list else [params]
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
    """Looks up rows of a dense tensor of ids."""
    return tf.nn.embedding_lookup(param, indices)


def OptimizerWrapper(optimizer: Any) -> Any:  # noqa: N802 (SparseOperationKit's name)
    """Returns the optimizer: any one updates tables."""
    return optimizer


def SGD(lr: float) -> Any:  # noqa: N802 (SparseOperationKit's name)
    """Makes a `tf.train.GradientDescentOptimizer`."""
    return tf.train.GradientDescentOptimizer(lr)


def filter_variables(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns (tables, other variables)."""
    tables = [v for v in variables if isinstance(v, Table)]
    return tables, [v for v in variables if not isinstance(v, Table)]


def _saver(variables: Any, optimizer: Any) -> tuple[Any, Any]:
    session = tf.get_default_session()
    if session is None:
        raise ValueError("sok.dump and sok.load need a session: with session.as_default(): …")
    tables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    slots = [] if optimizer is None else optimizer.variables()
    return tf.train.Saver([*tables, *slots], max_to_keep=None), session


def dump(path: str, dump_vars: Any, optimizer: Any = None) -> None:
    """Saves tables, and an optimizer's variables: a checkpoint `path`/sok, of TensorFlow's kind.

    All ranks call it, in a session that is the default one.

    Raises:
        ValueError: no session is the default one.
    """
    saver, session = _saver(dump_vars, optimizer)
    saver.save(session, f"{path}/sok", write_meta_graph=False)


def load(path: str, load_vars: Any, optimizer: Any = None) -> None:
    """Restores what `dump` has saved, on any number of ranks.

    Raises:
        ValueError: no session is the default one.
    """
    saver, session = _saver(load_vars, optimizer)
    saver.restore(session, f"{path}/sok")
