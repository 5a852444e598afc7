"""The environment of each rank, as a pure function of the plan.

There are two kinds of variables. *Identity* says which rank it is and where it meets the others; it
always comes from the launcher. The identity that an outer job (another launcher's rank, mpirun) has
left is removed. *Tuning* comes from the user if the user has set it, else from the launcher.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping

from collective.job import (
    file_record,
    info,
    metrics_address,
    preempt_signals,
    progress_board,
    secret,
    startup_hook,
    streams,
    training_apart,
)
from collective.job import milestones as milestone_board
from collective.job.gloo_address import LOOPBACK, PATIENCE
from collective.job.gloo_address import VARIABLE as GLOO_ADDRESS
from collective.launch.planning.plan import LaunchPlan

# Variables that the launcher sets for a rank, or a scheduler for the launcher.
RESERVED = re.compile(
    r"PET_.*|COLLECTIVE_(SECRET(_FILE)?|LOADER|STREAM_KEY)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|"
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|GLOO_RENDEZVOUS_.*)"
)
HASH_SEED = "PYTHONHASHSEED"
PYTHON_PATH = "PYTHONPATH"
# Python imports `sitecustomize` from here when a rank starts.
STARTUP_HOOK = os.path.dirname(os.path.abspath(startup_hook.__file__))

# The identity of an outer job under other launchers' names. TF_CONFIG describes a cluster of
# TensorFlow servers, which an Estimator would try to join.
_OUTER_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMI_",
    "PMIX_",
    "MV2_COMM_WORLD_",
    "MPI_LOCAL",
    "PET_",
)
_OUTER_NAMES = frozenset(
    {
        "TF_CONFIG",
        "HOROVOD_ELASTIC",
        "HOROVOD_RENDEZVOUS_ADDR",
        "HOROVOD_RENDEZVOUS_PORT",
        secret.VARIABLE,  # only launchers need it
        streams.LOADER,
    }
)


def loader_environment(plan: LaunchPlan, number: int) -> dict[str, str]:
    """Returns the whole environment of a loader.

    Args:
        plan: the job's plan.
        number: the loader's number, which is that of its stream.
    """
    return {
        # A batch that is made again is the same.
        HASH_SEED: "0",
        "PYTHONUNBUFFERED": "1",
        **_inherited(plan),
        "COLLECTIVE_LAUNCHED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        streams.LOADER: str(number),
        **_streams(plan),
    }


def _streams(plan: LaunchPlan) -> dict[str, str]:
    """Returns what ranks and loaders need to know of each other."""
    if plan.loaders:
        return {streams.LOADERS: ",".join(plan.loader_addresses), streams.KEY: plan.stream_key}
    job_secret = plan.launcher_environment.get(secret.VARIABLE)
    if not job_secret:
        return {}
    # The secret stays with the launchers. Ranks get what loaders elsewhere make of it, too.
    return {streams.KEY: streams.derived_key(job_secret.encode("utf-8", "surrogateescape"))}


def _inherited(plan: LaunchPlan) -> dict[str, str]:
    """Returns the launcher's variables, without those of an outer job."""
    inherited = {
        name: value
        for name, value in plan.launcher_environment.items()
        if name not in _OUTER_NAMES and not name.startswith(_OUTER_PREFIXES)
    }
    if not inherited.get(HASH_SEED):
        inherited.pop(HASH_SEED, None)  # to Python an empty value is the same as none
    return inherited


def line_prefix(plan: LaunchPlan, rank: int) -> str:
    """Returns the start of every line that a rank writes. A single rank needs none."""
    host = f"{plan.placements[rank].host}:" if plan.hosts else ""
    return f"[{host}{rank}] " if plan.size > 1 else ""


def rank_environment(
    plan: LaunchPlan,
    rank: int,
    rendezvous_port: str,
    board: str,
    milestones: str = "",
    script_files: str = "",
    rendezvous_address: str = LOOPBACK,
) -> dict[str, str]:
    """Returns the whole environment of one rank.

    Args:
        plan: the job's plan.
        rank: the rank's number.
        rendezvous_port: the port on which the rendezvous listens.
        board: the path of the progress board.
        milestones: the path of the milestone board.
        script_files: the path of the record of the script's files.
        rendezvous_address: the address of the rendezvous for Horovod.
    """
    inherited = _inherited(plan)
    return {
        **_tuning(plan, rank),
        **inherited,
        **_identity(plan, rank, board),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": rendezvous_port,
        **_attempt(plan, milestones),
        **({info.TEST_MODE: "1"} if plan.test_mode else {}),
        **({metrics_address.VARIABLE: plan.metrics_port} if plan.metrics_port else {}),
        **_streams(plan),
        file_record.VARIABLE: script_files,
        **_terminal(plan, inherited),
        **_preload(plan, inherited),
        **_watch(plan, inherited),
    }


def _identity(plan: LaunchPlan, rank: int, board: str) -> dict[str, str]:
    size, number = str(plan.size), str(rank)
    place = plan.placements[rank]
    return {
        "COLLECTIVE_LAUNCHED": "1",
        progress_board.VARIABLE: board if plan.detects_stalls else "",
        "RANK": number,
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(place.local_size),
        info.HOSTS: str(len(plan.hosts) or 1),
        "CUDA_VISIBLE_DEVICES": plan.devices[rank] or "",
        **_apart_for_nccl(plan, rank),
        "HOROVOD_RANK": number,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
        "HOROVOD_HOSTNAME": place.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Without it Gloo listens on the address of the host's name, which other hosts may reach.
        "HOROVOD_GLOO_IFACE": plan.interface,
    }


def _apart_for_nccl(plan: LaunchPlan, rank: int) -> dict[str, str]:
    """Lets NCCL accept ranks that share a GPU, as tests do: to NCCL each is on a host of its own.

    It then moves their data through sockets.
    """
    device = plan.devices[rank]
    if device is None or plan.devices.count(device) == 1:
        return {}
    return {"NCCL_HOSTID": f"{plan.placements[rank].host}-rank{rank}"}


def _preload(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Has Horovod listen at the plan's address; the user's own preloads come first."""
    if not plan.gloo_library:
        return {}
    others = inherited.get("LD_PRELOAD", "")
    return {
        GLOO_ADDRESS: plan.gloo_address,
        "LD_PRELOAD": f"{others}:{plan.gloo_library}" if others else plan.gloo_library,
    }


def _watch(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Makes ranks refuse to train apart (`training_apart`), or allows it."""
    if plan.independent:
        return {training_apart.VARIABLE: "1"}
    if plan.size == 1 or training_apart.is_independent(inherited):
        return {}
    others = inherited.get(PYTHON_PATH)
    folders = [folder for folder in (others or "").split(os.pathsep) if folder != STARTUP_HOOK]
    return {PYTHON_PATH: os.pathsep.join([STARTUP_HOOK, *(folders if others else [])])}


def _attempt(plan: LaunchPlan, milestones: str) -> dict[str, str]:
    return {
        milestone_board.VARIABLE: milestones,
        preempt_signals.VARIABLE: signal.Signals(plan.preempt_signal).name,
        "COLLECTIVE_RESTART_COUNT": str(plan.restart_count),
        "COLLECTIVE_MAX_RESTARTS": str(plan.max_restarts),
    }


def _tuning(plan: LaunchPlan, rank: int) -> dict[str, str]:
    threads = str(_threads(plan, rank))
    return {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
        "HOROVOD_CYCLE_TIME": "0.1" if _horovod_exchanges(plan) else "5",
        **_patience(plan),
        # Large blocks on huge pages: fewer faults where each step's buffers are new memory
        # (benchmarks/RESULTS.md).
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "NCCL_SOCKET_IFNAME": plan.interface,
        # A constant: all hosts, restarts and later jobs that resume from a checkpoint use the same
        # seed.
        HASH_SEED: "0",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **(_compiled_for_gpus() if plan.on_gpus else {}),
    }


def _patience(plan: LaunchPlan) -> dict[str, str]:
    """Returns how long Horovod waits: longer than the launcher, which says who is missing."""
    if not plan.detects_stalls:
        return PATIENCE
    return {name: f"{max(float(v), plan.stall_timeout) + 60:.0f}" for name, v in PATIENCE.items()}


def _threads(plan: LaunchPlan, rank: int) -> int:
    """Returns a rank's share of the cores, and of those that it is bound to."""
    share, cores = plan.cores // max(1, len(plan.local_ranks)), plan.cores_of(rank)
    if cores is not None:
        sharing = sum(plan.cores_of(other) == cores for other in plan.local_ranks)
        share = min(share, len(cores) // sharing)
    return max(1, share)


def _compiled_for_gpus() -> dict[str, str]:
    """Lets CUDA store on disk (`~/.nv`) what its driver compiles of TensorFlow's kernels.

    For GPUs newer than sm_90 (2.15: sm_80), TensorFlow has its kernels only as code that the
    driver compiles at a kernel's first use, which takes seconds each. CUDA's default of 1 GiB may
    not hold all of them.
    """
    return {"CUDA_CACHE_MAXSIZE": str(4 * 2**30)}


def _horovod_exchanges(plan: LaunchPlan) -> bool:
    """Tells whether the ranks' exchanges at each step are to go through Horovod.

    Every HOROVOD_CYCLE_TIME milliseconds, Horovod's thread on each rank asks all others whether
    there is something to send. If Horovod carries the exchange, its default of 1 makes a small
    exchange much slower. If CPU ranks exchange through memory, asking ten thousand times a second
    would cost more than the exchange: up to half of a small step, on all cores
    (benchmarks/RESULTS.md).
    """
    carrier = plan.launcher_environment.get("COLLECTIVE_CARRIER", "")
    several = len(plan.hosts) > 1
    return plan.size > 1 and (plan.on_gpus or several or carrier.lower() == "horovod")


def _terminal(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Lets a rank draw a progress bar although its own stderr is a pipe."""
    if not plan.terminal:
        return {"COLLECTIVE_TERMINAL": "0"}
    user_columns = inherited.get("COLUMNS", "")
    columns = int(user_columns) if user_columns.isdigit() else plan.columns
    if columns is None:
        return {"COLLECTIVE_TERMINAL": "1"}
    longest_prefix = max(len(line_prefix(plan, rank)) for rank in range(plan.size))
    return {"COLLECTIVE_TERMINAL": "1", "COLUMNS": str(max(1, columns - longest_prefix))}
