"""What a user wants to see of training: the plan when it starts, and where the time goes (see `CollectiveStrategy.scope`)."""
from __future__ import annotations

import dataclasses
from typing import Any, Callable

from collective.plan import reading
from collective.profiling.profiler import Original, Profiler
from collective.ranks.shared import Run


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is watched of the runs of sessions.

    Attributes:
        quiet: whether the plan isn't printed.
        profiler: what measures training runs, if anything.
    """
    quiet: bool
    profiler: Profiler | None

    def __call__(self, original: Original, session: Any, run: Run, carry_out: Callable[[Original], Any]) -> Any:
        """Carries out `run`: `carry_out(original)`, where the profiler may put something in the place of `original`."""
        if not run.reach.trains:
            return carry_out(original)
        reading.announce(session, run.reach, self.quiet)
        return carry_out(original) if self.profiler is None else self.profiler.watch(original, session, run, carry_out)
