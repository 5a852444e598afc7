"""The text of `--dry-run`: the plan of a job, made readable."""

from __future__ import annotations

import shlex
from dataclasses import replace

from collective.job import streams
from collective.job.hosts import Host
from collective.launch.command_line.host_options import HostList, HostOptions
from collective.launch.planning.environment import rank_environment
from collective.launch.planning.gpu_cores import described
from collective.launch.planning.plan import LaunchPlan

_PORT = "<a free port>"
_ADDRESS = "127.0.0.1:<port>/<token>"
_LOADER = "127.0.0.1:<a free port>"
_KEY = "<made of the secret>"
_MEMORY = "<memory of the launcher>"


def describe(
    plan: LaunchPlan, hosts: HostOptions | None = None, listed: HostList | None = None
) -> str:
    """Lists command, output and devices, and each variable that a rank's environment gets."""
    if hosts is not None:
        plan = _with_hosts(plan, hosts)
    plan = replace(plan, loader_addresses=(_LOADER,) * plan.loaders, stream_key=_KEY)
    environments = [
        rank_environment(plan, rank, _PORT, _MEMORY, _MEMORY, _MEMORY, _ADDRESS)
        for rank in plan.local_ranks
    ]
    for environment in environments:
        if streams.KEY in environment:
            environment[streams.KEY] = _KEY
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
        *_hosts(hosts),
        *_listed(listed),
        f"command      {shlex.join(plan.command)}",
        *_loaders(plan),
        f"cores        {plan.cores}",
        f"output       {_output(plan)}",
        f"stall        {f'after {plan.stall_timeout:g} s' if plan.stall_timeout else 'never'}",
        *_restarts(plan),
        f"environment  of every rank, in addition to the launcher's own{without}:",
        *(f"  {name}={environments[0][name]}" for name in same_everywhere),
    ]
    for rank, environment in zip(plan.local_ranks, environments):
        device = plan.devices[rank]
        cores = plan.cores_of(rank)
        where = "the CPU" if device is None else f"GPU {device}"
        bound = f", cores {described(cores)}" if cores is not None else ""
        lines.append(f"rank {rank}       on {where}{bound}:")
        lines += [f"  {name}={environment[name]}" for name in per_rank]
    return "\n".join(lines)


def _with_hosts(plan: LaunchPlan, hosts: HostOptions) -> LaunchPlan:
    """Returns the plan for all hosts, as if each had as many ranks as this one."""
    names = [f"<host {node}>" for node in range(hosts.nodes)]
    return replace(
        plan,
        devices=plan.devices * hosts.nodes,
        hosts=tuple(Host(name, plan.devices) for name in names),
        node=hosts.node,
        interface=hosts.interface or f"<the interface that leads to {hosts.master}>",
        shown_ranks=frozenset(range(plan.size * hosts.nodes)),
    )


def _hosts(hosts: HostOptions | None) -> list[str]:
    if hosts is None:
        return []
    return [
        f"hosts        {hosts.nodes}, this one is number {hosts.node}; they meet at "
        f"{hosts.master} port {hosts.port}. As if each had as many ranks as this one:",
    ]


def _listed(listed: HostList | None) -> list[str]:
    if listed is None:
        return []
    names = [name if ranks is None else f"{name} with {ranks}" for name, ranks in listed.hosts]
    return [f"hosts        {', '.join(names)}, started from here. On this one:"]


def _loaders(plan: LaunchPlan) -> list[str]:
    if not plan.loaders:
        return []
    return [f"loaders      {plan.loaders}, each: {shlex.join(plan.loader_command)}"]


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
