"""Tests what schedulers' variables say of a process, and whether they are about it at all."""

from __future__ import annotations

import socket
import threading

import pytest

from collective.job.errors import UsageError
from collective.job.scheduled_ranks import await_rendezvous, set_environment
from collective.job.schedulers import expand_counts, expand_names, started_by

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
}


@pytest.mark.parametrize(
    ("environment", "daemon", "numbers"),
    [
        (OPEN_MPI, "orted", ("mpirun", 5, 8, 1, 4, 1, 2, "", "prterun-1")),
        (OPEN_MPI, "prted", ("mpirun", 5, 8, 1, 4, 1, 2, "", "prterun-1")),
        (OPEN_MPI, "mpirun.openmpi", ("mpirun", 5, 8, 1, 4, 1, 2, "", "prterun-1")),
        (HYDRA, "hydra_pmi_proxy", ("mpirun", 1, 2, 1, 2, 0, 1, "", "")),
        (SLURM, "slurmstepd", ("srun", 6, 7, 0, 1, 3, 4, "gpu07", "77")),
    ],
)
@pytest.mark.parametrize("between", [[], ["bash"], ["numactl", "sh"]])
def test_who_was_started(environment, daemon, numbers, between):
    found = started_by(environment, [*between, daemon, "systemd"])
    assert found is not None
    assert (
        *(found.scheduler, found.rank, found.size, found.local_rank, found.local_size),
        *(found.node, found.cross_size, found.first_host, found.job),
    ) == numbers


@pytest.mark.parametrize(
    ("environment", "ancestors"),
    [
        ({}, ["orted"]),
        (OPEN_MPI, ["python3", "orted"]),  # a program of the job starts something of its own
        (OPEN_MPI, ["bash", "tmux: server"]),  # the shell has kept what it was given
        (OPEN_MPI, ["slurmstepd"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, ["orted"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"}, ["orted"]),
        (BATCH_SCRIPT, ["slurmstepd"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, ["slurmstepd"]),
    ],
)
def test_who_was_not(environment, ancestors):
    assert started_by(environment, ancestors) is None


def test_slurms_lists():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    assert expand_counts("") == expand_counts("x") == []
    assert expand_names("a[01-03,7]x,b") == ["a01x", "a02x", "a03x", "a7x", "b"]
    assert expand_names("n1,n2") == ["n1", "n2"]


@pytest.mark.parametrize(
    "environment", [{"HOROVOD_RANK": "1"}, {"COLLECTIVE_LAUNCHED": "1"}, OPEN_MPI]
)
def test_nothing_is_told_where_another_has(environment):
    """A launcher, horovodrun; and the tests' own parent is no scheduler."""
    told = dict(environment)
    assert set_environment(told) == "" and told == environment


def test_ranks_wait_for_rank_0_to_listen():
    """It may start last: under load Horovod's few tries were over before."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"rank 0 doesn't listen at 127.0.0.1 port {port}: Conn"
        ):
            await_rendezvous("127.0.0.1", port, 0.2)
        late = threading.Timer(0.3, listener.listen)
        late.start()
        await_rendezvous("127.0.0.1", port, 30)
        late.join()
