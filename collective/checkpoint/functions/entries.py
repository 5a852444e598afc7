"""Describes what a checkpoint has of a model that eager code made.

A session's variables are those of its graph. Eager code has no list of its variables: who knows the
model names them, and the names by which a session may have saved the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files.chain import Chain
from collective.checkpoint.reading.compatibility import find_stored_table
from collective.checkpoint.rows.shards import Shard
from collective.tables.table import Table, shard_of


@dataclasses.dataclass(frozen=True)
class Entry:
    """Describes a variable of a model, as a checkpoint has it.

    Attributes:
        name: its name in checkpoints.
        variable: an eager variable: a table, a slot of one, or a replicated one.
        other_names: names by which other programs save the same; the first that is there counts.
        is_optimizers: whether it is one of an optimizer: a slot, or a number of all variables.
        is_optional: whether it keeps its value if a checkpoint lacks it.
    """

    name: str
    variable: Any
    other_names: tuple[str, ...] = ()
    is_optimizers: bool = False
    is_optional: bool = False

    @property
    def is_sharded(self) -> bool:
        """Tells whether it is a table or a slot of one."""
        return shard_of(self.variable) is not None

    def found_in(self, chain: Chain) -> str | None:
        """Returns the name by which a checkpoint has it; None if it doesn't."""
        bundle = chain.base
        for name in (self.name, *self.other_names):
            if name in bundle.entries or name in bundle.layout.tables:
                return name
            if self.is_sharded and find_stored_table(bundle, name) is not None:
                return name
        return None


def check_names(entries: Sequence[Entry]) -> None:
    """Checks that no two variables of a model have the same name.

    Raises:
        ValueError: two have.
    """
    seen: dict[str, Any] = {}
    for entry in entries:
        if entry.name in seen and seen[entry.name] is not entry.variable:
            raise ValueError(
                f"Two variables are called '{entry.name}', {seen[entry.name].shape} and "
                f"{entry.variable.shape}: a checkpoint couldn't tell them apart. Give their layers "
                "names of their own."
            )
        seen[entry.name] = entry.variable


def shards_of(entries: Sequence[Entry], names: dict[str, str] | None = None) -> list[Shard]:
    """Returns the tables and slots among a model's variables.

    Args:
        entries: the model's variables.
        names: under which names a checkpoint has them; None: under their own.
    """

    def name_of(entry: Entry) -> str:
        return entry.name if names is None else names[entry.name]

    tables = {id(entry.variable): name_of(entry) for entry in entries}
    shards = []
    for entry in entries:
        table = shard_of(entry.variable)
        if table is not None:
            is_slot = not isinstance(entry.variable, Table)
            slot_of = tables.get(id(table), table.op.name) if is_slot else None
            shards.append(Shard(name_of(entry), entry.variable, table, slot_of))
    return shards


def is_counter(variable: Any) -> bool:
    """Tells whether a variable counts steps: one integer."""
    return bool(variable.dtype.is_integer) and tf.TensorShape(variable.shape).rank == 0
