"""The ranks of a host meet, and get one memory: all of them, or none. Ranks are threads here."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from collective.ops.communication import shared_memory

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def job():
    """Makes a job that is no other's."""
    return f"job {uuid.uuid4()}"


def meet(job, size, problems=(), broken=(), absent=(), patience=20.0, late=()):
    """Returns what each of `size` ranks is told, and the inodes that their descriptors have.

    Args:
        job: by which they find each other.
        size: how many there are.
        problems: {rank: why it can't share}.
        broken: ranks that can't open the memory.
        absent: ranks that don't come.
        patience: in seconds.
        late: ranks that come half a second later.
    """
    opened: dict[int, int] = {}

    def one(rank):
        if rank in late:
            time.sleep(0.5)

        def use(descriptor):
            assert not os.get_inheritable(descriptor)
            if rank in broken:
                return f"rank {rank} is broken"
            header = os.pread(descriptor, 24, 0)
            assert header == shared_memory.MAGIC + bytes([4, 0, 0, 0, size, 0, 0, 0])
            opened[rank] = os.fstat(descriptor).st_ino
            return ""

        return shared_memory.share(job, rank, size, dict(problems).get(rank), use, patience)

    here = [rank for rank in range(size) if rank not in absent]
    with ThreadPoolExecutor(size) as threads:
        return dict(zip(here, threads.map(one, here))), opened


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_get_the_same_memory(job, size):
    for late in ((), (0,), (1,)):
        told, opened = meet(job, size, late=late)
        assert told == dict.fromkeys(range(size))
        assert len(opened) == size and len(set(opened.values())) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_share_keeps_all_from_it(job, rank):
    told, opened = meet(job, 3, problems={rank: "there is a GPU"})
    assert told == dict.fromkeys(range(3), "there is a GPU") and not opened


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_open_the_memory_keeps_all_from_using_it(job, rank):
    told, _ = meet(job, 3, broken=[rank])
    assert told == dict.fromkeys(range(3), f"rank {rank} is broken")


def test_a_rank_that_does_not_come_is_named(job):
    told, opened = meet(job, 3, absent=[1], patience=0.5)
    assert set(told.values()) == {"rank 1 didn't come to the others of this host"} and not opened
    told, opened = meet(job, 3, absent=[0], patience=0.5)
    assert set(told.values()) == {"rank 0 didn't come to the others of this host"} and not opened


def test_jobs_do_not_meet(job):
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda name: meet(name, 3), [job, job + " too"]))
    assert [told for told, _ in both] == [dict.fromkeys(range(3))] * 2
    assert set(both[0][1].values()).isdisjoint(both[1][1].values())


def test_a_name_that_is_taken_is_no_hang(job):
    """Whatever has it, ranks go on without shared memory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(shared_memory._address(job, 2))
        stranger.listen(2)
        closed = threading.Timer(0.5, stranger.close)
        closed.start()
        told, opened = meet(job, 2, patience=1.0)
        closed.join()
    assert "can't meet the others" in told[0] and told[1] and not opened


def test_who_is_no_rank_is_not_waited_for(job):
    """A connection that says nothing of use is skipped."""

    def knock():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            while True:
                try:
                    stranger.connect(shared_memory._address(job, 2))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.001)
            stranger.send(b"[]")

    knocking = threading.Thread(target=knock)
    knocking.start()
    told, opened = meet(job, 2, late=[1])
    knocking.join()
    assert told == {0: None, 1: None} and len(opened) == 2


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}, None),
        (
            {"HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "::1"},
            "HOROVOD_GLOO_RENDEZVOUS_ADDR=::1 HOROVOD_GLOO_RENDEZVOUS_PORT=1",
        ),
        ({"PMIX_NAMESPACE": "77", "PMIX_RANK": "0"}, "PMIX_NAMESPACE=77"),
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, "SLURM_JOB_ID=5 SLURM_STEP_ID=0"),
    ],
)
def test_a_job_is_known_by_who_started_it(environment, words):
    assert shared_memory.job_of(environment) == words
