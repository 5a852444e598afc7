"""A plan as the text that rank 0 prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Callable

from collective.columns import columns, in_bytes
from collective.plan.names import PHASES

if TYPE_CHECKING:
    from collective.plan.description import ExchangePlan, Plan, TablePlan


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
