"""Slurm itself on hosts of network namespaces: its controller on the first, its daemon on each.

    munged        one for all hosts: a socket in the test's folder
    slurmctld     on h1
    slurmd        on each host
    srun, sbatch  by `on_host`, with SLURM_CONF

Nothing of the machine's own Slurm, if there is one, is read or written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.jobs.hosts.network import Network

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_START_SECONDS = 30.0
_STOP_SECONDS = 20.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({first_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str:
    """Returns why Slurm can't be started here; "" if it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)"
    return ""


class Slurm:
    """Runs Slurm on the hosts of a network."""

    def __init__(self, network: Network, folder: Path) -> None:
        """Starts nothing yet.

        Args:
          network: its hosts have been made.
          folder: of this Slurm alone.
        """
        self._network, self._folder = network, folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        folder.mkdir()
        (folder / "state").mkdir()
        nodes = []
        for name in network.names:
            nodes.append(f"NodeName={name} NodeAddr={network.address(name)} CPUs=1 State=UNKNOWN")
            (folder / f"spool-{name}").mkdir()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                first=network.names[0],
                first_address=network.address(network.names[0]),
                folder=folder,
                nodes="\n".join(nodes),
            )
        )
        # Autodetection wants a mounted cgroup file system, which a network namespace hides.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        table = [f"{network.address(name)} {name}" for name in network.names]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *table, ""]))
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin"])
        self.environment: Mapping[str, str] = {
            "PATH": path,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "NETWORK_HOSTS": str(folder / "hosts"),
        }

    def start(self) -> None:
        """Starts all daemons, and waits until every host is idle."""
        folder = self._folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = [
            f"--{option}={folder}/munge.{option.partition('-')[0]}"
            for option in ("socket", "key-file", "log-file", "pid-file", "seed-file")
        ]
        first = self._network.names[0]
        self._run(first, "munged", "--foreground", "--force", *files)
        self._wait(lambda: (folder / "munge.socket").exists(), "munged's socket")
        self._run(first, "slurmctld", "-D")
        for name in self._network.names:
            self._run(name, "slurmd", "-D", "-N", name)
        count = len(self._network.names)
        self._wait(lambda: self._states().count("idle") == count, "all hosts idle")

    def stop(self) -> None:
        """Ends all jobs, and all daemons, those of the hosts first."""
        end = time.monotonic() + _STOP_SECONDS
        while self._daemons and self._jobs() and time.monotonic() < end:
            self._ask("scancel", "--user=root", "--signal=KILL", "--full")
            self._ask("scancel", "--user=root")
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []

    def logs(self) -> str:
        """Returns what the daemons have logged, for a test that fails."""
        files = sorted(self._folder.glob("*.log")) + sorted(self._folder.glob("*.out"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def _states(self) -> list[str]:
        return self._ask("sinfo", "-h", "-N", "-o", "%t").split()

    def _jobs(self) -> list[str]:
        return self._ask("squeue", "-h", "-o", "%i").split()

    def _ask(self, *words: str) -> str:
        done = subprocess.run(
            [*self._network.on_host(self._network.names[0]), *words],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def _run(self, host: str, program: str, *arguments: str) -> None:
        with open(self._folder / f"{program}-{host}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*self._network.on_host(host), program, *arguments],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _wait(self, condition, what: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while not condition():
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                raise AssertionError(f"no {what}; ended: {ended}\n{self.logs()}")
            time.sleep(0.05)
