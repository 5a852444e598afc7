"""Reads the names of collectives: the phase of a step, and what is exchanged."""

from __future__ import annotations

import re

PREFIX = "collective."  # Begins the names of all collectives of this library.
NEAR = "host>"  # Follows PREFIX in collectives among the ranks of a host; no scope's name has a >.
KEYS, ROWS, GRADIENTS, DENSE, AGREEMENT, OTHER = (
    "keys",
    "rows",
    "gradients",
    "dense gradients",
    "agreement",
    "other",
)
PHASES = (AGREEMENT, KEYS, ROWS, GRADIENTS, DENSE, OTHER)  # in the order of a step

_LOOKUP = re.compile(rf"(?:{re.escape(NEAR)})*(.+)\.(keys|rows)(\.\d+)?((?:\.gradient(?:\.\d+)?)*)")


def short(name: str) -> str:
    """Returns a collective's `name` without its phase and without the common prefix."""
    return split_name(name)[1]


def near(name: str) -> str:
    """Returns the name of the exchange among the ranks of a host that adds to the collective
    `name`.

    A further exchange of the host is named `near(near(name))`.
    """
    return f"{PREFIX}{NEAR}{name[len(PREFIX) :]}"


def is_near(name: str) -> bool:
    """Tells whether the collective `name` is one among the ranks of a host."""
    return name.startswith(PREFIX + NEAR)


def split_name(name: str) -> tuple[str, str]:
    """Returns (phase, what is exchanged) of the collective `name`."""
    base = name[len(PREFIX) :] if name.startswith(PREFIX) else name
    match = _LOOKUP.fullmatch(base)
    if match:
        subject = match[1] + (match[3] or "")
        if match[4]:  # The gradient of a gradient travels like the rows.
            return (GRADIENTS if match[4].count("gradient") % 2 else ROWS), subject
        return match[2], subject
    if re.match(r"(dense|sparse)_gradients\.", base):
        return DENSE, ""
    return (AGREEMENT if base.partition(".")[0] == "agreement" else OTHER), ""
