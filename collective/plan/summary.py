"""Summarizes a plan of many tables in lines that fit on a screen."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, TypeVar

from collective.ops.communication.collective_names import PHASES
from collective.ops.counting import counted
from collective.plan import step_estimate
from collective.plan.data import ExchangePlan, PlanData, TablePlan, UngroupedLookupPlan
from collective.plan.formatting import (
    LONGEST_NAME,
    MOST_LINES,
    columns,
    cut_off,
    distinct,
    imbalance,
    in_bytes,
    largest,
    ratio,
    screen_columns,
    shortened,
)
from collective.plan.text import (
    bytes_by_rank,
    bytes_text,
    group_labels,
    legend,
    policy_text,
    title,
)

LARGEST_TABLES, POLICIES, REASONS, NOTES = 10, 2, 2, 2
EVERYTHING = "All of it: scope(plan='full') prints it, strategy.plan().to_json() has it as data."
# The name of one of the largest tables; the columns after it take up to 50.
LONGEST_LISTED = 70

Part = TypeVar("Part")


def lines_of(plan: PlanData) -> list[str]:
    """Returns at most `MOST_LINES` lines; on a terminal none is longer than `MOST_COLUMNS`.

    They show the number of tables, their bytes and how evenly ranks share them; the tables by group
    and dimension; the ten largest; the exchanges by phase; why lookups aren't grouped.
    """
    head = [title(plan), "", *_total_lines(plan)]
    rest = ["", *_largest_lines(plan)]
    if plan.exchanges:
        rest += ["", *_exchange_lines(plan.exchanges), *legend(plan.exchanges)]
    if plan.alone:
        rest += ["", *_ungrouped_lines(plan.alone)]
    rest += ["", *_note_lines(plan.notes), *step_estimate.advice(plan), EVERYTHING]
    room = MOST_LINES - len(head) - len(rest)
    lines = [*head, *_kind_lines(plan, room), *rest]
    return [cut_off(line, screen_columns()) for line in lines]


def _total_lines(plan: PlanData) -> list[str]:
    dynamic = sum(table.rows is None for table in plan.tables)
    sizes = bytes_by_rank(plan.tables, plan.ranks)
    text = counted(len(plan.tables), "table")
    replicated = sum(table.placement == "replicated" for table in plan.tables)
    whole = sum(table.placement.startswith("whole") for table in plan.tables)
    kinds = [(dynamic, "dynamic"), (whole, "whole on one rank"), (replicated, "replicated")]
    special = ", ".join(f"{count:,} {kind}" for count, kind in kinds if count)
    text += f" ({special})" if special else ""
    text += f", {in_bytes(max(sizes))} on the largest rank, slots included"
    if plan.imbalance is not None:
        text += f", {ratio(plan.imbalance)} times the ranks' mean"
    lines = [f"{text}."]
    if dynamic:
        lines.append("Of dynamic tables the rows on this rank so far count.")
    policies = collections.Counter(policy_text(table.policy) for table in plan.tables)
    del policies[""]
    for policy, tables in policies.most_common(POLICIES):
        lines.append(f"{counted(tables, 'table')} with {policy}.")
    if len(policies) > POLICIES:
        lines.append(f"… and {counted(len(policies) - POLICIES, 'other policy', 'other policies')}")
    return lines


# ---- Tables


def _kind_lines(plan: PlanData, room: int) -> list[str]:
    """Summarizes tables by group, dimension and type: kinds with most bytes, in `room` lines."""
    by_kind: dict[tuple[str, int, str], list[TablePlan]] = {}
    ungrouped = {lookup.table for lookup in plan.alone}
    labels = group_labels(plan)
    for table in plan.tables:
        by_kind.setdefault(
            (_group_of(table, ungrouped, labels), table.dim, table.dtype), []
        ).append(table)
    kinds = sorted(by_kind, key=lambda kind: -max(bytes_by_rank(by_kind[kind], plan.ranks)))
    rows = [_kind_row(kind, by_kind[kind], plan) for kind in kinds]
    shown, left_out = _cut(rows, room - 1)
    head = ["group", "dim", "type", "tables", "rows", "rows a rank", "bytes a rank", "max/mean"]
    lines = columns(head, shown)
    if left_out:
        lines.append(f"… and {counted(left_out, 'other kind')} of tables")
    return lines


def _group_of(table: TablePlan, ungrouped: set[str], labels: dict[str, str]) -> str:
    names = [labels.get(group, group) for group in table.groups]
    names = [*names, *(["exchanges of their own"] if table.name in ungrouped else [])]
    none = "replicated" if table.placement == "replicated" else "not looked up"
    return shortened(", ".join(names) or none, LONGEST_NAME)


def _kind_row(kind: tuple[str, int, str], tables: Sequence[TablePlan], plan: PlanData) -> list[str]:
    group, dim, dtype = kind
    sizes = bytes_by_rank(tables, plan.ranks)
    is_known = all(table.imbalance is not None for table in tables)
    rows_by_rank = [sum(table.shard_rows[r] or 0 for table in tables) for r in range(plan.ranks)]
    # Of dynamic tables a rank knows its own rows, or none.
    is_counted = any(rows is not None for table in tables for rows in table.shard_rows)
    all_rows = [table.rows for table in tables if table.rows is not None]
    return [
        group,
        str(dim),
        dtype,
        f"{len(tables):,}",
        f"{sum(all_rows):,}" if len(all_rows) == len(tables) else "dynamic",
        f"{max(rows_by_rank):,}" if is_counted else "?",
        in_bytes(max(sizes) if is_counted else None),
        ratio(imbalance(sizes)) if is_known else "",
    ]


def _largest_lines(plan: PlanData) -> list[str]:
    """Lists the tables with most bytes on a rank."""

    def size(table: TablePlan) -> int:
        return max((size for size in table.shard_bytes if size is not None), default=0)

    # Sorting keeps the order of names among tables of one size.
    tables = sorted(plan.tables, key=lambda table: -size(table))[:LARGEST_TABLES]
    names = distinct([table.name for table in tables], LONGEST_LISTED)
    rows = [
        [
            name,
            "dynamic" if table.rows is None else f"{table.rows:,}",
            str(table.dim),
            str(len(table.slots)),
            largest(table.shard_bytes, in_bytes),
            ratio(table.imbalance),
        ]
        for name, table in zip(names, tables)
    ]
    head = [f"the largest {len(rows)}" if len(rows) > 1 else "the table"]
    return columns([*head, "rows", "dim", "slots", "bytes a rank", "max/mean"], rows)


# ---- Exchanges


def _exchange_lines(exchanges: Sequence[ExchangePlan]) -> list[str]:
    """Summarizes the exchanges of a step by phase."""
    is_measured = any(exchange.received is not None for exchange in exchanges)
    rows = []
    for phase in PHASES:
        of_phase = [exchange for exchange in exchanges if exchange.phase == phase]
        if not of_phase:
            continue
        sizes = [exchange.bytes for exchange in of_phase]
        is_exact = all(exchange.exact for exchange in of_phase)
        received = [exchange.received for exchange in of_phase if exchange.received is not None]
        row = [
            phase,
            f"{len(of_phase):,}",
            shortened(", ".join(sorted({exchange.kind for exchange in of_phase})), 24),
            _count(sum(exchange.members for exchange in of_phase)),
            shortened(", ".join(sorted({exchange.dtype for exchange in of_phase})), 24),
            bytes_text(None if None in sizes else sum(filter(None, sizes)), is_exact),
        ]
        rows.append(row + [in_bytes(sum(received) if received else None)] * is_measured)
    head = ["of", "exchanges", "by", "lookups", "type", "bytes a rank", *["received"] * is_measured]
    return [f"{counted(len(exchanges), 'exchange')} a step:", *columns(head, rows)]


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _ungrouped_lines(lookups: Sequence[UngroupedLookupPlan]) -> list[str]:
    """Counts the lookups that have their own exchanges, by reason."""
    by_reason: dict[str, list[UngroupedLookupPlan]] = {}
    for lookup in lookups:
        by_reason.setdefault(lookup.why, []).append(lookup)
    reasons = sorted(by_reason, key=lambda why: -len(by_reason[why]))
    shown, left_out = _cut(reasons, REASONS)
    lines = [f"{counted(len(lookups), 'lookup')} with exchanges of their own:"]
    for why in shown:
        tables = {lookup.table for lookup in by_reason[why]}
        number = counted(len(by_reason[why]), "lookup")
        lines.append(f"  {number} in {counted(len(tables), 'table')}: {_one_line(why)}")
    if left_out:
        lines.append(f"  … and for {counted(left_out, 'other reason')}")
    return lines


# ---- The rest


def _note_lines(notes: dict[str, Any]) -> list[str]:
    shown, left_out = _cut([_one_line(f"{name}: {note}") for name, note in notes.items()], NOTES)
    return [*shown, *([f"… and {counted(left_out, 'other remark')}"] if left_out else [])]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(parts: Sequence[Part], most: int) -> tuple[list[Part], int]:
    """Returns the first parts that fit, and how many don't.

    If they don't all fit, one line is kept for the remark that says so.
    """
    if len(parts) <= most:
        return list(parts), 0
    most = max(most - 1, 1)
    return list(parts[:most]), len(parts) - most
