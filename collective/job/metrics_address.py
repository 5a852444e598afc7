"""Says where a job serves its metrics: what `--metrics-port` and its variable hold."""

from __future__ import annotations

from typing import NamedTuple

VARIABLE = "COLLECTIVE_METRICS_PORT"
_MOST = 2**16 - 1


class MetricsAddress(NamedTuple):
    """Holds an address and a port.

    Attributes:
        address: of a network interface of rank 0's host; "" stands for all of them.
        port: the port; 0 for any that is free.
    """

    address: str
    port: int


def parse(text: str) -> MetricsAddress:
    """Reads `9400`, `127.0.0.1:9400` or `[::1]:9400`.

    Raises:
        ValueError: it is none of these.
    """
    address, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= _MOST):
        raise ValueError(
            f"'{text}' is no port: give a number from 0 to {_MOST}, or one with the address of an "
            "interface, like 127.0.0.1:9400"
        )
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    elif ":" in address:
        raise ValueError(f"'{text}': put an address of IPv6 into brackets, like [::1]:9400")
    return MetricsAddress(address, int(port))
