"""Describes the tables of a checkpoint: which entries hold which rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

LAYOUT_ENTRY = "collective/layout"  # a string scalar: `CheckpointLayout.to_json`
FORMAT_ENTRY = "collective/format"  # a string scalar: the version alone
VERSION, WHOLE_VERSION = 2, 1  # The newest; that of whole checkpoints.
STATIC, DYNAMIC = "static", "dynamic"


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """Describes a stored matrix with a row for each row of a table: its values, or one slot.

    Attributes:
        name: the name that the Saver has for it: the variable's, unless its `var_list` renames it.
        kind: 'static' or 'dynamic'.
        rows: V; None if dynamic.
        dim: D, values in a row.
        dtype: a value's, by NumPy's name of it.
        block: rows in each stored slice, the last one excepted.
        parts: rows in each part.
        slot_of: the name of the table, if this is a slot.
        keys: the name of the table's keys if dynamic: `<keys>/part_<r>`, int64 and ascending; rows
            stand in their order. In an increment static tables and their slots have keys, too: the
            numbers of the rows that changed.
        whole: of an increment's: of each part, whether it has all rows of its rank. Keys of the
            rank that aren't among them are gone.
        removed: of an increment's dynamic table: how many keys each part names that are gone, in
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


@dataclasses.dataclass(frozen=True)
class Increment:
    """Says which place in which chain an increment has.

    Attributes:
        number: 1, 2, … since the base.
        base: the base's id.
        previous: the id of what it follows: the base, or the increment before.
    """

    number: int
    base: str
    previous: str


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """Describes all stored tables of a checkpoint.

    A part of a static table on N > 1 ranks holds rows r, r + N, r + 2N, … in this order; a part of
    a dynamic table the keys that rank r owned. A static table of one rank has a single part under
    its own name, as plain TensorFlow saves it.

    Attributes:
        ranks: N, which saved it.
        tables: tables and slots by name. A plain TensorFlow checkpoint has none: a table in it is
            the entry of its own name.
        id: tells the checkpoint from every other one; '' if it was saved without.
        replaced: the id of the checkpoint of the same name in whose place it came; '' for none.
        increment: the place in its chain, of an increment.
    """

    ranks: int = 1
    tables: dict[str, StoredTable] = dataclasses.field(default_factory=dict)
    id: str = ""
    replaced: str = ""
    increment: Increment | None = None

    @property
    def version(self) -> int:
        """Returns the version of the format: who knows no increments must not read one."""
        return WHOLE_VERSION if self.increment is None else VERSION

    def entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry that holds a part of a stored table."""
        is_whole = stored.kind == STATIC and len(stored.parts) == 1
        return stored.name if is_whole else f"{stored.name}/part_{part}"

    def keys_entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry that holds the keys of a part of a dynamic table."""
        return f"{stored.keys}/part_{part}"

    def removed_entry(self, stored: StoredTable, part: int) -> str:
        """Returns the name of the entry with the keys that are gone from a part."""
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
        """Reads the layout that `to_json` wrote; fields that it doesn't know are left out.

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


def part_rows(rows: int, ranks: int, part: int) -> int:
    """Returns how many of `rows` rows of a static table part `part` of `ranks` holds."""
    return len(range(part, rows, ranks))


def parts_of_rank(saved: int, ranks: int, rank: int) -> range:
    """Returns which of `saved` parts of a dynamic table can hold keys of `rank` of `ranks`.

    A key is in part mix(key) mod `saved`, and its owner is mix(key) mod `ranks`: some number has
    both remainders only if they are the same modulo gcd(saved, ranks).
    """
    step = math.gcd(saved, ranks)
    return range(rank % step, saved, step)
