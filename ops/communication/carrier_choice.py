"""Chooses the carrier of collectives: Horovod, memory shared by a host's ranks, both, or NCCL.

`shared_memory` carries them if all ranks are on CPUs of one host, whichever launcher has started
them (`ops/communication/shared_memory.py`). Its collectives are compiled operations
(`ops/native/carrier.cc`) with the same inputs and outputs as Horovod's. They find each other by the
same names, so that the rest of a graph doesn't depend on the carrier:

* Before each collective, Horovod asks whether all ranks are ready: one round of small messages over
  sockets. Here a rank leaves its data in memory, and continues as soon as the others' data is
  there.
* A message is found by its collective's name and the number of times that the name has been used,
  so ranks may start the collectives of a run in any order. An operation that waits holds no thread
  of TensorFlow: two collectives in different order on two ranks can't block each other, even with
  one inter-op thread.
* The others notice within a tenth of a second that a rank has ended; a rank that waits for it gets
  an UnknownError, as from Horovod. They keep waiting for a rank that is stopped; the launcher's
  stall detector names it.
* After a run that failed half-way the process exchanges nothing more, and a rank that waits for it
  gets an UnknownError, too.
* Sums are formed in the order of the ranks.

If Horovod is installed, scripts use it for their own reductions, and it carries everything if
memory can't be shared: between hosts, and on GPUs. (The GPUs of one host use NCCL if Horovod isn't
installed.) In a job of several hosts the carrier is `mixed`: the part of an all-to-all that stays
on a host goes through the host's memory; the rest, and all other collectives, go through Horovod.
Either all hosts do so or none: ranks build the same graphs.

`nccl` carries them between the GPUs of one host (`ops/native/gpu/nccl_carrier.cc`): ranks exchange
headers through shared memory, and NCCL moves the data on the operations' own stream. If
it is chosen by name and isn't possible, that is an error; `auto` chooses it for ranks with GPUs if
Horovod isn't installed.

The environment variable COLLECTIVE_CARRIER chooses the carrier, and `scope(carrier=…)` chooses it
for what is built inside. `auto`, the default, means shared memory if that is possible. The ranks'
agreement on a run, which belongs to no scope, follows the variable.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import horovod_library, horovod_threads, nccl, shared_memory
from collective.ops.communication.membership import Process

VARIABLE = "COLLECTIVE_CARRIER"
AUTO, HOROVOD, SHARED_MEMORY, NCCL = "auto", "horovod", "shared_memory", "nccl"
CHOICES = (AUTO, HOROVOD, SHARED_MEMORY, NCCL)
MIXED = "mixed"  # What SHARED_MEMORY means in a job of several hosts.
# How many seconds ranks wait for each other: once Horovod has started on all of them; and without
# Horovod, when they may have started at any time.
PATIENCE, PATIENCE_AT_START = 30.0, 600.0


@dataclasses.dataclass
class _Meeting:
    """Holds the result of the ranks' meeting, and what has been chosen since.

    Attributes:
        joined: this process's place, once the ranks have met.
        unavailable: why this job's ranks don't share memory, the same on every rank; "" if they do.
        has_memory: whether the ranks have memory for headers.
        has_nccl: whether NCCL is open.
        scope_choice: the choice of the scope that is open.
        exit_code: the exit code of the process, once an error has ended its program.
    """

    joined: Process | None = None
    unavailable: str = "the ranks have not joined"
    has_memory: bool = False
    has_nccl: bool = False
    scope_choice: str | None = None
    exit_code: int | None = None


_meeting = _Meeting()


def configured() -> str:
    """Returns the choice of the environment variable COLLECTIVE_CARRIER, 'auto' by default.

    Raises:
        ValueError: the value isn't the name of a carrier.
    """
    choice = os.environ.get(VARIABLE, "").lower() or AUTO
    if choice not in CHOICES:
        raise ValueError(
            f"{VARIABLE}={choice}: there is no such carrier. Known: {', '.join(CHOICES)}."
        )
    return choice


def join(process: Process, allgather_words: Callable[[str], list[str]]) -> bool:
    """Lets the ranks share memory if possible; every rank calls it, once Horovod has started.

    Returns whether this is the first time that they join.

    Args:
        process: this process's place.
        allgather_words: returns all ranks' texts; all ranks call it at the same time.

    Raises:
        ImportError: Horovod is needed, and isn't installed.
        ValueError: COLLECTIVE_CARRIER doesn't name a carrier.
        RuntimeError: it is 'nccl', which isn't possible; says why, the same on every rank.
    """
    configured()
    if _meeting.joined == process:
        return False
    if not process.on_one_host:
        _need_horovod(process, "Ranks on several hosts exchange by Horovod")
    if configured() == HOROVOD:
        _need_horovod(process, f"{VARIABLE}={HOROVOD} asks for Horovod")
    if configured() == NCCL or _only_nccl(process):
        _open_nccl(process, f"{VARIABLE}={configured()}")
        _meeting.joined, _meeting.unavailable = process, _own_problem() or ""
        return True
    problem = _shared(process, "", _own_problem())
    if problem:
        _need_horovod(
            process, f"The ranks of this host can't share memory ({problem}): they need Horovod"
        )
    if not process.on_one_host:
        problem = _first_problem(process, allgather_words(f"{process.local_rank} {problem or ''}"))
    _meeting.joined, _meeting.unavailable = process, problem or ""
    if process.size == 1 or of_broadcasts() == SHARED_MEMORY:
        horovod_threads.yield_processors()
    return True


def _only_nccl(process: Process) -> bool:
    """Tells whether only NCCL can carry the ranks' exchanges: they have GPUs, and no Horovod.

    It is the same on all ranks of a host.
    """
    return bool(
        horovod_library.missing
        and process.size > 1
        and configured() == AUTO
        and tf.config.list_physical_devices("GPU")
    )


def _open_nccl(process: Process | None, asked: str) -> None:
    """Lets the ranks exchange by NCCL; every rank calls it at the same time.

    Args:
        process: this process's place; None if it has none.
        asked: says who asks for it.

    Raises:
        RuntimeError: it isn't possible.
    """
    if process is None or process.size == 1 or _meeting.has_nccl:
        return
    problem = nccl.problem()
    if not process.on_one_host:
        problem = (
            "it carries collectives between the GPUs of one host only, and these ranks are on "
            f"several: {HOROVOD!r} carries them"
        )
    elif not _meeting.has_memory:
        # All ranks learn about the first problem of any of them.
        problem = _shared(process, " nccl", problem)
    problem = problem or nccl.start(process.rank, process.size)
    if problem:
        raise RuntimeError(f"{asked}: {problem}")
    _meeting.has_nccl = True


def _shared(process: Process, purpose: str, own_problem: str | None) -> str | None:
    """Returns None if this process and its host's other ranks now share memory, else why
    not.

    Args:
        process: this process's place.
        purpose: distinguishes this meeting from others of the job.
        own_problem: why this process can't; None if it can.
    """
    if process.size == 1:
        return "there is one rank"
    # Peers with another choice wait in vain for this rank, and then go by its choice.
    if configured() == HOROVOD and not purpose:
        return f"{VARIABLE}={HOROVOD}"
    job = shared_memory.job_of(os.environ)
    if job is None:
        return "what started the ranks doesn't say by which they could find each other"
    if not process.on_one_host:  # Containers on one machine may count as hosts and still meet.
        job += f" host of rank {process.host.start}"
    local_rank, local_size = process.local_rank, process.local_size
    opener = _opener(local_rank, local_size)
    patience = PATIENCE_AT_START if horovod_library.missing else PATIENCE
    return shared_memory.share(job + purpose, local_rank, local_size, own_problem, opener, patience)


def _first_problem(process: Process, words: Sequence[str]) -> str | None:
    """Returns why the hosts of a job can't use their memory, the same on all ranks.

    Args:
        process: this process's place.
        words: each rank's text: its local rank, and its own problem.
    """
    local_ranks = [int(said.partition(" ")[0]) for said in words]
    problems = [said.partition(" ")[2] for said in words]
    for rank, problem in enumerate(problems):
        if problem:
            return f"on the host of rank {rank}: {problem}"
    if not any(local_ranks):
        return "every host has one rank"
    # Hosts follow each other: local ranks count up, and begin with 0 again on the next host.
    for rank, local_rank in enumerate(local_ranks):
        before = local_ranks[rank - 1] if rank else -1
        if local_rank not in (0, before + 1):
            return (
                f"the ranks of a host don't follow each other: rank {rank} is number {local_rank} "
                "of its host"
            )
    return None


def _own_problem() -> str | None:
    """Returns why this process can't share memory; None if it can."""
    reason = native_library.missing()
    if reason is not None:
        return f"the compiled operations are missing: {reason}"
    return "the ranks have GPUs" if tf.config.list_physical_devices("GPU") else None


def use(choice: str | None) -> None:
    """Sets the choice for collectives built from now on; None means the environment's choice.

    Raises:
        RuntimeError: it is 'nccl', which isn't possible; says why.
    """
    if choice == NCCL:
        _open_nccl(_meeting.joined, f"scope(carrier={NCCL!r})")
    if choice == HOROVOD:
        _need_horovod(_meeting.joined, "scope(carrier='horovod') asks for Horovod")
        horovod_threads.compete()
    _meeting.scope_choice = choice


def _need_horovod(process: Process | None, why: str) -> None:
    """Refuses a job of several ranks that needs Horovod if Horovod isn't installed.

    Raises:
        ImportError: its text begins with `why`, as in "… asks for Horovod".
    """
    if horovod_library.missing and process is not None and process.size > 1:
        raise ImportError(
            f"{why}, which isn't installed ({horovod_library.missing}). `make setup` in a checkout "
            "builds it, `collective build-horovod` anywhere else, against the installed "
            "TensorFlow. The ranks of one host need none."
        )


def in_force() -> str:
    """Returns the carrier of what is built now: HOROVOD, SHARED_MEMORY, MIXED or NCCL."""
    return _resolved(_meeting.scope_choice or configured())


def of_agreement() -> str:
    """Returns the carrier of the ranks' agreement on runs, the same in the whole process.

    Headers are in the host's memory, so shared memory carries them if NCCL carries the rest.
    """
    carrier = of_broadcasts()
    return SHARED_MEMORY if carrier == NCCL else carrier


def of_broadcasts() -> str:
    """Returns the carrier for values that one rank sends to all, the same in the whole process."""
    return _resolved(configured())


def can_mix() -> bool:
    """Tells whether the ranks of each of several hosts share memory."""
    return (
        _meeting.joined is not None and not _meeting.unavailable and not _meeting.joined.on_one_host
    )


def ranks_of_host() -> range:
    """Returns the ranks with which this one shares memory, itself among them."""
    assert _meeting.joined is not None
    return _meeting.joined.host


def give_up() -> None:
    """Ends what waits in memory for other ranks, now and later, and tells those ranks.

    It is called after a run that has failed half-way: peers may wait for data that never comes.
    """
    if _meeting.has_memory:
        native_library.functions().collective_mailbox_give_up()


def given_up() -> str:
    """Returns what waited for which rank when this one gave up; "" if it hasn't given up."""
    if not _meeting.has_memory:
        return ""
    function = native_library.functions().collective_mailbox_given_up
    function.restype = ctypes.c_char_p
    words: str = function().decode()
    return words


def die(code: int) -> None:
    """Notes that an error has ended the program, so that the process ends with this code.

    If it has given up, a peer may be stopped, and Horovod would wait for that peer at its end.
    """
    _meeting.exit_code = code


def _leave() -> None:
    """Tells the others that this process ends; called right before Horovod ends."""
    native_library.functions().collective_mailbox_leave()
    if _meeting.exit_code is not None and given_up():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_meeting.exit_code)


def explanation() -> str:
    """Says which carrier is in force, and why."""
    asked = _meeting.scope_choice or configured()
    origin = f"scope(carrier='{asked}')" if _meeting.scope_choice else f"{VARIABLE}={asked}"
    if asked == HOROVOD:
        return f"Horovod, by {origin}"
    if asked == NCCL:
        if not _meeting.has_nccl:
            return f"Horovod, though {origin} asks for NCCL: there is one rank"
        return f"NCCL between the GPUs of this host, by {origin}"
    if _meeting.unavailable:
        instead = "" if asked == AUTO else f", though {origin} asks for shared memory"
        return f"Horovod{instead}: {_meeting.unavailable}"
    by = "" if asked == AUTO else f", by {origin}"
    if in_force() == MIXED:
        return f"shared memory between the ranks of a host, Horovod between hosts{by}"
    return f"shared memory of the ranks of this host{by}"


def _resolved(choice: str) -> str:
    if choice == NCCL or (choice == AUTO and horovod_library.missing and _meeting.has_nccl):
        return NCCL if _meeting.has_nccl else HOROVOD
    if choice == HOROVOD or _meeting.unavailable:
        return HOROVOD
    return SHARED_MEMORY if _meeting.joined is None or _meeting.joined.on_one_host else MIXED


def _opener(rank: int, size: int) -> Callable[[int], str]:
    """Returns the function that opens the memory that a descriptor stands for, for this rank."""

    def use(descriptor: int) -> str:
        functions = native_library.functions()
        functions.collective_mailbox_open.restype = ctypes.c_char_p
        problem: str = functions.collective_mailbox_open(descriptor, rank, size).decode()
        if problem:
            return f"rank {rank} can't use it: {problem}"
        atexit.register(_leave)
        _meeting.has_memory = True
        return ""

    return use
