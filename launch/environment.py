"""What each rank finds in its environment, as a pure function of the launcher's own.

Two kinds of variables: *identity* says who a rank is and where it meets the others. It is always
the launcher's, and what an outer job left behind (this launcher in a rank of another one, mpirun)
goes. *Tuning* is the user's where the user set it, and ours where not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .board import VARIABLE

LOOPBACK = "127.0.0.1"

# An outer job's identity under other launchers' names. TF_CONFIG describes a cluster of TensorFlow
# servers, which Estimator would try to join.
_STALE_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMI_",
    "PMIX_",
    "MV2_COMM_WORLD_",
    "MPI_LOCAL",
)
_STALE = frozenset(
    {"TF_CONFIG", "HOROVOD_ELASTIC", "HOROVOD_RENDEZVOUS_ADDR", "HOROVOD_RENDEZVOUS_PORT"}
)


@dataclass(frozen=True)
class World:
    """What all ranks of a job share."""

    size: int
    port: str  # of the rendezvous
    cores: int  # that the launcher may use
    terminal: bool  # is the launcher's stderr one?
    columns: int | None = None  # how wide that terminal is
    board: str = ""  # where ranks post their progress; "" if nobody watches


def prefix(rank: int, size: int) -> str:
    """What stands before every line that a rank writes. Alone, it needs none."""
    return f"[{rank}] " if size > 1 else ""


def rank_environment(
    outer: Mapping[str, str], world: World, rank: int, device: str | None
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
      outer: the launcher's own environment.
      world: what all ranks share.
      rank: which one.
      device: its entry for CUDA_VISIBLE_DEVICES, None for a CPU rank.
    """
    inherited = {
        name: value
        for name, value in outer.items()
        if name not in _STALE and not name.startswith(_STALE_PREFIXES)
    }
    return {
        **_tuning(world),
        **inherited,
        **_identity(world, rank, device),
        **_terminal(inherited, world),
    }


def _identity(world: World, rank: int, device: str | None) -> dict[str, str]:
    size, number = str(world.size), str(rank)
    return {
        "COLLECTIVE_LAUNCHED": "1",
        VARIABLE: world.board,
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "CUDA_VISIBLE_DEVICES": device or "",
        "HOROVOD_RANK": number,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": number,
        "HOROVOD_LOCAL_SIZE": size,
        # "Cross" ranks are the machines: there is one.
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": world.port,
        # Without it Gloo listens on the address of the host's name, which others may reach.
        "HOROVOD_GLOO_IFACE": "lo",
    }


def _tuning(world: World) -> dict[str, str]:
    share = str(max(1, world.cores // world.size))
    return {
        "OMP_NUM_THREADS": share,
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": share,
        # Milliseconds that Horovod waits for more to send; its default of 1 makes a small exchange
        # much slower.
        "HOROVOD_CYCLE_TIME": "0.1",
        # Horovod's default of 30 s ends a job in which one rank is merely slow to start or paused
        # by a debugger.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
        # Large blocks on huge pages: fewer faults where each step's buffers are new memory
        # (benchmarks/RESULTS.md).
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _terminal(inherited: Mapping[str, str], world: World) -> dict[str, str]:
    """Lets a rank draw a progress bar although its own stderr is a pipe."""
    if not world.terminal:
        return {"COLLECTIVE_TERMINAL": "0"}
    given = inherited.get("COLUMNS", "")
    columns = int(given) if given.isdigit() else world.columns
    if columns is None:
        return {"COLLECTIVE_TERMINAL": "1"}
    room = max(1, columns - len(prefix(world.size - 1, world.size)))
    return {"COLLECTIVE_TERMINAL": "1", "COLUMNS": str(room)}
