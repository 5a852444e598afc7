"""Makes the page of one profile, or of two side by side.

What it shows is computed here and in the modules of its sections; `templates/` has its text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Callable

from collective.ops.counting import counted
from collective.plan.formatting import imbalance, in_bytes
from collective.profiling.report.charts import Table
from collective.profiling.report.findings import findings, overlap, profiled_ms
from collective.profiling.report.plan_section import plan_section
from collective.profiling.report.profile import Profile
from collective.profiling.report.step_section import (
    compared_phases,
    course,
    goes_on,
    in_ms,
    phase_legend,
    phase_table,
    step_bars,
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

if TYPE_CHECKING:
    import jinja2

# Characters that neither HTML nor XML allows, though the name of a table may have them.
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page(profiles: Sequence[Profile]) -> str:
    """Returns the page of one profile, or of two, as a complete document that is HTML and XML."""
    names = _names(profiles)
    two = len(profiles) == 2
    return _template().render(
        title=" and ".join(profile.name for profile in profiles),
        profiles=_views(profiles, names),
        comparison=_comparison(profiles) if two else None,
        warning=overlap(*profiles) if two else None,
        phase_legend=phase_legend(profiles),
        phase_table=compared_phases(profiles[0], profiles[1], names)
        if two
        else phase_table(profiles[0]),
        any_course=any(map(goes_on, profiles)),
        byte_legend=byte_legend(profiles),
        any_rows=any(profile.history.get("rows") for profile in profiles),
    )


@functools.cache
def _template() -> jinja2.Template:
    # Imported at its first use: most programs that profile nothing load this module, too.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        finalize=_allowed,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["counted"] = counted
    return environment.get_template("page.jinja2")


def _allowed(value: Any) -> Any:
    """Replaces the characters of a text that no page may have; markup is already free of them."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return FORBIDDEN.sub("\ufffd", value) if is_text else value


def _views(profiles: Sequence[Profile], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the page shows of each profile; all have the same scales."""
    ms = max(max(profile.ms) for profile in profiles)
    course_ms = max(max(profile.history.get("ms") or [0.0]) for profile in profiles)
    table_bytes = max(map(bytes_scale, profiles))
    keys = max(max(profile.keys_by_owner, default=0.0) for profile in profiles)
    memory = max(max(profile.bytes_by_rank, default=0.0) for profile in profiles)
    rows = max(map(rows_scale, profiles))
    return [
        {
            "name": name,
            "size": profile.size,
            "alone": profile.alone,
            "origin": _origin(profile, name),
            "tiles": _tiles(profile),
            "findings": findings(profile),
            "step": step_bars(profile, ms),
            "course": course(profile, course_ms),
            "bytes": bytes_by_table(profile, table_bytes),
            "owners": owners(profile, keys, memory),
            "rows": rows_over_time(profile, rows),
            "plan": plan_section(profile),
        }
        for profile, name in zip(profiles, names)
    ]


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


def _tiles(profile: Profile) -> list[tuple[str, str]]:
    return [
        (name, text(value))
        for name, value, text in _measures(profile)
        if value is not None
        and name != "the median step"
        and not (profile.alone and "max/mean" in name)
    ]


def _comparison(profiles: Sequence[Profile]) -> Table:
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
    return Table(["", *_names(profiles), "change"], rows)


def _names(profiles: Sequence[Profile]) -> list[str]:
    """Returns the profiles' names, marked A and B if there are two."""
    if len(profiles) == 1:
        return [profiles[0].name]
    return [f"{letter} · {profile.name}" for letter, profile in zip("AB", profiles)]
