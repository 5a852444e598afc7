"""Makes the page of one profile, or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Callable

from collective.ops.counting import counted
from collective.plan.formatting import imbalance, in_bytes
from collective.profiling.report import charts, style
from collective.profiling.report.findings import findings, overlap, profiled_ms
from collective.profiling.report.markup import Markup, element
from collective.profiling.report.plan_section import plan
from collective.profiling.report.profile import Profile
from collective.profiling.report.step_section import (
    bars,
    compared_phases,
    course,
    goes_on,
    in_ms,
    phase_legend,
    phase_table,
)
from collective.profiling.report.table_sections import (
    byte_legend,
    bytes_by_table,
    bytes_scale,
    owners,
    ratio,
    rows_over_time,
    rows_scale,
)

Draw = Callable[[Profile], object]
TITLE = "Where the time of a step goes"


def page(profiles: Sequence[Profile]) -> str:
    """Returns the page of one profile, or of two, as a complete document that is HTML and XML."""
    sections = [_head(profiles), _step(profiles), _course(profiles), _bytes(profiles)]
    sections += [_owners(profiles), _rows(profiles), _plan(profiles), _caveats()]
    names = " and ".join(profile.name for profile in profiles)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{names}: {TITLE.lower()}"),
        element("style", Markup(style.sheet())),
    )
    body = element("body", element("main", sections))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


# ---- Head


def _head(profiles: Sequence[Profile]) -> Markup:
    drawn: list[object] = [element("h1", TITLE)]
    for profile, name in zip(profiles, _names(profiles)):
        drawn.append(element("p", _origin(profile, name), class_="soft"))
    for profile, name in zip(profiles, _names(profiles)):
        if profile.alone:
            drawn.append(
                element(
                    "p",
                    f"{name}: training ended before the last step that was to be profiled, so "
                    "these are the times of rank 0 alone. How long it waited for others isn't "
                    "known: that is part of the exchanges.",
                    class_="note",
                )
            )
    if len(profiles) == 1:
        drawn += [_tiles(profiles[0]), _findings(profiles[0])]
    else:
        drawn.append(_comparison(profiles))
        drawn.append(_beside(profiles, _findings))
    return element("header", drawn)


def _origin(profile: Profile, name: str) -> str:
    steps = f"step {profile.first}"
    if profile.steps > 1:
        steps = f"steps {profile.first} to {profile.last}"
    parts = [f"{name}: the mean of {steps}", counted(profile.size, "rank")]
    if profile.plan:
        parts.append(f"backend {profile.plan['backend']}")
    parts += [f"{key}={value}" for key, value in sorted(profile.options.items())]
    if profile.version:
        parts.append(f"collective {profile.version}")
    if profile.written:
        parts.append(profile.written)
    return ", ".join(parts)


def _measures(profile: Profile) -> list[tuple[str, float | None, Callable[[float], str]]]:
    """Returns (name, value, format) of the main measures to compare."""
    return [
        ("a step", profile.mean_ms, in_ms),
        ("the median step", median(profiled_ms(profile) or [profile.mean_ms]), in_ms),
        ("samples/s, all ranks", profile.samples_per_s, "{:,.0f}".format),
        ("a rank receives in a step", profile.bytes_per_step, in_bytes),
        ("of the ids travel as keys", profile.distinct_share, "{:.1%}".format),
        ("keys per owner, max/mean", profile.key_imbalance, ratio),
        ("memory of tables, max/mean", imbalance(profile.bytes_by_rank), ratio),
    ]


def _tiles(profile: Profile) -> Markup:
    tiles = [
        element("div", element("dt", name), element("dd", text(value)))
        for name, value, text in _measures(profile)
        if value is not None
        and name != "the median step"
        and not (profile.alone and "max/mean" in name)
    ]
    return element("dl", tiles, class_="tiles")


def _findings(profile: Profile) -> Markup | None:
    sentences = [element("li", sentence) for sentence in findings(profile)]
    return element("ul", sentences, class_="findings") if sentences else None


def _comparison(profiles: Sequence[Profile]) -> Markup:
    rows = [["ranks", *(str(profile.size) for profile in profiles), ""]]
    for old, new in zip(*map(_measures, profiles)):
        name, values, text = old[0], (old[1], new[1]), old[2]
        if values == (None, None):
            continue
        change = ""
        if values[0] and values[1] is not None:
            change = f"{values[1] / values[0] - 1:+.1%}"
        cells = ["" if value is None else text(value) for value in values]
        rows.append([name, *cells, change])
    warning = overlap(*profiles)
    return element(
        "div",
        charts.table(["", *_names(profiles), "change"], rows),
        warning and element("p", warning, class_="note"),
    )


# ---- Sections


def _step(profiles: Sequence[Profile]) -> Markup:
    scale = max(max(profile.ms) for profile in profiles)
    tables = (
        phase_table(profiles[0])
        if len(profiles) == 1
        else compared_phases(profiles[0], profiles[1], _names(profiles))
    )
    return _section(
        "A step, by rank",
        "Bars show the milliseconds of a step. A rank computes in several threads at once: each "
        "moment counts for what is computed then, and for an exchange only while nothing is.",
        phase_legend(profiles),
        _beside(profiles, lambda profile: bars(profile, scale)),
        tables,
    )


def _course(profiles: Sequence[Profile]) -> Markup | None:
    if not any(map(goes_on, profiles)):
        return None
    most = max(max(profile.history.get("ms") or [0.0]) for profile in profiles)
    return _section(
        "Steps over the job",
        "Milliseconds of the steps that were measured, the mean over ranks.",
        _beside(profiles, lambda profile: course(profile, most)),
    )


def _bytes(profiles: Sequence[Profile]) -> Markup:
    scale = max(map(bytes_scale, profiles))
    return _section(
        "Bytes by table",
        "What a rank receives in a step, its own share included: the mean over ranks. Tables that "
        "share an exchange share its bytes by their keys and by the size of their rows.",
        byte_legend(profiles),
        _beside(profiles, lambda profile: bytes_by_table(profile, scale)),
    )


def _owners(profiles: Sequence[Profile]) -> Markup:
    keys = max(max(profile.keys_by_owner, default=0.0) for profile in profiles)
    memory = max(max(profile.bytes_by_rank, default=0.0) for profile in profiles)
    return _section(
        "Balance of owners",
        "Each rank owns a shard of every table. The dashed line is the mean over ranks; a rank "
        "that is asked for more than that has more to read, to send and to update.",
        _beside(profiles, lambda profile: owners(profile, keys, memory)),
    )


def _rows(profiles: Sequence[Profile]) -> Markup | None:
    if not any(profile.history.get("rows") for profile in profiles):
        return None
    most = max(map(rows_scale, profiles))
    few = not any(map(goes_on, profiles))
    return _section(
        "Rows of dynamic tables over time",
        "Rows on all ranks together."
        + " scope(profile_every=100) counts them at every 100th step, too." * few,
        _beside(profiles, lambda profile: rows_over_time(profile, most)),
    )


def _plan(profiles: Sequence[Profile]) -> Markup:
    return _section("The plan", None, _beside(profiles, plan))


def _caveats() -> Markup:
    return _section(
        "How to read this",
        "Tracing costs time, so compare these steps with other traced steps only. A rank waits "
        "for others from the moment it comes to an exchange until the last rank has come; no two "
        "clocks are compared for that. On a GPU the times are those of the host, which starts "
        "kernels and doesn't wait for each.",
    )


def _section(title: str, sentence: str | None, *content: object) -> Markup:
    paragraph = element("p", sentence, class_="soft") if sentence else None
    return element("section", element("h2", title), paragraph, content)


def _beside(profiles: Sequence[Profile], draw: Draw) -> Markup:
    if len(profiles) == 1:
        return element("div", draw(profiles[0]))
    drawn = [
        element("div", element("h3", name), draw(profile))
        for profile, name in zip(profiles, _names(profiles))
    ]
    return element("div", drawn, class_="pair two")


def _names(profiles: Sequence[Profile]) -> list[str]:
    """Returns the profiles' names, marked A and B if there are two."""
    if len(profiles) == 1:
        return [profiles[0].name]
    return [f"{letter} · {profile.name}" for letter, profile in zip("AB", profiles)]
