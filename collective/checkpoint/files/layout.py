"""Describes the tables of a checkpoint: which entries hold which rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from collective.ops import placement
from collective.ops.placement import Placement, RowPlacement

LAYOUT_ENTRY = "collective/layout"  # a string scalar: `CheckpointLayout.to_json`
FORMAT_ENTRY = "collective/format"  # a string scalar: the version alone
VERSION, WHOLE_VERSION = 2, 1  # the newest; the version of whole checkpoints
STATIC, DYNAMIC = "static", "dynamic"


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """Describes a stored matrix with one row for each row of a table: its values, or one slot.

    Attributes:
        name: the Saver's name for it: the variable's name, unless the Saver's `var_list` renames
            it.
        kind: 'static' or 'dynamic'.
        rows: V; None if dynamic.
        dim: D, the number of values in a row.
        dtype: the type of a value, by NumPy's name.
        block: how many rows each stored slice has, except for the last one.
        parts: how many rows each part has.
        slot_of: the name of the table, if this is a slot.
        keys: the name of a dynamic table's keys: `<keys>/part_<r>`, int64 and ascending; rows are
            in the order of their keys. In an increment static tables and their slots have keys,
            too: the numbers of the changed rows.
        whole: in an increment, whether each part has all rows of its rank. Then keys of that rank
            that aren't among them have been removed.
        removed: in an increment of a dynamic table, how many removed keys each part lists in
            `<keys>/removed/part_<r>`, int64 and ascending.
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
    whole: tuple[bool, ...] | None = None
    removed: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Returns the number of rows in all parts."""
        return sum(self.parts)

    @property
    def placement(self) -> Placement:
        """Returns the placement of its keys on its parts.

        In an increment of a static table the keys are the rows' numbers.
        """
        return self.row_placement if self.kind == STATIC else placement.dynamic(len(self.parts))

    @property
    def row_placement(self) -> RowPlacement:
        """Returns the placement of a static table's keys on its parts, and on the parts' rows.

        Raises:
            ValueError: the table is dynamic; its keys are stored with their rows.
        """
        if self.kind != STATIC:
            raise ValueError(f"table '{self.name}' is {self.kind}: keys tell its rows.")
        return placement.static(len(self.parts))


@dataclasses.dataclass(frozen=True)
class Increment:
    """Describes the place of an increment in its chain.

    Attributes:
        number: 1, 2, … since the base.
        base: the id of the base.
        previous: the id of its predecessor: the base, or the increment before.
    """

    number: int
    base: str
    previous: str


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """Describes all stored tables of a checkpoint.

    A part holds the rows of one rank (`collective.ops.placement`) by ascending keys. A static table
    of one rank is a single part under its own name, as plain TensorFlow saves it.

    Attributes:
        ranks: N, the number of ranks that saved it.
        tables: tables and slots by name. A plain TensorFlow checkpoint has none: a table in it is
            the entry of the same name.
        id: identifies the checkpoint; '' if it was saved without an id.
        replaced: the id of the checkpoint of the same name that it replaced; '' for none.
        increment: for an increment, its place in its chain.
    """

    ranks: int = 1
    tables: dict[str, StoredTable] = dataclasses.field(default_factory=dict)
    id: str = ""
    replaced: str = ""
    increment: Increment | None = None

    @property
    def version(self) -> int:
        """Returns the format's version: a reader that doesn't know increments must not read one."""
        return WHOLE_VERSION if self.increment is None else VERSION

    def entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry that holds a part of a stored table."""
        is_whole = stored.kind == STATIC and len(stored.parts) == 1
        return stored.name if is_whole else f"{stored.name}/part_{part}"

    def keys_entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry that holds the keys of a part of a dynamic table."""
        return f"{stored.keys}/part_{part}"

    def removed_entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry with the keys that were removed from a part."""
        return f"{stored.keys}/removed/part_{part}"

    def entries_of(self, stored: StoredTable) -> Iterator[str]:
        """Yields the names of all entries that hold a stored table or its keys."""
        for part in range(len(stored.parts)):
            yield self.entry(stored, part)
            if stored.keys:
                yield self.keys_entry(stored, part)
            if stored.removed is not None:
                yield self.removed_entry(stored, part)

    def entries(self) -> set[str]:
        """Returns the names of all entries that hold stored tables or keys."""
        return {name for stored in self.tables.values() for name in self.entries_of(stored)}

    def slots_of(self, name: str) -> list[StoredTable]:
        """Returns the stored slots of the table `name`."""
        return [stored for stored in self.tables.values() if stored.slot_of == name]

    def to_json(self) -> str:
        columns = {}
        for name, stored in self.tables.items():
            columns[name] = dataclasses.asdict(stored)
            for field in ("name", *(f for f in ("whole", "removed") if columns[name][f] is None)):
                del columns[name][field]
        record: dict[str, Any] = {"version": self.version, "ranks": self.ranks}
        record.update(columns=columns, id=self.id, replaced=self.replaced)
        if self.increment is not None:
            record["increment"] = dataclasses.asdict(self.increment)
        return json.dumps(record, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> CheckpointLayout:
        """Reads the layout that `to_json` wrote; unknown fields are ignored.

        Raises:
            ValueError: a later version of this library wrote it.
        """
        record: dict[str, Any] = json.loads(text)
        if record["version"] > VERSION:
            raise ValueError(
                f"The checkpoint's layout has version {record['version']}; this library reads "
                f"versions up to {VERSION}. Restore it with the version of the library that wrote "
                "it, or a later one."
            )
        known = {field.name for field in dataclasses.fields(StoredTable)}
        tables = {}
        for name, fields in record["columns"].items():
            fields = {field: value for field, value in fields.items() if field in known}
            for field in ("parts", "whole", "removed"):
                if fields.get(field) is not None:
                    fields[field] = tuple(fields[field])
            tables[name] = StoredTable(name=name, **fields)
        increment = record.get("increment")
        return CheckpointLayout(
            record["ranks"],
            tables,
            record.get("id", ""),
            record.get("replaced", ""),
            None if increment is None else Increment(**increment),
        )
