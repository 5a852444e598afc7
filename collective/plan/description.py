"""What a plan says, as data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from collective.plan import text


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """A table. Symbols: N ranks.

    Attributes:
        name: the variable's.
        rows: V; None for a dynamic table.
        dim: D.
        dtype: of its rows.
        slots: the names of the optimizers' slots that it has.
        row_bytes: of one row with its slots.
        shard_rows: [N], each rank's; of a dynamic table those there are so far on this rank, None
            where it isn't known.
        shard_bytes: [N], slots included; None where shard_rows is.
        groups: the groups in which it is looked up.
        packed: how many tables the operations read and sum gradients of that do it for this one:
            those of its (largest) group at once, however many and of whatever dimensions; 1 for
            lookups on their own. Its memory is its own, and so is its update.
        imbalance: of shard_bytes, the largest over their mean; None if it isn't known.
        keys_per_owner: [N], the keys a step that each rank was asked for, as of the last profile of
            the graph; else None.
        key_imbalance: of keys_per_owner, the largest over their mean.
    """

    name: str
    rows: int | None
    dim: int
    dtype: str
    slots: tuple[str, ...]
    row_bytes: int
    shard_rows: tuple[int | None, ...]
    shard_bytes: tuple[int | None, ...]
    groups: tuple[str, ...]
    packed: int
    imbalance: float | None
    keys_per_owner: tuple[float, ...] | None = None
    key_imbalance: float | None = None


@dataclasses.dataclass(frozen=True)
class SectionPlan:
    """What travels for one table of a group: its distinct keys, or, pooled, one lookup's samples.

    Attributes:
        table: the table's name.
        dim: D.
        pooled: the owner pools a sample's rows; else each distinct key's row travels once.
        lookups: how many lookups share it.
    """

    table: str
    dim: int
    pooled: bool
    lookups: int


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Lookups that share three all-to-alls.

    Attributes:
        name: the middle of its collectives' names.
        level: 1; one more for keys that depend on the rows of the level before.
        lookups: how many.
        sections: what travels, in this order.
    """

    name: str
    level: int
    lookups: int
    sections: tuple[SectionPlan, ...]


@dataclasses.dataclass(frozen=True)
class AlonePlan:
    """A lookup with an exchange of its own.

    Attributes:
        lookup: its name; '' for one in a function.
        table: the table's name.
        why: what kept it out of a group.
    """

    lookup: str
    table: str
    why: str


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """A collective.

    Attributes:
        name: under which the ranks meet.
        kind: 'Alltoall', 'Allreduce', 'Allgather' or 'Broadcast'.
        phase: 'keys', 'rows', 'gradients', 'dense gradients', 'agreement' or 'other'.
        of: the group, or the table of a lookup on its own; '' for others.
        level: of the gate that it waits for.
        tables, sections, members: how many of them it carries.
        dtype: in which it travels.
        bytes: of one rank in one step, as far as the graph tells: the keys or gradients that the
            rank sends or the rows that it gets, its own share included; None if it depends on the
            data.
        exact: whether it is that; else it is the most there can be, since keys that repeat travel
            once.
        received: bytes a step that this rank received, as of the last profile of the graph, its own
            share included; else None.
    """

    name: str
    kind: str
    phase: str
    of: str
    level: int
    tables: int
    sections: int
    members: int
    dtype: str
    bytes: int | None
    exact: bool
    received: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was built for a graph.

    Attributes:
        backend: the name of it.
        ranks: N.
        tables: all of the graph.
        groups: all of the graph.
        alone: the lookups that are in none, and why.
        exchanges: of a step; of the whole graph as long as it isn't known what a step is.
        imbalance: of all shards' bytes, the largest over their mean; None if it isn't known.
        notes: what other parts say of themselves, by their names.
    """

    backend: str
    ranks: int
    tables: tuple[TablePlan, ...]
    groups: tuple[GroupPlan, ...]
    alone: tuple[AlonePlan, ...]
    exchanges: tuple[ExchangePlan, ...]
    imbalance: float | None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, tuples and plain values, with the names of the attributes."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return text.of_plan(self)
