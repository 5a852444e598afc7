"""Launching for real: `launch(...)` runs a job to its end, `launch.start(...)` lets a test
interfere.

Every process of a test carries a mark in its environment, by which it is found however often it
forked or changed its session; a test that leaves one behind fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 30.0
MARK = "COLLECTIVE_TEST_MARK"

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


def wait_until(condition, what, deadline=DEADLINE):
    """Polls until `condition()` is true and returns its value."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"after {deadline} s still not: {what}")
        time.sleep(0.01)


def _signals_as_in_a_terminal():
    """Whoever runs the tests may ignore some (under nohup, or in the background of a shell), which
    is inherited.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Launcher:
    """Starts launchers whose processes can all be found again."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            ),
        }
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "COLUMNS"):
            self.environment.pop(name, None)

    def script(self, source, name="script.py"):
        """Writes a script into the test's folder and returns its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    def start(self, *arguments, environment=None, **how):
        """A launcher that runs, as a Popen; its output goes to pipes unless `how` says otherwise."""
        settings = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "preexec_fn": _signals_as_in_a_terminal,
            **how,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "collective.launch", *map(str, arguments)],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            **settings,
        )

    def __call__(self, *arguments, timeout=DEADLINE, stdin=b"", **how):
        """Runs a launcher to its end: (exit code, stdout, stderr), the last two as bytes."""
        with self.start(*arguments, **{"stdin": subprocess.PIPE, **how}) as process:
            try:
                stdout, stderr = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, stdout, stderr

    def sleeper(self, extra=""):
        """The path of a SLEEPER that does `extra` first."""
        return self.script(SLEEPER.format(extra=extra.strip("\n").lstrip()))

    def start_sleeping(self, *options, extra="", ranks=2):
        """A job of sleepers that are up: (launcher, pids of the ranks)."""
        process = self.start("-np", ranks, *options, self.sleeper(extra))
        return process, self.files(*(f"rank{rank}" for rank in range(ranks)))

    @staticmethod
    def end(process, timeout=20):
        """Waits for a launcher: (exit code, what it wrote to stderr)."""
        _, stderr = process.communicate(timeout=timeout)
        return process.returncode, stderr.decode()

    def processes(self):
        """The pids of all living processes of this test but the test itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    alive = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if (
                        alive
                        and f"{MARK}={self.mark}".encode() in entry.joinpath("environ").read_bytes()
                    ):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def files(self, *names):
        """Waits until the scripts have written these files and returns their contents as numbers."""
        self.files_exist(*names)
        paths = [self.folder / name for name in names]
        wait_until(
            lambda: all(path.read_text().endswith("\n") for path in paths), f"{names} written"
        )
        return [int(path.read_text()) for path in paths]

    wait_until = staticmethod(wait_until)

    def files_exist(self, *names):
        """Waits until the scripts have made these files."""
        wait_until(
            lambda: all(self.folder.joinpath(name).exists() for name in names), f"{names} made"
        )


@pytest.fixture
def launch(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    try:
        wait_until(lambda: not launcher.processes(), "all processes of the test gone", 3)
    finally:
        for pid in launcher.processes():
            os.kill(pid, signal.SIGKILL)
