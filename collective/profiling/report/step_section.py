"""Draws the time of a step: a bar for each rank, a table of phases, the course of the job."""

from __future__ import annotations

from collections.abc import Sequence

from collective.ops.counting import counted
from collective.plan.formatting import in_bytes
from collective.profiling.report import charts
from collective.profiling.report.charts import Line, Part, kind_of
from collective.profiling.report.findings import mean_phases
from collective.profiling.report.markup import Markup, element
from collective.profiling.report.phases import MEANINGS, ORDER, WAITING, by_phase
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import shown_ranks


def in_ms(ms: float) -> str:
    return f"{ms:,.2f} ms" if ms < 100 else f"{ms:,.0f} ms"


def bars(profile: Profile, scale: float) -> Markup:
    """Draws the mean over ranks, and the ranks. `scale` is in milliseconds."""
    phases_by_rank = [by_phase(phases) for phases in profile.phases]
    if not any(phases_by_rank):
        return element("p", "No trace of these steps could be read.", class_="soft")
    if len(phases_by_rank) == 1:
        return _bar("rank 0", phases_by_rank[0], scale)
    waits = [phases.get(WAITING, 0.0) for phases in phases_by_rank]
    shown = shown_ranks(waits)
    drawn = [_bar("mean", mean_phases(profile), scale, "mean")]
    if len(shown) < len(waits):
        half = len(shown) // 2
        drawn.append(element("h3", f"The {half} ranks that wait least: others wait for them"))
        drawn += [_bar(f"rank {r}", phases_by_rank[r], scale) for r in shown[:half]]
        drawn.append(element("h3", f"The {half} ranks that wait most"))
        drawn += [_bar(f"rank {r}", phases_by_rank[r], scale) for r in shown[half:]]
        every = [_bar(f"rank {r}", phases, scale) for r, phases in enumerate(phases_by_rank)]
        summary = element("summary", f"All {counted(len(waits), 'rank')}")
        drawn.append(element("details", summary, every))
    else:
        drawn += [_bar(f"rank {r}", phases_by_rank[r], scale) for r in shown]
    return element("div", drawn)


def _bar(label: str, phases: dict[str, float], scale: float, kind: str = "") -> Markup:
    parts = [Part(kind_of(name), name, ms) for name, ms in phases.items()]
    return charts.bar(label, parts, scale, in_ms, kind)


def phase_legend(profiles: Sequence[Profile]) -> Markup:
    """Draws the colours of the phases that occur."""
    present = {name for profile in profiles for name in mean_phases(profile)}
    return charts.legend([(kind_of(name), name) for name in ORDER if name in present])


def phase_table(profile: Profile) -> Markup:
    """Draws each phase with its meaning, milliseconds and bytes."""
    phases_by_rank = [by_phase(phases) for phases in profile.phases]
    received = mean_received(profile)
    several = len(phases_by_rank) > 1
    head = ["phase", "what it is", "ms a step", "share"]
    head += ["least", "most"] * several + ["received"]
    rows = []
    for name, ms in mean_phases(profile).items():
        row: list[object] = [_swatched(name), MEANINGS[name], f"{ms:.2f}"]
        row.append(f"{ms / profile.mean_ms:.1%}" if profile.mean_ms else "")
        if several:
            of_ranks = [phases.get(name, 0.0) for phases in phases_by_rank]
            row += [f"{min(of_ranks):.2f}", f"{max(of_ranks):.2f}"]
        rows.append([*row, in_bytes(received[name]) if name in received else ""])
    whole: list[object] = ["step", "", f"{profile.mean_ms:.2f}", ""]
    whole += [f"{min(profile.ms):.2f}", f"{max(profile.ms):.2f}"] * several
    rows.append([*whole, in_bytes(profile.bytes_per_step) if received else ""])
    return charts.table(head, rows, left=2, kind="wordy")


def compared_phases(before: Profile, after: Profile, names: Sequence[str]) -> Markup:
    """Draws the phases of two profiles in one table.

    Args:
        before, after: the profiles.
        names: the names under which they are shown.
    """
    of_both = [mean_phases(before), mean_phases(after)]
    of_both[0]["step"], of_both[1]["step"] = before.mean_ms, after.mean_ms
    rows = []
    for phase in [*ORDER, "step"]:
        old, new = (phases.get(phase) for phases in of_both)
        if old is None and new is None:
            continue
        difference = (new or 0.0) - (old or 0.0)
        cells = ["" if ms is None else f"{ms:.2f}" for ms in (old, new)]
        label = "step" if phase == "step" else _swatched(phase)
        rows.append([label, MEANINGS.get(phase, ""), *cells, f"{difference:+.2f}"])
    head = ["phase", "what it is", f"{names[0]}, ms", f"{names[1]}, ms", "difference"]
    return charts.table(head, rows, left=2, kind="wordy")


def _swatched(phase: str) -> Markup:
    return element("span", element("span", class_=f"swatch {kind_of(phase)}"), phase)


def mean_received(profile: Profile) -> dict[str, float]:
    """Returns the bytes per step by phase, the mean over ranks."""
    sums: dict[str, float] = {}
    for received in profile.received:
        for name, size in received.items():
            sums[name] = sums.get(name, 0.0) + size / len(profile.received)
    return by_phase(sums)


def course(profile: Profile, most: float) -> Markup | None:
    """Draws the milliseconds of a step over the job; None if only the profiled steps are known.

    Args:
        profile: the profile.
        most: milliseconds at the top.
    """
    history = profile.history
    steps, ms = history.get("step", []), history.get("ms", [])
    if not goes_on(profile):
        return None
    line = Line("milliseconds a step", list(zip(steps, ms)))
    return charts.lines([line], most, in_ms, "step", (steps[0], steps[-1]))


def goes_on(profile: Profile) -> bool:
    """Tells whether steps other than those of the window were measured."""
    steps = profile.history.get("step", [])
    return any(not profile.first <= step <= profile.last for step in steps)
