"""Tests the environment of each rank."""

from __future__ import annotations

import pytest

from collective.job.streams import stream_key
from collective.launch.planning.environment import (
    STARTUP_HOOK,
    loader_environment,
    rank_environment,
)
from collective.launch.planning.plan import LaunchPlan


def environment_of(rank, launcher_environment=None, size=3, device=None, cores=8, **plan):
    """Returns the environment of one rank of a job on the same device everywhere."""
    job = LaunchPlan(("python",), (device,) * size, launcher_environment or {}, cores, **plan)
    boards = {"board": "/proc/1/fd/2", "milestones": "/proc/1/fd/3", "script_files": "/proc/1/fd/4"}
    return rank_environment(job, rank, rendezvous_port="4711", **boards)


def test_identity():
    environment = environment_of(2, device="GPU-b")
    assert {
        name: value
        for name, value in environment.items()
        if not name.startswith(("TF_", "OMP_", "NCCL", "PY", "GLIBC"))
    } == {
        "COLLECTIVE_HOSTS": "1",
        "COLLECTIVE_LAUNCHED": "1",
        "COLLECTIVE_MAX_RESTARTS": "0",
        "COLLECTIVE_MILESTONES": "/proc/1/fd/3",
        "COLLECTIVE_PREEMPT_SIGNAL": "SIGTERM",
        "COLLECTIVE_PROGRESS": "/proc/1/fd/2",
        "COLLECTIVE_RESTART_COUNT": "0",
        "COLLECTIVE_SCRIPT_FILES": "/proc/1/fd/4",
        "COLLECTIVE_TERMINAL": "0",
        "CUDA_VISIBLE_DEVICES": "GPU-b",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CYCLE_TIME": "0.1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "660",
        "CUDA_CACHE_MAXSIZE": "4294967296",
    }


def test_ranks_that_share_a_gpu_are_on_hosts_of_their_own_to_nccl():
    assert [environment_of(rank, device="0", size=2)["NCCL_HOSTID"] for rank in range(2)] == [
        "localhost-rank0",
        "localhost-rank1",
    ]
    assert "NCCL_HOSTID" not in environment_of(0, device="0", size=1)
    assert "NCCL_HOSTID" not in environment_of(0, size=2)


def test_cpu_ranks_are_told_nothing_of_cuda():
    assert "CUDA_CACHE_MAXSIZE" not in environment_of(0)
    assert environment_of(0, {"CUDA_CACHE_MAXSIZE": "7"}, device="1")["CUDA_CACHE_MAXSIZE"] == "7"


@pytest.mark.parametrize(
    ("size", "device", "carrier", "milliseconds"),
    [
        (2, None, "", "5"),
        (2, None, "shared_memory", "5"),
        (2, None, "Horovod", "0.1"),
        (2, "0", "auto", "0.1"),
        (1, "0", "horovod", "5"),
    ],
)
def test_horovod_looks_often_only_where_ranks_exchange_through_it(
    size, device, carrier, milliseconds
):
    environment = environment_of(0, {"COLLECTIVE_CARRIER": carrier}, size, device)
    assert environment["HOROVOD_CYCLE_TIME"] == milliseconds


def test_the_users_tuning_wins():
    tuning = {
        "OMP_NUM_THREADS": "7",
        "TF_NUM_INTRAOP_THREADS": "6",
        "TF_NUM_INTEROP_THREADS": "5",
        "HOROVOD_CYCLE_TIME": "3",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "9",
        "PYTHONUNBUFFERED": "",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLIBC_TUNABLES": "",
        "HOROVOD_FUSION_THRESHOLD": "1",
        "OMPI_MCA_btl": "tcp",
        "HOME": "/home/me",
    }
    environment = environment_of(0, tuning)
    assert {name: environment[name] for name in tuning} == tuning


def test_all_ranks_hash_alike_in_every_attempt_and_the_users_seed_wins():
    seeds = {environment_of(rank, size=3)["PYTHONHASHSEED"] for rank in range(3)}
    seeds.add(environment_of(0, restart_count=2, max_restarts=3)["PYTHONHASHSEED"])
    seeds.add(environment_of(0, {"PYTHONHASHSEED": ""})["PYTHONHASHSEED"])  # to Python it is none
    assert seeds == {"0"}
    assert environment_of(1, {"PYTHONHASHSEED": "7"})["PYTHONHASHSEED"] == "7"
    assert environment_of(1, {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


def test_identity_is_always_the_launchers():
    outer = environment_of(8, size=9, device="7", cores=1, terminal=True, columns=80)
    inner = environment_of(1, outer)
    fresh = environment_of(1)
    tuning = ("TF_", "OMP_", "HOROVOD_CYCLE_TIME")
    own = [name for name in fresh if not name.startswith(tuning)]
    assert {name: inner[name] for name in own} == {name: fresh[name] for name in own}


def test_identity_of_other_launchers_goes():
    stale = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_UNIVERSE_SIZE",
        "PMI_RANK",
        "PMIX_RANK",
        "MV2_COMM_WORLD_RANK",
        "TF_CONFIG",
    ]
    assert not set(stale) & set(environment_of(1, dict.fromkeys(stale, "5")))


def test_each_rank_gets_its_share_of_the_cores():
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    for size, cores, share in [(1, 8, "8"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")]:
        environment = environment_of(0, size=size, cores=cores)
        assert [environment[name] for name in names] == [share] * 3


def test_a_cpu_rank_sees_no_gpu():
    assert environment_of(0, {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""


def test_nobody_posts_progress_where_nobody_looks():
    assert environment_of(0, size=1)["COLLECTIVE_PROGRESS"] == ""
    assert environment_of(0, stall_timeout=0)["COLLECTIVE_PROGRESS"] == ""


def test_a_terminal_is_as_wide_as_the_prefix_leaves():
    def columns(outer, size, terminal=True, width=80):
        environment = environment_of(0, outer, size=size, terminal=terminal, columns=width)
        return environment["COLLECTIVE_TERMINAL"], environment.get("COLUMNS")

    assert columns({}, 1) == ("1", "80")
    assert columns({}, 2) == ("1", "76")
    assert columns({}, 11) == ("1", "75")
    assert columns({"COLUMNS": "40"}, 2) == ("1", "36")
    assert columns({"COLUMNS": "40"}, 2, terminal=False) == ("0", "40")
    assert columns({}, 2, terminal=False) == ("0", None)
    assert columns({}, 2, width=None) == ("1", None)


def test_ranks_of_several_refuse_to_train_apart():
    assert environment_of(0)["PYTHONPATH"] == STARTUP_HOOK
    assert environment_of(0, {"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{STARTUP_HOOK}:/a:/b"
    assert environment_of(0, {"PYTHONPATH": f"{STARTUP_HOOK}"})["PYTHONPATH"] == STARTUP_HOOK
    assert "PYTHONPATH" not in environment_of(0, size=1)


def test_ranks_that_are_independent_may_train_apart():
    environment = environment_of(0, independent=True)
    assert environment["COLLECTIVE_INDEPENDENT"] == "1" and "PYTHONPATH" not in environment
    assert "PYTHONPATH" not in environment_of(0, {"COLLECTIVE_INDEPENDENT": "1"})
    assert environment_of(0, {"COLLECTIVE_INDEPENDENT": "0"})["PYTHONPATH"] == STARTUP_HOOK


def test_loaders_and_ranks_know_each_other():
    outer = {"PMI_RANK": "1", "COLLECTIVE_SECRET": "s" * 20, "COLLECTIVE_LOADER": "5", "HOME": "/h"}
    found = {
        "loaders": 2,
        "loader_addresses": ("127.0.0.1:1", "127.0.0.1:2"),
        "stream_key": "a key",
    }
    plan = LaunchPlan(("python",), (None, None), outer, 8, **found)
    assert loader_environment(plan, 1) == {
        "HOME": "/h",
        "COLLECTIVE_LAUNCHED": "1",
        "COLLECTIVE_LOADER": "1",
        "COLLECTIVE_LOADERS": "127.0.0.1:1,127.0.0.1:2",
        "COLLECTIVE_STREAM_KEY": "a key",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    environment = environment_of(0, outer, **found)
    assert environment["COLLECTIVE_LOADERS"] == "127.0.0.1:1,127.0.0.1:2"
    assert environment["COLLECTIVE_STREAM_KEY"] == "a key"
    assert "COLLECTIVE_LOADER" not in environment


def test_ranks_get_a_key_of_the_secret_but_not_the_secret():
    """A loader elsewhere that has the secret derives the same key."""
    outer = {"COLLECTIVE_SECRET": "s" * 20, "COLLECTIVE_LOADERS": "h:1"}
    environment = environment_of(0, outer)
    assert environment["COLLECTIVE_STREAM_KEY"].encode() == stream_key(outer)
    assert environment["COLLECTIVE_LOADERS"] == "h:1"
    assert not any("s" * 20 in value for value in environment.values())
    assert "COLLECTIVE_STREAM_KEY" not in environment_of(0, {})
