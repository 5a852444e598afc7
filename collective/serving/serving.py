"""Tables of a graph that is built to be served: variables of TensorFlow's own, looked up by its own
operations.

A SavedModel must answer in a process that has TensorFlow alone. So while one is exported,
`tf.get_variable` in embedding_scope() makes no `Table` but the parts of one, as a checkpoint has
them: a plain variable for each. They are never initialized here: `Saver.restore` only notes the
checkpoint, and `Saver.save` copies what the variables need from one to the other
(`collective.serving.copying`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import composite_tensor, tensor_conversion_registry
from tensorflow.python.ops import resource_variable_ops

from collective import strategies
from collective.checkpoint.bundle import Bundle
from collective.checkpoint.layout import DYNAMIC, STATIC, Column
from collective.checkpoint.matching import column_of
from collective.errors import TableError
from collective.ops import graphs, kernels, keys
from collective.ranks.steps import Steps
from collective.serving.copying import Source, copy_variables


def of(graph: tf.Graph) -> Serving | None:
    """What `graph` is served from, if it is built to be served."""
    found: Serving | None = getattr(graphs.outermost(graph), "_collective_serving", None)
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
            f"or variable. Look its rows up "
            "(tf.nn.embedding_lookup, embedding_lookup_sparse, safe_embedding_lookup_sparse, "
            "tf.gather)."
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
        owner = keys.owners(asked, self.ranks)
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
    keys, _, positions = kernels.distinct_by_owner(tf.reshape(lookup.ids, [-1]), tf.zeros_like, 1)
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


class Serving:
    """A checkpoint that is to be served, and the variables that take their values from it.

    Args:
        prefix: the checkpoint's.
        steps: in which the ranks export it.

    Raises:
        ValueError: there is no checkpoint at `prefix`.
    """

    def __init__(self, prefix: str, steps: Steps):
        self.bundle, self._steps = Bundle(prefix), steps
        self._sources: dict[str, Source] = {}

    def bind(self, graph: tf.Graph) -> None:
        """`graph` is built to be served from now on."""
        graph._collective_serving = self

    def table(self, name: str, rows: int | None, dim: int, dtype: tf.DType, **options: Any) -> Any:
        """What `tf.get_variable` and `get_embedding_variable` give for a table.

        Args:
            name: the variable's.
            rows: V; None if dynamic.
            dim: D.
            dtype: of a value.
            **options: `trainable`, `collections`: those of its variables.

        Returns:
            A `ServedTable`, or the only variable of a static table that has one part.

        Raises:
            ValueError: the checkpoint hasn't got this table, or one of another shape.
        """
        column = self._column(name, rows, dim, dtype)
        layout = self.bundle.layout
        filled = [p for p, count in enumerate(column.parts) if count]
        entries = {p: layout.entry(column, p) for p in filled}
        made = {
            p: self._variable(
                name + entry[len(column.name) :],
                entry,
                (column.parts[p], dim),
                dtype,
                column.block,
                p,
                options,
            )
            for p, entry in entries.items()
        }
        if rows is not None:
            return (
                made[0]
                if len(made) == 1
                else ServedTable(name, rows, dim, dtype, list(made.values()))
            )
        known = [
            self._variable(
                f"{name}/keys/part_{p}",
                layout.keys_entry(column, p),
                (column.parts[p],),
                tf.int64,
                column.block,
                p,
                {**options, "trainable": False},
            )
            for p in filled
        ]
        return ServedDynamicTable(
            name, dim, dtype, list(made.values()), known, filled, layout.ranks
        )

    def _column(self, name: str, rows: int | None, dim: int, dtype: tf.DType) -> Column:
        kind, mine = (DYNAMIC, ("any int64 key", dim)) if rows is None else (STATIC, (rows, dim))
        column = column_of(self.bundle, name)
        if column is None or column.name != name:
            known = sorted(c.name for c in self.bundle.layout.columns.values() if c.slot_of is None)
            raise ValueError(
                f"checkpoint '{self.bundle.prefix}' has no table '{name}'; it has "
                f"{', '.join(known) or 'no tables'}. Export with the names that were "
                f"trained."
            )
        stored = ("any int64 key" if column.rows is None else column.rows, column.dim)
        if (column.kind, stored, column.dtype) != (kind, mine, dtype.name):
            raise ValueError(
                f"table '{name}' is {kind}, [{mine[0]}, {mine[1]}] {dtype.name}, in the graph to "
                f"be served; in checkpoint "
                f"'{self.bundle.prefix}' it is {column.kind}, [{stored[0]}, {stored[1]}] "
                f"{column.dtype}. "
                "Build it as it was trained."
            )
        return column

    def _variable(
        self,
        name: str,
        entry: str,
        shape: tuple[int, ...],
        dtype: tf.DType,
        block: int,
        part: int,
        options: dict[str, Any],
    ) -> Any:
        variable = resource_variable_ops.ResourceVariable(
            initial_value=lambda: tf.zeros(shape, dtype), name=name, dtype=dtype, **options
        )
        self._sources[variable.op.name] = Source(entry, part, block)
        return variable

    # -- what Saver does in such a graph

    def source(self, prefix: str, saver: Any) -> None:
        """`Saver.restore`: the values stay where they are."""
        if tf.compat.as_str(prefix) != self.bundle.prefix:
            raise ValueError(
                f"A SavedModel of checkpoint '{self.bundle.prefix}' is being "
                f"exported; {type(saver).__name__} "
                f"can't restore '{tf.compat.as_str(prefix)}' in its graph."
            )

    def write_variables(self, session: Any, saver: Any, path: str) -> str:
        """`Saver.save`: the checkpoint `path` of the variables, on rank 0; every rank copies parts
        of it.
        """
        return copy_variables(self.bundle, self._source_of, session.graph, saver, path, self._steps)

    def _source_of(self, name: str, saved: tf.Tensor | None) -> Source | None:
        """Where what a saver has under `name` comes from, if that is a part of a table.

        A saver may restore a variable from another one's values, its moving average's
        (`ExponentialMovingAverage.variables_to_restore`): under the variable's name and what that
        adds to it.
        """
        if name in self._sources or saved is None:
            return self._sources.get(name)
        op = saved.op
        while op.type in ("Identity", "ReadVariableOp"):
            op = op.inputs[0].op
        source, added = self._sources.get(op.name), name[len(op.name) :]
        if source is None or name != op.name + added:
            return source
        column = column_of(self.bundle, source.entry)
        other = None if column is None else column_of(self.bundle, column.name + added)
        if other is None or column is None or other.parts != column.parts:
            return None
        return source._replace(entry=self.bundle.layout.entry(other, source.part))
