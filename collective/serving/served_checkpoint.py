"""Builds the tables of a graph for serving from TensorFlow's own variables.

A SavedModel must work in a process that has only TensorFlow. So during an export, `tf.get_variable`
in embedding_scope() doesn't make a `Table` but its parts in the checkpoint: a plain variable for
each. They are never initialized here: `Saver.restore` only notes the checkpoint, and `Saver.save`
copies what the variables need from one to the other (`collective.serving.variable_copy`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import DYNAMIC, STATIC, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading.compatibility import find_stored_table
from collective.coordination.barrier import Steps
from collective.serving.base_version import BaseVersion
from collective.serving.table_record import TableRecord
from collective.serving.variable_copy import CopiedVariables, TablePart, copy_variables
from collective.tables import served_table
from collective.tables.served_table import ServedDynamicTable, ServedTable
from collective.tensorflow_internals.variables import resource_variable_ops


class ServedCheckpoint:
    """Serves a checkpoint: makes the variables that get their values from it, and fills them.

    Args:
        prefix: the checkpoint's.
        steps: the meetings of the ranks, which export it together.
        base: the version whose files are linked where they are the same; None: all are written.

    Attributes:
        copied: what was made of the variables; None before.
        tables: of which variables each table consists, by its name.

    Raises:
        ValueError: there is no checkpoint at `prefix`.
    """

    def __init__(self, prefix: str, steps: Steps, base: BaseVersion | None = None):
        self.bundle, self._steps, self._base = Bundle(prefix), steps, base
        self.copied: CopiedVariables | None = None
        self.tables: dict[str, TableRecord] = {}
        self._part_of_variable: dict[str, TablePart] = {}

    def bind(self, graph: tf.Graph) -> None:
        """Marks `graph` as a graph for serving, before its first variable."""
        served_table.serve(graph, self)

    def has_table(self, name: str) -> bool:
        """Tells whether the checkpoint has `name` as a table, not as an ordinary variable."""
        return name in self.bundle.layout.tables

    def table(
        self,
        name: str,
        rows: int | None,
        dim: int,
        dtype: tf.DType,
        unknown: float = 0.0,
        **options: Any,
    ) -> Any:
        """Makes a table for `tf.get_variable` or `get_embedding_variable`.

        Args:
            name: the variable's.
            rows: V; None if dynamic.
            dim: D.
            dtype: a value's.
            unknown: the value of all elements that an unknown key of a dynamic table reads.
            **options: `trainable`, `collections` for its variables.

        Returns:
            A `ServedTable`, or the only variable of a static table that has one part.

        Raises:
            ValueError: the checkpoint lacks this table, or has it in another shape.
        """
        stored = self._stored_table(name, rows, dim, dtype)
        layout = self.bundle.layout
        filled_parts = [part for part, count in enumerate(stored.parts) if count]
        row_variables = []
        for part in filled_parts:
            entry = layout.entry(stored, part)
            keys = layout.keys_entry(stored, part) if rows is None else None
            table_part = TablePart(entry, part, stored.block, keys)
            variable_name = name + entry[len(stored.name) :]
            shape = stored.parts[part], dim
            row_variables.append(self._variable(variable_name, table_part, shape, dtype, options))
        record = TableRecord(rows, dim, dtype.name, tuple(row.op.name for row in row_variables))
        self.tables[name] = record
        if rows is not None:
            if len(row_variables) == 1:
                return row_variables[0]
            return ServedTable(name, rows, dim, dtype, row_variables)
        key_variables = []
        for part in filled_parts:
            keys = layout.keys_entry(stored, part)
            table_part = TablePart(keys, part, stored.block, keys)
            key_variables.append(
                self._variable(
                    f"{name}/keys/part_{part}",
                    table_part,
                    (stored.parts[part],),
                    tf.int64,
                    {**options, "trainable": False},
                )
            )
        self.tables[name] = dataclasses.replace(
            record,
            keys=tuple(keys.op.name for keys in key_variables),
            numbers=tuple(filled_parts),
            ranks=len(stored.parts),
            unknown=unknown,
        )
        return ServedDynamicTable(
            name, dim, dtype, row_variables, key_variables, filled_parts, len(stored.parts), unknown
        )

    def _stored_table(self, name: str, rows: int | None, dim: int, dtype: tf.DType) -> StoredTable:
        """Returns the table `name` of the checkpoint, which must be as the graph has it."""
        stored = find_stored_table(self.bundle, name)
        if stored is None or stored.name != name:
            tables = self.bundle.layout.tables.values()
            known = sorted(table.name for table in tables if table.slot_of is None)
            raise ValueError(
                f"checkpoint '{self.bundle.prefix}' has no table '{name}'; it has "
                f"{', '.join(known) or 'no tables'}. Export with the names that were trained."
            )
        kind = DYNAMIC if rows is None else STATIC
        built = kind, "any int64 key" if rows is None else rows, dim, dtype.name
        trained = (
            stored.kind,
            "any int64 key" if stored.rows is None else stored.rows,
            stored.dim,
            stored.dtype,
        )
        if built != trained:
            raise ValueError(
                f"table '{name}' is {_table_text(*built)}, in the graph to be served; in "
                f"checkpoint '{self.bundle.prefix}' it is {_table_text(*trained)}. Build it as it "
                "was trained."
            )
        return stored

    def _variable(
        self,
        name: str,
        table_part: TablePart,
        shape: tuple[int, ...],
        dtype: tf.DType,
        options: dict[str, Any],
    ) -> Any:
        variable = resource_variable_ops.ResourceVariable(
            initial_value=lambda: tf.zeros(shape, dtype), name=name, dtype=dtype, **options
        )
        self._part_of_variable[variable.op.name] = table_part
        return variable

    # -- Savers of such a graph

    def source(self, prefix: str, saver: Any) -> None:
        """Stands in for `Saver.restore`: the values stay where they are."""
        if tf.compat.as_str(prefix) != self.bundle.prefix:
            raise ValueError(
                f"A SavedModel of checkpoint '{self.bundle.prefix}' is being exported; "
                f"{type(saver).__name__} can't restore '{tf.compat.as_str(prefix)}' in its graph."
            )

    def write_variables(self, session: Any, saver: Any, path: str) -> str:
        """Stands in for `Saver.save`: writes the checkpoint `path` of the variables.

        It appears on rank 0; every rank copies parts of it.
        """
        self.copied = copy_variables(
            self.bundle, self._part_of, session.graph, saver, path, self._steps, self._base
        )
        return self.copied.path

    def _part_of(self, name: str, saved: tf.Tensor | None) -> TablePart | None:
        """Returns the part of a table from which a saved tensor comes; None if from none.

        A saver may restore a variable from another one's values, its moving average's
        (`ExponentialMovingAverage.variables_to_restore`): under the variable's name and what that
        adds to it.

        Args:
            name: the saver's for it.
            saved: the tensor; None for a slice.
        """
        if name in self._part_of_variable or saved is None:
            return self._part_of_variable.get(name)
        op = saved.op
        while op.type in ("Identity", "ReadVariableOp"):
            op = op.inputs[0].op
        table_part, suffix = self._part_of_variable.get(op.name), name[len(op.name) :]
        if table_part is None or name != op.name + suffix:
            return table_part
        stored = find_stored_table(self.bundle, table_part.entry)
        average = stored and find_stored_table(self.bundle, stored.name + suffix)
        if stored is None or average is None or average.parts != stored.parts:
            return None
        return table_part._replace(entry=self.bundle.layout.entry(average, table_part.part))


def _table_text(kind: str, rows: Any, dim: int, dtype: str) -> str:
    return f"{kind}, [{rows}, {dim}] {dtype}"
