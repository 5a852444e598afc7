"""Computes what tables cost: bytes on the wire, the balance of their owners, rows over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from collective.ops.communication.collective_names import GRADIENTS, KEYS, ROWS
from collective.ops.counting import counted
from collective.plan.formatting import imbalance, in_bytes
from collective.profiling.report import charts
from collective.profiling.report.charts import Bar, Columns, Line, LineChart, Table, kind_of
from collective.profiling.report.phases import EXCHANGES
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import largest
from collective.profiling.report.step_section import mean_received

OF_TABLES = (KEYS, ROWS, GRADIENTS)


class BytesByTable(NamedTuple):
    """Holds the bars of the bytes.

    Attributes:
        bars: of the largest tables, of the rest, and of all else.
        tells_tables_apart: whether bytes are known by table.
        fades_out: whether a bar is longer than there is room for.
    """

    bars: list[Bar]
    tells_tables_apart: bool
    fades_out: bool


class Owners(NamedTuple):
    """Holds the balance of ranks; None where nothing is known."""

    keys: Columns | None
    key_imbalance: str
    uneven_tables: Table | None
    memory: Columns | None
    memory_imbalance: str


class RowsOverTime(NamedTuple):
    """Holds a chart of rows.

    Attributes:
        chart: the chart of the largest tables.
        legend: (class, text) of each line.
        rest: the text for all other tables, whose line would dwarf the largest.
    """

    chart: LineChart
    legend: list[tuple[str, str]]
    rest: str | None


def in_count(count: float) -> str:
    return f"{count:,.0f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ---- Bytes


def bytes_scale(profile: Profile) -> float:
    """Returns the bytes of the largest table; of everything, if tables aren't distinguished."""
    sizes = [sum(of.values()) for of in profile.table_bytes.values()]
    return max(sizes, default=profile.bytes_per_step)


def bytes_by_table(profile: Profile, scale: float) -> BytesByTable:
    """Returns a bar for each of the largest tables, one for the rest, and one for all else.

    Args:
        profile: the profile.
        scale: bytes of the longest bar; the bar of the rest may be longer, and fades out.
    """
    rows = _byte_rows(profile)
    bars = [charts.bar(label, sizes, scale, in_bytes) for label, sizes in rows]
    fades_out = any(sum(sizes.values()) > scale for _, sizes in rows)
    return BytesByTable(bars, bool(profile.table_bytes), fades_out)


def byte_legend(profiles: Sequence[Profile]) -> list[tuple[str, str]]:
    """Returns (class, name) of the phases in which bytes were exchanged."""
    present = {phase for profile in profiles for phase in mean_received(profile)}
    return [(kind_of(name), name) for name in EXCHANGES if name in present]


def _byte_rows(profile: Profile) -> list[tuple[str, dict[str, float]]]:
    """Returns (label, bytes by phase): tables, the rest of the tables, and everything else."""
    chosen = largest({name: sum(of.values()) for name, of in profile.table_bytes.items()})
    rows = [(name, _ordered(profile.table_bytes[name])) for name in chosen.names]
    if chosen.others:
        rest: dict[str, float] = {}
        for name in chosen.others:
            for phase, size in profile.table_bytes[name].items():
                rest[phase] = rest.get(phase, 0.0) + size
        rows.append((f"{counted(len(chosen.others), 'other table')}", _ordered(rest)))
    left = {}
    for phase, size in mean_received(profile).items():
        of_tables = sum(of.get(phase, 0.0) for of in profile.table_bytes.values())
        # A rounding error of a sum isn't bytes.
        if size - of_tables > 0.5:
            left[phase] = size - of_tables
    if left:
        rows.append(("all else" if profile.table_bytes else "all exchanges", left))
    return rows


def _ordered(by_phase: dict[str, float]) -> dict[str, float]:
    return {phase: by_phase[phase] for phase in OF_TABLES if phase in by_phase}


# ---- Owners


def owners(profile: Profile, most_keys: float, most_bytes: float) -> Owners:
    """Returns, for each rank, the keys that it is asked for and the memory of its shards.

    Args:
        profile: the profile.
        most_keys, most_bytes: the values that take the whole height.
    """
    keys, memory = profile.keys_by_owner, profile.bytes_by_rank
    return Owners(
        charts.columns(keys, most_keys, in_count) if sum(keys) else None,
        ratio(imbalance(keys)),
        _uneven_tables(profile) if sum(keys) and not profile.alone else None,
        charts.columns(memory, most_bytes, in_bytes) if sum(memory) else None,
        ratio(imbalance(memory)),
    )


def _uneven_tables(profile: Profile) -> Table:
    """Lists the tables by how far the keys of their largest owner exceed the mean."""
    surplus = {
        name: max(keys) - sum(keys) / len(keys) for name, keys in profile.keys_per_owner.items()
    }
    chosen = largest(surplus)
    rows: list[list[object]] = []
    for name in chosen.names:
        keys = profile.keys_per_owner[name]
        most = f"rank {keys.index(max(keys))}" if sum(keys) else ""
        rows.append([name, in_count(sum(keys)), in_count(max(keys)), most, ratio(imbalance(keys))])
    if chosen.others:
        rest = [profile.keys_per_owner[name] for name in chosen.others]
        keys = [sum(of_rank) for of_rank in zip(*rest)]
        label = counted(len(rest), "other table")
        rows.append([label, in_count(sum(keys)), in_count(max(keys)), "", ratio(imbalance(keys))])
    head = ["table", "keys a step", "of them, largest owner", "which", "max/mean"]
    return Table(head, rows)


# ---- Rows


def rows_scale(profile: Profile) -> float:
    """Returns the rows at the top of the chart."""
    return max((rows for line in _row_lines(profile) for _, rows in line.points), default=0.0)


def rows_over_time(profile: Profile, most: float) -> RowsOverTime | None:
    """Returns the rows of dynamic tables over steps; None if none were counted.

    Args:
        profile: the profile.
        most: rows at the top.
    """
    drawn = _row_lines(profile)
    if not drawn:
        return None
    legend = [(f"line-{i}", _described(line)) for i, line in enumerate(drawn)]
    rest = _rest_of_rows(profile)
    return RowsOverTime(
        charts.lines(drawn, most, in_count), legend, None if rest is None else _described(rest)
    )


def _row_lines(profile: Profile) -> list[Line]:
    rows_by_table = profile.history.get("rows", {})
    steps = profile.history.get("step", [])
    if not rows_by_table or not steps:
        return []
    chosen = largest({name: counts[-1] for name, counts in rows_by_table.items()})
    return [Line(name, list(zip(steps, rows_by_table[name]))) for name in chosen.names]


def _rest_of_rows(profile: Profile) -> Line | None:
    """Returns the rows of all other tables together, whose line would dwarf the largest."""
    rows_by_table = profile.history["rows"]
    others = largest({name: counts[-1] for name, counts in rows_by_table.items()}).others
    if not others:
        return None
    sums = [sum(counts) for counts in zip(*(rows_by_table[name] for name in others))]
    name = counted(len(others), "other table") + " together"
    return Line(name, list(zip(profile.history["step"], sums)))


def _described(line: Line) -> str:
    (first_step, first), (last_step, last) = line.points[0], line.points[-1]
    text = f"{line.name}: {counted(round(last), 'row')}"
    if last_step > first_step:
        text += f", {(last - first) / (last_step - first_step):+,.1f} a step"
    return text
