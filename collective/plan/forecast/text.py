"""Formats a forecast as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from collective.ops.counting import counted
from collective.plan.formatting import columns, cut_off, in_bytes, shortened
from collective.planner.choices import NAMES_OF_PARTS, Choice
from collective.planner.machines import Figure
from collective.planner.search import Forecast
from collective.planner.step_model import StepModel
from collective.planner.workload import Kind, kind_of

LONGEST_NAME, MOST_TABLES = 32, 40
ESTIMATE = (
    "An estimate. It has been compared with steps of two CPU ranks, never with steps of GPUs or of "
    "several hosts (docs/guides/placement.md)."
)
UNITS = {
    "memory": "B",
    "memory_rate": "B/s",
    "flops": "FLOP/s",
    "within_rate": "B/s",
    "between_rate": "B/s",
    "start": "s",
    "id_time": "s",
    "within_wait": "s",
    "between_wait": "s",
}
WHAT = {
    "memory": "memory",
    "memory_rate": "reading and writing it",
    "flops": "matrix products",
    "within_rate": "sending within a host",
    "between_rate": "sending between hosts",
    "start": "starting an operation",
    "id_time": "an id of a replicated table",
    "within_wait": "a collective within a host",
    "between_wait": "a collective between hosts",
    "usable": "memory that tables may have",
    "memory_share": "of the memory's rate reached",
    "wire_share": "of the wires' rates reached",
    "flop_share": "of the products' rate reached",
}


def lines_of(
    forecast: Forecast, full: bool = False, origins: Sequence[Sequence[str]] = ()
) -> list[str]:
    """Returns the lines of a forecast.

    Args:
        forecast: what was chosen.
        full: lists every table; otherwise the `MOST_TABLES` that take most memory.
        origins: where numbers of the workload come from: name, value, origin and source of each.
    """
    lines = [title(forecast), "", *_table_lines(forecast.choices, full), ""]
    lines += _step_lines(forecast)
    lines += ["", "Where the numbers come from:", *_figure_lines(forecast, origins)]
    return [*lines, "", ESTIMATE]


def title(forecast: Forecast) -> str:
    machines = forecast.machines
    samples = counted(forecast.workload.batch, "sample")
    return f"collective plan: {machines.name}, {samples} in a step"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _table_lines(choices: Sequence[Choice], full: bool) -> list[str]:
    shown = sorted(choices, key=lambda c: (-c.bytes, c.table.name))
    left_out = [] if full else shown[MOST_TABLES:]
    shown = shown[: len(shown) - len(left_out)]
    head = ["table", "rows", "dim", "ids", "placement", "bytes a rank", "ms", "other: ms more"]
    rows = []
    for choice in shown:
        table = choice.table
        costs = "" if choice.other_costs is None else f"+{milliseconds(choice.other_costs)}"
        rows.append(
            [
                shortened(table.name, LONGEST_NAME),
                f"{table.rows:,}",
                str(table.dimension),
                f"{table.ids:g}",
                choice.placement,
                in_bytes(choice.bytes),
                milliseconds(choice.parts.seconds),
                costs,
            ]
        )
    lines = columns(head, rows)
    width = max(map(len, lines))
    named = [f"{lines[0]:<{width}}  why", *_with_reasons(lines[1:], shown, width)]
    if left_out:
        replicated, whole = _count(left_out, "replicated"), _count(left_out, "whole")
        also = f", {whole} whole on one rank" if whole else ""
        named.append(
            f"and {counted(len(left_out), 'smaller table')}, {replicated} of them replicated{also} "
            "(--full lists them)"
        )
    return named


def _count(choices: Sequence[Choice], kind: Kind) -> int:
    return sum(kind_of(choice.placement) == kind for choice in choices)


def _with_reasons(lines: Sequence[str], choices: Sequence[Choice], width: int) -> list[str]:
    return [cut_off(f"{line:<{width}}  {choice.why}", 160) for line, choice in zip(lines, choices)]


def _step_lines(forecast: Forecast) -> list[str]:
    seconds, machines = forecast.parts.seconds, forecast.machines
    rate = counted(round(forecast.workload.batch / seconds), "sample")
    compared = ""
    if forecast.by_rows is not None:
        compared = f"; all tables by rows: {milliseconds(forecast.by_rows)} ms"
    lines = [
        f"A step: {milliseconds(seconds)} ms, {rate} a second{compared}",
    ]
    parts = dataclasses.asdict(forecast.parts)
    rows = [[f"  {NAMES_OF_PARTS[n]}", milliseconds(v), "ms"] for n, v in parts.items() if v]
    lines += columns(["", "", ""], rows)[1:]
    share = machines.device.usable.value
    which = "the fullest rank" if _count(forecast.choices, "whole") else "a rank"
    lines.append(
        f"Memory of {which}: {in_bytes(forecast.bytes)} of {in_bytes(machines.room)} "
        f"({share:g} of {in_bytes(machines.device.memory.value)})"
    )
    buffers = StepModel(forecast.workload, machines).buffer_bytes()
    lines.append(f"  of which {in_bytes(buffers)} on their way between ranks, and for the network")
    return lines


def _figure_lines(forecast: Forecast, origins: Sequence[Sequence[str]]) -> list[str]:
    rows = [[f"  {name}", *rest] for name, *rest in origins]
    for name, figure in forecast.machines.device.figures().items():
        if "between" in name and forecast.machines.hosts == 1:
            continue
        rows.append([f"  {WHAT[name]}", _value(name, figure), figure.origin, figure.source])
    tables = forecast.workload.tables
    unknown = sum(table.distinct is None for table in tables)
    if unknown:
        which = (
            "all tables"
            if unknown == len(tables)
            else f"{unknown} of {counted(len(tables), 'table')}"
        )
        why = "all rows equally likely: the most that there can be"
        rows.append([f"  distinct ids of {which}", "", "assumed", why])
    return [line.rstrip() for line in columns(["", "", "", ""], rows, left=4)[1:]]


def _value(name: str, figure: Figure) -> str:
    unit, value = UNITS.get(name, ""), figure.value
    if not unit:
        return f"{value:g}"
    if unit == "s":
        return f"{1e6 * value:.3g} µs"
    if unit == "FLOP/s":
        return f"{value / 1e12:.3g} TFLOP/s"
    return in_bytes(value) + unit[1:]


_LISTED: tuple[Kind, ...] = ("replicated", "whole")


def comparison_lines(forecasts: Sequence[Forecast | tuple[str, str]]) -> list[str]:
    """Returns a line for each of several forecasts, compared with the first.

    Args:
        forecasts: the first one, and others; in place of one that isn't possible its name and the
            reason.
    """
    head = ["", "samples", "ms a step", "samples a second", "of a rank's memory", "replicated"]
    head.append("whole")
    rows, problems = [], []
    for each in forecasts:
        if isinstance(each, tuple):
            rows.append([each[0], *["", "doesn't fit", "", "", "", ""]])
            problems.append(f"{each[0]}: {each[1]}")
            continue
        rows.append(
            [
                each.machines.name,
                f"{each.workload.batch:,}",
                milliseconds(each.parts.seconds),
                f"{each.workload.batch / each.parts.seconds:,.0f}",
                in_bytes(each.bytes),
                *(f"{_count(each.choices, k)} of {len(each.choices)}" for k in _LISTED),
            ]
        )
    return [*columns(head, rows), *problems]
