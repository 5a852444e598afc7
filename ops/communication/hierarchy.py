"""Decides whether each host merges what it sends to other hosts.

`collective.strategies.two_level_exchange` does the merging. It needs hosts with equal numbers of
ranks, two or more, that share memory. All ranks decide alike: after joining they tell each other
how many ranks each host has and, if possible, how fast memory and network were just then.

`scope(hierarchical=…)` makes the choice for exchanges that are built inside. 'auto', the default,
merges if memory is `WORTHWHILE` times as fast as the network: then two more passes through memory
cost less than the traffic that they save.

With `scope(deterministic=True)` gradients are added in the order of all ranks, as on one host. A
host that adds them up first would change that order, so gradients stay flat, and so do the keys
that say which rows they belong to. Rows are merged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Callable, NamedTuple, Union

from collective.ops import kernel_device
from collective.ops.communication import carrier_choice
from collective.ops.communication.membership import Process
from collective.tensorflow_internals.graphs import config

AUTO = "auto"
Choice = Union[str, bool]
# The memory must carry this many times as many bytes per second as the network.
WORTHWHILE = 8.0
# The bytes that a rank sends to measure, and how often it sends them: with eight ranks on hosts
# with 1 Gbit/s it takes 0.4 s, with 10 Gbit/s 0.04 s.
PROBE, TRIALS = 1 << 20, 5


class Hosts(NamedTuple):
    """Says how a job's ranks are spread evenly over hosts.

    Attributes:
        number: how many hosts there are, H.
        ranks: how many ranks each has, L.
    """

    number: int
    ranks: int


class Bandwidths(NamedTuple):
    """Holds the slowest rank's rate while all ranks send at the same time, in bytes per second.

    Attributes:
        memory: the rate to another rank of its host.
        network: the rate to a rank of another host.
    """

    memory: float
    network: float


class _Settled(NamedTuple):
    """Holds what all ranks have agreed on.

    Attributes:
        hosts: None if the ranks aren't spread evenly over several hosts.
        bandwidths: None if they weren't measured.
        unavailable: why nothing can be merged; '' if it can.
    """

    hosts: Hosts | None = None
    bandwidths: Bandwidths | None = None
    unavailable: str = "all ranks are on one host"


@dataclasses.dataclass
class _Merging:
    """Holds what all ranks have agreed on, and the choice for what is built now."""

    settled: _Settled = _Settled()
    choice: Choice = AUTO


_merging = _Merging()


def settle(
    process: Process,
    allgather_words: Callable[[str], list[str]],
    probe: Callable[[], contextlib.AbstractContextManager[Callable[[bool], None]]],
) -> None:
    """Lets the ranks find out all this; every rank calls it once the carriers are joined.

    Args:
        process: this process's place.
        allgather_words: returns all ranks' texts; all ranks call it at the same time.
        probe: returns a context with a function that sends PROBE bytes to another rank, of this
            host (True) or of another; all ranks call it at the same time.
    """
    if process.on_one_host:
        _merging.settled = _Settled()
        return
    hosts = hosts_of([int(words) for words in allgather_words(str(process.local_rank))])
    if isinstance(hosts, str):
        _merging.settled = _Settled(unavailable=hosts)
    elif not carrier_choice.can_mix():
        _merging.settled = _Settled(hosts, unavailable="the ranks of a host don't share memory")
    else:
        with probe() as send:
            own = f"{_rate(lambda: send(True))} {_rate(lambda: send(False))}"
        measured = [[float(rate) for rate in words.split()] for words in allgather_words(own)]
        _merging.settled = _Settled(hosts, Bandwidths(*map(min, zip(*measured))), "")


def _rate(send: Callable[[], None]) -> float:
    """Returns the bytes per second of the fastest of a few calls, after one that opens connections.

    Other work on the machine can only make a call slower.
    """
    times = []
    for _ in range(1 + TRIALS):
        start = time.perf_counter()
        send()
        times.append(time.perf_counter() - start)
    return PROBE / max(min(times[1:]), 1e-9)


def hosts_of(local_ranks: Sequence[int]) -> Hosts | str:
    """Returns the hosts of a job, or why nothing can be merged on them.

    Args:
        local_ranks: each rank's number on its host.
    """
    starts = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], len(local_ranks)])]
    if list(local_ranks) != [number for size in sizes for number in range(size)]:
        return "the ranks of a host don't follow each other"
    if max(sizes) == 1:
        return "every host has one rank"
    if len(set(sizes)) > 1:
        return f"hosts have different numbers of ranks: {', '.join(map(str, sizes))}"
    if len(sizes) == 1:
        return "all ranks are on one host"
    return Hosts(len(sizes), sizes[0])


def bandwidths() -> Bandwidths | None:
    """Returns what was measured when the ranks joined, the same on all; None if nothing was."""
    return _merging.settled.bandwidths


def use(choice: Choice) -> None:
    """Sets the choice for exchanges that are built from now on: AUTO, True or False."""
    _merging.choice = choice if choice == AUTO else bool(choice)


def of_group() -> Hosts | None:
    """Returns the hosts on which a group built now is to merge; None means that it is flat."""
    return None if why_flat() else _merging.settled.hosts


def why_flat() -> str:
    """Returns why a group built now merges nothing; '' if it merges."""
    if _merging.choice is False:
        return "scope(hierarchical=False)"
    if _merging.settled.unavailable:
        return _merging.settled.unavailable
    if carrier_choice.in_force() != carrier_choice.MIXED:
        return "Horovod carries everything"
    if kernel_device.chosen() != "cpu":
        return "tables are on GPUs"
    return "" if _merging.choice is True or _is_worthwhile() else f"auto, by {_measured()}"


def keeps_order() -> bool:
    """Tells whether gradients are added in the order of all ranks: then only rows are merged."""
    return bool(config.is_op_determinism_enabled())


def explanation() -> str:
    """Says whether groups built now merge, and why; '' for a job on one host."""
    if _merging.settled == _Settled():
        return ""
    why = why_flat()
    if why:
        return f"flat: {why}"
    by = (
        f"auto, by {_measured()}"
        if _merging.choice == AUTO
        else f"scope(hierarchical={_merging.choice})"
    )
    hosts = _merging.settled.hosts
    assert hosts is not None
    ranks = f"two levels: the {hosts.ranks} ranks of each of {hosts.number} hosts"
    if keeps_order():
        return (
            f"{ranks} merge the rows that they get of others ({by}); keys and gradients are flat, "
            "by scope(deterministic=True): gradients are added in the order of all ranks"
        )
    return f"{ranks} merge what they exchange with others ({by})"


def _is_worthwhile() -> bool:
    rates = _merging.settled.bandwidths
    return rates is not None and rates.memory >= WORTHWHILE * rates.network


def _measured() -> str:
    rates = _merging.settled.bandwidths
    assert rates is not None
    return (
        f"{rates.memory / 1e9:.2g} GB/s a rank within a host and {rates.network / 1e9:.2g} "
        f"between hosts; from {WORTHWHILE:g} times on it is two levels"
    )
