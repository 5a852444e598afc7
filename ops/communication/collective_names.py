"""Reads the names of collectives: the phase of a step, and what they exchange."""

from __future__ import annotations

import re

PREFIX = "collective."  # Of the names of all collectives of this library.
NEAR = "host>"  # Follows it in the names of those among the ranks of a host; no scope has a >.
KEYS, ROWS, GRADIENTS, DENSE, AGREEMENT, OTHER = (
    "keys",
    "rows",
    "gradients",
    "dense gradients",
    "agreement",
    "other",
)
PHASES = (AGREEMENT, KEYS, ROWS, GRADIENTS, DENSE, OTHER)  # In the order of a step.

_LOOKUP = re.compile(rf"(?:{re.escape(NEAR)})*(.+)\.(keys|rows)(\.\d+)?((?:\.gradient(?:\.\d+)?)*)")


def short(name: str) -> str:
    """Returns `name` of a collective without its phase, and without the prefix that all have."""
    return split_name(name)[1]


def near(name: str) -> str:
    """Returns the name of what the ranks of a host exchange in addition to the collective called
    `name`.

    They may exchange something else in addition, whose name is `near(near(name))`.
    """
    return f"{PREFIX}{NEAR}{name[len(PREFIX) :]}"


def is_near(name: str) -> bool:
    """Tells whether the collective called `name` is one among the ranks of a host."""
    return name.startswith(PREFIX + NEAR)


def split_name(name: str) -> tuple[str, str]:
    """Returns (phase, what is exchanged) of the collective called `name`."""
    base = name[len(PREFIX) :] if name.startswith(PREFIX) else name
    match = _LOOKUP.fullmatch(base)
    if match:
        subject = match[1] + (match[3] or "")
        if match[4]:  # The gradient of a gradient goes the way of the rows.
            return (GRADIENTS if match[4].count("gradient") % 2 else ROWS), subject
        return match[2], subject
    if re.match(r"(dense|sparse)_gradients\.", base):
        return DENSE, ""
    return (AGREEMENT if base.partition(".")[0] == "agreement" else OTHER), ""
