"""Jobs that true schedulers start: Open MPI's and MPICH's mpirun, and Slurm on two hosts.

The same with the schedulers' variables alone, where they aren't installed: test_hosts_schedulers.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from collective.launch import cli
from tests.jobs.hosts.slurm import Slurm, why_not
from tests.jobs.hosts.test_hosts import TELL
from tests.jobs.hosts.test_hosts_schedulers import SCRIPT
from tests.jobs.hosts.test_hosts_train import STEPS, on_one_host, weights
from tests.jobs.launch.conftest import ROOT
from tests.jobs.test_preemption import PROGRAM

pytestmark = [pytest.mark.timeout(280), pytest.mark.matrix]

TOLD_ON_ONE_HOST = ["told 0 2 0 2 0 1 3.0 3.0", "told 1 2 1 2 0 1 3.0 3.0"]
TOLD_ON_TWO_HOSTS = ["told 0 2 0 1 0 2 3.0 3.0", "told 1 2 0 1 1 2 3.0 3.0"]


def told(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("told"))


def run(hosts, *words: object, on: str = "", **variables: str) -> str:
    """Runs a command, on a host, and returns its stdout; it must end well."""
    before = hosts.network.on_host(on) if on else []
    done = subprocess.run(
        [*before, *map(str, words)],
        cwd=hosts.folder,
        env={**hosts.environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
MPICH = ("mpirun.mpich",)


def needs(program: str) -> pytest.MarkDecorator:
    package = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}[program]
    missing = shutil.which(program) is None
    return pytest.mark.skipif(missing, reason=f"there is no {program} (Debian: {package})")


@pytest.mark.parametrize(
    "mpirun",
    [
        pytest.param(OPEN_MPI, marks=needs(OPEN_MPI[0]), id="open-mpi"),
        pytest.param(MPICH, marks=[needs(MPICH[0]), pytest.mark.long], id="mpich"),
    ],
)
def test_mpirun_starts_ranks_of_one_host(hosts, mpirun):
    output = run(hosts, *mpirun, "-np", 2, sys.executable, hosts.script(SCRIPT))
    assert told(output) == TOLD_ON_ONE_HOST


REMOTE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
name=h${1##*.}
shift
exec env -i PATH="$PATH" HOME="$HOME" COLLECTIVE_TEST_MARK="$COLLECTIVE_TEST_MARK" \\
    nsenter --net=/run/netns/"$NAMESPACES-$name" unshare --uts \\
    sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$*"
"""


@pytest.fixture
def remote_shell(hosts) -> dict[str, str]:
    """Makes two hosts; returns the variables that tell mpirun its way from the first to both."""
    hosts.make(2)
    program = hosts.folder / "shell"
    program.write_text(REMOTE_SHELL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "NAMESPACES": hosts.network._name("x")[:-2],
        "OMPI_MCA_plm_rsh_agent": str(program),
        "OMPI_MCA_oob_tcp_if_include": "net0",
    }


@needs(OPEN_MPI[0])
def test_open_mpi_starts_a_launcher_on_each_host(hosts, remote_shell):
    passed = ("COLLECTIVE_SECRET", "PYTHONPATH", "COLLECTIVE_TEST_MARK")
    options = [word for name in passed for word in ("-x", name)]
    options += ["--map-by", "ppr:1:node", "-H", "10.77.0.1:2,10.77.0.2:2"]
    options += ["-x", "MASTER_ADDR=10.77.0.1"]
    launcher = (*hosts.COMMAND, "-np", 1, hosts.script(TELL))
    output = run(hosts, *OPEN_MPI, *options, *launcher, on="h1", **remote_shell)
    assert sorted(output.splitlines()) == [
        "[h1:0] 0 2 0 1 0 2 h1 net0 False",
        "[h2:1] 1 2 0 1 1 2 h2 net0 False",
    ]


@pytest.fixture
def slurm(hosts) -> Iterator[Slurm]:
    if why_not():
        pytest.skip(why_not())
    hosts.make(2)
    made = Slurm(hosts.network, hosts.folder / "slurm")
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_srun_starts_ranks_of_two_hosts(hosts, slurm):
    words = ("srun", "-N2", "-n2", sys.executable, hosts.script(SCRIPT))
    assert told(run(hosts, *words, on="h1", **slurm.environment)) == TOLD_ON_TWO_HOSTS


@pytest.mark.long
def test_srun_starts_a_launcher_on_each_host(hosts, slurm, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    launcher = (*hosts.COMMAND, "-np", 1, "--device", "cpu", ROOT / PROGRAM, folder, STEPS)
    output = run(hosts, "srun", "-N2", *launcher, on="h1", **slurm.environment)
    assert weights(output) == on_one_host(tmp_path / "one", 2)


@pytest.mark.long
def test_a_batch_file_that_is_stopped_goes_on_from_its_checkpoint(hosts, slurm, tmp_path):
    """The time limit's signal comes: ranks save, the job goes back to the queue, and is done."""
    folder = tmp_path / "job"
    folder.mkdir()
    # Rank 0 waits in its seventh step for the signal, which comes once it has been seen there.
    event = "0:7:stop"
    options = ("--emit", "slurm", "--replicas", "2", "-np", "1", "--device", "cpu", "--grace", "60")
    command = (str(ROOT / PROGRAM), str(folder), str(STEPS), event)
    manifest = cli.emitted(cli.parse_options([*options, "--job-name", "train", *command]))
    (hosts.folder / "train.sbatch").write_text(manifest)
    environment = dict(slurm.environment)
    python = os.path.dirname(sys.executable)
    environment["PATH"] = f"{python}{os.pathsep}{environment['PATH']}"
    on_first = {"on": "h1", **environment}
    number = run(hosts, "sbatch", "--parsable", "train.sbatch", **on_first).strip()
    output = hosts.folder / f"train-{number}.out"
    mark = folder / (event.replace(":", "_") + ".happened")

    def see(condition, what: str) -> None:
        end = time.monotonic() + 100
        while not condition():
            text = output.read_text() if output.exists() else "no output"
            assert time.monotonic() < end, f"not {what}\n{text}\n{slurm.logs()}"
            time.sleep(0.1)

    see(mark.exists, "at the seventh step")
    run(hosts, "scancel", "--batch", "--signal=USR1", number, **on_first)
    see(lambda: "SIGTERM: stopping" in output.read_text(), "told to stop")
    os.kill(int((folder / "pid.0").read_text()), signal.SIGCONT)

    def state() -> str:
        return run(hosts, "scontrol", "show", "job", number, **on_first)

    see(lambda: "JobState=PENDING" in state(), "back in the queue")
    # Slurm lets a job that is back wait for two minutes; now it may be under way already.
    at_once = f"scontrol update jobid={number} StartTime=now 2>/dev/null || true"

    def under_way() -> bool:
        run(hosts, "sh", "-c", at_once, **on_first)
        return "JobState=PENDING" not in state()

    see(under_way, "under way again")
    see(lambda: re.search("JobState=(COMPLETED|FAILED)", state()), "done")
    text = output.read_text()
    assert "JobState=COMPLETED" in state(), text
    assert "all ranks stopped after step" in text
    assert weights(text) == on_one_host(tmp_path / "one", 2)
    assert not list(hosts.folder.glob(".secret-*"))
