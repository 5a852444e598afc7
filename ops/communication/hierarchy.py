"""Decides whether what travels between hosts is merged on each host first.

`collective.strategies.two_level_exchange` does it. It takes hosts with equal numbers of ranks, two
or more, that share memory. All ranks decide alike: they tell each other how many there are on each
host when they have joined, and, where that can be, how fast memory and network were just then.

`scope(hierarchical=…)` says what is wanted of exchanges that are built inside. 'auto', the default,
merges where memory is `WORTHWHILE` times as fast as the network: two more passes through memory
then cost less than what needn't travel.

With `scope(deterministic=True)` gradients are added in the order of all ranks, as on one host. What
a host adds up before would be another order, so gradients stay flat, and with them the keys that
say whose they are. Rows are merged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Callable, NamedTuple, Union

from collective.ops import placement
from collective.ops.communication import carriers
from collective.ops.communication.membership import Process
from collective.tensorflow_internals.graphs import config

AUTO = "auto"
Choice = Union[str, bool]
# How many times as many bytes a second memory must carry.
WORTHWHILE = 8.0
# Bytes that a rank sends to measure, and how often: with eight ranks on hosts with 1 Gbit/s it
# takes 0.4 s, with 10 Gbit/s 0.04 s.
PROBE, TRIALS = 1 << 20, 5


class Hosts(NamedTuple):
    """Tells how a job's ranks are on hosts, evenly.

    Attributes:
        number: how many hosts there are, H.
        ranks: how many ranks each has, L.
    """

    number: int
    ranks: int


class Bandwidths(NamedTuple):
    """Holds what the slowest rank sent at once with all others, in bytes a second.

    Attributes:
        memory: to another rank of its host.
        network: to a rank of another host.
    """

    memory: float
    network: float


class _Settled(NamedTuple):
    """Holds what all ranks know alike.

    Attributes:
        hosts: None where the ranks aren't evenly on several hosts.
        bandwidths: None where they weren't measured.
        unavailable: why nothing can be merged; '' if it can.
    """

    hosts: Hosts | None = None
    bandwidths: Bandwidths | None = None
    unavailable: str = "all ranks are on one host"


_settled = _Settled()
_choice: Choice = AUTO


def settle(
    process: Process,
    allgather_words: Callable[[str], list[str]],
    probe: Callable[[], contextlib.AbstractContextManager[Callable[[bool], None]]],
) -> None:
    """Lets the ranks find out what they can; every rank calls it, once the carriers are joined.

    Args:
        process: this one's place.
        allgather_words: gives all ranks' words, which all ranks say at the same time.
        probe: gives a function that sends PROBE bytes to another rank, as all ranks do at the same
            time: one of this host (True) or of another.
    """
    global _settled
    if process.on_one_host:
        _settled = _Settled()
        return
    hosts = hosts_of([int(words) for words in allgather_words(str(process.local_rank))])
    if isinstance(hosts, str):
        _settled = _Settled(unavailable=hosts)
    elif not carriers.can_mix():
        _settled = _Settled(hosts, unavailable="the ranks of a host don't share memory")
    else:
        with probe() as send:
            own = f"{_rate(lambda: send(True))} {_rate(lambda: send(False))}"
        measured = [[float(rate) for rate in words.split()] for words in allgather_words(own)]
        _settled = _Settled(hosts, Bandwidths(*map(min, zip(*measured))), "")


def _rate(send: Callable[[], None]) -> float:
    """Returns bytes a second of the fastest of a few sendings, after one that opens connections.

    Others' work on the machine can only make it slower.
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
        local_ranks: of each rank its number on its host.
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


def use(choice: Choice) -> None:
    """Sets the choice for exchanges that are built from now on: AUTO, True or False."""
    global _choice
    _choice = choice if choice == AUTO else bool(choice)


def of_group() -> Hosts | None:
    """Returns the hosts if a group that is built now is to merge on them; None: it is flat."""
    return None if why_flat() else _settled.hosts


def why_flat() -> str:
    """Returns why a group that is built now merges nothing; '' if it does."""
    if _choice is False:
        return "scope(hierarchical=False)"
    if _settled.unavailable:
        return _settled.unavailable
    if carriers.in_force() != carriers.MIXED:
        return "Horovod carries everything"
    if placement.chosen() != "cpu":
        return "tables are on GPUs"
    return "" if _choice is True or _is_worthwhile() else f"auto, by {_measured()}"


def keeps_order() -> bool:
    """Tells whether gradients are added in the order of all ranks: only rows are merged then."""
    return bool(config.is_op_determinism_enabled())


def explanation() -> str:
    """Says whether groups that are built now merge, and why; '' for a job on one host."""
    if _settled == _Settled():
        return ""
    why = why_flat()
    if why:
        return f"flat: {why}"
    by = f"auto, by {_measured()}" if _choice == AUTO else f"scope(hierarchical={_choice})"
    hosts = _settled.hosts
    assert hosts is not None
    ranks = f"two levels: the {hosts.ranks} ranks of each of {hosts.number} hosts"
    if keeps_order():
        return (
            f"{ranks} merge the rows that they get of others ({by}); keys and gradients are flat, "
            "by scope(deterministic=True): gradients are added in the order of all ranks"
        )
    return f"{ranks} merge what they exchange with others ({by})"


def _is_worthwhile() -> bool:
    rates = _settled.bandwidths
    return rates is not None and rates.memory >= WORTHWHILE * rates.network


def _measured() -> str:
    rates = _settled.bandwidths
    assert rates is not None
    return (
        f"{rates.memory / 1e9:.2g} GB/s a rank within a host and {rates.network / 1e9:.2g} "
        f"between hosts; from {WORTHWHILE:g} times on it is two levels"
    )
