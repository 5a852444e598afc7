"""Tables of a graph that is built to be served."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import composite_tensor, tensor_conversion_registry

from collective import strategies
from collective.errors import TableError
from collective.ops import graphs, key_hashing, tensorflow_lookup
from collective.ops.graph_state import state_of


class ServedGraph(Protocol):
    """A checkpoint from which a graph is served: tables of the graph and its savers ask it."""

    def table(self, name: str, rows: int | None, dim: int, dtype: tf.DType, **options: Any) -> Any:
        """Makes the table `name` [rows, dim] of the checkpoint's parts."""

    def source(self, prefix: str, saver: Any) -> None:
        """Stands in for `Saver.restore`."""

    def write_variables(self, session: Any, saver: Any, path: str) -> str:
        """Stands in for `Saver.save`."""


def served_graph(graph: tf.Graph) -> ServedGraph | None:
    """Returns what `graph` is served from, if it is built to be served."""
    found: ServedGraph | None = state_of(graphs.outermost(graph)).served_from
    return found


class ServedTable(composite_tensor.CompositeTensor):
    """A table in a graph that is to be served.

    It is looked up as a `Table` is. Whatever else takes a variable for one value gets all rows of a
    static one, put together from its parts. With one part it isn't made at all: the part is the
    table. (It is no composite tensor, but TensorFlow dispatches by the types of those only.)

    Attributes:
        rows: V; None if dynamic.
        dim: D.
        shape: [V, D].
        parts: its variables, [n_p, D] each; id i is row i div P of part i mod P.
    """

    # tf.nn.safe_embedding_lookup_sparse would convert anything else to a tensor
    _should_act_as_resource_variable = True

    def __init__(
        self, name: str, rows: int | None, dim: int, dtype: tf.DType, parts: Sequence[Any]
    ):
        # as a variable has them
        self.name, self.op = f"{name}:0", types.SimpleNamespace(name=name)
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
        """[K, D], the rows of `keys` [K] int64."""
        return tf.nn.embedding_lookup(self.parts, keys, partition_strategy="mod")

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """What `tf.gather(table, indices)` calls."""
        return tf.nn.embedding_lookup(self, indices, name=name)

    def value(self, name: str | None = None) -> tf.Tensor:
        """[V, D], all rows."""
        if self.rows is None:
            self.refuse()
        return tf.nn.embedding_lookup(self, tf.range(self.rows, dtype=tf.int64), name=name)

    read_value = value

    def refuse(self) -> NoReturn:
        raise TableError(
            f"table '{self.op.name}' is served from {len(self.parts)} parts and isn't one tensor "
            "or variable. Look its rows up (tf.nn.embedding_lookup, embedding_lookup_sparse, "
            "safe_embedding_lookup_sparse, tf.gather)."
        )


class ServedDynamicTable(ServedTable):
    """A dynamic table in a graph that is to be served: a key that it doesn't have yields zeros.

    Attributes:
        parts: its variables, [n_p, D] each, without those of no rows.
        keys: [n_p] int64 variables, ascending: row i of a part is that of key i.
        numbers: which part each of them is: key k is in part mix(k) mod P.
        ranks: P, how many parts there are with the empty ones.
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
    ):
        super().__init__(name, None, dim, dtype, parts)
        self.keys, self.numbers, self.ranks = list(keys), list(numbers), ranks

    def fetch(self, asked: tf.Tensor) -> tf.Tensor:
        if not self.parts:
            return tf.zeros([tf.size(asked), self.dim], self.dtype)
        if self.ranks == 1:
            return self._found(0, asked)
        owner = key_hashing.owners(asked, self.ranks)
        split = tf.dynamic_partition(asked, owner, self.ranks)
        places = tf.dynamic_partition(tf.range(tf.size(asked)), owner, self.ranks)
        rows = [tf.zeros([tf.size(part), self.dim], self.dtype) for part in split]
        for i, number in enumerate(self.numbers):
            rows[number] = self._found(i, split[number])
        whole = tf.dynamic_stitch(places, rows)
        whole.set_shape([None, self.dim])
        return whole

    def _found(self, i: int, asked: tf.Tensor) -> tf.Tensor:
        """[K, D], the rows of `asked` [K] in part i, zeros where it has none."""
        known = self.keys[i].read_value()
        place = tf.raw_ops.LowerBound(
            sorted_inputs=known[None], values=asked[None], out_type=tf.int64
        )[0]
        place = tf.minimum(place, tf.size(known, out_type=tf.int64) - 1)
        there = tf.equal(tf.gather(known, place), asked)
        return tf.where_v2(
            there[:, None], tf.gather(self.parts[i], place), tf.zeros([], self.dtype)
        )


def look_up(lookup: strategies.Lookup) -> tf.Tensor:
    """What a lookup in a `ServedTable` returns: an exchange with nobody."""
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
