"""The network of a host: its addresses, and which interface leads to the other hosts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from collective.job.errors import UsageError

LOOPBACK_INTERFACE = "lo"
_MOST_LOOKUPS_AT_ONCE = 32


def addresses_by_interface() -> dict[str, list[str]]:
    """Returns the addresses of this host's interfaces, for each interface the IPv4 ones first."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address.partition("%")[0]
            for family in families
            for entry in entries
            if entry.family == family
        ]
        for name, entries in psutil.net_if_addrs().items()
    }


def interface_of(address: str) -> str:
    """Returns the interface that has `address`; "" if none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in addresses_by_interface().items():
        if any(ipaddress.ip_address(each) == wanted for each in addresses):
            return name
    # All of 127.0.0.0/8 belongs to the loopback interface, though it shows one address.
    return LOOPBACK_INTERFACE if wanted.is_loopback else ""


def address_of_interface(interface: str) -> str:
    """Returns the address of an interface.

    Raises:
        UsageError: the interface doesn't exist, or has no address.
    """
    found = addresses_by_interface()
    usable = [name for name, addresses in found.items() if addresses]
    if interface not in usable:
        raise UsageError(
            f"--network-interface {interface}: this host has no such interface with an address; "
            f"it has {', '.join(usable)}"
        )
    return found[interface][0]


def listening_address(master: str, interface: str | None) -> str:
    """Returns the address at which the first host waits for the others.

    Args:
        master: --master-addr: a name or an address by which the others find this host.
        interface: --network-interface, if given.

    Raises:
        UsageError: the address isn't this host's, or only this host can reach it.
    """
    if interface is not None:
        return address_of_interface(interface)
    found = resolve(master)
    for address in found:
        if interface_of(address):
            break
    else:
        raise UsageError(
            f"--master-addr {master} is {', '.join(found)}, no address of this host, which is "
            "--node-rank 0: start that one there, or give --network-interface"
        )
    if ipaddress.ip_address(address).is_loopback and not _means_loopback(master):
        raise UsageError(
            f"--master-addr {master} is {address} on this host, which no other host reaches: give "
            "its address in the network, or --network-interface"
        )
    return address


def resolve(name: str, option: str = "--master-addr") -> list[str]:
    """Returns the addresses of a name, IPv4 first; `option` names its source for errors.

    Raises:
        UsageError: the name has no address.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{option} {name} can't be resolved: {error.strerror}") from None
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def source_address(destination: str) -> str:
    """Returns the address of this host on the route to `destination`.

    Raises:
        OSError: there is no route.
    """
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, 9))  # sends nothing
        return str(probe.getsockname()[0])


def is_this_host(name: str) -> bool:
    """Tells whether a name or an address is this host's."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    addresses = {each for known in addresses_by_interface().values() for each in known}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(found & addresses)


def addresses_of_hosts(names: Sequence[str]) -> dict[str, set[str]]:
    """Returns each name's addresses: for a name of this host, all of this host's addresses."""
    own = {each for known in addresses_by_interface().values() for each in known}

    def addresses_of(name: str) -> set[str]:
        if is_this_host(name):
            return own
        try:
            return set(resolve(name, "-H"))
        except UsageError:
            return set()  # ssh may know it by another name

    with ThreadPoolExecutor(min(len(names), _MOST_LOOKUPS_AT_ONCE)) as pool:
        return dict(zip(names, pool.map(addresses_of, names)))


def _means_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
