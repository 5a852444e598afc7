"""Computes the time of a step: a bar for each rank, a table of phases, the course of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from collective.plan.formatting import in_bytes
from collective.profiling.report import charts
from collective.profiling.report.charts import Bar, Line, LineChart, Swatched, Table, kind_of
from collective.profiling.report.findings import mean_phases
from collective.profiling.report.phases import MEANINGS, ORDER, WAITING, by_phase
from collective.profiling.report.profile import Profile
from collective.profiling.report.selection import shown_ranks


class StepBars(NamedTuple):
    """Holds the bars of a step.

    Attributes:
        bars: the mean over ranks, and each rank; only the mean if there are many ranks.
        least, most: of many ranks, those that wait least and most.
        every: of many ranks, all.
    """

    bars: list[Bar]
    least: Sequence[Bar] = ()
    most: Sequence[Bar] = ()
    every: Sequence[Bar] = ()


def in_ms(ms: float) -> str:
    return f"{ms:,.2f} ms" if ms < 100 else f"{ms:,.0f} ms"


def step_bars(profile: Profile, scale: float) -> StepBars | None:
    """Returns the bars; None if no trace could be read. `scale` is in milliseconds."""
    phases_by_rank = [by_phase(phases) for phases in profile.phases]
    if not any(phases_by_rank):
        return None
    every = [charts.bar(f"rank {r}", p, scale, in_ms) for r, p in enumerate(phases_by_rank)]
    if len(every) == 1:
        return StepBars(every)
    mean = charts.bar("mean", mean_phases(profile), scale, in_ms, "mean")
    shown = shown_ranks([phases.get(WAITING, 0.0) for phases in phases_by_rank])
    if len(shown) == len(every):
        return StepBars([mean, *every])
    half = len(shown) // 2
    least, most = [every[r] for r in shown[:half]], [every[r] for r in shown[half:]]
    return StepBars([mean], least, most, every)


def phase_legend(profiles: Sequence[Profile]) -> list[tuple[str, str]]:
    """Returns (class, name) of the phases that occur."""
    present = {name for profile in profiles for name in mean_phases(profile)}
    return [(kind_of(name), name) for name in ORDER if name in present]


def phase_table(profile: Profile) -> Table:
    """Returns each phase with its meaning, milliseconds and bytes."""
    phases_by_rank = [by_phase(phases) for phases in profile.phases]
    received = mean_received(profile)
    several = len(phases_by_rank) > 1
    head = ["phase", "what it is", "ms a step", "share"]
    head += ["least", "most"] * several + ["received"]
    rows = []
    for name, ms in mean_phases(profile).items():
        row: list[object] = [Swatched(kind_of(name), name), MEANINGS[name], f"{ms:.2f}"]
        row.append(f"{ms / profile.mean_ms:.1%}" if profile.mean_ms else "")
        if several:
            of_ranks = [phases.get(name, 0.0) for phases in phases_by_rank]
            row += [f"{min(of_ranks):.2f}", f"{max(of_ranks):.2f}"]
        rows.append([*row, in_bytes(received[name]) if name in received else ""])
    whole: list[object] = ["step", "", f"{profile.mean_ms:.2f}", ""]
    whole += [f"{min(profile.ms):.2f}", f"{max(profile.ms):.2f}"] * several
    rows.append([*whole, in_bytes(profile.bytes_per_step) if received else ""])
    return Table(head, rows, left=2, kind="wordy")


def compared_phases(before: Profile, after: Profile, names: Sequence[str]) -> Table:
    """Returns the phases of two profiles in one table.

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
        label = "step" if phase == "step" else Swatched(kind_of(phase), phase)
        rows.append([label, MEANINGS.get(phase, ""), *cells, f"{difference:+.2f}"])
    head = ["phase", "what it is", f"{names[0]}, ms", f"{names[1]}, ms", "difference"]
    return Table(head, rows, left=2, kind="wordy")


def mean_received(profile: Profile) -> dict[str, float]:
    """Returns the bytes per step by phase, the mean over ranks."""
    sums: dict[str, float] = {}
    for received in profile.received:
        for name, size in received.items():
            sums[name] = sums.get(name, 0.0) + size / len(profile.received)
    return by_phase(sums)


def course(profile: Profile, most: float) -> LineChart | None:
    """Returns the milliseconds of a step over the job; None if only the profiled steps are known.

    Args:
        profile: the profile.
        most: milliseconds at the top.
    """
    if not goes_on(profile):
        return None
    points = list(zip(profile.history["step"], profile.history.get("ms", [])))
    return charts.lines([Line("milliseconds a step", points)], most, in_ms)


def goes_on(profile: Profile) -> bool:
    """Tells whether steps other than those of the window were measured."""
    steps = profile.history.get("step", [])
    return any(not profile.first <= step <= profile.last for step in steps)
