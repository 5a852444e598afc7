"""Judges the facts about hosts: one line for each problem that the job would have.

The functions are pure: facts in, findings out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collective.launch.check.host_facts import HostFacts
from collective.launch.check.host_survey import Answer, Survey

# Measured numbers of descriptors. A rank has four for each other rank, and some of its own; it also
# reads and writes files. The launcher has two pipes and two logs per rank, and one per host.
_DESCRIPTORS_OF_PEER = 4
_DESCRIPTORS_OF_RANK = 128
_DESCRIPTORS_OF_LAUNCHER = 64
_ENOUGH_SHARED_MEMORY = 1 << 30  # NCCL keeps its buffers there; a container has 64 MB
_CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """Says what is wrong, gives both values, and says what helps.

    Attributes:
        sentence: the text.
        is_obstacle: whether it prevents the job from running.
    """

    sentence: str
    is_obstacle: bool = True


def open_files_needed(ranks: int, own_ranks: int, hosts: int = 1) -> int:
    """Returns how many files a process on a host must be able to open.

    Args:
        ranks: the number of ranks in the job.
        own_ranks: the number of ranks on the host.
        hosts: the number of hosts in the job.
    """
    of_rank = _DESCRIPTORS_OF_RANK + _DESCRIPTORS_OF_PEER * (ranks - 1)
    return max(of_rank, _DESCRIPTORS_OF_LAUNCHER + 4 * own_ranks + hosts)


def of_host(
    facts: HostFacts, name: str, ranks: int, own_ranks: int | None, hosts: int, uses_gpus: bool
) -> list[Finding]:
    """Returns what a host lacks.

    Args:
        facts: the host's facts.
        name: the host's name for messages; "" for this host.
        ranks: the number of ranks in the job, as far as it is known.
        own_ranks: the number of ranks on this host; None means one per GPU.
        hosts: the number of hosts in the job.
        uses_gpus: whether the job may run on GPUs.
    """
    of = f"host {name}: " if name else ""
    found = []
    own = own_ranks or max(1, facts.gpus if uses_gpus else 0)
    needed = open_files_needed(max(ranks, own), own, hosts)
    if facts.open_files < needed:
        plural = "s" if max(ranks, own) > 1 else ""
        found.append(
            Finding(
                f"{of}a process may open {facts.open_files} files (ulimit -n), a job of "
                f"{max(ranks, own)} rank{plural} needs {needed}: `ulimit -n {needed}` before "
                "the launcher, or nofile in /etc/security/limits.conf"
            )
        )
    gpus = facts.gpus if uses_gpus else 0
    if gpus and own_ranks is not None and own_ranks > gpus:
        found.append(
            Finding(
                f"{of}{own_ranks} ranks and {gpus} GPUs: give it fewer ranks, or --device cpu",
            )
        )
    if min(gpus, own) > 1 and facts.shared_memory < _ENOUGH_SHARED_MEMORY:
        found.append(
            Finding(
                f"{of}/dev/shm has {_mebibytes(facts.shared_memory)}, and NCCL's buffers of "
                f"{min(gpus, own)} GPUs may need {_mebibytes(_ENOUGH_SHARED_MEMORY)}: "
                "`docker run --shm-size=1g` or `--ipc=host` gives a container more",
                is_obstacle=False,
            )
        )
    found += [
        Finding(f"{of}{path} does not exist: hosts need script and data, each at its own path")
        for path in facts.missing
    ]
    if hosts > 1 and not facts.has_address_library and facts.address:
        if facts.address not in facts.name_addresses:
            found.append(
                Finding(
                    f"{of}the ranks would listen where its name {facts.host_name} leads, at "
                    f"{', '.join(facts.name_addresses) or 'no address'}, not at {facts.address}: a "
                    f'line "{facts.address} {facts.host_name}" in /etc/hosts, or compiled '
                    "operations (`make setup` in a checkout, or `pip install .`)"
                )
            )
    elif hosts == 1 and max(ranks, own) > 1 and not facts.has_address_library:
        if not facts.name_addresses:
            found.append(
                Finding(
                    f"the ranks would listen where the name of this host, {facts.host_name}, "
                    f'leads, and it leads to no address: a line "127.0.1.1 {facts.host_name}" in '
                    "/etc/hosts, or compiled operations (`make setup` in a checkout, or "
                    "`pip install .`)"
                )
            )
    return found


def of_hosts(
    surveyed: Survey,
    here: HostFacts,
    ranks: Mapping[str, int | None],
    uses_gpus: bool,
) -> list[Finding]:
    """Returns what would stop a job that is started from here on all hosts.

    Args:
        surveyed: the answers of all hosts.
        here: the facts of this host, with which they are compared.
        ranks: the number of ranks on each host; None means one per GPU.
        uses_gpus: whether the job may run on GPUs.
    """
    total = sum(
        ranks[each.name] or max(1, each.facts.gpus if each.facts and uses_gpus else 1)
        for each in surveyed.answers
    )
    found = [] if surveyed.address or not surveyed.problem else [Finding(surveyed.problem)]
    for answer in surveyed.answers:
        if answer.facts is None:
            problem = answer.problem + _needs_ipv6(answer, here)
            found.append(Finding(f"host {answer.name}: {problem}"))
            continue
        found += _of_name(answer, bool(surveyed.address))
        count = len(surveyed.answers)
        found += of_host(answer.facts, answer.name, total, ranks[answer.name], count, uses_gpus)
        found += _versions(answer.name, answer.facts, here)
        found += _network(answer, surveyed.address)
        if abs(answer.clock_offset) > _CLOCK_SECONDS:
            ahead = "ahead of" if answer.clock_offset > 0 else "behind"
            found.append(
                Finding(
                    f"host {answer.name}: its clock is {abs(answer.clock_offset):.0f} s {ahead} "
                    "this host's, so that times in reports and logs can't be compared: let chrony "
                    "or ntpd set both",
                    is_obstacle=False,
                )
            )
    if uses_gpus:
        found += _mixed_devices(surveyed.answers)
    return found


def describe(answer: Answer) -> str:
    """Returns a line about a host, for messages."""
    facts = answer.facts
    if facts is None:
        return "doesn't answer"
    packages = [f"{name} {version or 'none'}" for name, version in facts.packages.items()]
    reached = f"{facts.address} ({interface_with(facts, facts.address)}), " if facts.address else ""
    return f"{reached}{facts.cores} cores, {facts.gpus} GPUs, Python {facts.python}, " + ", ".join(
        [*packages, f"collective {facts.collective}"]
    )


def network_text(facts: HostFacts, address: str, why: str) -> str:
    """Returns the interface that a job uses, and why; without an address, all interfaces.

    Args:
        facts: the host's facts.
        address: the address that the job uses, "" if it isn't known.
        why: why the job uses this address.
    """
    usable = {
        name: [each for each in addresses if not _is_link_local(each)]
        for name, addresses in facts.interfaces.items()
    }
    usable = {name: addresses for name, addresses in usable.items() if addresses}
    chosen = interface_with(facts, address) if address else ""
    others = [
        f"{name} ({', '.join(addresses)})" for name, addresses in usable.items() if name != chosen
    ]
    if not chosen:
        return ", ".join(others) or "no interface with an address"
    text = f"{chosen} ({address}), {why}"
    return f"{text}; also {', '.join(others)}" if others else text


def ip_versions(facts: HostFacts) -> str:
    """Returns "IPv4", "IPv6" or both: the kinds of a host's addresses, except for loopback."""
    versions = {
        ipaddress.ip_address(each).version
        for addresses in facts.interfaces.values()
        for each in addresses
        if not ipaddress.ip_address(each).is_loopback and not _is_link_local(each)
    }
    return " and ".join(f"IPv{version}" for version in sorted(versions)) or "the loopback's only"


def interface_with(facts: HostFacts, address: str) -> str:
    """Returns the interface of a host that has this address, "" if none has."""
    for name, addresses in facts.interfaces.items():
        if address in addresses:
            return name
    return "lo" if address and ipaddress.ip_address(address).is_loopback else ""


def _of_name(answer: Answer, has_address: bool) -> list[Finding]:
    """Returns what is wrong with a host's name."""
    name, found = answer.name, answer.addresses
    if not found:
        return [
            Finding(
                f"host {name}: ssh knows it, but its name doesn't lead to an address here: a line "
                "in /etc/hosts, its address in -H, or --network-interface",
                is_obstacle=not has_address,
            )
        ]
    return []


def _needs_ipv6(answer: Answer, here: HostFacts) -> str:
    """Says that a host is reachable only by IPv6, which this host lacks; "" otherwise."""
    found = answer.addresses
    versions = {ipaddress.ip_address(each.partition("%")[0]).version for each in found}
    if versions != {6} or "IPv6" in ip_versions(here):
        return ""
    return (
        f" ({answer.name} leads to {', '.join(found)} only, and this host has addresses of "
        f"{ip_versions(here)}: give its IPv4 address, in -H or /etc/hosts)"
    )


def _versions(name: str, facts: HostFacts, here: HostFacts) -> list[Finding]:
    pairs = [("collective", facts.collective, here.collective)]
    pairs += [
        (package, facts.packages.get(package, ""), version)
        for package, version in here.packages.items()
    ]
    pairs.append(("Python", _minor(facts.python), _minor(here.python)))
    return [
        Finding(
            f"host {name}: {what} {there or 'is missing'}, here {own or 'none'}: install the same "
            "on all"
        )
        for what, there, own in pairs
        if there != own
    ]


def _network(answer: Answer, address: str) -> list[Finding]:
    """Returns which hosts a host can't reach."""
    facts = answer.facts
    assert facts is not None
    found = []
    if facts.unreachable:
        found.append(
            Finding(
                f"host {answer.name} can't connect to this host at {address}: {facts.unreachable}: "
                "open all ports between hosts in their firewalls, or --network-interface names the "
                "interface that they reach"
            )
        )
    for peer, reason in answer.unreachable.items():
        found.append(
            Finding(
                f"host {answer.name} can't connect to host {peer}: {reason}: ranks listen at any "
                "port; open all between hosts in their firewalls"
            )
        )
    return found


def _mixed_devices(answers: Sequence[Answer]) -> list[Finding]:
    gpus = {answer.name: answer.facts.gpus for answer in answers if answer.facts is not None}
    without = [name for name, count in gpus.items() if not count]
    if not without or len(without) == len(gpus):
        return []
    have = next(name for name, count in gpus.items() if count)
    return [
        Finding(
            f"host {have} has {gpus[have]} GPUs, host {', '.join(without)} none: leave hosts out, "
            "or --device cpu"
        )
    ]


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
