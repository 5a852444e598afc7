"""Computes what was built: the tables with their memory, and the exchanges of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from collective.ops.counting import counted
from collective.plan.formatting import in_bytes
from collective.profiling.report.charts import Table
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import largest


class Listed(NamedTuple):
    """Holds a list of which the page shows the largest entries, and all after a click.

    Attributes:
        number: how many there are, in words.
        largest: the largest, the sum of the rest and of all; None if all are shown after a click.
        all: all of them; None if the largest are all.
    """

    number: str
    largest: Table | None
    all: Table | None


class PlanSection(NamedTuple):
    """Holds what a plan shows. `alone` has the lookups with an exchange of their own."""

    summary: str
    tables: Listed | None
    exchanges: Listed | None
    alone: Listed | None
    notes: Mapping[str, str]


def plan_section(profile: Profile) -> PlanSection | None:
    """Returns what is shown of a profile's plan; None if it has none."""
    if profile.plan is None:
        return None
    of_plan = profile.plan
    summary = (
        f"Backend {of_plan['backend']}, {counted(of_plan['ranks'], 'rank')}, "
        f"{counted(len(of_plan['tables']), 'table')} in {counted(len(of_plan['groups']), 'group')}"
        f", {counted(len(of_plan['exchanges']), 'exchange')} a step."
    )
    return PlanSection(
        summary,
        _tables(profile, of_plan),
        _exchanges(of_plan),
        _alone(of_plan),
        of_plan.get("notes", {}),
    )


# ---- Tables


def _tables(profile: Profile, of_plan: Mapping[str, Any]) -> Listed | None:
    tables = {table["name"]: table for table in of_plan["tables"]}
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
    every = [_table_row(profile, tables[name], sizes[name]) for name in sorted(tables)]
    return Listed(
        counted(len(tables), "table"),
        Table(head, rows),
        Table(head, every) if chosen.others else None,
    )


def _table_row(profile: Profile, table: Mapping[str, Any], size: float) -> list[object]:
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


def _bytes(profile: Profile, table: Mapping[str, Any]) -> float:
    """Returns the bytes of a table and its slots on all ranks, as far as they are known."""
    counts = profile.dynamic_rows.get(table["name"])
    if counts is not None:
        return float(sum(counts) * table["row_bytes"])
    return float(sum(size or 0 for size in table["shard_bytes"]))


# ---- Exchanges


def _exchanges(of_plan: Mapping[str, Any]) -> Listed | None:
    exchanges = {exchange["name"]: exchange for exchange in of_plan["exchanges"]}
    if not exchanges:
        return None
    sizes = {name: _received(exchange) or 0.0 for name, exchange in exchanges.items()}
    chosen = largest(sizes)
    head = ["exchange of", "in", "by", "tables", "lookups", "type", "received on rank 0"]
    rows = [_exchange_row(exchanges[name]) for name in chosen.names]
    if chosen.others:
        rest = sum(sizes[name] for name in chosen.others)
        label = counted(len(chosen.others), "other exchange")
        rows.append([label, *[""] * 5, in_bytes(rest)])
    every = [_exchange_row(exchange) for exchange in exchanges.values()]
    return Listed(
        counted(len(exchanges), "exchange"),
        Table(head, rows, left=3),
        Table(head, every, left=3) if chosen.others else None,
    )


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


def _alone(of_plan: Mapping[str, Any]) -> Listed | None:
    lookups = of_plan["alone"]
    if not lookups:
        return None
    rows = [[lookup["lookup"] or "a lookup", lookup["table"], lookup["why"]] for lookup in lookups]
    have = "has an exchange of its own" if len(rows) == 1 else "have exchanges of their own"
    summary = f"{counted(len(rows), 'lookup')} {have}"
    return Listed(summary, None, Table(["lookup", "table", "why"], rows, left=3))
