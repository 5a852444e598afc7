"""Lets TensorFlow's own operations on variables use all rows of a sharded one.

A read looks up every row, so it shares exchanges, agreements and gradients with the script's
lookups. A write takes the same whole value on every rank, and each rank keeps its own rows. Both
cost as much as moving the whole table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.communication import collectives, gate
from collective.ops.exchange import shard_gradients
from collective.ops.graph import control_flow, device_scopes, graph_state, graphs
from collective.ops.placement import RowPlacement
from collective.tensorflow_internals.graphs import pywrap_tfe, record, tape

WARN_ABOVE = 64 << 20  # Bytes of a table that is read as one value.
UNREAD = "/unread/"  # In the names of the operations that `unread` makes.


# Not empty while all ranks save whole tables.
_saving: list[bool] = []


@contextlib.contextmanager
def whole_saves() -> Iterator[None]:
    """Inside, tables that were made eagerly are saved whole, by all ranks together."""
    _saving.append(True)
    try:
        yield
    finally:
        _saving.pop()


def saves_whole() -> bool:
    """Tells whether all ranks save whole tables now."""
    return bool(_saving)


class ShardedRows(Protocol):
    """Describes what a dense view needs of a `collective.tables.table.Sharded`."""

    rows: Any
    dim: int
    warned_of_dense_read: bool
    dtype: Any
    op: Any
    handle: Any
    trainable: Any
    initializer: Any

    @property
    def row_placement(self) -> RowPlacement: ...


@dataclasses.dataclass
class Squares:
    """Records what a graph computes by `l2_loss`, in order.

    Attributes:
        made: the tables, and for each the identity that `l2_loss` returned.
    """

    made: list[tuple[ShardedRows, tf.Operation]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class WholeWrites:
    """Records what a function assigns to whole tables: each table with the value."""

    made: list[tuple[ShardedRows, tf.Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class LoopUses:
    """Records which tables a graph reads as one value, and writes, in which loops."""

    _read: dict[int, list[object]] = dataclasses.field(default_factory=dict)
    _written: dict[int, list[object]] = dataclasses.field(default_factory=dict)

    def reads(self, table: ShardedRows, loop: object) -> bool:
        """Notes a read; returns whether it is the value from before the loop."""
        is_written = any(other is loop for other in self._written.get(id(table), []))
        if not is_written:
            self._read.setdefault(id(table), []).append(loop)
        return not is_written

    def writes(self, table: ShardedRows, loop: object) -> None:
        """Notes a write.

        Raises:
            TableError: what was read in the loop before wouldn't change with it.
        """
        if any(other is loop for other in self._read.get(id(table), [])):
            raise TableError(
                f"table '{table.op.name}' is written in a loop that has read all of it before. "
                "Ranks read it once, outside: the next iteration wouldn't see what is written. "
                "Look up its rows there instead: "
                f"tf.nn.embedding_lookup(table, tf.range({table.rows}))."
            )
        self._written.setdefault(id(table), []).append(loop)


# What compares the values that ranks write to a table: of the layer that knows the other ranks.
_comparisons: list[Callable[..., None]] = []


def connect(compare: Callable[..., None]) -> None:
    """Has `compare(table, what, value)` called before ranks write a table eagerly."""
    _comparisons.append(compare)


def compare_eagerly(table: ShardedRows, what: str, value: tf.Tensor) -> None:
    """Returns once all ranks write this value to the table.

    Raises:
        ValueError, RankError: another rank writes another value, or does something else.
    """
    if collectives.size() > 1:
        for compare in _comparisons:
            compare(table, what, value.numpy())


def read(table: ShardedRows, name: str | None = None) -> tf.Tensor:
    """Returns all rows on every rank, [V, D]. Its gradient is a sparse gradient of the rows."""
    warn_of_size(
        table,
        "table '%s' is read as one value: each run that uses it sends all of its %.1f GB to "
        "every rank. Look up rows instead (tf.nn.embedding_lookup), or make it outside "
        "embedding_scope().",
    )
    with _outside_loops(table):
        return tf.nn.embedding_lookup(table, tf.range(table.rows, dtype=tf.int64), name=name)


@contextlib.contextmanager
def _outside_loops(table: ShardedRows) -> Iterator[None]:
    """Adds operations outside of loops, and of the branches of traced functions.

    In a loop a table would be read in every iteration, and ranks may have different numbers of
    iterations. A tape goes on recording: for it, the loop uses what is read outside. What is read
    after it is written in the loop isn't outside.
    """
    graph = tf.get_default_graph()
    around = graphs.outermost(graph)
    inside = contextlib.nullcontext() if around is graph else around.as_default()
    loop = control_flow.outermost_loop()
    if graphs.is_traced(around):
        with inside, tf.control_dependencies(None):
            yield
    elif loop is None:
        yield
    elif tf.executing_eagerly_outside_functions():
        with tf.init_scope():
            yield
    elif graph_state.of(around, LoopUses).reads(table, loop):
        with inside:
            # What the script has the loop wait for.
            before = [
                op
                for op in around._current_control_dependencies()
                if op._get_control_flow_context() is None
            ]
            with tf.control_dependencies(None), tf.control_dependencies(before):
                yield
    else:
        yield


def note_write(table: ShardedRows) -> None:
    """Notes that a graph writes the table.

    Raises:
        TableError: it has read the whole table in the same loop, which happens outside.
    """
    graph = graphs.outermost(tf.get_default_graph())
    loop = control_flow.outermost_loop()
    if loop is not None and not graphs.is_traced(graph):
        graph_state.of(graph, LoopUses).writes(table, loop)


def warn_of_size(table: ShardedRows, message: str) -> None:
    """Warns, once for a large table, about an operation on all of its rows.

    Args:
        table: the table.
        message: has places for the table's name and its size in GB.
    """
    size = table.rows * table.dim * table.dtype.size
    if size > WARN_ABOVE and not table.warned_of_dense_read:
        table.warned_of_dense_read = True
        tf.logging.warning(message, table.op.name, size / 1e9)


def unread(table: ShardedRows) -> tf.Tensor:
    """Returns an error in place of the table's value, for sessions outside of strategy.scope()."""
    message = (
        f"table '{table.op.name}' is sharded, and fetched by a session that isn't run inside "
        "`with strategy.scope():`."
    )
    with tf.init_scope(), device_scopes.on_host(), tf.name_scope(table.op.name + UNREAD):
        with tf.control_dependencies(
            [tf.raw_ops.Assert(condition=tf.constant(False), data=[message])]
        ):
            return tf.zeros([table.rows, table.dim], table.dtype)


def check_numerics(original: Any) -> Any:
    """Stands in for `tf.add_check_numerics_ops`: checks all of a graph but what `unread` has made.

    A check would execute it, and it raises an error.
    """
    graph = tf.get_default_graph()
    all_operations = graph.get_operations
    graph.get_operations = lambda: [op for op in all_operations() if UNREAD not in op.name]
    try:
        return original()
    finally:
        del graph.get_operations


def gather_nd(table: ShardedRows, indices: Any, name: str | None = None) -> tf.Tensor:
    """Looks up the rows that `indices` [..., 1 or 2] name, for `tf.gather_nd(table, indices)`."""
    indices = tf.convert_to_tensor(indices, name="indices")
    depth = tf.compat.dimension_value(indices.shape[-1])
    if depth not in (1, 2):
        return tf.gather_nd(read(table), indices, name=name)
    rows = tf.nn.embedding_lookup(table, indices[..., 0], name=name if depth == 1 else None)
    return (
        rows
        if depth == 1
        else tf.gather(rows, indices[..., 1], batch_dims=indices.shape.rank - 1, name=name)
    )


def l2_loss(table: ShardedRows, name: str | None = None) -> tf.Tensor:
    """Computes `tf.nn.l2_loss(table)`: half the sum of the squares of all rows.

    Each rank adds up its own, and no row travels.
    """
    graph = tf.get_default_graph()
    is_traced = not tf.executing_eagerly() and graphs.is_traced(graph)
    # Elsewhere a tape knows the gradient of lookups only.
    if tf.executing_eagerly() or not (is_traced or pywrap_tfe.TFE_Py_TapeSetIsEmpty()):
        return tf.nn.l2_loss(read(table), name)
    with tf.name_scope(name, "L2Loss"), record.stop_recording():
        shard = _with_scaled_gradient(
            tf.raw_ops.ReadVariableOp(resource=table.handle, dtype=table.dtype)
        )
        opened = gate.gates_of(graph).of_collective([]).zero
        value = collectives.allreduce_sum(
            [tf.nn.l2_loss(shard)], collectives.unique_name(f"{table.op.name}/l2_loss"), opened
        )[0]
        out = tf.identity(value)
    if is_traced:
        if table.trainable:
            tape.variable_accessed(table)
        # `collective.gradients.traced_gradients` takes the gradient on to the shard.
        record.record_operation("CollectiveSquares", [out], [table.handle], lambda *_: [None])
        graph.watch_variable(table)
        graph_state.of(graph, Squares).made.append((table, out.op))
    return out


@tf.custom_gradient
def _with_scaled_gradient(shard: tf.Tensor) -> Any:
    """Returns `shard`; its gradient is scaled as those of lookups are."""
    return tf.identity(
        shard
    ), lambda gradient: gradient * tf.cast(shard_gradients.gradient_scale(), gradient.dtype)


def local_rows(table: ShardedRows, value: Any) -> Any:
    """Returns this rank's rows of `value` [V, D], a tensor or an array.

    Raises:
        ValueError: it has another shape.
    """
    if not tf.TensorShape(value.shape).is_compatible_with([table.rows, table.dim]):
        raise ValueError(
            f"table '{table.op.name}' is [{table.rows}, {table.dim}], and can't be assigned a "
            f"value of shape {value.shape}: give the whole table, the same on every rank."
        )
    return value[table.row_placement.rows_of(collectives.rank())]


def agreed(table: ShardedRows, what: str) -> tf.Tensor:
    """Makes an operation after which all ranks change `table`, or none does.

    Args:
        table: a change by one rank alone would change only its shard.
        what: names the change.
    """
    opened = gate.gates_of(tf.get_default_graph()).of_collective([]).zero
    name = collectives.unique_name(f"{what}/{table.op.name}")
    with tf.name_scope(None):
        return tf.identity(opened, name=collectives.ALIKE + name)


def load(table: ShardedRows, value: Any, session: Any) -> None:
    """Loads a whole `value` for `table.load(value, session)`: every rank keeps its rows."""
    session = session or tf.get_default_session()
    if session is None:
        raise ValueError(f"table '{table.op.name}': load needs a session, or a default one.")
    array = np.asarray(value, table.dtype.as_numpy_dtype)
    session.run(table.initializer, {table.initializer.inputs[1]: local_rows(table, array)})
