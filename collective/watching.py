"""What a user wants to see of training: the plan when it starts, where the time goes, and that
replicas stay equal.

See `CollectiveStrategy.scope`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

from collective import comparing
from collective.plan import reading
from collective.profiling import profiler
from collective.profiling.profiler import Original, Profiler
from collective.ranks.shared import Run


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is watched of the runs of sessions.

    Attributes:
        quiet: whether the plan isn't printed.
        profiler: what measures training runs, if anything.
        check: after how many training runs the ranks compare replicated variables; 0 for never.
        alike: options that all ranks must have given alike before they train together, for ranks to
            compare.
    """

    quiet: bool
    profiler: Profiler | None
    check: int
    alike: tuple[str, ...]

    def __call__(
        self, original: Original, session: Any, run: Run, carry_out: Callable[[Original], Any]
    ) -> Any:
        """Carries out `run`: `carry_out(original)`, where the profiler may put something in the
        place of `original`.
        """
        if not run.reach.trains:
            return carry_out(original)
        reading.announce(session, run.reach, self.quiet)
        out = (
            carry_out(original)
            if self.profiler is None
            else self.profiler.watch(original, session, run, carry_out)
        )
        if self.check:
            comparing.after_training(session, self.check)
        return out


def of_options(option: Callable[[str], Any]) -> Watch:
    """What the options of scope() say is to be watched."""
    check = comparing.every(option("check"))
    alike = [
        name
        for name, given in (
            (f"scope(check={check})", check),
            ("scope(deterministic=True)", option("deterministic")),
        )
        if given
    ]
    return Watch(option("plan") == "quiet", profiler.of_options(option), check, tuple(alike))
