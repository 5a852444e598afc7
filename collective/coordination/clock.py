"""Lets hooks that act by the clock act at the same step on all ranks."""

from __future__ import annotations

import time
from typing import Any

from collective.coordination import coordinator
from collective.ops.communication import collectives


class Clock:
    """Stands in for the module `time`: `time()` is rank 0's."""

    def time(self) -> float:
        """Returns seconds since 1970 on rank 0, as of the last agreement."""
        agreed = None
        if collectives.size() > 1 and coordinator.started():
            agreed = coordinator.instance().clock
        return time.time() if agreed is None else agreed

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
