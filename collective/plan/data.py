"""Defines the plan of a graph, as data and as the text that rank 0 prints.

Symbols: N ranks, V rows of dimension D.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from collective.ops.collective_names import PHASES
from collective.plan.formatting import columns, in_bytes

# ---- Data


@dataclasses.dataclass(frozen=True)
class Plan:
    """Describes what was built for a graph.

    Attributes:
        backend: its name.
        ranks: N.
        tables: all of the graph.
        groups: all of the graph.
        alone: the lookups that are in no group, and why.
        exchanges: of a step; of the whole graph as long as it isn't known what a step is.
        imbalance: the largest rank's bytes over their mean; None if it isn't known.
        notes: remarks of other parts of the library, by their names.
    """

    backend: str
    ranks: int
    tables: tuple[TablePlan, ...]
    groups: tuple[GroupPlan, ...]
    alone: tuple[UngroupedLookupPlan, ...]
    exchanges: tuple[ExchangePlan, ...]
    imbalance: float | None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns dictionaries, tuples and plain values, with the names of the attributes."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return _plan_text(self)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Describes a table.

    Attributes:
        name: the variable's.
        rows: V; None for a dynamic table.
        dim: D.
        dtype: of its rows.
        slots: the names of the optimizers' slots that it has.
        row_bytes: of one row with its slots.
        shard_rows: [N], each rank's; of a dynamic table the rows on this rank so far, None where it
            isn't known.
        shard_bytes: [N], slots included; None where shard_rows is.
        groups: the groups in which it is looked up.
        packed: how many tables share the operations that read rows and sum gradients: the tables of
            its (largest) group, of whatever dimensions; 1 for ungrouped lookups. Each table has its
            own memory, and its own update.
        imbalance: the largest of shard_bytes over their mean; None if it isn't known.
        keys_per_owner: [N], the keys a step that each rank was asked for, as of the last profile of
            the graph; else None.
        key_imbalance: the largest of keys_per_owner over their mean.
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
class GroupPlan:
    """Describes lookups that share three all-to-alls.

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
class SectionPlan:
    """Describes what travels for a table of a group: distinct keys, or a pooled lookup's samples.

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
class UngroupedLookupPlan:
    """Describes a lookup with an exchange of its own.

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
    """Describes a collective.

    Attributes:
        name: under which the ranks meet.
        kind: 'Alltoall', 'Allreduce', 'Allgather' or 'Broadcast'.
        phase: 'keys', 'rows', 'gradients', 'dense gradients', 'agreement' or 'other'.
        of: the group, or the table of an ungrouped lookup; '' for others.
        level: of the gate that it waits for.
        tables, sections, members: how many of them it carries.
        dtype: in which it travels.
        bytes: of one rank in one step, as far as the graph tells: the keys or gradients that the
            rank sends or the rows that it gets, its own share included; None if it depends on the
            data.
        exact: `bytes` is exact; else it is the most there can be, since keys that repeat travel
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


# ---- Text


def _plan_text(plan: Plan) -> str:
    """Shows every table, every exchange of a step, and the ungrouped lookups."""
    ranks = f"{plan.ranks} rank" + ("s" if plan.ranks > 1 else "")
    lines = [f"collective: the plan of {ranks}, backend {plan.backend}"]
    if plan.tables:
        lines += ["", *_table_lines(plan)]
    if plan.ranks == 1:
        lines += ["", "With one rank nothing travels: every table is whole here."]
    elif plan.exchanges:
        lines += ["", *_exchange_lines(plan.exchanges)]
    if plan.alone:
        lines += ["", "Lookups with an exchange of their own:"]
        lines += [f"  {x.lookup or 'a lookup'} in {x.table}: {x.why}" for x in plan.alone]
    if plan.notes:
        lines += ["", *(f"{name}: {note}" for name, note in plan.notes.items())]
    return "\n".join(lines)


def _table_lines(plan: Plan) -> list[str]:
    is_measured = any(table.key_imbalance for table in plan.tables)
    head = ["table", "rows", "dim", "type", "slots", "rows a rank", "bytes a rank", "max/mean"]
    head += ["keys max/mean"] * is_measured
    rows = []
    for table in plan.tables:
        row = [
            table.name,
            "dynamic" if table.rows is None else f"{table.rows:,}",
            str(table.dim),
            table.dtype,
            str(len(table.slots)),
            _largest(table.shard_rows, "{:,}".format),
            _largest(table.shard_bytes, in_bytes),
            _ratio(table.imbalance),
        ]
        row += [_ratio(table.key_imbalance)] * is_measured
        rows.append([*row, _exchanges_of_table(plan, table)])
    bytes_by_rank = [sum(t.shard_bytes[r] or 0 for t in plan.tables) for r in range(plan.ranks)]
    totals = [f"{len(plan.tables)} tables", *[""] * 5]
    totals += [in_bytes(max(bytes_by_rank)), _ratio(plan.imbalance)]
    rows.append([*totals, *[""] * is_measured, ""])
    lines = columns([*head, ""], rows)
    if any(table.rows is None for table in plan.tables):
        lines.append("(of dynamic tables the rows on this rank so far)")
    return lines


def _exchanges_of_table(plan: Plan, table: TablePlan) -> str:
    """Says in which groups the table's lookups travel, and how."""
    texts = []
    for group in plan.groups:
        sections = [section for section in group.sections if section.table == table.name]
        ways = []
        for pooled, way in ((False, "by distinct rows"), (True, "pooled by the owner")):
            lookups = [section.lookups for section in sections if section.pooled == pooled]
            if lookups:
                ways.append(f"{sum(lookups)} {way}")
        others = len({section.table for section in group.sections}) - 1
        packed = f" (packed with {others} other{'s' * (others > 1)})" if others else ""
        if ways:
            texts.append(f"{group.name}{packed}: {', '.join(ways)}")
    ungrouped = sum(x.table == table.name for x in plan.alone)
    if ungrouped:
        texts.append(f"{ungrouped} alone")
    return "; ".join(texts)


def _exchange_lines(exchanges: Sequence[ExchangePlan]) -> list[str]:
    is_measured = any(exchange.received is not None for exchange in exchanges)
    head = ["an exchange of", "in", "by", "level", "tables", "sections", "lookups", "type"]
    head += ["bytes a rank", *["received"] * is_measured]
    rows = []
    for exchange in exchanges:
        of = exchange.of
        if not of and exchange.phase == PHASES[-1]:
            of = exchange.name.partition(".")[2]
        counts = (exchange.tables, exchange.sections, exchange.members)
        is_bound = not exchange.exact and exchange.bytes is not None
        row = [exchange.phase, of, exchange.kind, str(exchange.level)]
        row += [str(count or "") for count in counts]
        row += [exchange.dtype, ("≤ " if is_bound else "") + in_bytes(exchange.bytes)]
        rows.append(row + [in_bytes(exchange.received)] * is_measured)
    return [f"{len(rows)} exchanges a step:", *columns(head, rows, left=3)]


def _largest(values: Iterable[int | None], text: Callable[[int], str]) -> str:
    known = [value for value in values if value is not None]
    return text(max(known)) if known else "?"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
