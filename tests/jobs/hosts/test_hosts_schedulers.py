"""Scripts that a scheduler starts itself, without a launcher: its daemon is a script of its name."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(150), pytest.mark.matrix]

SCRIPT = """
    import os
    from collective.ops.communication import collectives
    import horovod.tensorflow as hvd
    import tensorflow as tf

    collectives.init()
    total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="total")
    hvd.shutdown()
    hvd.init()
    again = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="again")
    print("told", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
          hvd.cross_size(), float(total[0]), float(again[0]), flush=True)
"""


def daemon(hosts, name):
    """Returns the path of a program of that name that runs the words after it as its child."""
    path = hosts.folder / name
    path.write_text('#!/bin/sh\n"$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def start(hosts, before, environment):
    script = hosts.script(SCRIPT)
    return subprocess.Popen(
        [*before, sys.executable, script],
        env={**hosts.environment, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def told(hosts, processes):
    ends = hosts.ends(processes, 120)
    assert [code for code, _, _ in ends] == [0] * len(processes), ends
    return ["".join(line for line in out.splitlines() if "told" in line) for _, out, _ in ends]


def test_mpirun_on_one_host(hosts):
    orted = daemon(hosts, "orted")
    processes = []
    for rank in range(2):
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        numbers = (rank, 2, rank, 2)
        environment = {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, numbers)}
        environment["PMIX_NAMESPACE"] = f"test-{os.getpid()}"
        processes.append(start(hosts, [orted], environment))
    assert told(hosts, processes) == [
        "told 0 2 0 2 0 1 3.0 3.0",
        "told 1 2 1 2 0 1 3.0 3.0",
    ]


def test_srun_on_two_hosts(hosts):
    hosts.make(2)
    table = hosts.folder / "table"
    table.write_text("127.0.0.1 localhost\n10.77.0.1 h1\n10.77.0.2 h2\n")
    stepd = daemon(hosts, "slurmstepd")
    processes = []
    for rank in range(2):
        environment = {
            "NETWORK_HOSTS": str(table),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_STEP_NODELIST": "h[1-2]",
        }
        before = [*hosts.network.on_host(f"h{rank + 1}"), stepd]
        processes.append(start(hosts, before, environment))
    assert told(hosts, processes) == [
        "told 0 2 0 1 0 2 3.0 3.0",
        "told 1 2 0 1 1 2 3.0 3.0",
    ]
