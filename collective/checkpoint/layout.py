"""What a checkpoint says about the tables in it: which entries hold which rows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

ENTRY = "collective/layout"  # a string scalar: `Layout.to_json`
FORMAT_ENTRY = "collective/format"  # a string scalar: the version alone
VERSION = 1
STATIC, DYNAMIC = "static", "dynamic"


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A matrix with one row for each row of a table: the table's values or one optimizer slot of
    it.

    Attributes:
        name: under which the Saver has it: the variable's, unless its `var_list` renames it.
        kind: 'static' or 'dynamic'.
        rows: V; None if dynamic.
        dim: D, values in a row.
        dtype: of a value, NumPy's name of it.
        block: rows in each stored slice, the last one excepted.
        parts: rows in each part.
        slot_of: the name of the table's own column if this is a slot.
        keys: the name of the table's keys if dynamic: `<keys>/part_<r>`, int64 and ascending; rows
            stand in their order.
    """

    name: str
    kind: str
    rows: int | None
    dim: int
    dtype: str
    block: int
    parts: tuple[int, ...]
    slot_of: str | None = None
    keys: str | None = None

    @property
    def count(self) -> int:
        """Rows in all parts."""
        return sum(self.parts)


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """The columns of a checkpoint.

    A part of a static table on N > 1 ranks holds rows r, r + N, r + 2N, … in this order; one of a
    dynamic table the keys that rank r owned. A static table of one rank has a single part under its
    own name, as plain TensorFlow saves it.

    Attributes:
        ranks: N, which saved it.
        columns: by name. Those of a plain TensorFlow checkpoint are none: a table in it is the
            entry of its own name.
    """

    ranks: int = 1
    columns: dict[str, StoredTable] = dataclasses.field(default_factory=dict)

    def entry(self, column: StoredTable, part: int) -> str:
        """The name of the entry that holds a part of a column."""
        whole = column.kind == STATIC and len(column.parts) == 1
        return column.name if whole else f"{column.name}/part_{part}"

    def keys_entry(self, column: StoredTable, part: int) -> str:
        """The name of the entry that holds the keys of a part of a dynamic column."""
        return f"{column.keys}/part_{part}"

    def entries(self) -> set[str]:
        """The names of all entries that hold columns or keys."""
        names = {self.entry(c, r) for c in self.columns.values() for r in range(self.ranks)}
        return names | {
            self.keys_entry(c, r)
            for c in self.columns.values()
            if c.keys
            for r in range(self.ranks)
        }

    def slots_of(self, name: str) -> list[StoredTable]:
        """The slots of the table whose own column is `name`."""
        return [c for c in self.columns.values() if c.slot_of == name]

    def to_json(self) -> str:
        columns = {
            c.name: {k: v for k, v in dataclasses.asdict(c).items() if k != "name"}
            for c in self.columns.values()
        }
        return json.dumps(
            {"version": VERSION, "ranks": self.ranks, "columns": columns}, sort_keys=True
        )

    @staticmethod
    def from_json(text: str) -> CheckpointLayout:
        """The layout in `text`.

        Raises:
            ValueError: a later version of this library wrote it.
        """
        told: dict[str, Any] = json.loads(text)
        if told["version"] > VERSION:
            raise ValueError(
                f"The checkpoint's layout has version {told['version']}; this "
                f"library reads versions up to "
                f"{VERSION}. Restore it with the version of the library that wrote "
                f"it, or a later one."
            )
        known = {f.name for f in dataclasses.fields(StoredTable)}
        columns = {
            name: StoredTable(
                **{
                    **{k: v for k, v in c.items() if k in known},
                    "name": name,
                    "parts": tuple(c["parts"]),
                }
            )
            for name, c in told["columns"].items()
        }
        return CheckpointLayout(told["ranks"], columns)


def part_rows(rows: int, ranks: int, part: int) -> int:
    """How many of `rows` rows of a static table part `part` of `ranks` holds."""
    return len(range(part, rows, ranks))
