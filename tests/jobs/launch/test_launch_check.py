"""--check as a command: of this host, and of one that doesn't answer."""

from __future__ import annotations

import os
import time

# Importing TensorFlow is no affair of these tests, and takes long.
STUBS = {
    "tensorflow": "from types import SimpleNamespace\n"
    "__version__ = '0'\ntest = SimpleNamespace(is_built_with_cuda=bool)\n",
    "horovod": "__version__ = '0'\n",
    "horovod/tensorflow": "gloo_built = lambda: True\nnccl_built = mpi_built = lambda: False\n",
}


def make_stubs(launcher) -> str:
    """Writes packages in the place of TensorFlow and Horovod; returns the path to find them by."""
    folder = launcher.folder / "stubs"
    for name, text in STUBS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return f"{folder}{os.pathsep}{launcher.environment['PYTHONPATH']}"


def check(launch, *arguments, **variables):
    environment = {"PYTHONPATH": make_stubs(launch), **variables}
    code, stdout, stderr = launch("--check", *arguments, environment=environment)
    assert stderr == b"", stderr
    return code, stdout.decode().splitlines()


def test_this_host_is_asked_without_ssh(launch):
    names = ("-H", "localhost:2", "--device", "cpu")
    code, lines = check(launch, *names, launch.script(""))
    assert code == 0, lines
    assert any(line.startswith("host localhost ") and "GPUs, Python 3" in line for line in lines)
    assert lines[-1] == "Training on these hosts can start."


def test_a_host_that_says_nothing_is_named_in_time(launch):
    """What ssh has started holds its output, too."""
    program = launch.folder / "ssh"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    start = time.monotonic()
    path = f"{launch.folder}{os.pathsep}{os.environ['PATH']}"
    code, lines = check(launch, "-H", "127.1.2.3,192.0.2.1", "--start-timeout", 1, PATH=path)
    assert code == 1 and time.monotonic() < start + 50
    said = "problem: host 192.0.2.1: it did not answer within 1 s: try `ssh 192.0.2.1 true`"
    assert said in lines
