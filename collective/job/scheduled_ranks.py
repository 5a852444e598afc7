"""Lets ranks that a scheduler itself has started find each other, without a launcher.

    srun -n 8 python train.py        mpirun -np 8 python train.py

Horovod with MPI needs no help, and horovodrun provides its own. Otherwise each process would take
itself for a job of one rank. So each process gets from the scheduler's variables (schedulers.py)
what a launcher would have told it, and rank 0 serves the rendezvous on the interface that leads to
the others. The rendezvous answers only clients that know a path derived from the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

from collective.job.errors import UsageError
from collective.job.gloo_address import LOOPBACK, PATIENCE, check_host_name
from collective.job.key_value_store import KeyValueStore, gloo_address_of
from collective.job.network import (
    interface_of,
    listening_address,
    resolve,
    source_address,
)
from collective.job.schedulers import Membership, started_by
from collective.job.secret import job_secret

_FIRST_PORT, _PORTS = 20_000, 10_000
_CONNECT_SECONDS, _RETRY_SECONDS = 3.0, 0.1
_store: KeyValueStore | None = None  # on rank 0, for the life of the process


def is_in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether a launcher or scheduler has started this process as a rank of a job."""
    is_launched = environment.get("HOROVOD_RANK") or environment.get("COLLECTIVE_LAUNCHED")
    return bool(is_launched) or started_by(environment) is not None


def set_environment(
    environment: MutableMapping[str, str] = os.environ, has_mpi: bool = False
) -> str:
    """Tells Horovod about the job that a scheduler has started, before Horovod is initialised.

    Args:
        environment: the process's environment.
        has_mpi: whether Horovod was built with MPI, and finds the job by itself.

    Returns:
        The scheduler's name; "" if there is nothing to tell.

    Raises:
        UsageError: the ranks can't find each other.
    """
    if has_mpi or environment.get("HOROVOD_RANK") or environment.get("COLLECTIVE_LAUNCHED"):
        return ""
    membership = started_by(environment)
    if membership is None:
        return ""
    environment.update(_identity(membership, environment))
    for name, value in PATIENCE.items():
        environment.setdefault(name, value)
    return membership.scheduler


def _identity(membership: Membership, environment: MutableMapping[str, str]) -> dict[str, str]:
    global _store
    job = membership.job or environment.get("MASTER_PORT", "")
    digest = hmac.new(
        job_secret(environment, None), f"rendezvous of {job}".encode(), hashlib.sha256
    ).hexdigest()
    token = digest[:32]
    text = environment.get("MASTER_PORT", "")
    port = int(text) if text.isdigit() else _FIRST_PORT + int(digest[32:40], 16) % _PORTS
    master, own = _addresses(membership, environment)
    if not membership.on_one_host:
        check_host_name(own)
    if membership.rank == 0:
        members = {"global": membership.size}
        try:
            _store = KeyValueStore(members, address=own, port=port, token=token)
        except OSError as error:
            raise UsageError(
                f"rank 0 can't listen at {own} port {port}: {error.strerror}; give all ranks "
                "another MASTER_PORT"
            ) from None
        _store.serve()
    else:
        await_rendezvous(master, port, _patience(environment))
    return {
        "HOROVOD_RANK": str(membership.rank),
        "HOROVOD_SIZE": str(membership.size),
        "HOROVOD_LOCAL_RANK": str(membership.local_rank),
        "HOROVOD_LOCAL_SIZE": str(membership.local_size),
        "HOROVOD_CROSS_RANK": str(membership.node),
        "HOROVOD_CROSS_SIZE": str(membership.cross_size),
        "HOROVOD_HOSTNAME": f"host{membership.node}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": gloo_address_of(master, port, token),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface_of(own),
    }


def _addresses(membership: Membership, environment: MutableMapping[str, str]) -> tuple[str, str]:
    """Returns the address of rank 0's host, and the address by which others reach this host."""
    if membership.on_one_host:
        return LOOPBACK, LOOPBACK
    name = environment.get("MASTER_ADDR") or membership.first_host
    if not name:
        raise UsageError(
            f"{membership.scheduler} doesn't tell its tasks where rank 0 is: give all of them "
            f"MASTER_ADDR (`{membership.scheduler} -x MASTER_ADDR=HOST`), the name or address of "
            "the first host"
        )
    if membership.rank == 0:
        own = listening_address(name, None)
        if ":" in own:
            raise UsageError(_needs_ipv4(name, own))
        return own, own
    addresses = resolve(name, "MASTER_ADDR")
    master = next((each for each in addresses if ":" not in each), "")
    if not master:
        raise UsageError(_needs_ipv4(name, ", ".join(addresses)))
    try:
        own = source_address(master)
    except OSError as error:
        raise UsageError(f"there is no route to {name} ({master}): {error.strerror}") from None
    return master, LOOPBACK if own == master and own.startswith("127.") else own


def await_rendezvous(address: str, port: int, seconds: float) -> None:
    """Waits until rank 0 listens: Horovod would try a few times and then abort.

    Raises:
        UsageError: rank 0 doesn't listen within `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"after {seconds:g} s (HOROVOD_GLOO_TIMEOUT_SECONDS) rank 0 doesn't listen at "
                    f"{address} port {port}: {error.strerror or error}; it has failed, or "
                    "MASTER_ADDR, MASTER_PORT or the job's secret aren't the same on all hosts"
                ) from None
        time.sleep(_RETRY_SECONDS)


def _patience(environment: MutableMapping[str, str]) -> float:
    text = {**PATIENCE, **environment}["HOROVOD_GLOO_TIMEOUT_SECONDS"]
    return float(text) if text.isdigit() else 0.0


def _needs_ipv4(name: str, addresses: str) -> str:
    return (
        f"MASTER_ADDR {name} is {addresses}, and ranks without a launcher need an IPv4 address: "
        "give one, or start the launcher on each host (srun --ntasks-per-node=1, mpirun --map-by "
        "ppr:1:node)"
    )
