"""Keras in graphs of TensorFlow 1: its legacy optimizers update tables, its Embedding layer has
one.

`tf.keras.optimizers.legacy.…` (in `tf.compat.v1` these are `tf.keras.optimizers.…`) make slots and
updates by methods of their own, not by those of `tf.train`. The new `tf.keras.optimizers.…` don't
train in such a graph, with this library or without.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow.compat.v1 as tf
from keras.src.engine import base_layer_utils
from keras.src.layers.core import embedding
from tensorflow.python.framework.func_graph import FuncGraph

from collective.gradients.reduction import updating_shards
from collective.options import EmbeddingOptions
from collective.replication import assignments
from collective.scope import SCOPES
from collective.tables.optimizer_slots import sharded_as
from collective.tables.table import Table
from collective.tables.variable_getter import table_getter


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`legacy.Optimizer.apply_gradients`, in which tables present themselves as their shards.

    Raises:
        NotImplementedError: of a dynamic table, or with scope(local_steps=…).
    """
    if tf.executing_eagerly():
        return original(optimizer, grads_and_vars, *args, **kwargs)
    grads_and_vars = assignments.gradients(list(grads_and_vars))
    tables = [v for g, v in grads_and_vars if g is not None and isinstance(v, Table)]
    like = f"Use an optimizer of tf.compat.v1.train in the place of the Keras optimizer {type(optimizer).__name__}"
    local_steps = SCOPES.options.local_steps
    if local_steps > 1:
        raise NotImplementedError(f"{like}: scope(local_steps={local_steps}) is for these.")
    for table in tables:
        if table.rows is None:
            raise NotImplementedError(
                f"{like}, which makes no slots for the dynamic table '{table.op.name}'."
            )

    def create(next_creator: Callable[..., Any], **made: Any) -> Any:
        of = str(made.get("name")).rpartition("/")[0]
        table = next((t for t in tables if t._shared_name == of), None)
        return next_creator(**made) if table is None else sharded_as(table, next_creator, **made)

    with updating_shards(grads_and_vars), tf.variable_creator_scope(create):
        return original(optimizer, grads_and_vars, *args, **kwargs)


def trains_nothing(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`apply_gradients` of the new optimizers, and what their `minimize` begins with: plain
    TensorFlow's graphs, too, get no operation from it that would update the variables.

    Raises:
        NotImplementedError: in a graph.
    """
    if not tf.executing_eagerly() and not isinstance(tf.get_default_graph(), FuncGraph):
        name = type(optimizer).__name__
        raise NotImplementedError(
            f"tf.keras.optimizers.{name} gives a graph of TensorFlow 1 no operation that updates "
            f"its variables. Use "
            f"tf.keras.optimizers.legacy.{name}, or an optimizer of tf.compat.v1.train."
        )
    return original(optimizer, *args, **kwargs)


def add_weight(
    original: Callable[..., Any],
    layer: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`tf.keras.layers.Embedding.add_weight`, which makes its weights without `tf.get_variable`: a
    table.

    Args:
        original: not called: Keras gives its layers another base class where there is a graph.
    """
    options = SCOPES.embedding_options
    if options is not None:
        kwargs.setdefault("getter", functools.partial(_get_table, options))
    return super(embedding.Embedding, layer).add_weight(*args, **kwargs)


def _get_table(options: EmbeddingOptions, name: str, **kwargs: Any) -> Any:
    # by which its rows start, too
    name = tf.get_default_graph().unique_name(name, mark_as_used=False)
    with tf.name_scope(None):
        return table_getter(
            base_layer_utils.make_variable, name, min_rows=options.min_rows, **kwargs
        )
