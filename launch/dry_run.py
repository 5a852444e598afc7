"""The text of `--dry-run`: the plan of a job, for people."""

from __future__ import annotations

import shlex

from .environment import rank_environment
from .plan import LaunchPlan

_PORT = "<a free port>"
_MEMORY = "<memory of the launcher>"


def describe(plan: LaunchPlan) -> str:
    """Lists command, output and devices, and each variable that a rank's environment gains."""
    environments = [
        rank_environment(plan, rank, rendezvous_port=_PORT, board=_MEMORY, milestones=_MEMORY)
        for rank in range(plan.size)
    ]
    changed = {
        name
        for environment in environments
        for name, value in environment.items()
        if value != plan.launcher_environment.get(name)
    }
    same_everywhere: list[str] = []
    per_rank: list[str] = []
    for name in sorted(changed):
        values = {environment[name] for environment in environments}
        (same_everywhere if len(values) == 1 else per_rank).append(name)
    removed = sorted(plan.launcher_environment.keys() - environments[0].keys())
    without = f" (without {', '.join(removed)})" if removed else ""
    lines = [
        f"ranks        {plan.size}",
        f"command      {shlex.join(plan.command)}",
        f"cores        {plan.cores}",
        f"output       {_output(plan)}",
        f"stall        {f'after {plan.stall_timeout:g} s' if plan.stall_timeout else 'never'}",
        *_restarts(plan),
        f"environment  of every rank, beside what the launcher's own holds{without}:",
        *(f"  {name}={environments[0][name]}" for name in same_everywhere),
    ]
    for rank, environment in enumerate(environments):
        device = plan.devices[rank]
        lines.append(f"rank {rank}       on {'the CPU' if device is None else f'GPU {device}'}:")
        lines += [f"  {name}={environment[name]}" for name in per_rank]
    return "\n".join(lines)


def _restarts(plan: LaunchPlan) -> list[str]:
    if not plan.max_restarts:
        return []
    elastic = f", on {plan.min_ranks} to {plan.most_ranks} ranks" if plan.min_ranks else ""
    return [
        f"restarts     {plan.max_restarts}, the first after {plan.restart_pause:g} s{elastic}",
    ]


def _output(plan: LaunchPlan) -> str:
    if len(plan.shown_ranks) == plan.size:
        shown = "shown"
    elif plan.shown_ranks:
        shown = f"shown of ranks {','.join(map(str, sorted(plan.shown_ranks)))}"
    else:
        shown = "not shown"
    if plan.verbose and plan.shown_ranks:
        shown += " as it is"
    return shown + (f", kept in {plan.log_dir}" if plan.log_dir else "")
