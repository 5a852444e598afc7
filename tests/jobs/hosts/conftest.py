"""Hosts for a test: network namespaces with names and addresses, and launchers on them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.hosts.network import Network, why_not
from tests.jobs.launch.conftest import Launcher, wait_until

SECRET = "a secret of the tests, long enough"

reason = functools.lru_cache(maxsize=None)(why_not)


class Hosts(Launcher):
    """Starts launchers on hosts of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.network = Network([])
        self.environment["COLLECTIVE_SECRET"] = SECRET

    def make(self, count: int, version: int = 4) -> Sequence[str]:
        """Makes hosts "h1", "h2", ... with IP of a version, and returns their names."""
        self.network = Network([f"h{number}" for number in range(1, count + 1)])
        self.network.make(version)
        return self.network.names

    def start_on(
        self, name: str, *arguments: object, options: Sequence[object] = (), **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a launcher on a host, which is one of all."""
        names = self.network.names
        nodes = ("--nnodes", len(names), "--node-rank", names.index(name))
        first = ("--master-addr", self.network.address(names[0]))
        words = [*self.COMMAND, *nodes, *first, *options, *arguments]
        environment = {**self.environment, **how.pop("environment", {})}
        return subprocess.Popen(
            [*self.network.on_host(name), *map(str, words)],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **how,
        )

    def start_all(
        self, ranks: int, *arguments: object, **how: Any
    ) -> list[subprocess.Popen[bytes]]:
        """Starts a launcher on each host, with so many ranks."""
        return [self.start_on(name, "-np", ranks, *arguments, **how) for name in self.network.names]

    @staticmethod
    def ends(
        launchers: Sequence[subprocess.Popen[bytes]], timeout: float = 40
    ) -> list[tuple[int, str, str]]:
        """Waits for launchers; returns exit code, stdout and stderr of each."""
        ended = []
        for launcher in launchers:
            stdout, stderr = launcher.communicate(timeout=timeout)
            ended.append((launcher.returncode, stdout.decode(), stderr.decode()))
        return ended


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason():
        pytest.skip(f"no hosts of network namespaces: {reason()}")
    hosts = Hosts(tmp_path)
    yield hosts
    try:
        wait_until(lambda: not hosts.processes(), "all processes of the test gone", 5)
    finally:
        for pid in hosts.processes():
            os.kill(pid, signal.SIGKILL)
        hosts.network.remove()
