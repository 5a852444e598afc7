"""What the launcher says of a job that was told to stop: what was saved, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from collective.job.milestones import Milestones


def newest(milestones: Sequence[Milestones]) -> Milestones:
    """Returns those of the rank that knows the newest checkpoint."""
    return max(milestones, key=lambda each: (bool(each.checkpoint), each.step))


def departure(milestones: Sequence[Milestones], left: bool) -> str:
    """Returns the words; "" for ranks that have trained nothing.

    Args:
      milestones: of each rank.
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
