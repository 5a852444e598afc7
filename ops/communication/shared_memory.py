"""Lets the ranks of one host meet, and gives memory to all of them, or to none.

    rank r                                        rank 0
    "here", or why it can't share    ──►  all are here: makes the memory
                                     ◄──  its descriptor
    "open", or why it isn't          ──►
                                     ◄──  "all have it", or who hasn't, and why

They meet at a Unix socket that no folder has. Its name is made of what every rank's environment
says of its job, whatever started it, so no network is needed, nor a launcher's help. Ranks that
can't reach each other (each in a container of its own, say) share nothing, after a while.

The memory has no name either (a container's /dev/shm is small), and is gone with the last process
that has it, however that ends. Here it gets a header only. Ranks lay out the rest, and take pages
as they need them (ops/native/mailbox.h).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

MAGIC = b"collective wire\n"
VERSION = 4  # of the layout, and of what is said here
_HEADER = struct.Struct("<16sII")  # magic, version, ranks
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOST_BYTES = 4096  # of a message
_RETRY = 0.005  # seconds between two looks for rank 0's socket

# What tells a job from others, by who started it: the first of which a rank has all.
_IDENTITIES = (
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("PMIX_NAMESPACE",),  # Open MPI
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def job_of(environment: Mapping[str, str]) -> str | None:
    """Returns what tells the job of a rank with this environment from others; None if nothing does.

    It is the same for all ranks of the job.
    """
    for names in _IDENTITIES:
        values = [environment.get(name) for name in names]
        if all(values):
            return " ".join(f"{name}={value}" for name, value in zip(names, values))
    return None


def share(
    job: str, rank: int, size: int, problem: str | None, use: Callable[[int], str], patience: float
) -> str | None:
    """Gives the ranks of a job one memory; every rank calls it once.

    Args:
        job: from `job_of`.
        rank: this rank.
        size: how many ranks there are, all on this host.
        problem: why this rank can't share memory; None if it can.
        use: opens the memory of this descriptor, which it keeps; returns why it can't, or "".
        patience: how many seconds ranks wait for each other to come here.

    Returns:
        None where all ranks have it open; else why not. It is None on all ranks, or on none.
    """
    try:
        meet = _meet_all if rank == 0 else _meet_rank_0
        return meet(_address(job, size), rank, size, problem, use, time.monotonic() + patience)
    except OSError as error:
        return f"rank {rank} can't meet the others of this host: {error}"


def _address(job: str, size: int) -> str:
    """Returns the name of the socket at which ranks meet: abstract, as its first character says."""
    words = f"{job} {size} {os.getuid()} {VERSION}"
    return "\0collective-" + hashlib.sha256(words.encode()).hexdigest()[:32]


def _meet_all(
    address: str, rank: int, size: int, problem: str | None, use: Callable[[int], str], end: float
) -> str | None:
    """Is rank 0's part."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(address)
        listener.listen(size)
        problems: dict[int, str] = {0: problem or ""}
        peers: dict[int, socket.socket] = {}
        while len(peers) < size - 1:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                peer = stack.enter_context(listener.accept()[0])
                said = _heard(peer, end) if _is_own_user(peer) else {}
            except socket.timeout:
                missing = next(r for r in range(1, size) if r not in peers)
                problems[missing] = f"rank {missing} didn't come to the others of this host"
                break
            if said.get("rank") in range(1, size):
                peers[said["rank"]] = peer
                problems[said["rank"]] = said["problem"]
        listener.close()  # A rank that comes now is refused.
        descriptor = -1
        if not any(problems.values()):
            try:
                descriptor = _new_memory(size)
            except OSError as error:
                problems[0] = f"rank 0 can't make memory: {error}"
        first = _first(problems)
        for peer in peers.values():
            _send(peer, {"problem": first}, descriptor)
        if first:
            return first
        problems = {0: use(descriptor)}
        for other, peer in peers.items():
            problems[other] = _heard(peer, None).get("problem", f"rank {other} has ended")
        first = _first(problems)
        for peer in peers.values():
            _send(peer, {"problem": first})
        return first or None


def _meet_rank_0(
    address: str, rank: int, size: int, problem: str | None, use: Callable[[int], str], end: float
) -> str | None:
    """Is every other rank's part."""
    gone = "rank 0 has ended"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        while True:
            try:
                peer.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                if time.monotonic() > end:
                    return "rank 0 didn't come to the others of this host"
                time.sleep(_RETRY)
        _send(peer, {"rank": rank, "problem": problem or ""})
        data, descriptors, _, _ = socket.recv_fds(peer, _MOST_BYTES, 1)
        first: str = _read(data).get("problem", gone)
        if first or not descriptors:
            return first or gone
        os.set_inheritable(descriptors[0], False)
        _send(peer, {"problem": use(descriptors[0])})
        return _heard(peer, None).get("problem", gone) or None


def _new_memory(size: int) -> int:
    """Returns the descriptor of new memory.

    Raises:
        OSError: there is none.
    """
    if not hasattr(os, "memfd_create"):  # Python was built for a C library before 2.27.
        raise OSError("this Python has no os.memfd_create")
    descriptor = os.memfd_create("collective.wire")
    os.pwrite(descriptor, _HEADER.pack(MAGIC, VERSION, size), 0)
    return descriptor


def _first(problems: Mapping[int, str]) -> str:
    """Returns the problem of the lowest rank that has one, "" for none."""
    return next((problems[rank] for rank in sorted(problems) if problems[rank]), "")


def _is_own_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _send(peer: socket.socket, words: Mapping[str, Any], descriptor: int = -1) -> None:
    """Sends words; a rank that has ended hears nothing."""
    data = json.dumps(words).encode()[:_MOST_BYTES]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(peer, [data], [descriptor] if descriptor >= 0 else [])


def _heard(peer: socket.socket, end: float | None) -> dict[str, Any]:
    """Returns what `peer` says, {} if it has ended.

    Raises:
        socket.timeout: it says nothing until `end`.
    """
    peer.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
    try:
        return _read(peer.recv(_MOST_BYTES))
    except ConnectionResetError:
        return {}


def _read(data: bytes) -> dict[str, Any]:
    try:
        words = json.loads(data)
    except ValueError:
        return {}
    return words if isinstance(words, dict) else {}
