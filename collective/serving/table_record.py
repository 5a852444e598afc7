"""Records of which variables of a SavedModel each table consists, for lookups of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tables.served_table import ServedDynamicTable, ServedTable


@dataclasses.dataclass(frozen=True)
class TableRecord:
    """Describes a table of a SavedModel.

    Attributes:
        rows: V; None if dynamic.
        dim: D.
        dtype: the name of a value's type.
        parts: the names of the variables with its rows, [n_p, D] each, without the empty ones.
        keys: of a dynamic table, the names of the variables with the keys of these parts.
        numbers: of a dynamic table, the parts' numbers.
        ranks: of a dynamic table, P, the number of parts with the empty ones.
        unknown: the value of all elements that an unknown key of a dynamic table reads.
    """

    rows: int | None
    dim: int
    dtype: str
    parts: tuple[str, ...]
    keys: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    ranks: int = 0
    unknown: float = 0.0

    def table(self, name: str, variables: Mapping[str, Any]) -> ServedTable:
        """Returns the table `name` over the variables of a loaded graph, by their names.

        Raises:
            KeyError: a variable is missing.
        """
        dtype, parts = tf.as_dtype(self.dtype), [variables[part] for part in self.parts]
        if self.rows is not None:
            return ServedTable(name, self.rows, self.dim, dtype, parts)
        keys = [variables[key] for key in self.keys]
        return ServedDynamicTable(
            name, self.dim, dtype, parts, keys, self.numbers, self.ranks, self.unknown
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> TableRecord:
        rows = record["rows"]
        return TableRecord(
            None if rows is None else int(rows),
            int(record["dim"]),
            str(record["dtype"]),
            tuple(map(str, record["parts"])),
            tuple(map(str, record["keys"])),
            tuple(map(int, record["numbers"])),
            int(record["ranks"]),
            float(record["unknown"]),
        )
