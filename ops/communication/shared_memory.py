"""Lets the ranks of one host meet, and gives shared memory to all of them or to none.

    rank r                                        rank 0
    "here", or why it can't share    ──►  all are here: makes the memory
                                     ◄──  its descriptor
    "open", or why it isn't          ──►
                                     ◄──  "all have it", or which rank doesn't, and why

They meet at a Unix socket that is in no folder. Its name is derived from the description of the job
in every rank's environment, whatever has started the job, so neither a network nor a launcher's
help is needed. Ranks that can't reach each other (each in its own container, for example) give up
after a while, and share nothing.

The memory has no name either (a container's /dev/shm is small), and is freed when the last process
that has it ends, for whatever reason. This file writes only its header. Ranks lay out the rest, and
take pages as they need them (ops/native/mailbox.h).
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
VERSION = 4  # of the layout, and of the messages of this file
_HEADER = struct.Struct("<16sII")  # magic, version, ranks
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOST_BYTES = 4096  # of a message
_RETRY = 0.005  # seconds between two looks for rank 0's socket

# Variables that identify a job, by what has started it: the first group that is complete counts.
_IDENTITIES = (
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("PMIX_NAMESPACE",),  # Open MPI
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def job_of(environment: Mapping[str, str]) -> str | None:
    """Returns what identifies the job of a rank with this environment; None if nothing does.

    It is the same on all ranks of the job.
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
        job: the result of `job_of`.
        rank: this rank.
        size: how many ranks there are, all on this host.
        problem: why this rank can't share memory; None if it can.
        use: opens the memory of a descriptor, which it keeps; returns why it can't, or "".
        patience: how many seconds ranks wait for each other.

    Returns:
        None if all ranks have it open; else why not. It is None on all ranks, or on none.
    """
    try:
        meet = _meet_all if rank == 0 else _meet_rank_0
        return meet(_address(job, size), rank, size, problem, use, time.monotonic() + patience)
    except OSError as error:
        return f"rank {rank} can't meet the others of this host: {error}"


def _address(job: str, size: int) -> str:
    """Returns the name of the socket at which ranks meet; its first character makes it abstract."""
    words = f"{job} {size} {os.getuid()} {VERSION}"
    return "\0collective-" + hashlib.sha256(words.encode()).hexdigest()[:32]


def _meet_all(
    address: str, rank: int, size: int, problem: str | None, use: Callable[[int], str], end: float
) -> str | None:
    """Does rank 0's part of the meeting."""
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
    """Does every other rank's part of the meeting."""
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
        OSError: there is no memory.
    """
    if not hasattr(os, "memfd_create"):  # Python was built for a C library before 2.27.
        raise OSError("this Python has no os.memfd_create")
    descriptor = os.memfd_create("collective.wire")
    os.pwrite(descriptor, _HEADER.pack(MAGIC, VERSION, size), 0)
    return descriptor


def _first(problems: Mapping[int, str]) -> str:
    """Returns the problem of the lowest rank that has one; "" if none has."""
    return next((problems[rank] for rank in sorted(problems) if problems[rank]), "")


def _is_own_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _send(peer: socket.socket, words: Mapping[str, Any], descriptor: int = -1) -> None:
    """Sends a message; a rank that has ended doesn't get it."""
    data = json.dumps(words).encode()[:_MOST_BYTES]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(peer, [data], [descriptor] if descriptor >= 0 else [])


def _heard(peer: socket.socket, end: float | None) -> dict[str, Any]:
    """Returns the message of `peer`; {} if it has ended.

    Raises:
        socket.timeout: no message has arrived by `end`.
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
