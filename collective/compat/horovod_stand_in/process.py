"""Has Horovod's functions that tell a process its place in the job, and Horovod's constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collective.job import training_apart
from collective.ops.communication import carrier_choice, collectives, horovod_library, membership
from collective.wrappers import keras_saving

# How to get the rest of Horovod, where it is missing, and where this stands in for it nevertheless.
ADVICE = (
    "Horovod isn't built for this TensorFlow. `collective build-horovod` builds it; without it "
    "scripts of one host have only Horovod's common functions"
)
ADVICE_IN_VERSION_2 = (
    "a script of TensorFlow 2 that runs by `--as` has only Horovod's common functions; "
    "without --as it has Horovod's own, if that is built"
)
# Horovod's numbers of its reductions.
Average, Sum, Adasum, Min, Max, Product = range(6)


class _State:
    """Says whether scripts are of TensorFlow 2, and whether one has called `init`."""

    is_in_version_2 = False
    is_initialized = False


STATE = _State()


def unavailable(what: str) -> str:
    """Returns the text of the error about something that only Horovod has."""
    advice = ADVICE_IN_VERSION_2 if STATE.is_in_version_2 else ADVICE
    return f"{what} needs Horovod itself: {advice} (docs/coming-from/horovod.md lists them)."


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job that the launcher described.

    Args:
        comm: must be None: all ranks take part.
        process_sets: must be None.

    Raises:
        NotImplementedError: it is to use some of the ranks, or sets of them.
        ImportError: the ranks are on several hosts, or share no memory.
    """
    for name, value in (("comm", comm), ("process_sets", process_sets)):
        if value is not None:
            raise NotImplementedError(unavailable(f"hvd.init({name}=…)"))
    collectives.init()
    training_apart.watch(membership.size(), has_horovod=True)  # The script reduces by itself.
    STATE.is_initialized = True
    if STATE.is_in_version_2:
        keras_saving.by_themselves()


def shutdown() -> None:
    """Notes that the script has finished; what the ranks share is kept for others."""
    STATE.is_initialized = False


def is_initialized() -> bool:
    """Tells whether the script has called `init`, and not `shutdown` since."""
    return STATE.is_initialized


def needed() -> None:
    """Checks that the script has called `init`.

    Raises:
        ValueError: it hasn't; the text is Horovod's.
    """
    if not STATE.is_initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def _placed(place: Callable[[], int]) -> Callable[[], int]:
    def of_process() -> int:
        needed()
        return place()

    return of_process


rank, size = _placed(membership.rank), _placed(membership.size)
# All ranks are on one host.
local_rank, local_size = _placed(membership.local_rank), _placed(membership.size)
cross_rank, cross_size = _placed(lambda: 0), _placed(lambda: 1)


def is_homogeneous() -> bool:
    """Tells whether every host has as many ranks: there is one host."""
    needed()
    return True


def nccl_built() -> int:
    """Returns 1 if NCCL carries the exchanges, else 0."""
    return int(is_initialized() and carrier_choice.in_force() == carrier_choice.NCCL)


def not_built() -> bool:
    """Tells that MPI, Gloo and Horovod's other libraries aren't here."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = not_built
gloo_built = gloo_enabled = cuda_built = rocm_built = sycl_built = ccl_built = ddl_built = not_built


class GlobalProcessSet:
    """Stands for all ranks; there is no other set of them."""

    process_set_id, ranks = 0, None
    rank, size = staticmethod(rank), staticmethod(size)

    def included(self) -> bool:
        """Tells whether this rank belongs to it."""
        return True


global_process_set = GlobalProcessSet()


def check_process_set(process_set: Any) -> None:
    """Refuses a set of some of the ranks.

    Raises:
        NotImplementedError: it isn't the set of all ranks.
    """
    if process_set is not global_process_set:
        raise NotImplementedError(unavailable("hvd's process_set other than that of all ranks"))


def check_root(root_rank: int) -> None:
    """Refuses a rank that the job doesn't have.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= root_rank < size():
        raise ValueError(f"hvd.broadcast(root_rank={root_rank}): ranks are 0 to {size() - 1}")


def missing_horovod() -> str:
    """Returns why Horovod can't be imported; "" if it can."""
    return horovod_library.missing
