"""Tests the lists of hosts, the ranks' places, and the options of several hosts: pure functions."""

from __future__ import annotations

import re

import pytest

from collective.job import schedulers
from collective.job.errors import UsageError
from collective.job.hosts import (
    Host,
    distinct_names,
    named_twice,
    parse_hostfile,
    parse_hosts,
    placements,
    ranks_of_node,
)
from collective.launch import cli
from collective.launch.cli import make_plan, parse_options
from collective.launch.command_line.host_options import host_list, host_options
from collective.launch.planning.environment import line_prefix, rank_environment
from collective.launch.planning.plan import LaunchPlan

HOSTS = (Host("a", (None, None)), Host("b", (None,)), Host("c", (None, None, None)))


def test_places():
    places = placements(HOSTS)
    assert [(p.node, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in places] == [
        (0, 0, 2, 0, 3),
        (0, 1, 2, 0, 2),
        (1, 0, 1, 1, 3),
        (2, 0, 3, 2, 3),
        (2, 1, 3, 1, 2),
        (2, 2, 3, 0, 1),
    ]
    assert [ranks_of_node(HOSTS, node) for node in range(3)] == [
        range(0, 2),
        range(2, 3),
        range(3, 6),
    ]


def test_environment_of_a_rank():
    plan = LaunchPlan(
        ("python",), (None,) * 6, {"COLLECTIVE_SECRET": "x", "PET_NNODES": "3"}, 8,
        hosts=HOSTS, node=2, interface="eth1", gloo_address="10.0.0.3", gloo_library="/lib.so",
    )  # fmt: skip
    environment = rank_environment(plan, 4, "4711", "", "")
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "c",
        "HOROVOD_GLOO_IFACE": "eth1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_CYCLE_TIME": "0.1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "2",
        "COLLECTIVE_GLOO_ADDRESS": "10.0.0.3",
        "LD_PRELOAD": "/lib.so",
    }
    assert {name: environment[name] for name in expected} == expected
    assert not {"COLLECTIVE_SECRET", "PET_NNODES"} & set(environment)
    assert line_prefix(plan, 4) == "[c:4] "


def test_names_are_distinct():
    assert distinct_names(["a", "b"]) == ["a", "b"]
    assert distinct_names(["vm", "b", "vm"]) == ["vm-0", "b", "vm-2"]
    assert len(set(distinct_names(["a", "a", "a-1"]))) == 3
    assert len(set(distinct_names(["a", "a", "a-1", "a-1-1", "a-0"]))) == 5


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1:8,h2:8", [("h1", 8), ("h2", 8)]),
        ("h1, 10.0.0.2:1", [("h1", None), ("10.0.0.2", 1)]),
        ("[fe80::1]:2,[::2]", [("fe80::1", 2), ("::2", None)]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no name or address of a host"),
        ("-oProxyCommand=x", "is no name or address of a host"),
        ("h1;rm", "is no name or address of a host"),
        ("$(x)", "is no name or address of a host"),
        ("h1:0", "give 1 to 4096 ranks"),
        ("h1:99999999", "give 1 to 4096 ranks"),
        ("h1:x", "isn't HOST or HOST:RANKS"),
        ("h1,h1:2", "host h1 is listed twice"),
        ("h1,,h2", "is no name or address of a host"),
    ],
)
def test_lists_that_are_none(text, words):
    with pytest.raises(UsageError, match=words):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        ([("h1", 1), ("h2", 2)], ""),
        ([("h1", 1), ("10.0.0.1", 2)], r"as h1 and as 10.0.0.1 \(both .*\): name it once, h1:3$"),
        ([("h2", 1), ("h1", None), ("10.0.0.1", 2)], "as h1 and as 10.0.0.1 .* once, h1$"),
        ([("alias", 1), ("other", 2)], ""),  # ssh alone knows them
    ],
)
def test_a_host_under_two_names(hosts, sentence):
    addresses = {
        "h1": {"10.0.0.1", "fd00::1"},
        "h2": {"10.0.0.2"},
        "10.0.0.1": {"10.0.0.1"},
        "alias": set(),
        "other": set(),
    }
    said = named_twice(hosts, addresses)
    assert re.search(sentence, said) if sentence else said == ""


def test_host_files():
    text = "# mine\nh1 slots=8\nh2 slots=4 max_slots=8  # half\n\nh3:2\nh4\n"
    assert parse_hostfile(text, "f") == [("h1", 8), ("h2", 4), ("h3", 2), ("h4", None)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--hostfile f names no host"),
        ("h1\nh2 slot=8", "f, line 2: 'slot=8' isn't slots=N"),
        ("h1,h2", "line 1: 'h1,h2' isn't one host"),
        ("h1 slots=0", "give 1 to 4096 ranks"),
        ("h1\nh1", "host h1 is listed twice"),
    ],
)
def test_host_files_that_are_none(text, words):
    with pytest.raises(UsageError, match=words):
        parse_hostfile(text, "f")


def options_of(*words, **environment):
    return host_options(parse_options([*words, "s.py"]), environment)


def test_torchruns_options_and_variables():
    words = ("--nnodes", "3", "--node-rank", "1", "--master-addr", "a", "--master-port", "5")
    by_options = options_of(*words)
    assert (by_options.nodes, by_options.node, by_options.master, by_options.port) == (3, 1, "a", 5)
    variables = {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "1",
        "NODE_RANK": "2",
        "MASTER_ADDR": "a",
        "PET_MASTER_PORT": "5",
    }
    assert options_of(**variables) == by_options
    assert options_of("--node-rank", "2", **variables).node == 2
    assert options_of("--standalone", **variables) is None
    assert options_of("--nnodes", "1:1") is None
    assert options_of(MASTER_ADDR="a", NODE_RANK="1") is None
    assert options_of("--nnodes=2", "--node-rank=0", "--master-addr=a").port == 29500


def test_a_launcher_on_each_host_by_srun(monkeypatch):
    names = ["PROCID", "NODEID", "LOCALID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"]
    environment = {f"SLURM_{n}": v for n, v in zip(names, ["1", "1", "0", "2", "1(x2)"])}
    environment["SLURM_STEP_NODELIST"] = "n[4,7]"
    assert options_of(**environment) is None  # these tests aren't started by it
    monkeypatch.setattr(schedulers, "_names_of_ancestors", lambda: ["slurmstepd"])
    found = options_of(**environment)
    assert (found.nodes, found.node, found.master) == (2, 1, "n4")
    assert options_of("--master-addr", "m", **environment).master == "m"
    assert options_of("--standalone", **environment) is None
    environment.update(SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    with pytest.raises(UsageError, match="srun has started 2 launchers on this host"):
        options_of(**environment)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", "2"), "--nnodes 2: give --node-rank, too"),
        (("--nnodes", "2", "--node-rank", "0"), "2 hosts: give --master-addr, too"),
        (("--nnodes", "1:4"), "a fixed number of hosts; give one number, as 4"),
        (("--nnodes", "x"), "--nnodes x: give a number, 1 to 4096"),
        (("--node-rank", "1"), "give --nnodes, too"),
        (("--node-rank", "1", "--standalone"), "--standalone is one host, which --node-rank 1"),
        (("--node-rank", "1", "--nnodes", "1"), "--node-rank 1: --nnodes 1 has node 0 only"),
        (("--nnodes", "2", "--node-rank", "2"), "--node-rank 2: give a number, 0 to 1"),
        (("--nnodes", "2", "--standalone"), "--standalone is one host"),
        (("--host-timeout", "0"), "--host-timeout 0: give a number of seconds, more than 0"),
        (
            ("--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=0"),
            "--master-port 0: give a number, 1 to 65535",
        ),
    ],
)
def test_options_that_are_wrong(words, message):
    with pytest.raises(UsageError, match=message):
        options_of(*words)


def listed(*words):
    found = host_list(parse_options([*words, "s.py"]), {})
    return None if found is None else list(found.hosts)


def test_ranks_are_shared_out_in_the_lists_order():
    assert listed("-H", "a:2,b:2,c:2", "-np", "3") == [("a", 2), ("b", 1)]
    assert listed("-H", "a:2,b:2") == [("a", 2), ("b", 2)]
    assert listed("-H", "a,b", "-np", "gpu") == [("a", None), ("b", None)]
    assert listed("-np", "3") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-H", "a:2,b:2", "-np", "5"), "-np 5: the hosts have places for 1 to 4 ranks"),
        (("-H", "a:2,b:2", "-np", "nonsense"), "-np nonsense: give the number of all ranks"),
        (("-H", "a,b", "-np", "-1"), "-np -1: give the number of all ranks"),
        (("-H", "a:2,b", "-np", "2"), "host b doesn't say how many it takes"),
        (("-H", "a", "--hostfile", "f"), "both name the hosts"),
        (("-H", "a", "--nnodes", "2"), "-H starts the launcher on all hosts"),
        (("--hostfile", "/none"), "--hostfile /none can't be read"),
        (("-H", "a,b:2", "-np", "cpu"), "-np cpu counts .* b:2; leave one .* --device cpu"),
        (("-H", "a:1", "-np", "gpu"), "-np gpu counts the ranks of each host, and the list says"),
        (("-H", "a:1", "--start-timeout", "-1"), "--start-timeout -1: give a number of seconds"),
    ],
)
def test_lists_that_contradict(words, message):
    with pytest.raises(UsageError, match=message):
        listed(*words)


def test_ranks_by_torchruns_variable(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("")
    options = parse_options(["--device", "cpu", str(script)])
    assert make_plan(options, {"PET_NPROC_PER_NODE": "3"}).size == 3
    options = parse_options(["--device", "cpu", "-np", "2", str(script)])
    assert make_plan(options, {"PET_NPROC_PER_NODE": "3"}).size == 2


@pytest.fixture
def plan_of(tmp_path):
    """Returns a function that makes the plan of this host, with the hosts that a list names."""
    script = tmp_path / "s.py"
    script.write_text("")

    def plan(*words, **environment):
        options = parse_options([*words, str(script)])
        found = host_list(options, environment)
        assert found is not None
        options.standalone = True  # as the command line has it of a list
        return make_plan(options, environment, found)

    return plan


def test_the_first_host_counts_its_ranks_as_the_others_do(plan_of, monkeypatch):
    monkeypatch.setattr(cli, "available_cores", lambda: 3)
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "PET_NPROC_PER_NODE": "7"}
    assert plan_of("-H", "localhost,b", **variables).devices == ("0", "1")
    assert plan_of("-H", "localhost,b", "-np", "cpu", **variables).devices == (None,) * 3
    assert plan_of("-H", "localhost:1,b:2", **variables).devices == ("0",)
    assert plan_of("-H", "localhost:2,b:2", "-np", "3", **variables).devices == ("0", "1")
    with pytest.raises(UsageError, match="-np gpu: no GPU is visible"):
        plan_of("-H", "localhost,b", "-np", "gpu", CUDA_VISIBLE_DEVICES="")


def test_a_host_without_ranks_needs_no_gpus(plan_of):
    """As the launcher's pod of an MPIJob."""
    plan = plan_of("-H", "192.0.2.1:2", "--device", "gpu", CUDA_VISIBLE_DEVICES="")
    assert plan.size == 1


def test_tee_is_for_the_ranks_of_a_host_file_that_is_found(plan_of, tmp_path, monkeypatch):
    """Nobody knows yet how many ranks the hosts will have."""
    file = tmp_path / "hostfile"
    file.write_text("192.0.2.1 slots=4\n192.0.2.2 slots=4\n")
    monkeypatch.setattr("collective.launch.command_line.host_options.DEFAULT_HOSTFILE", str(file))
    assert plan_of("--device", "cpu", "--tee", "7").shown_ranks == {0}
