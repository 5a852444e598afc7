"""Stands in for tables in a graph that is built for serving."""

from __future__ import annotations

import dataclasses
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import tensorflow.compat.v1 as tf

from collective import strategies
from collective.errors import TableError
from collective.ops import placement
from collective.ops.counting import counted
from collective.ops.exchange import tensorflow_lookup
from collective.ops.graph import graph_state, graphs
from collective.tensorflow_internals.graphs import composite_tensor, tensor_conversion_registry


class ServedGraph(Protocol):
    """Describes a checkpoint from which a graph is served, for its tables and its savers."""

    def has_table(self, name: str) -> bool:
        """Tells whether the checkpoint has `name` as a table, not as an ordinary variable."""

    def table(
        self,
        name: str,
        rows: int | None,
        dim: int,
        dtype: tf.DType,
        unknown: float = 0.0,
        **options: Any,
    ) -> Any:
        """Makes the table `name` [rows, dim] of the checkpoint's parts."""

    def source(self, prefix: str, saver: Any) -> None:
        """Stands in for `Saver.restore`."""

    def write_variables(self, session: Any, saver: Any, path: str) -> str:
        """Stands in for `Saver.save`."""


@dataclasses.dataclass
class Serving:
    """Records the checkpoint that a graph is served from; None if it isn't built for serving."""

    checkpoint: ServedGraph | None = None


def served_graph(graph: tf.Graph) -> ServedGraph | None:
    """Returns the checkpoint from which `graph` is served; None if it isn't built for serving."""
    return graph_state.of(graphs.outermost(graph), Serving).checkpoint


def serve(graph: tf.Graph, checkpoint: ServedGraph) -> None:
    """Marks `graph` as one that is served from `checkpoint`, before its first variable."""
    graph_state.of(graph, Serving).checkpoint = checkpoint


class ServedTable(composite_tensor.CompositeTensor):
    """Stands in for a table, in a graph that is to be served.

    It is looked up like a `Table`. All other operations on a variable's value get all rows of a
    static table, assembled from its parts. If there is only one part, the part itself is the table
    and this class isn't used. (It isn't a composite tensor, but TensorFlow dispatches only by types
    of composite tensors.)

    Attributes:
        rows: V; None if dynamic.
        dim: D.
        shape: [V, D].
        parts: its variables, [n_p, D] each, which have its rows as that many ranks would.
    """

    # Else tf.nn.safe_embedding_lookup_sparse would convert the table to a tensor.
    _should_act_as_resource_variable = True

    def __init__(
        self, name: str, rows: int | None, dim: int, dtype: tf.DType, parts: Sequence[Any]
    ):
        # Variables have them, too; tf.get_variable shows where a name was taken before.
        made_at = traceback.extract_stack()[:-1]
        self.name = f"{name}:0"
        self.op = types.SimpleNamespace(name=name, traceback=made_at)
        self.rows, self.dim, self.dtype, self.parts = rows, dim, dtype, list(parts)

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([self.rows, self.dim])

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def _type_spec(self) -> NoReturn:
        self.refuse()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def fetch(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of `keys` [K] int64, [K, D]."""
        strategy = placement.static(len(self.parts)).strategy
        return tf.nn.embedding_lookup(self.parts, keys, partition_strategy=strategy)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Looks up rows, for `tf.gather(table, indices)`."""
        return tf.nn.embedding_lookup(self, indices, name=name)

    def value(self, name: str | None = None) -> tf.Tensor:
        """Returns all rows, [V, D]."""
        if self.rows is None:
            self.refuse()
        return tf.nn.embedding_lookup(self, tf.range(self.rows, dtype=tf.int64), name=name)

    read_value = value

    def refuse(self) -> NoReturn:
        raise TableError(
            f"table '{self.op.name}' is served from {counted(len(self.parts), 'part')} and isn't "
            "one tensor or variable. Look its rows up (tf.nn.embedding_lookup, "
            "embedding_lookup_sparse, safe_embedding_lookup_sparse, tf.gather)."
        )


class ServedDynamicTable(ServedTable):
    """Stands in for a dynamic table; an unknown key yields zeros, or another number.

    Attributes:
        parts: its variables, [n_p, D] each, without the empty ones.
        keys: [n_p] int64 variables, ascending: row i of a part is that of key i.
        numbers: the parts' numbers: keys are placed on parts as on ranks.
        ranks: P, the number of parts with the empty ones.
        unknown: the value of all elements that an unknown key reads.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        dtype: tf.DType,
        parts: Sequence[Any],
        keys: Sequence[Any],
        numbers: Sequence[int],
        ranks: int,
        unknown: float = 0.0,
    ):
        super().__init__(name, None, dim, dtype, parts)
        self.keys, self.numbers, self.ranks = list(keys), list(numbers), ranks
        self.unknown = unknown

    def fetch(self, keys: tf.Tensor) -> tf.Tensor:
        if not self.parts:
            return self._unknown_rows(keys)
        if self.ranks == 1:
            return self._rows_in_part(0, keys)
        owner = placement.dynamic(self.ranks).owner_tensor(keys)
        split = tf.dynamic_partition(keys, owner, self.ranks)
        places = tf.dynamic_partition(tf.range(tf.size(keys)), owner, self.ranks)
        rows = [self._unknown_rows(part) for part in split]
        for i, number in enumerate(self.numbers):
            rows[number] = self._rows_in_part(i, split[number])
        stitched = tf.dynamic_stitch(places, rows)
        stitched.set_shape([None, self.dim])
        return stitched

    def _unknown_rows(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of unknown `keys` [K], [K, D]."""
        return tf.fill([tf.size(keys), self.dim], tf.constant(self.unknown, self.dtype))

    def _rows_in_part(self, i: int, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of `keys` [K] in part i, [K, D]; `unknown` for keys that it lacks."""
        part_keys = self.keys[i].read_value()
        position = tf.raw_ops.LowerBound(
            sorted_inputs=part_keys[None], values=keys[None], out_type=tf.int64
        )[0]
        position = tf.minimum(position, tf.size(part_keys, out_type=tf.int64) - 1)
        is_present = tf.equal(tf.gather(part_keys, position), keys)
        return tf.where_v2(
            is_present[:, None],
            tf.gather(self.parts[i], position),
            tf.constant(self.unknown, self.dtype),
        )


def look_up(lookup: strategies.Lookup) -> tf.Tensor:
    """Returns the rows of a lookup in a `ServedTable`, for which nothing is exchanged."""
    keys, _, positions = tensorflow_lookup.distinct_by_owner(
        tf.reshape(lookup.ids, [-1]), tf.zeros_like, 1
    )
    return lookup.combined(lookup.table.fetch(keys), positions)


def _convert(
    table: ServedTable, dtype: Any = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    return table.value(name)


def _operator(name: str) -> Any:
    def operate(table: ServedTable, *args: Any, **kwargs: Any) -> Any:
        return getattr(tf.Tensor, name)(table.value(), *args, **kwargs)

    return operate


tensor_conversion_registry.register_tensor_conversion_function(ServedTable, _convert)
for _name in tf.Tensor.OVERLOADABLE_OPERATORS:
    setattr(ServedTable, _name, _operator(_name))
