"""The address at which Horovod's ranks listen, and the library that makes them listen there.

Horovod 0.28.1 takes HOROVOD_GLOO_IFACE for its first connections only; the others listen where the
host's name leads (ops/gloo_address.cc). Where the library isn't compiled, that is how it stays:
then the host's name must lead to the right address.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from .environment import LOOPBACK
from .errors import UsageError
from .plan import LaunchPlan

_FOLDER = Path(__file__).resolve().parent.parent / "ops"


def with_gloo_address(plan: LaunchPlan, address: str = LOOPBACK) -> LaunchPlan:
    """Returns the plan of a job whose ranks on this host listen at an address.

    Args:
      plan: the job's.
      address: one of this host's.

    Raises:
      UsageError: they would listen elsewhere, and other hosts couldn't reach them; or nowhere.
    """
    if plan.size == 1:
        return plan
    library = _library()
    if library:
        return replace(plan, gloo_address=address, gloo_library=library)
    if plan.hosts and plan.local_ranks:
        check_host_name(address)
    elif not plan.hosts and not addresses_of_name(socket.gethostname()):
        raise UsageError(
            f"the ranks would listen where the name of this host, {socket.gethostname()}, leads, "
            f'and it leads to no address: add a line "127.0.1.1 {socket.gethostname()}" to '
            "/etc/hosts, or compile the operations (`make setup` in a checkout, or `pip install .`)"
        )
    return plan


def has_library() -> bool:
    """Tells whether the library is there, which makes ranks listen at the right address."""
    return bool(_library())


def addresses_of_name(name: str) -> list[str]:
    """Returns the addresses to which a name leads; none if it can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_host_name(address: str) -> None:
    """Checks that Horovod, left alone, would listen at an address of this host.

    Raises:
      UsageError: it wouldn't, and other hosts couldn't reach it.
    """
    name = socket.gethostname()
    found = addresses_of_name(name)
    if address not in found:
        raise UsageError(
            f"the ranks of this host would listen where its name leads, at "
            f"{', '.join(found) or 'no address'} of {name}, not at {address}: have the name lead "
            f'there (a line "{address} {name}" in /etc/hosts), or have the launcher start them, '
            "with compiled operations (`make setup` in a checkout, or `pip install .`)"
        )


def _library() -> str:
    """Returns the path of the library, "" if it isn't there or can't be named in LD_PRELOAD."""
    for path in sorted(_FOLDER.glob("_gloo_address*.so")):
        if not set(str(path)) & set(" :;\t\n"):
            return str(path)
    return ""
