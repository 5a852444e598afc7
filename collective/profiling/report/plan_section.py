"""Draws what was built: the tables with their memory, and the exchanges of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collective.ops.counting import counted
from collective.plan.formatting import in_bytes
from collective.profiling.report import charts
from collective.profiling.report.markup import Markup, element
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import largest

Table = Mapping[str, Any]


def plan(profile: Profile) -> Markup:
    """Draws the plan: its largest tables and exchanges; a click shows all."""
    if profile.plan is None:
        return element("p", "Not in this profile: an earlier release wrote it.", class_="soft")
    of_plan = profile.plan
    sentence = (
        f"Backend {of_plan['backend']}, {counted(of_plan['ranks'], 'rank')}, "
        f"{counted(len(of_plan['tables']), 'table')} in {counted(len(of_plan['groups']), 'group')}"
        f", {counted(len(of_plan['exchanges']), 'exchange')} a step."
    )
    drawn = [element("p", sentence), _tables(profile), _exchanges(of_plan), _alone(of_plan)]
    drawn += [
        element("p", element("strong", f"{name}: "), note)
        for name, note in of_plan.get("notes", {}).items()
    ]
    return element("div", drawn)


# ---- Tables


def _tables(profile: Profile) -> Markup | None:
    tables = {table["name"]: table for table in (profile.plan or {})["tables"]}
    if not tables:
        return None
    sizes = {name: _bytes(profile, table) for name, table in tables.items()}
    chosen = largest(sizes)
    head = ["table", "rows", "dim", "type", "slots", "bytes of a row", "all ranks", "in group"]
    rows = [_table_row(profile, tables[name], sizes[name]) for name in chosen.names]
    if chosen.others:
        rest = sum(sizes[name] for name in chosen.others)
        label = counted(len(chosen.others), "other table")
        rows.append([label, *[""] * 5, in_bytes(rest), ""])
    total = counted(len(tables), "table") if len(tables) > 1 else "total"
    rows.append([total, *[""] * 5, in_bytes(sum(sizes.values())), ""])
    drawn = [charts.table(head, rows)]
    if chosen.others:
        every = [_table_row(profile, tables[name], sizes[name]) for name in sorted(tables)]
        drawn.append(
            element(
                "details",
                element("summary", f"All {counted(len(tables), 'table')}, by name"),
                charts.table(head, every),
            )
        )
    return element("div", element("h3", "Tables, the largest first"), drawn)


def _table_row(profile: Profile, table: Table, size: float) -> list[object]:
    rows = "dynamic" if table["rows"] is None else f"{table['rows']:,}"
    counts = profile.dynamic_rows.get(table["name"])
    if counts:
        rows = f"dynamic, {sum(counts):,} now"
    return [
        table["name"],
        rows,
        table["dim"],
        table["dtype"],
        len(table["slots"]),
        in_bytes(table["row_bytes"]),
        in_bytes(size),
        ", ".join(table["groups"]) or "none",
    ]


def _bytes(profile: Profile, table: Table) -> float:
    """Returns the bytes of a table and its slots on all ranks, as far as they are known."""
    counts = profile.dynamic_rows.get(table["name"])
    if counts is not None:
        return float(sum(counts) * table["row_bytes"])
    return float(sum(size or 0 for size in table["shard_bytes"]))


# ---- Exchanges


def _exchanges(of_plan: Mapping[str, Any]) -> Markup | None:
    exchanges = {exchange["name"]: exchange for exchange in of_plan["exchanges"]}
    if not exchanges:
        return None
    sizes = {name: _received(exchange) or 0.0 for name, exchange in exchanges.items()}
    chosen = largest(sizes)
    head = ["exchange of", "in", "by", "tables", "lookups", "type", "received on rank 0"]
    rows = [_exchange_row(exchanges[name]) for name in chosen.names]
    drawn = []
    if chosen.others:
        rest = sum(sizes[name] for name in chosen.others)
        label = counted(len(chosen.others), "other exchange")
        rows.append([label, *[""] * 5, in_bytes(rest)])
        every = [_exchange_row(exchange) for exchange in exchanges.values()]
        summary = element("summary", f"All {counted(len(exchanges), 'exchange')}")
        drawn.append(element("details", summary, charts.table(head, every, left=3)))
    heading = element("h3", "Exchanges of a step, the largest first")
    return element("div", heading, charts.table(head, rows, left=3), drawn)


def _exchange_row(exchange: Mapping[str, Any]) -> list[object]:
    received = _received(exchange)
    is_bound = exchange.get("received") is None and not exchange["exact"]
    bound = "at most " if is_bound and received is not None else ""
    return [
        exchange["phase"],
        exchange["of"] or ("" if exchange["phase"] != "other" else exchange["name"]),
        exchange["kind"],
        exchange["tables"] or "",
        exchange["members"] or "",
        exchange["dtype"],
        bound + in_bytes(received),
    ]


def _received(exchange: Mapping[str, Any]) -> float | None:
    """Returns the bytes per step: measured, else planned; None if they depend on the data."""
    measured = exchange.get("received")
    size = exchange["bytes"] if measured is None else measured
    return None if size is None else float(size)


def _alone(of_plan: Mapping[str, Any]) -> Markup | None:
    lookups = of_plan["alone"]
    if not lookups:
        return None
    rows = [[lookup["lookup"] or "a lookup", lookup["table"], lookup["why"]] for lookup in lookups]
    listed = charts.table(["lookup", "table", "why"], rows, left=3)
    have = "has an exchange of its own" if len(rows) == 1 else "have exchanges of their own"
    sentence = f"{counted(len(rows), 'lookup')} {have}"
    return element("details", element("summary", sentence), listed)
