"""Tests the text of --dry-run, line by line."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

from collective.launch.cli import make_plan, parse_options
from collective.launch.command_line.dry_run import describe
from collective.launch.command_line.host_options import host_list, host_options
from collective.launch.planning.environment import STARTUP_HOOK
from collective.launch.planning.plan import LaunchPlan


def test_the_whole_text():
    plan = LaunchPlan(
        command=("python3", "train.py", "--epochs", "3 4"),
        devices=("GPU-b", None),
        launcher_environment={
            "HOME": "/home/me",
            "HOROVOD_CYCLE_TIME": "7",
            "RANK": "0",
            "TF_CONFIG": "{}",
        },
        cores=8,
        shown_ranks=frozenset({0, 1}),
        log_dir="logs",
    )
    expected = """\
        ranks        2
        command      python3 train.py --epochs '3 4'
        cores        8
        output       shown, kept in logs
        stall        after 600 s
        environment  of every rank, in addition to the launcher's own (without TF_CONFIG):
          COLLECTIVE_HOSTS=1
          COLLECTIVE_LAUNCHED=1
          COLLECTIVE_MAX_RESTARTS=0
          COLLECTIVE_MILESTONES=<memory of the launcher>
          COLLECTIVE_PREEMPT_SIGNAL=SIGTERM
          COLLECTIVE_PROGRESS=<memory of the launcher>
          COLLECTIVE_RESTART_COUNT=0
          COLLECTIVE_SCRIPT_FILES=<memory of the launcher>
          COLLECTIVE_TERMINAL=0
          CUDA_CACHE_MAXSIZE=4294967296
          GLIBC_TUNABLES=glibc.malloc.hugetlb=1
          HOROVOD_CONTROLLER=gloo
          HOROVOD_CPU_OPERATIONS=gloo
          HOROVOD_CROSS_RANK=0
          HOROVOD_CROSS_SIZE=1
          HOROVOD_GLOO_IFACE=lo
          HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1:<port>/<token>
          HOROVOD_GLOO_RENDEZVOUS_PORT=<a free port>
          HOROVOD_GLOO_TIMEOUT_SECONDS=660
          HOROVOD_HOSTNAME=localhost
          HOROVOD_LOCAL_SIZE=2
          HOROVOD_SIZE=2
          LOCAL_WORLD_SIZE=2
          NCCL_SOCKET_IFNAME=lo
          OMP_NUM_THREADS=4
          PYTHONHASHSEED=0
          PYTHONPATH=<startup hook>
          PYTHONUNBUFFERED=1
          TF_CPP_MIN_LOG_LEVEL=2
          TF_NUM_INTEROP_THREADS=4
          TF_NUM_INTRAOP_THREADS=4
          WORLD_SIZE=2
        rank 0       on GPU GPU-b:
          CUDA_VISIBLE_DEVICES=GPU-b
          HOROVOD_LOCAL_RANK=0
          HOROVOD_RANK=0
          LOCAL_RANK=0
          RANK=0
        rank 1       on the CPU:
          CUDA_VISIBLE_DEVICES=
          HOROVOD_LOCAL_RANK=1
          HOROVOD_RANK=1
          LOCAL_RANK=1
          RANK=1"""
    assert describe(plan) == textwrap.dedent(expected).replace("<startup hook>", STARTUP_HOOK)


@pytest.mark.parametrize(
    "shown, log_dir, text",
    [
        ({0, 1, 2}, None, "shown"),
        ({2, 0}, None, "shown of ranks 0,2"),
        ((), None, "not shown"),
        ((), "logs", "not shown, kept in logs"),
    ],
)
def test_where_the_output_goes(shown, log_dir, text):
    plan = LaunchPlan(
        ("python3",), (None,) * 3, {}, 8, shown_ranks=frozenset(shown), log_dir=log_dir
    )
    assert describe(plan).splitlines()[3] == f"output       {text}"


def test_a_job_that_may_stall_for_ever():
    plan = LaunchPlan(("python3",), (None,) * 3, {}, 8, stall_timeout=0)
    text = describe(plan)
    assert "\nstall        never\n" in text and "\n  COLLECTIVE_PROGRESS=\n" in text


def test_a_job_that_is_started_again():
    plan = LaunchPlan(("python3",), (None,) * 3, {}, 8, max_restarts=2, restart_pause=0.5)
    assert "\nrestarts     2, the first after 0.5 s\n" in describe(plan)
    elastic = dataclasses.replace(plan, min_ranks=1, most_ranks=3)
    assert "\nrestarts     2, the first after 0.5 s, on 1 to 3 ranks\n" in describe(elastic)


def test_loaders_are_shown_and_their_key_is_not():
    plan = LaunchPlan(
        ("python3", "train.py"),
        (None,) * 2,
        {},
        8,
        max_restarts=1,
        loaders=2,
        loader_command=("python3", "loader.py", "a b"),
        stream_key="the key",
    )
    text = describe(plan)
    assert "\nloaders      2, each: python3 loader.py 'a b'\n" in text
    listed = ",".join(["127.0.0.1:<a free port>"] * 2)
    assert f"\n  COLLECTIVE_LOADERS={listed}\n" in text
    assert "\n  COLLECTIVE_STREAM_KEY=<made of the secret>\n" in text and "the key" not in text


def test_several_hosts(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("")
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h1", "--device", "cpu"]
    options = parse_options([*words, "-np", "2", str(script)])
    text = describe(make_plan(options, {}), host_options(options, {}))
    assert "hosts        2, this one is number 1; they meet at h1 port 29500" in text
    assert "rank 2       on the CPU:" in text and "rank 3       on the CPU:" in text
    assert "rank 0 " not in text and "  WORLD_SIZE=4\n" in text
    assert "  HOROVOD_GLOO_IFACE=<the interface that leads to h1>\n" in text


def test_hosts_that_are_started_from_here(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("")
    options = parse_options(["-H", "a:2,b", "--device", "cpu", str(script)])
    listed = host_list(options, {})
    text = describe(make_plan(options, {}, listed), None, listed)
    assert "hosts        a with 2, b, started from here." in text
