"""Chooses what carries collectives: Horovod, or memory that the ranks of one host share.

`shared_memory` carries them where all ranks are on CPUs of one host, whoever started them
(`ops/shared_memory.py`). Its collectives are compiled operations (`ops/native/carrier.cc`) that
take and give what Horovod's do, and find each other by the same names, so that nothing else of a
graph depends on the carrier:

* Horovod asks before each collective whether all ranks are ready, one round of small messages over
  sockets. Here a rank leaves its data in memory, and goes on as soon as the others' is there.
* A message is found by its collective's name and by how often that name has been used, so ranks may
  start the collectives of a run in any order. An operation that waits keeps no thread of
  TensorFlow's: two collectives in different order on two ranks can't block each other, even with
  one inter-op thread.
* A rank that ends is noticed within a tenth of a second, and whoever waits for it gets an
  UnknownError, as from Horovod. A rank that is stopped is waited for; the launcher's stall detector
  names it.
* Sums are formed in the order of the ranks.

Horovod stays beside it, for what scripts reduce by themselves, and carries everything wherever
memory can't be shared: between hosts, on GPUs.

The environment variable COLLECTIVE_CARRIER says which to use, and `scope(carrier=…)` for what is
built inside. `auto`, which is the default, is shared memory where that can be. The agreement of the
ranks on a run, which belongs to no scope, follows the variable.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from collective.ops import native_library, shared_memory

VARIABLE = "COLLECTIVE_CARRIER"
AUTO, HOROVOD, SHARED_MEMORY = "auto", "horovod", "shared_memory"
CHOICES = (AUTO, HOROVOD, SHARED_MEMORY)
# For how many seconds ranks wait for each other, when Horovod has started on all of them.
PATIENCE = 30.0

# Why memory isn't shared in this job, the same on every rank; "" if it is.
_unavailable = "the ranks have not joined"
_joined: tuple[int, int] | None = None
_scope_choice: str | None = None


def configured() -> str:
    """Returns the choice of the environment variable COLLECTIVE_CARRIER, 'auto' by default.

    Raises:
        ValueError: it is none.
    """
    choice = os.environ.get(VARIABLE, "").lower() or AUTO
    if choice not in CHOICES:
        raise ValueError(
            f"{VARIABLE}={choice}: there is no such carrier. Known: {', '.join(CHOICES)}."
        )
    return choice


def join(rank: int, size: int, local_size: int) -> None:
    """Lets the ranks share memory, if that can be; every rank calls it, once Horovod has started.

    Args:
        rank: this process's.
        size: the number of ranks.
        local_size: how many of them are on this host.

    Raises:
        ValueError: COLLECTIVE_CARRIER has no such carrier.
    """
    global _joined, _unavailable
    configured()
    if _joined == (rank, size):
        return
    _joined, _unavailable = (rank, size), _shared(rank, size, local_size) or ""


def _shared(rank: int, size: int, local_size: int) -> str | None:
    """Returns None if this process and its peers have shared memory from now on, else why not."""
    if size == 1:
        return "there is one rank"
    if local_size != size:
        return "the ranks are on several hosts"
    if configured() == HOROVOD:  # The peers that have another choice wait in vain, and go by it.
        return f"{VARIABLE}={HOROVOD}"
    job = shared_memory.job_of(os.environ)
    if job is None:
        return "what started the ranks doesn't say by which they could find each other"
    return shared_memory.share(job, rank, size, _own_problem(), _opener(rank, size), PATIENCE)


def _own_problem() -> str | None:
    """Returns why this process can't share memory; None if it can."""
    reason = native_library.missing()
    if reason is not None:
        return f"the compiled operations are missing: {reason}"
    return "the ranks have GPUs" if tf.config.list_physical_devices("GPU") else None


def use(choice: str | None) -> None:
    """Sets the choice for collectives that are built from now on; None: the environment's."""
    global _scope_choice
    _scope_choice = choice


def in_force() -> str:
    """Returns the carrier of collectives that are built now: HOROVOD or SHARED_MEMORY."""
    return _resolved(_scope_choice or configured())


def of_agreement() -> str:
    """Returns the carrier of the ranks' agreement on runs, the same in the whole process."""
    return _resolved(configured())


def explanation() -> str:
    """Says which carrier is in force, and why."""
    asked = _scope_choice or configured()
    origin = f"scope(carrier='{asked}')" if _scope_choice else f"{VARIABLE}={asked}"
    if asked == HOROVOD:
        return f"Horovod, by {origin}"
    if _unavailable:
        instead = "" if asked == AUTO else f", not shared memory as of {origin}"
        return f"Horovod{instead}: {_unavailable}"
    by = "" if asked == AUTO else f", by {origin}"
    return f"shared memory of the ranks of this host{by}"


def _resolved(choice: str) -> str:
    return HOROVOD if choice == HOROVOD or _unavailable else SHARED_MEMORY


def _opener(rank: int, size: int) -> Callable[[int], str]:
    """Returns the function that opens the memory of a descriptor for this rank."""

    def use(descriptor: int) -> str:
        functions = native_library.functions()
        functions.collective_mailbox_open.restype = ctypes.c_char_p
        problem: str = functions.collective_mailbox_open(descriptor, rank, size).decode()
        if problem:
            return f"rank {rank} can't use it: {problem}"
        atexit.register(functions.collective_mailbox_leave)
        return ""

    return use
