"""What the name of a collective tells."""

from __future__ import annotations

import re

from collective.ops import collectives

KEYS, ROWS, GRADIENTS, DENSE, AGREEMENT, OTHER = (
    "keys",
    "rows",
    "gradients",
    "dense gradients",
    "agreement",
    "other",
)
PHASES = (AGREEMENT, KEYS, ROWS, GRADIENTS, DENSE, OTHER)  # in the order of a step


def short(name: str) -> str:
    """`name` of a collective without what all have, and without its phase."""
    return split_name(name)[1]


def split_name(name: str) -> tuple[str, str]:
    """(phase, what it is of) of the collective called `name`."""
    base = name[len(collectives.PREFIX) :] if name.startswith(collectives.PREFIX) else name
    found = re.fullmatch(r"(.+)\.(keys|rows)(\.\d+)?((?:\.gradient(?:\.\d+)?)*)", base)
    if found:
        of = found[1] + (found[3] or "")
        if found[4]:  # the gradient of a gradient goes the way of the rows
            return (GRADIENTS if found[4].count("gradient") % 2 else ROWS), of
        return found[2], of
    if re.match(r"dense_gradients\.|.*\.gradient_(values|indices)(\.\d+)?$", base):
        return DENSE, ""
    return (AGREEMENT if base.partition(".")[0] == "agreement" else OTHER), ""
