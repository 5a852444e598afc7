"""Formats a plan in full: every table, every exchange of a step, and the ungrouped lookups."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Iterable, Sequence

from collective.ops.communication.collective_names import PHASES
from collective.ops.counting import counted
from collective.plan import step_estimate
from collective.plan.data import ExchangePlan, PlanData, TablePlan
from collective.plan.formatting import (
    LONGEST_NAME,
    MOST_COLUMNS,
    columns,
    cut_off,
    distinct,
    in_bytes,
    largest,
    ratio,
    screen_columns,
)

LOOKUPS = "lookups, by group"
DIGEST = re.compile(r"(?<=\d)\.[0-9a-f]{8}(?=\.|$)")

NO_TABLE = (
    "No variable is a table: none was made inside embedding_scope(), or min_rows left all of them "
    "out. So nothing is sharded: every rank holds and updates the whole model. "
    "docs/troubleshooting.md says what to do."
)


def lines_of(plan: PlanData, full: bool = True) -> list[str]:
    """Returns the lines of the plan, with one for each table and exchange.

    Args:
        plan: the plan.
        full: the lines of tables have any length; otherwise they say less, and are cut off on a
            terminal.
    """
    lines = [title(plan)]
    if plan.tables:
        lines += ["", *_table_lines(plan, full)]
    else:
        lines += ["", *textwrap.wrap(NO_TABLE, MOST_COLUMNS)]
    if plan.ranks == 1 and plan.tables:
        lines += ["", "With one rank nothing travels: every table is whole here."]
    elif plan.exchanges:
        lines += ["", *_exchange_lines(plan.exchanges, group_labels(plan))]
    if plan.alone:
        lines += ["", "Lookups with an exchange of their own:"]
        lines += [f"  {x.lookup or 'a lookup'} in {x.table}: {x.why}" for x in plan.alone]
    if plan.notes:
        lines += ["", *(f"{name}: {note}" for name, note in plan.notes.items())]
    advice = step_estimate.advice(plan)
    if advice:
        lines += ["", *advice]
    return lines


def title(plan: PlanData) -> str:
    return f"collective: the plan of {counted(plan.ranks, 'rank')}, backend {plan.backend}"


def bytes_by_rank(tables: Iterable[TablePlan], ranks: int) -> list[int]:
    """Returns the bytes of each rank's shards of these tables, if they are known."""
    totals = [0] * ranks
    for table in tables:
        for rank, size in enumerate(table.shard_bytes):
            totals[rank] += size or 0
    return totals


def _table_lines(plan: PlanData, full: bool) -> list[str]:
    is_measured = any(table.key_imbalance for table in plan.tables)
    has_policies = any(table.policy for table in plan.tables)
    head = ["rows", "dim", "type", "slots", "rows a rank", "bytes a rank", "max/mean"]
    head += ["keys max/mean"] * is_measured + ["policy"] * has_policies
    rows = []
    for table in plan.tables:
        row = [
            "dynamic" if table.rows is None else f"{table.rows:,}",
            str(table.dim),
            table.dtype,
            str(len(table.slots)),
            largest(table.shard_rows, "{:,}".format),
            largest(table.shard_bytes, in_bytes),
            ratio(table.imbalance),
        ]
        row += [ratio(table.key_imbalance)] * is_measured
        rows.append(row + [policy_text(table.policy)] * has_policies)
    totals = [*[""] * 5, in_bytes(max(bytes_by_rank(plan.tables, plan.ranks)))]
    totals.append(ratio(plan.imbalance))
    rows.append([*totals, *[""] * (is_measured + has_policies)])
    names = [table.name for table in plan.tables]
    labels = group_labels(plan)
    lookups = [_exchanges_of_table(plan, table, labels, full) for table in plan.tables]
    alike = ""
    if not full:
        room = screen_columns() - sum(_widths([head, *rows]))
        names, lookups, alike = _in_width(names, lookups, room)
    # The last column is aligned to the left, the others are to the right.
    heading = LOOKUPS if any(lookups) else ""
    width = max(map(len, [heading, *lookups]))
    cells = zip([*names, counted(len(plan.tables), "table")], rows, [*lookups, ""])
    lines = columns(
        ["table", *head, heading.ljust(width)],
        [[name, *row, text.ljust(width)] for name, row, text in cells],
    )
    if not full:
        lines = [cut_off(line, screen_columns()) for line in lines]
    if alike:
        lines.append(f"({LOOKUPS}, of each table: {alike})")
    if any(table.rows is None for table in plan.tables):
        is_unknown = any(set(table.shard_rows) == {None} for table in plan.tables)
        unknown = "; ?: no session has counted them" if is_unknown else ""
        lines.append(f"(of dynamic tables the rows on this rank so far{unknown})")
    return lines


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    """Returns the widths of columns, with the gap before each."""
    return [2 + max(map(len, column)) for column in zip(*lines)]


def _in_width(
    names: Sequence[str], lookups: Sequence[str], room: int
) -> tuple[list[str], list[str], str]:
    """Makes names and lookups fit into `room` columns, the gap between them included.

    Returns:
        Names, shortened as little as possible, to `LONGEST_NAME` characters if necessary; lookups,
        cut off if necessary; and the lookups of each table, if all are the same and their column
        was left out.
    """
    width = max(map(len, [LOOKUPS, *lookups])) if any(lookups) else 0
    if max(map(len, names)) + 2 + width > room and len(set(lookups)) == 1:
        return distinct(names, max(LONGEST_NAME, room)), [""] * len(lookups), lookups[0]
    shown = distinct(names, max(LONGEST_NAME, room - 2 - width))
    left = max(room - 2 - max(map(len, shown)), len(LOOKUPS))
    cut = [text if len(text) <= left else f"{text[: left - 1]}…" for text in lookups]
    return shown, cut, ""


def policy_text(options: dict[str, float | str]) -> str:
    """Formats the options of a table's policy: 'weight_bound=10'."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else format(value, 'g')}"
        for name, value in options.items()
    )


def group_labels(plan: PlanData) -> dict[str, str]:
    """Returns the label of each group in texts, by the group's name.

    The digest in a name lets ranks notice that their groups differ; it means nothing to readers.
    """
    short = {group.name: DIGEST.sub("", group.name) for group in plan.groups}
    often = collections.Counter(short.values())
    return {name: label if often[label] == 1 else name for name, label in short.items()}


def _exchanges_of_table(
    plan: PlanData, table: TablePlan, labels: dict[str, str], full: bool
) -> str:
    """Says in which groups the table's lookups are, and how; in full, also with how many tables."""
    chosen = f"; auto: {table.why}" if table.why and full else ""
    if table.placement == "replicated":
        return f"replicated: nothing is exchanged{chosen}"
    groups_by_way: dict[str, list[str]] = {}
    for group in plan.groups:
        sections = [section for section in group.sections if section.table == table.name]
        ways = []
        for pooled, way in ((False, "by distinct rows"), (True, "pooled by the owner")):
            lookups = [section.lookups for section in sections if section.pooled == pooled]
            if lookups:
                ways.append(f"{sum(lookups)} {way}")
        others = len({section.table for section in group.sections}) - 1
        packed = f" (packed with {counted(others, 'other')})" if others and full else ""
        if ways:
            way = f"{packed}: {', '.join(ways)}"
            groups_by_way.setdefault(way, []).append(labels[group.name])
    texts = [f"{', '.join(groups)}{way}" for way, groups in groups_by_way.items()]
    ungrouped = sum(x.table == table.name for x in plan.alone)
    if ungrouped:
        texts.append(f"{ungrouped} alone")
    whole, _, owner = table.placement.partition(":")
    if whole == "whole":
        texts.append(f"whole on rank {owner}")
    return "; ".join(texts) + chosen


def _exchange_lines(exchanges: Sequence[ExchangePlan], labels: dict[str, str]) -> list[str]:
    is_measured = any(exchange.received is not None for exchange in exchanges)
    head = ["an exchange of", "in", "by", "level", "tables", "sections", "lookups", "type"]
    head += ["bytes a rank", *["received"] * is_measured]
    rows = []
    for exchange in exchanges:
        of = exchange.of
        if not of and exchange.phase == PHASES[-1]:
            of = exchange.name.partition(".")[2]
        counts = (exchange.tables, exchange.sections, exchange.members)
        row = [exchange.phase, labels.get(of, of), _kind(exchange), str(exchange.level)]
        row += [str(count or "") for count in counts]
        row += [exchange.dtype, bytes_text(exchange.bytes, exchange.exact)]
        rows.append(row + [in_bytes(exchange.received)] * is_measured)
    title = f"{counted(len(rows), 'exchange')} a step:"
    return [title, *columns(head, rows, left=3), *legend(exchanges)]


def _kind(exchange: ExchangePlan) -> str:
    return f"{exchange.kind} {exchange.reach}".rstrip()


def legend(exchanges: Sequence[ExchangePlan]) -> list[str]:
    """Explains the signs of `bytes_text`, where there are any."""
    parts = []
    if any(exchange.bytes is None for exchange in exchanges):
        parts.append("?: it depends on the batch; scope(profile=DIR) measures it")
    if any(exchange.bytes is not None and not exchange.exact for exchange in exchanges):
        parts.append("≤: at most, since repeated ids are sent once")
    return [f"({'. '.join(parts)})"] if parts else []


def bytes_text(size: int | None, exact: bool) -> str:
    """Formats bytes, with '≤' where there can be fewer."""
    return ("" if exact or size is None else "≤ ") + in_bytes(size)
