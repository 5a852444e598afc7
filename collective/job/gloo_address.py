"""The address at which Horovod's ranks listen, and the library that makes them listen there.

Horovod 0.28.1 uses HOROVOD_GLOO_IFACE for its first connections only; the others listen at the
address of the host's name (ops/native/gloo_address.cc). If the library isn't compiled, that stays
so: then the host's name must resolve to the right address.
"""

from __future__ import annotations

import socket
from pathlib import Path

from collective.job.errors import UsageError

LOOPBACK = "127.0.0.1"
# Has the address for the library.
VARIABLE = "COLLECTIVE_GLOO_ADDRESS"
# Horovod's default of 30 s ends a job in which one rank is merely slow to start, or paused by a
# debugger.
PATIENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"}
_FOLDER = Path(__file__).resolve().parents[1] / "ops"


def library() -> str:
    """Returns the path of the library; "" if it wasn't compiled or can't be named in LD_PRELOAD."""
    path = _FOLDER / "_gloo_address.so"
    return str(path) if path.exists() and not set(str(path)) & set(" :;\t\n") else ""


def addresses_of_name(name: str) -> list[str]:
    """Returns the addresses to which a name resolves; none if it doesn't."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_host_name(address: str) -> None:
    """Checks that Horovod by itself would listen at an address of this host.

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
