"""Starts of the launcher: the forms of a command, devices, refusals, and `--check`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = pytest.mark.timeout(60)
CHECK_TIMEOUT = (
    150.0  # it imports TensorFlow, Horovod and CuPy, perhaps in parallel with other tests
)

SHOW = """
    import json, os, sys
    print(json.dumps([sys.executable, sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"]]))
"""


@pytest.mark.parametrize(
    "form", ["{script}", "python {script}", "python3 -u {script}", "-m script"]
)
def test_command_forms(launch, form):
    words = form.format(script=launch.script(SHOW)).split()
    code, stdout, stderr = launch("-np", 1, *words, "-np", "7", "--help", "two words")
    assert (code, stderr) == (0, b"")
    assert json.loads(stdout) == [sys.executable, ["-np", "7", "--help", "two words"], "0", "1"]


def test_another_interpreter_is_taken_at_its_word(launch, tmp_path):
    other = tmp_path / "python3.9"
    other.write_text('#!/bin/sh\necho "other: $1"\n')
    other.chmod(0o755)
    assert launch(str(other), launch.script(SHOW))[1] == f"other: {tmp_path}/script.py\n".encode()


@pytest.mark.parametrize(
    "line, words",
    [
        ("missing.py", "there is no script missing.py"),
        ("--log-dir script.py/logs script.py", "--log-dir script.py/logs can't be written"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(launch, line, words):
    launch.script("print('started')")
    code, stdout, stderr = launch(*line.split())
    assert (code, stdout) == (2, b"")
    assert words in stderr.decode()
    assert stderr.count(b"\n") == 1 and stderr.startswith(b"collective launch: ")


@pytest.mark.parametrize(
    "options, cuda, expected",
    [
        ([], None, [""]),
        ([], "1,GPU-x", ["1", "GPU-x"]),
        (["-np", "2", "--device", "cpu"], "0", ["", ""]),
    ],
)
def test_each_rank_sees_its_own_device_only(launch, options, cuda, expected):
    script = launch.script(
        "import os; print(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    code, stdout, _ = launch(*options, script, environment=environment)
    lines = sorted(line.split("] ")[-1] for line in stdout.decode().splitlines())
    assert (code, lines) == (0, [f"{rank} {device}" for rank, device in enumerate(expected)])


def test_dry_run_starts_nothing(launch, tmp_path):
    script = launch.script("open('started', 'w')")
    code, stdout, stderr = launch("-np", 2, "--dry-run", "--log-dir", "logs", script)
    assert (code, stderr) == (0, b"")
    assert f"{sys.executable} {script}" in stdout.decode()
    assert not (tmp_path / "started").exists() and not (tmp_path / "logs").exists()


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_check_tells_what_is_there(launch):
    code, stdout, stderr = launch(
        "--check", environment={"CUDA_VISIBLE_DEVICES": ""}, timeout=CHECK_TIMEOUT
    )
    text = stdout.decode()
    assert (code, stderr) == (0, b"")
    release = ".".join(metadata.version("tensorflow").split(".")[:2])
    for word in (
        "Python",
        "TensorFlow",
        "Horovod",
        "gloo yes",
        f"compiled for TensorFlow {release}",
        "CuPy",
        "GPUs",
        "cores",
        "memory",
        "/dev/shm",
    ):
        assert word in text


def test_check_tells_what_is_missing(launch, tmp_path):
    """TensorFlow breaks on import, and Horovod is empty: folders on the path hide the real ones."""
    for name, source in [
        ("tensorflow", "raise ImportError('libfoo.so is missing')"),
        ("horovod", ""),
    ]:
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "__init__.py").write_text(source)
    path = f"{tmp_path}:{launch.environment['PYTHONPATH']}"
    code, stdout, stderr = launch("--check", environment={"PYTHONPATH": path})
    assert (code, stderr) == (1, b"")
    assert b"libfoo.so is missing" in stdout and b"make setup" in stdout


def test_the_launcher_imports_nothing_heavy(launch):
    source = """
        import sys
        import collective.launch.cli, collective.launch.job
        heavy = {"tensorflow", "horovod", "numpy", "cupy", "psutil", "multiprocessing", "asyncio"}
        print(sorted(heavy & set(sys.modules)))
        own = {name.split(".")[1] for name in sys.modules if name.startswith("collective.")}
        print(sorted(own - {"launch", "job", "version"}))
    """
    result = subprocess.run(
        [sys.executable, launch.script(source)],
        env=launch.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]
