"""Draws what tables cost: bytes on the wire, the balance of their owners, rows over time."""

from __future__ import annotations

from collections.abc import Sequence

from collective.ops.communication.collective_names import GRADIENTS, KEYS, ROWS
from collective.ops.counting import counted
from collective.plan.formatting import imbalance, in_bytes
from collective.profiling.report import charts
from collective.profiling.report.charts import Line, Part, kind_of
from collective.profiling.report.markup import Markup, element
from collective.profiling.report.phases import EXCHANGES
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import largest
from collective.profiling.report.step_section import mean_received

OF_TABLES = (KEYS, ROWS, GRADIENTS)


def in_count(count: float) -> str:
    return f"{count:,.0f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ---- Bytes


def bytes_scale(profile: Profile) -> float:
    """Returns the bytes of the largest table; of everything, if tables aren't distinguished."""
    sizes = [sum(of.values()) for of in profile.table_bytes.values()]
    return max(sizes, default=profile.bytes_per_step)


def bytes_by_table(profile: Profile, scale: float) -> Markup:
    """Draws a bar for each of the largest tables, one for the rest, and one for all else.

    Args:
        profile: the profile.
        scale: bytes of the longest bar; the bar of the rest may be longer, and fades out.
    """
    if profile.size == 1:
        return _soft("With one rank nothing travels.")
    drawn, rows = [], _byte_rows(profile)
    if not profile.table_bytes:
        drawn.append(
            _soft(
                "This profile doesn't tell tables apart: there is no lookup in it, or an earlier "
                "release has written it."
            )
        )
    for label, parts in rows:
        of_kinds = [Part(kind_of(name), name, size) for name, size in parts.items()]
        drawn.append(charts.bar(label, of_kinds, scale, in_bytes))
    if any(sum(parts.values()) > scale for _, parts in rows):
        drawn.append(_soft("A bar that fades out is longer than there is room for."))
    return element("div", drawn, class_="by-table")


def byte_legend(profiles: Sequence[Profile]) -> Markup:
    """Draws the colours of the phases in which bytes were exchanged."""
    present = {phase for profile in profiles for phase in mean_received(profile)}
    return charts.legend([(kind_of(name), name) for name in EXCHANGES if name in present])


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


def owners(profile: Profile, most_keys: float, most_bytes: float) -> Markup:
    """Draws, for each rank, the keys that it is asked for and the memory of its shards.

    Args:
        profile: the profile.
        most_keys, most_bytes: the values that take the whole height.
    """
    if profile.size == 1:
        return _soft("One rank owns everything.")
    drawn: list[Markup] = []
    keys, memory = profile.keys_by_owner, profile.bytes_by_rank
    if keys and sum(keys):
        head = f"Keys a step that each rank is asked for: max/mean {ratio(imbalance(keys))}"
        if profile.alone:
            head = "Keys a step that rank 0 is asked for"
        drawn += [element("h3", head), charts.columns(keys, most_keys, in_count)]
        if not profile.alone:
            drawn.append(_uneven_tables(profile))
    if memory and sum(memory):
        head = f"Memory of tables and slots on each rank: max/mean {ratio(imbalance(memory))}"
        drawn += [element("h3", head), charts.columns(memory, most_bytes, in_bytes)]
    return element("div", drawn) if drawn else _soft("No lookup was counted in these steps.")


def _uneven_tables(profile: Profile) -> Markup:
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
    return charts.table(head, rows)


# ---- Rows


def rows_scale(profile: Profile) -> float:
    """Returns the rows at the top of the chart."""
    return max((rows for line in _row_lines(profile) for _, rows in line.points), default=0.0)


def rows_over_time(profile: Profile, most: float) -> Markup:
    """Draws the rows of dynamic tables over steps.

    Args:
        profile: the profile.
        most: rows at the top.
    """
    drawn = _row_lines(profile)
    if not drawn:
        return _soft("No dynamic table was counted.")
    steps = profile.history["step"]
    kinds = [(f"line-{i}", _described(line)) for i, line in enumerate(drawn)]
    chart = charts.lines(drawn, most, in_count, "step", (steps[0], steps[-1]))
    rest = _rest_of_rows(profile)
    return element(
        "div", chart, charts.legend(kinds), rest and _soft(f"Not drawn: {_described(rest)}.")
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


def _soft(sentence: str) -> Markup:
    return element("p", sentence, class_="soft")
