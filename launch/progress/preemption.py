"""The launcher's words about a preempted job: what was saved, and how the job continues."""

from __future__ import annotations

from collections.abc import Sequence

from collective.job.milestones import Milestones


def newest(milestones: Sequence[Milestones]) -> Milestones:
    """Returns the milestones of the rank that knows the newest checkpoint."""
    return max(milestones, key=lambda each: (bool(each.checkpoint), each.step))


def departure(milestones: Sequence[Milestones], left: bool) -> str:
    """Returns the text; "" if the ranks have trained nothing.

    Args:
        milestones: each rank's milestones.
        left: whether all ranks stopped by themselves, after the same step.
    """
    steps = max(each.last_step for each in milestones)
    if not any(each.steps or each.checkpoint for each in milestones):
        return ""
    last = newest(milestones)
    how = (
        f"all ranks stopped after step {steps}" if left else f"the job was stopped at step {steps}"
    )
    if not last.checkpoint:
        return f"{how}, and has saved no checkpoint: the same command begins from the start"
    return (
        f"{how}; its last checkpoint is '{last.checkpoint}'. Resume with the same command, from "
        f"step {last.step}"
    )
