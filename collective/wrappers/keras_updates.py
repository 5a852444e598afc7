"""Lets Keras's optimizers update tables in a `tf.function` that eager code calls, and without one.

To an optimizer a table looks like this rank's shard, with slots as large as that. So its own update
of rows is right, if it treats every row by itself.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients import eager_gradients, loss_scaling, reduction
from collective.ops.communication import collectives
from collective.ops.graph import graphs, library_operations, nested_calls
from collective.tables.dynamic_table import DynamicTable
from collective.tables.grouping import group_traced
from collective.tables.policies import eager_steps
from collective.tables.rows import rows_in_file
from collective.tables.table import Sharded, shard_view
from collective.tables.updates.optimizer_slots import sharded_as
from collective.tables.updates.slots import Slot
from collective.tensorflow_internals.keras import package
from collective.wrappers import keras_rows, keras_rules

# Which update each row by itself, or by numbers that are the same for all rows.
BY_ROW = frozenset(
    getattr(package.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Nadam",
        "Ftrl",
        "Lion",
    )
    if hasattr(package.optimizers, name)
)


# Whether the gradients that an optimizer is given are already those of shards.
_GIVEN = contextvars.ContextVar("gradients of shards", default=False)


def shards_of(optimizer: Any, grads_and_vars: Sequence[Any]) -> list[Any]:
    """Returns gradients for an optimizer to apply in a traced function.

    Those of tables are of their shards, with the shards' shapes.

    Raises:
        NotImplementedError: it isn't where the function is traced, but in a branch or loop of it.
        ValueError: two tables have the same name.
    """
    if _GIVEN.get():
        return list(grads_and_vars)
    graph = tf.get_default_graph()
    tables = [v for g, v in grads_and_vars if g is not None and isinstance(v, Sharded)]
    if tables and not graphs.is_traced(graph):
        nested_calls.want_inlining(graph)
        raise NotImplementedError(
            f"{type(optimizer).__name__} updates the table '{tables[0].op.name}' in a branch or a "
            "loop of a tf.function. Update it directly in the function that eager code calls."
        )
    eager_steps.note_update(optimizer, tables)
    for table in tables:
        rows_in_file.note_use(graph, table)
    names = [table.op.name for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Two tables are called '{name}': their slots couldn't be told apart. Give the "
                "layers different names."
            )
    if not tables:
        return list(grads_and_vars)
    group_traced(graph)
    return [
        (_with_shape(g, v) if g is not None and isinstance(v, Sharded) else g, v)
        for g, v in reduction.of_shards(grads_and_vars)
    ]


def _with_shape(gradient: Any, table: Sharded) -> Any:
    """Returns the gradient of a shard with its shape, by which some optimizers make it a matrix."""
    if not isinstance(gradient, tf.IndexedSlices) or isinstance(table, DynamicTable):
        return gradient
    shape = tf.constant(table.shard_shape.as_list(), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def apply_gradients(
    original: Callable[..., Any], optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `apply_gradients` of the new optimizers: updates the shards of tables.

    Raises:
        NotImplementedError: it is called in a graph of TensorFlow 1; or the optimizer may not
            update each row by itself.
    """
    refuse_in_graphs(optimizer)
    grads_and_vars = list(grads_and_vars)
    if tf.executing_eagerly():

        def update(pairs: list[Any]) -> Any:
            return apply_gradients(original, optimizer, pairs, *args, **kwargs)

        return eager_gradients.apply(optimizer, grads_and_vars, update)
    tables = [v for g, v in grads_and_vars if g is not None and isinstance(v, Sharded)]
    if tables:
        if type(optimizer) not in BY_ROW:
            raise NotImplementedError(
                f"The Keras optimizer {type(optimizer).__name__} may compute something of all rows "
                f"of the table '{tables[0].op.name}', and a rank has its own only. Use one of "
                + ", ".join(sorted(kind.__name__ for kind in BY_ROW))
                + ", no subclass (Horovod's wrapper isn't needed here), or an optimizer of "
                "tf.keras.optimizers.legacy."
            )
        keras_rows.check(optimizer, tables)
        # By XLA, which knows none of the operations that the update waits for.
        optimizer.jit_compile = False
    grads_and_vars = shards_of(optimizer, grads_and_vars)
    noted = library_operations.noted_as_optimizers(tf.get_default_graph(), optimizer)
    with noted, shard_view(), keras_rows.updating(optimizer):
        with keras_rules.fusing(optimizer, grads_and_vars):
            applied = original(optimizer, grads_and_vars, *args, **kwargs)
        keras_rows.clip_constrained(grads_and_vars)
        return applied


def apply_unscaled(
    original: Callable[..., Any], optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `apply_gradients` of optimizers that scale the loss, which apply them in a branch.

    Ranks exchange the gradients before it. All take the same branch: `clipping.is_all_finite`.

    Raises:
        NotImplementedError: scope(mixed_precision='float16') scales, too; or the scale is dynamic,
            and a table, too.
    """
    grads_and_vars = list(grads_and_vars)
    dynamic = [v for g, v in grads_and_vars if g is not None and isinstance(v, DynamicTable)]
    if dynamic and optimizer.dynamic and tf.executing_eagerly_outside_functions():
        raise NotImplementedError(
            f"{type(optimizer).__name__} with a dynamic scale inserts keys of the dynamic table "
            f"'{dynamic[0].op.name}' in some steps only. Make it with dynamic=False, or give the "
            "table its number of rows."
        )
    apply = functools.partial(loss_scaling.refuse_second_scale, original, optimizer)
    if not graphs.is_traced(tf.get_default_graph()):
        return apply(grads_and_vars, *args, **kwargs)
    grads_and_vars = shards_of(optimizer, grads_and_vars)
    token = _GIVEN.set(True)
    try:
        return apply(grads_and_vars, *args, **kwargs)
    finally:
        _GIVEN.reset(token)


def scaled_loss(original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    """Replaces `get_scaled_loss`: a rank's loss is its part of the mean over the whole batch.

    So its gradients are as large as in one process, and overflow in half precision where those do.
    """
    if collectives.size() == 1:
        return original(optimizer, loss)
    scaled, ranks = original(optimizer, loss), collectives.size()
    return (lambda: scaled() / ranks) if callable(loss) else scaled / ranks


def unscaled_gradients(
    original: Callable[..., Any], optimizer: Any, gradients: Sequence[Any]
) -> list[Any]:
    """Replaces `get_unscaled_gradients`: the mean over ranks of `scaled_loss` becomes the sum."""
    unscaled = original(optimizer, gradients)
    if collectives.size() == 1:
        return list(unscaled)

    def of_all(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values * collectives.size()
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient * collectives.size()

    return [of_all(gradient) for gradient in unscaled]


def refuse_in_graphs(optimizer: Any) -> None:
    """Refuses a new optimizer in a graph of TensorFlow 1, where it updates nothing.

    Raises:
        NotImplementedError: the graph is one of TensorFlow 1.
    """
    name = type(optimizer).__name__
    if not (tf.executing_eagerly() or hasattr(tf.get_default_graph(), "outer_graph")):
        raise NotImplementedError(
            f"tf.keras.optimizers.{name} gives a graph of TensorFlow 1 no operation that updates "
            f"its variables. Use tf.keras.optimizers.legacy.{name}, or an optimizer of "
            "tf.compat.v1.train."
        )


def compute_gradients(
    original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `compute_gradients` of the new optimizers: refuses it in graphs."""
    refuse_in_graphs(optimizer)
    return original(optimizer, *args, **kwargs)


def build(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `build` of BY_ROW: slots of tables are as large as the shards.

    A function that calls it makes the variables outside of itself, as TensorFlow does with others.
    """
    with tf.init_scope(), shard_view():
        return original(optimizer, *args, **kwargs)


def add_slot(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `add_variable_from_reference`, and `add_slot` of legacy optimizers.

    A slot of a table is sharded like the table, also if a checkpoint is restored to it when it is
    made.
    """
    of = args[0] if args else kwargs.get("model_variable", kwargs.get("var"))
    if not isinstance(of, Sharded) or not of.is_eager:
        return original(optimizer, *args, **kwargs)

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        value = arguments["initial_value"]
        value = value() if callable(value) else value
        value = tf.convert_to_tensor(getattr(value, "wrapped_value", value))
        if value.shape.rank != 2:
            return next_creator(**arguments)
        if isinstance(of, DynamicTable):
            return Slot(of, value, arguments["name"])
        arguments["initial_value"] = value
        return sharded_as(of, value.shape[1], next_creator, **arguments)

    with shard_view(), tf.variable_creator_scope(create):
        return original(optimizer, *args, **kwargs)


def finalize(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `finalize_variable_values`: averages of tables are assigned to the shards."""
    with shard_view():
        return original(optimizer, *args, **kwargs)
