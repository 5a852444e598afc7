"""Launches for real: `launch(...)` runs a job, `launch.start(...)` lets a test interfere.

Every process of a test carries a mark in its environment, by which it is found however often it
forked or changed its session; a test that leaves one fails. Tests share no folder, port or
name, so several may run at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 30.0
MARK = "COLLECTIVE_TEST_MARK"
T = TypeVar("T")

# Each rank tells its pid and then sleeps, to be ended by others; `extra` comes before that.
SLEEPER = """
    import os, signal, subprocess, sys, time
    rank = int(os.environ["RANK"])

    def tell(name, number):
        with open(name + ".part", "w") as file:
            file.write(f"{{number}}\\n")
        os.rename(name + ".part", name)

    def wait_for(name):
        end = time.monotonic() + 20
        while not os.path.exists(name):
            assert time.monotonic() < end, name
            time.sleep(0.01)

    {extra}
    tell(f"rank{{rank}}", os.getpid())
    time.sleep(60)
"""


def wait_until(condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Polls until `condition()` is true and returns its value."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"after {deadline} s still not: {what}")
        time.sleep(0.01)


def _restore_signals() -> None:
    """Takes signals as in a terminal.

    The user who runs the tests may ignore some (under nohup, or in the background of a shell),
    which is inherited.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Launcher:
    """Starts launchers whose processes can all be found again."""

    COMMAND = (sys.executable, "-m", "collective.launch")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": python_path.rstrip(os.pathsep),
        }
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "COLUMNS"):
            self.environment.pop(name, None)

    def script(self, source: str, name: str = "script.py") -> str:
        """Writes a script into the test's folder and returns its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    def start(
        self, *arguments: object, environment: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a launcher; its output goes to pipes unless `how` says otherwise."""
        settings = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "preexec_fn": _restore_signals,
            **how,
        }
        return subprocess.Popen(
            [*self.COMMAND, *map(str, arguments)],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            **settings,
        )

    def __call__(
        self, *arguments: object, timeout: float = DEADLINE, stdin: bytes = b"", **how: Any
    ) -> tuple[int, bytes, bytes]:
        """Runs a launcher to its end; returns its exit code, stdout and stderr."""
        with self.start(*arguments, **{"stdin": subprocess.PIPE, **how}) as process:
            try:
                stdout, stderr = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, stdout, stderr

    def sleeper(self, extra: str = "") -> str:
        """Writes a SLEEPER that does `extra` first and returns its path."""
        return self.script(SLEEPER.format(extra=extra.strip("\n").lstrip()))

    def start_sleeping(
        self, *options: object, extra: str = "", ranks: int = 2
    ) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Starts a job of sleepers and waits for them; returns the launcher and the ranks' pids."""
        process = self.start("-np", ranks, *options, self.sleeper(extra))
        return process, self.files(*(f"rank{rank}" for rank in range(ranks)))

    @staticmethod
    def end(process: subprocess.Popen[bytes], timeout: float = 20) -> tuple[int, str]:
        """Waits for a launcher; returns its exit code and stderr."""
        _, stderr = process.communicate(timeout=timeout)
        return process.returncode, stderr.decode()

    def processes(self) -> list[int]:
        """Returns the pids of all living processes of this test but the test itself."""
        mark = f"{MARK}={self.mark}".encode()
        pids = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                state = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark in folder.joinpath("environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile
        return pids

    def files(self, *names: str) -> list[int]:
        """Waits until the scripts have written these files; returns their contents as numbers."""
        self.files_exist(*names)
        paths = [self.folder / name for name in names]
        wait_until(
            lambda: all(path.read_text().endswith("\n") for path in paths), f"{names} written"
        )
        return [int(path.read_text()) for path in paths]

    wait_until = staticmethod(wait_until)

    def files_exist(self, *names: str, deadline: float = DEADLINE) -> None:
        """Waits until the scripts have made these files."""
        paths = [self.folder / name for name in names]
        wait_until(lambda: all(path.exists() for path in paths), f"{names} made", deadline)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    try:
        wait_until(lambda: not launcher.processes(), "all processes of the test gone", 3)
    finally:
        for pid in launcher.processes():
            os.kill(pid, signal.SIGKILL)
