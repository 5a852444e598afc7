"""Tables of a graph that is built to be served: variables of TensorFlow's own, looked up by its own
operations.

A SavedModel must answer in a process that has TensorFlow alone. So while one is exported,
`tf.get_variable` in embedding_scope() makes no `Table` but the parts of one, as a checkpoint has
them: a plain variable for each. They are never initialized here: `Saver.restore` only notes the
checkpoint, and `Saver.save` copies what the variables need from one to the other
(`collective.serving.variable_copy`).
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import resource_variable_ops

from collective.checkpoint.compatibility import column_of
from collective.checkpoint.layout import DYNAMIC, STATIC, StoredTable
from collective.checkpoint.tensor_bundle import Bundle
from collective.coordination.barrier import Steps
from collective.ops.graph_state import state_of
from collective.serving.variable_copy import Source, copy_variables
from collective.tables.served_table import ServedDynamicTable, ServedTable


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
        state_of(graph).served_from = self

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

    def _column(self, name: str, rows: int | None, dim: int, dtype: tf.DType) -> StoredTable:
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
