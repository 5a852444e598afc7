"""The line by which the launcher says that it starts: the ranks take seconds to write one."""

from __future__ import annotations

from collective.launch.planning.plan import LaunchPlan

# With more ranks than this a core, somebody who waits for a job should know why.
_MOST_RANKS_A_CORE = 2


def announcement(plan: LaunchPlan) -> str:
    """Returns the line; "" where nobody waits for one.

    Somebody watches a terminal. A file gets the line only if it is a warning: a job that goes well
    writes nothing of the launcher's there.
    """
    if plan.size == 1 or not plan.shown_ranks:
        return ""
    if len(plan.hosts) > 1:
        text = f"starting {plan.size} ranks on {len(plan.hosts)} hosts"
        return text if plan.terminal else ""
    on_gpus = all(device is not None for device in plan.devices)
    unit, count = ("GPU", plan.size) if on_gpus else ("core", plan.cores)
    text = f"starting {plan.size} ranks on {count} {unit}{'' if count == 1 else 's'}"
    if not on_gpus and plan.size > _MOST_RANKS_A_CORE * plan.cores:
        return f"{text}: they share them, and a step takes longer than with fewer ranks"
    return text if plan.terminal else ""
