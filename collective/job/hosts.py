"""The hosts of a job, and the place of each rank: pure functions of lists.

Ranks are numbered host by host: with hosts of 2, 1 and 2 ranks, the second host has rank 2 and the
third has ranks 3 and 4. A "cross" rank counts the hosts that have a rank with this local number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from collective.job.errors import UsageError

# A name or an address that neither ssh reads as an option nor a shell as special characters.
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]+")
_SLOTS = re.compile(r"(?:slots|max_slots|max-slots)=(\d+)")
_MOST_SLOTS = 4096


@dataclass(frozen=True)
class Host:
    """Describes a host of a job.

    Attributes:
        name: differs from the name of every other host of the job.
        devices: for each of its ranks, the entry for CUDA_VISIBLE_DEVICES; None for a CPU rank.
    """

    name: str
    devices: tuple[str | None, ...]

    @property
    def size(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class Placement:
    """Says where a rank is placed.

    Attributes:
        node: the number of its host.
        host: the name of its host.
        local_rank, local_size: its number among the ranks of its host, and their number.
        cross_rank, cross_size: the same among the ranks with its local rank.
    """

    node: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def placements(hosts: Sequence[Host]) -> tuple[Placement, ...]:
    """Returns the place of each rank."""
    places = []
    for node, host in enumerate(hosts):
        for local_rank in range(host.size):
            with_it = [number for number, other in enumerate(hosts) if other.size > local_rank]
            places.append(
                Placement(node, host.name, local_rank, host.size, with_it.index(node), len(with_it))
            )
    return tuple(places)


def ranks_of_node(hosts: Sequence[Host], node: int) -> range:
    """Returns the ranks of a host."""
    first = sum(host.size for host in hosts[:node])
    return range(first, first + hosts[node].size)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Returns the hosts' names, with a number added to equal ones, as they occur in containers."""
    distinct = list(names)
    while len(set(distinct)) < len(distinct):
        distinct = [
            f"{name}-{number}" if distinct.count(name) > 1 else name
            for number, name in enumerate(distinct)
        ]
    return distinct


def parse_hosts(text: str, option: str = "-H") -> list[tuple[str, int | None]]:
    """Returns the hosts in `h1:8,h2:8`, each with its number of ranks if that is given.

    Raises:
        UsageError: the text has a different form.
    """
    hosts = []
    for word in text.split(","):
        entry = word.strip()
        # An IPv6 address contains colons, and is in brackets.
        bracketed = re.fullmatch(r"\[([^\]]*)\](?::(\d+))?", entry)
        match = bracketed or re.fullmatch(r"([^:]*)(?::(\d+))?", entry)
        if match is None:
            raise UsageError(f"{option} {text}: {entry!r} isn't HOST or HOST:RANKS")
        hosts.append((_checked(match[1], f"{option} {text}"), _slots(match[2], option, entry)))
    return _distinct(hosts, f"{option} {text}")


def parse_hostfile(text: str, path: str) -> list[tuple[str, int | None]]:
    """Returns the hosts of a file in Open MPI's form, `h1 slots=8`, or with lines like `h1:8`.

    Raises:
        UsageError: the text has a different form; the error names the line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        origin = f"--hostfile {path}, line {number}"
        [(name, slots)] = parse_hosts(words[0], origin) if "," not in words[0] else [("", None)]
        if not name:
            raise UsageError(f"{origin}: {words[0]!r} isn't one host; give each a line")
        for word in words[1:]:
            match = _SLOTS.fullmatch(word)
            if match is None:
                raise UsageError(f"{origin}: {word!r} isn't slots=N")
            if word.startswith("slots"):
                slots = _slots(match[1], origin, word)
        hosts.append((name, slots))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host")
    return _distinct(hosts, f"--hostfile {path}")


def named_twice(
    hosts: Sequence[tuple[str, int | None]], addresses: Mapping[str, Collection[str]]
) -> str:
    """Returns a sentence about a host that a list has under two names; "" if there is none.

    Args:
        hosts: the list: names and numbers of ranks.
        addresses: the addresses to which each name resolves; none if that isn't known.
    """
    ranks = dict(hosts)
    owners: dict[str, str] = {}
    for name in ranks:
        for address in sorted(addresses[name]):
            other = owners.get(address)
            if other is not None:
                counts = [ranks[other], ranks[name]]
                total = "" if None in counts else f":{sum(count or 0 for count in counts)}"
                return (
                    f"the list of hosts has one host twice, as {other} and as {name} (both are "
                    f"{address}): name it once, {other}{total}"
                )
        owners.update(dict.fromkeys(addresses[name], name))
    return ""


def _checked(name: str, origin: str) -> str:
    if not _HOST_NAME.fullmatch(name) or len(name) > 253:
        raise UsageError(f"{origin}: {name!r} is no name or address of a host")
    return name


def _slots(text: str | None, option: str, entry: str) -> int | None:
    if text is None:
        return None
    if len(text) > 6 or not 1 <= int(text) <= _MOST_SLOTS:
        raise UsageError(f"{option}: {entry}: give 1 to {_MOST_SLOTS} ranks")
    return int(text)


def _distinct(hosts: list[tuple[str, int | None]], origin: str) -> list[tuple[str, int | None]]:
    seen: set[str] = set()
    for name, _ in hosts:
        if name in seen:
            raise UsageError(f"{origin}: host {name} is listed twice; add its ranks up")
        seen.add(name)
    return hosts
