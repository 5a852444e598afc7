"""Durations as people write them: seconds, or numbers with units such as 90s, 1m or 1h30m."""

from __future__ import annotations

import argparse
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_WITH_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d)")


def seconds(text: str) -> float:
    """Returns the seconds in a text such as "90", "90s", "1.5m" or "1h30m".

    Raises:
        argparse.ArgumentTypeError: the text isn't a duration.
    """
    try:
        return float(text)
    except ValueError:
        pass
    total = 0.0
    position = 0
    for match in _NUMBER_WITH_UNIT.finditer(text):
        if match.start() != position:
            break
        total += float(match[1]) * _UNITS[match[2]]
        position = match.end()
    if not text or position != len(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; give seconds, or a number with a unit like 90s, 1m or 2h"
        )
    return total
