"""The ranks' clock: rank 0's time as of the last run that all agreed on.

What a hook decides by it ("ten minutes since the last checkpoint") all ranks decide alike, at the
same step.
"""

from __future__ import annotations

import time
from typing import Any

from collective.ops import communication
from collective.ranks import protocol


class Clock:
    """Stands in for the module `time`; only `time()` is another."""

    def time(self) -> float:
        """Seconds since 1970 on rank 0."""
        agreed = (
            protocol.of_process().clock if communication.size() > 1 and protocol.started() else None
        )
        return time.time() if agreed is None else agreed

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
