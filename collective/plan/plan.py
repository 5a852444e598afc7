"""What a plan says, as data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Callable

from collective.ops.collective_names import PHASES
from collective.plan.formatting import columns, in_bytes


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
        return of_plan(self)


def of_plan(plan: Plan) -> str:
    """Every table, every exchange of a step, what has an exchange of its own and why."""
    ranks = f"{plan.ranks} rank" + ("s" if plan.ranks > 1 else "")
    lines = [f"collective: the plan of {ranks}, backend {plan.backend}"]
    if plan.tables:
        lines += ["", *_tables(plan)]
    if plan.ranks == 1:
        lines += ["", "With one rank nothing travels: every table is whole here."]
    elif plan.exchanges:
        lines += ["", *_exchanges(plan.exchanges)]
    if plan.alone:
        lines += ["", "Lookups with an exchange of their own:"]
        lines += [f"  {x.lookup or 'a lookup'} in {x.table}: {x.why}" for x in plan.alone]
    lines += [""] * bool(plan.notes) + [f"{name}: {said}" for name, said in plan.notes.items()]
    return "\n".join(lines)


def _tables(plan: Plan) -> Iterable[str]:
    measured = any(table.key_imbalance for table in plan.tables)
    ways = {table.name: _ways(plan, table) for table in plan.tables}
    rows = [
        [
            table.name,
            "dynamic" if table.rows is None else f"{table.rows:,}",
            str(table.dim),
            table.dtype,
            str(len(table.slots)),
            _most(table.shard_rows, "{:,}".format),
            _most(table.shard_bytes, in_bytes),
            _ratio(table.imbalance),
        ]
        + [_ratio(table.key_imbalance)] * measured
        + [ways[table.name]]
        for table in plan.tables
    ]
    totals = [sum(table.shard_bytes[r] or 0 for table in plan.tables) for r in range(plan.ranks)]
    rows.append(
        [
            f"{len(plan.tables)} tables",
            "",
            "",
            "",
            "",
            "",
            in_bytes(max(totals)),
            _ratio(plan.imbalance),
        ]
        + [""] * measured
        + [""]
    )
    head = ["table", "rows", "dim", "type", "slots", "rows a rank", "bytes a rank", "max/mean"] + [
        "keys max/mean"
    ] * measured
    lines = columns([*head, ""], rows)
    if any(table.rows is None for table in plan.tables):
        lines.append("(of dynamic tables the rows on this rank so far)")
    return lines


def _ways(plan: Plan, table: TablePlan) -> str:
    """How the table's lookups travel."""
    said = []
    for group in plan.groups:
        mine = [section for section in group.sections if section.table == table.name]
        kinds = [
            f"{sum(s.lookups for s in mine if s.pooled == pooled)} {how}"
            for pooled, how in ((False, "by distinct rows"), (True, "pooled by the owner"))
            if any(s.pooled == pooled for s in mine)
        ]
        others = len({section.table for section in group.sections}) - 1
        packed = f" (packed with {others} other{'s' * (others > 1)})" * bool(others)
        said += [f"{group.name}{packed}: {', '.join(kinds)}"] if kinds else []
    alone = sum(x.table == table.name for x in plan.alone)
    return "; ".join(said + [f"{alone} alone"] * bool(alone))


def _exchanges(exchanges: Iterable[ExchangePlan]) -> Iterable[str]:
    exchanges = list(exchanges)
    measured = any(x.received is not None for x in exchanges)
    rows = []
    for x in exchanges:
        of = x.of or ("" if x.phase in PHASES[:-1] else x.name.partition(".")[2])
        size = ("" if x.exact or x.bytes is None else "≤ ") + in_bytes(x.bytes)
        counts = (str(n or "") for n in (x.tables, x.sections, x.members))
        rows.append(
            [
                x.phase,
                of,
                x.kind,
                str(x.level),
                *counts,
                x.dtype,
                size,
                *[in_bytes(x.received)] * measured,
            ]
        )
    head = [
        "an exchange of",
        "in",
        "by",
        "level",
        "tables",
        "sections",
        "lookups",
        "type",
        "bytes a rank",
    ]
    return [
        f"{len(rows)} exchanges a step:",
        *columns([*head, *["received"] * measured], rows, left=3),
    ]


def _most(values: Iterable[int | None], say: Callable[[int], str]) -> str:
    known = [value for value in values if value is not None]
    return say(max(known)) if known else "?"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
