"""What launcher, loaders and ranks say of streams: where loaders listen, and the key they share.

    COLLECTIVE_LOADERS       where loaders listen, in the order of their streams: h1:7000,h2:7000
    COLLECTIVE_LOADER        the number of this process's stream, if it is a loader
    COLLECTIVE_STREAM_KEY    the key of the job's streams, derived from its secret by the launcher

Ranks and loaders that the launcher hasn't given a key derive it from the job's secret themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from collective.job.secret import job_secret

LOADERS = "COLLECTIVE_LOADERS"
LOADER = "COLLECTIVE_LOADER"
KEY = "COLLECTIVE_STREAM_KEY"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,\[\]]+):([0-9]{1,5})")
_LAST_PORT = 65535


def derived_key(secret: bytes) -> str:
    """Returns the key of a job's streams, from which the secret can't be found."""
    return hmac.new(secret, b"collective.streams", hashlib.sha256).hexdigest()


def stream_key(environment: Mapping[str, str]) -> bytes:
    """Returns the key by which loaders and ranks know each other.

    Args:
        environment: of the process.

    Raises:
        UsageError: the secret is too short or unreadable, or other users may read it.
    """
    known = environment.get(KEY)
    return (known or derived_key(job_secret(environment, None))).encode()


def loader_addresses(given: str | Sequence[str]) -> list[str]:
    """Returns addresses, each HOST:PORT.

    Args:
        given: a list, or the text of COLLECTIVE_LOADERS.

    Raises:
        ValueError: there are none, one isn't such an address, or one occurs twice.
    """
    addresses = [each.strip() for each in (given.split(",") if isinstance(given, str) else given)]
    if not addresses:
        raise ValueError("there is no address of a loader: give HOST:PORT of each.")
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) <= _LAST_PORT:
            raise ValueError(f"the loader's address {address!r} isn't HOST:PORT, as h1:7000.")
    twice = {address for address in addresses if addresses.count(address) > 1}
    if twice:
        raise ValueError(f"the loader's address {min(twice)} occurs twice: each has one stream.")
    return addresses


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of an address of `loader_addresses`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
