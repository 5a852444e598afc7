"""Chooses what carries collectives: Horovod, or memory that the ranks of one host share.

`shared_memory` is for jobs of which the launcher has started all ranks, on CPUs of one host. Its
collectives are compiled operations (`ops/native/carrier.cc`) that take and give what Horovod's do,
and find each other by the same names, so that nothing else of a graph depends on the carrier:

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
memory can't be shared for certain: on several hosts, on GPUs, without the launcher.

The environment variable COLLECTIVE_CARRIER says which to use, and `scope(carrier=…)` for what is
built inside. The agreement of the ranks on a run, which belongs to no scope, follows the variable.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
from collections.abc import Mapping

from collective.launch.shared_memory import VARIABLE as MEMORY
from collective.ops import native_library

VARIABLE = "COLLECTIVE_CARRIER"
AUTO, HOROVOD, SHARED_MEMORY = "auto", "horovod", "shared_memory"
CHOICES = (AUTO, HOROVOD, SHARED_MEMORY)

# Set by mpirun and the like for each of their processes; the launcher takes them away.
_OTHER_LAUNCHERS = re.compile(r"OMPI_COMM_WORLD_|PMI_|PMIX_|MV2_COMM_WORLD_")

_rank_and_size = (0, 1)
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


def join(rank: int, size: int) -> None:
    """Takes note of who this process is; opens the shared memory if it is to be used.

    Raises:
        ValueError: COLLECTIVE_CARRIER has no such carrier.
        RuntimeError: the memory should be there, but can't be opened.
    """
    global _rank_and_size
    _rank_and_size = rank, size
    if _resolved(configured()) == SHARED_MEMORY:
        _open()


def use(choice: str | None) -> None:
    """Sets the choice for collectives that are built from now on; None: the environment's."""
    global _scope_choice
    _scope_choice = choice


def in_force() -> str:
    """Returns the carrier of collectives that are built now: HOROVOD or SHARED_MEMORY.

    Raises:
        RuntimeError: the memory should be there, but can't be opened.
    """
    carrier = _resolved(_scope_choice or configured())
    if carrier == SHARED_MEMORY:
        _open()
    return carrier


def of_agreement() -> str:
    """Returns the carrier of the ranks' agreement on runs, the same in the whole process."""
    return _resolved(configured())


def explanation() -> str | None:
    """Says which carrier is in force and why; None where nobody has asked for any."""
    asked = _scope_choice or configured()
    if asked == AUTO:
        return None
    origin = f"scope(carrier='{asked}')" if _scope_choice else f"{VARIABLE}={asked}"
    if asked == HOROVOD:
        return f"Horovod, by {origin}"
    missing = unavailable()
    if missing is None:
        return f"shared memory of the ranks of this host, by {origin}"
    return f"Horovod, not shared memory as of {origin}: {missing}"


def _resolved(choice: str) -> str:
    return SHARED_MEMORY if choice == SHARED_MEMORY and unavailable() is None else HOROVOD


@functools.cache
def unavailable() -> str | None:
    """Returns why memory can't be shared in this job, the same on every rank; None if it can."""
    return why_unavailable(os.environ, _rank_and_size[1]) or _missing_operations()


def why_unavailable(environment: Mapping[str, str], size: int) -> str | None:
    """Returns what in a rank's environment speaks against sharing memory; None for nothing.

    Args:
        environment: the rank's.
        size: the number of ranks.
    """
    if size == 1:
        return "there is one rank"
    if not environment.get(MEMORY):
        return "the ranks were not started by python -m collective.launch"
    others = [name for name in environment if _OTHER_LAUNCHERS.match(name)]
    if others or environment.get("WORLD_SIZE") != str(size):
        return "the ranks were started by another program below python -m collective.launch"
    if environment.get("CUDA_VISIBLE_DEVICES"):
        return "the ranks have GPUs"
    return None


def _missing_operations() -> str | None:
    reason = native_library.missing()
    return None if reason is None else f"the compiled operations are missing: {reason}"


@functools.cache
def _open() -> None:
    path, (rank, size) = os.environ[MEMORY], _rank_and_size
    functions = native_library.functions()
    open_mailbox = functions.collective_mailbox_open
    open_mailbox.restype = ctypes.c_char_p
    port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    problem = open_mailbox(path.encode(), rank, size, port).decode()
    if problem:
        # The other ranks may have opened it: this one can't choose by itself.
        raise RuntimeError(
            f"the memory that the ranks of this job share ({MEMORY}={path}) can't be used by rank "
            f"{rank}: {problem}. {VARIABLE}=horovod does without it."
        )
    atexit.register(functions.collective_mailbox_leave)
