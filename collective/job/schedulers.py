"""A table of the variables that schedulers set for the processes they start.

A process is *started by* a scheduler if its parent is the scheduler's daemon, with only shells in
between. If another program is in between (a launcher, a notebook, a test), the process is *nested*
in a job that has nothing to do with it, and the variables don't count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "env", "time", "numactl", "taskset"})
_MOST_ANCESTORS = 16


@dataclass(frozen=True)
class Scheduler:
    """Names the variables of a scheduler.

    Attributes:
        name: the program that users call.
        daemons: the processes that start its tasks.
        rank, size, local_rank: the variables with a task's numbers.
        local_size: the variable with the number of tasks on its host, or Slurm's list for all
            hosts.
        node: the variable with its host's number, if the scheduler sets one.
        host_names: the variable with all hosts' names in Slurm's form, if the scheduler sets one.
        job: variables that identify the job; the first one that is set counts.
    """

    name: str
    daemons: frozenset[str]
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    host_names: str = ""
    job: tuple[str, ...] = ()


SCHEDULERS = (
    Scheduler(
        name="mpirun",  # Open MPI
        daemons=frozenset(
            {
                *("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "prte"),
                *("mpirun.openmpi", "mpiexec.openmpi"),  # Debian's
            }
        ),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Scheduler(
        name="mpirun",  # MPICH and Intel MPI
        daemons=frozenset({"hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy", "mpiexec.hydra"}),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        job=("HYDI_CONTROL_FD", "PMI_ID"),
    ),
    Scheduler(
        name="srun",  # missing in the batch script itself, which isn't a task of a step
        daemons=frozenset({"slurmstepd"}),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        host_names="SLURM_STEP_NODELIST",
        job=("SLURM_JOB_ID",),
    ),
)


@dataclass(frozen=True)
class Membership:
    """Says which task of a scheduler's job a process is.

    Attributes:
        scheduler: the scheduler's name.
        rank, size, local_rank, local_size: the task's numbers.
        node: the number of its host.
        cross_size: how many hosts have a task with this local rank.
        first_host: the name of the first host, "" if the scheduler doesn't tell it.
        job: identifies the job.
    """

    scheduler: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    cross_size: int
    first_host: str
    job: str

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size


def started_by(
    environment: Mapping[str, str], ancestors: Sequence[str] | None = None
) -> Membership | None:
    """Returns this process's place in a scheduler's job of several tasks; None if it has none.

    Args:
        environment: the process's environment.
        ancestors: the names of its parent, grandparent and so on; None to look them up.
    """
    for scheduler in SCHEDULERS:
        found = _membership(scheduler, environment)
        if found is None or found.size < 2:
            continue
        names = _names_of_ancestors() if ancestors is None else ancestors
        starter = next((name for name in names if name not in _SHELLS), "")
        if starter in scheduler.daemons:
            return found
    return None


def ends_jobs_itself(environment: Mapping[str, str]) -> bool:
    """Tells whether this process is in a job of Slurm, which kills processes whose time is over.

    `scancel`, a preemption and the end of the time limit send TERM, and KILL after KillWait or
    GraceTime. TERM may arrive several times: directly, through the batch file and srun, and again
    after some time.
    """
    return "SLURM_JOB_ID" in environment


def _membership(scheduler: Scheduler, environment: Mapping[str, str]) -> Membership | None:
    numbers = [
        environment.get(name, "") for name in (scheduler.rank, scheduler.size, scheduler.local_rank)
    ]
    if not all(number.isdigit() for number in numbers):
        return None
    rank, size, local_rank = map(int, numbers)
    node_text = environment.get(scheduler.node, "") if scheduler.node else ""
    sizes = expand_counts(environment.get(scheduler.local_size, ""))
    if not sizes:
        return None
    if scheduler.node and node_text.isdigit() and int(node_text) < len(sizes):
        node = int(node_text)
        local_size = sizes[node]
        cross_size = sum(count > local_rank for count in sizes)
    else:  # these schedulers' default: ranks fill host by host, equally many on each
        local_size = sizes[0]
        node = rank // local_size
        cross_size = -(-(size - local_rank) // local_size)
    hosts = expand_names(environment.get(scheduler.host_names, "")) if scheduler.host_names else []
    job = next((environment[name] for name in scheduler.job if environment.get(name)), "")
    first = hosts[0] if hosts else ""
    return Membership(
        scheduler.name, rank, size, local_rank, local_size, node, cross_size, first, job
    )


def expand_counts(text: str) -> list[int]:
    """Returns the counts in Slurm's "2(x3),1": 2, 2, 2, 1; nothing if the form is different."""
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,5})\))?", word)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_names(text: str) -> list[str]:
    """Returns the names in Slurm's "a[01-03,7]x,b": a01x, a02x, a03x, a7x, b."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", word)
        if match is None:
            names.append(word)
            continue
        before, ranges, after = match.groups()
        for part in ranges.split(","):
            first, dash, last = part.partition("-")
            if not dash:
                names.append(before + part + after)
            elif first.isdigit() and last.isdigit() and int(last) - int(first) < 100_000:
                width = len(first)
                numbers = range(int(first), int(last) + 1)
                names += [f"{before}{number:0{width}d}{after}" for number in numbers]
    return names


def _names_of_ancestors() -> list[str]:
    """Returns the names of this process's parent, grandparent and so on."""
    names: list[str] = []
    pid = os.getppid()
    while pid > 1 and len(names) < _MOST_ANCESTORS:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                before, _, after = stat.read().rpartition(b")")
        except OSError:
            break
        names.append(before.partition(b"(")[2].decode("utf-8", "replace"))
        pid = int(after.split()[1])
    return names
