"""What each rank finds in its environment."""

from __future__ import annotations

from collective.launch.environment import World, rank_environment

WORLD = World(size=3, port="4711", cores=8, terminal=False)


def test_identity():
    environment = rank_environment({}, WORLD, 2, "GPU-b")
    assert {
        name: value
        for name, value in environment.items()
        if not name.startswith(("TF_", "OMP_", "NCCL", "PY", "GLIBC"))
    } == {
        "COLLECTIVE_LAUNCHED": "1",
        "COLLECTIVE_PROGRESS": "",
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
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
    }


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
    environment = rank_environment(tuning, WORLD, 0, None)
    assert {name: environment[name] for name in tuning} == tuning


def test_identity_is_always_the_launchers():
    outer = rank_environment(
        {}, World(size=9, port="1", cores=1, terminal=True, columns=80), 8, "7"
    )
    inner = rank_environment(outer, WORLD, 1, None)
    fresh = rank_environment({}, WORLD, 1, None)
    own = [name for name in fresh if not name.startswith(("TF_", "OMP_"))]
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
    assert not set(stale) & set(rank_environment(dict.fromkeys(stale, "5"), WORLD, 1, None))


def test_each_rank_gets_its_share_of_the_cores():
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    for size, cores, share in [(1, 8, "8"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")]:
        environment = rank_environment({}, World(size, "1", cores, terminal=False), 0, None)
        assert [environment[name] for name in names] == [share] * 3


def test_a_cpu_rank_sees_no_gpu():
    assert (
        rank_environment({"CUDA_VISIBLE_DEVICES": "0"}, WORLD, 0, None)["CUDA_VISIBLE_DEVICES"]
        == ""
    )


def test_a_terminal_is_as_wide_as_the_prefix_leaves():
    def columns(outer, size, terminal=True):
        world = World(size, "1", 1, terminal=terminal, columns=80)
        environment = rank_environment(outer, world, 0, None)
        return environment["COLLECTIVE_TERMINAL"], environment.get("COLUMNS")

    assert columns({}, 1) == ("1", "80")
    assert columns({}, 2) == ("1", "76")
    assert columns({}, 11) == ("1", "75")
    assert columns({"COLUMNS": "40"}, 2) == ("1", "36")
    assert columns({"COLUMNS": "40"}, 2, terminal=False) == ("0", "40")
    assert columns({}, 2, terminal=False) == ("0", None)
