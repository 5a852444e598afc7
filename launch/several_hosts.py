"""A job of several hosts, from the command line to the exit code.

on the first host                       on every other host
listens, waits for all              ◀──  connects, with the job's secret
sends the list of hosts             ──▶  knows its ranks
Job with RemoteHosts: decides       ◀─▶  HostAgent: follows orders
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from collective.job.errors import UsageError
from collective.job.gloo_address import LOOPBACK
from collective.job.hosts import Host, named_twice
from collective.job.network import (
    address_of_interface,
    addresses_of_hosts,
    interface_of,
    is_this_host,
    listening_address,
    resolve,
    source_address,
)
from collective.job.secret import new_secret
from collective.launch.command_line.host_options import HostList, HostOptions
from collective.launch.connection.channel import Channel
from collective.launch.connection.rendezvous import (
    Guest,
    HostRendezvous,
    Stopped,
    introduction,
    join,
    make_world,
)
from collective.launch.job import Job
from collective.launch.other_hosts.host_agent import HostAgent
from collective.launch.other_hosts.host_start import HostStarter, passed_environment
from collective.launch.other_hosts.remote_hosts import RemoteHosts
from collective.launch.planning.plan import LaunchPlan, with_gloo_address
from collective.launch.processes.signals import SignalPipe, stop_signals


def run(
    plan: LaunchPlan,
    options: HostOptions,
    secret: bytes,
    choose_shown: Callable[[int], frozenset[int]],
) -> int:
    """Runs this host's part of the job; returns the launcher's exit code.

    Args:
        plan: the plan of this host's ranks alone.
        options: say which host this is.
        secret: the job's secret.
        choose_shown: returns the ranks whose output is shown, given the number of ranks.

    Raises:
        UsageError: the hosts don't find each other, or the job can't be started.
    """
    signals = SignalPipe(stop_signals(plan.preempt_signal))
    try:
        if options.node == 0:
            return _run_first(plan, options, secret, choose_shown, signals)
        return _run_other(plan, options, secret, signals)
    except Stopped as stop:
        return stopped_before_start(stop.signum, plan)


def stopped_before_start(signum: signal.Signals, plan: LaunchPlan) -> int:
    """Says that a signal arrived before the job began; returns the launcher's exit code."""
    print(
        f"collective launch: {signum.name} before all hosts were there: nothing was started",
        file=sys.stderr,
        flush=True,
    )
    return 128 + (signal.SIGTERM if signum == plan.preempt_signal else signum)


def _run_first(
    plan: LaunchPlan,
    options: HostOptions,
    secret: bytes,
    choose_shown: Callable[[int], frozenset[int]],
    signals: SignalPipe,
) -> int:
    address = listening_address(options.master, options.interface)
    rendezvous = HostRendezvous(
        address,
        options.port,
        secret,
        awaited=range(1, options.nodes),
        nodes=options.nodes,
        host_timeout=options.host_timeout,
    )
    guests = rendezvous.wait(signals, options.start_timeout)
    own = [Host(os.uname().nodename, plan.devices)]
    return run_with_guests(plan, own, guests, address, choose_shown, signals)


def run_with_guests(
    plan: LaunchPlan,
    own: Sequence[Host],
    guests: dict[int, Guest],
    address: str,
    choose_shown: Callable[[int], frozenset[int]],
    signals: SignalPipe,
) -> int:
    """Runs the job on the hosts that have connected; returns the launcher's exit code.

    Args:
        plan: the plan of this host's ranks alone.
        own: this host, the first; empty if the job is only started from here.
        guests: the others, by their number.
        address: this host's address, by which the others reach it.
        choose_shown: returns the ranks whose output is shown, given the number of ranks.
        signals: the launcher's signals.
    """
    hosts = make_world(own, guests)
    plan = _with_hosts(plan, hosts, 0 if own else -1, address)
    numbered = {number: guests[node] for number, node in enumerate(sorted(guests), len(own))}
    remote = RemoteHosts(numbered, plan)
    try:
        plan = replace(with_gloo_address(plan, address), shown_ranks=choose_shown(plan.size))
    except UsageError as error:
        remote.say(f"collective launch: {error}")
        remote.finish(2)
        raise
    return Job(plan, signals, remote).run()


def _run_other(plan: LaunchPlan, options: HostOptions, secret: bytes, signals: SignalPipe) -> int:
    source = None if options.interface is None else address_of_interface(options.interface)
    joined = join(
        lambda: resolve(options.master),
        options.port,
        secret,
        introduction(options.node, options.nodes, plan.devices),
        (options.start_timeout, options.host_timeout),
        signals,
        source,
    )
    return run_as_agent(plan, joined, signals)


def run_as_agent(
    plan: LaunchPlan, joined: tuple[Channel, Sequence[Host], int], signals: SignalPipe
) -> int:
    """Follows the first host's orders; returns the launcher's exit code.

    Args:
        plan: the plan of this host's ranks alone.
        joined: the result of `join`.
        signals: the launcher's signals.

    Raises:
        UsageError: the ranks can't be started here.
    """
    channel, hosts, node = joined
    plan = replace(plan, terminal=False, columns=None)  # the first host shows the output
    try:
        plan = _with_hosts(plan, hosts, node, channel.address)
        plan = with_gloo_address(plan, channel.address)
        return HostAgent(plan, signals, channel).run()
    except UsageError as error:
        channel.send("unable", reason=str(error))
        channel.drain(1.0)
        channel.close()
        raise


def run_from_here(
    plan: LaunchPlan,
    host_list: HostList,
    arguments: Sequence[str],
    choose_shown: Callable[[int], frozenset[int]],
) -> int:
    """Starts the launchers of all hosts, and runs the job; returns the launcher's exit code.

    Args:
        plan: the plan of this host's ranks alone, if the list begins with this host.
        host_list: the hosts, their ranks, and how to start them.
        arguments: this launcher's command line.
        choose_shown: returns the ranks whose output is shown, given the number of ranks.

    Raises:
        UsageError: a host can't be started, or the job can't be started.
        HostsLeftOut: the job starts again without some of the hosts.
    """
    plan = replace(plan, starts_hosts=True)
    signals = SignalPipe(stop_signals(plan.preempt_signal))
    names = [name for name, _ in host_list.hosts]
    twice = named_twice(host_list.hosts, addresses_of_hosts(names)) if len(names) > 1 else ""
    if twice:
        raise UsageError(twice)
    first_is_here = is_this_host(names[0])
    others = range(1 if first_is_here else 0, len(names))
    own = [Host(names[0], plan.devices)] if first_is_here else []
    if not others:
        return Job(with_gloo_address(replace(plan, shown_ranks=choose_shown(plan.size)))).run()
    address = _address_towards(names, others, host_list.interface)
    secret = new_secret()
    rendezvous = HostRendezvous(
        address, 0, secret.encode(), list(others), len(names), host_list.host_timeout
    )
    starter = HostStarter(host_list.ssh)
    try:
        for node in others:
            ranks = host_list.hosts[node][1]
            instructions = {
                "secret": secret,
                "environment": passed_environment(plan.launcher_environment),
                "address": address,
                "port": rendezvous.port,
                "node": node,
                "nodes": len(names),
                "ranks": None if ranks is None else str(ranks),
                "arguments": list(arguments),
            }
            starter.start(names[node], instructions)
        guests = rendezvous.wait(signals, host_list.start_timeout, starter.problem)
        # Uses the names in the list, so that the user recognizes them in a report.
        guests = {node: replace(guest, name=names[node]) for node, guest in guests.items()}
        return run_with_guests(plan, own, guests, address, choose_shown, signals)
    except Stopped as stop:
        return stopped_before_start(stop.signum, plan)
    finally:
        rendezvous.close()
        starter.end()


def _address_towards(names: Sequence[str], others: Sequence[int], interface: str | None) -> str:
    """Returns this host's address by which the others reach it."""
    if interface is not None:
        return address_of_interface(interface)
    found = LOOPBACK
    for node in others:
        if not is_this_host(names[node]):
            try:
                found = source_address(resolve(names[node], "-H")[0])
            except OSError as error:
                raise UsageError(
                    f"there is no route to host {names[node]}: {error.strerror}"
                ) from None
            break
    return found


def _with_hosts(plan: LaunchPlan, hosts: Sequence[Host], node: int, address: str) -> LaunchPlan:
    devices = tuple(device for host in hosts for device in host.devices)
    return replace(
        plan,
        devices=devices,
        hosts=tuple(hosts),
        node=node,
        interface=interface_of(address),
        most_ranks=len(devices),
    )
