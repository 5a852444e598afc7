"""The command line: what is run, what is refused, what is only shown."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from collective.launch.cli import parse

pytestmark = pytest.mark.timeout(60)

SHOW = """
    import json, os, sys
    print(json.dumps([sys.executable, sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"]]))
"""


@pytest.mark.parametrize(
    "line, ranks, command",
    [
        ("train.py", "auto", "train.py"),
        ("-np 2 train.py", "2", "train.py"),
        ("--nproc-per-node=gpu train.py", "gpu", "train.py"),
        ("-np 2 train.py -np 3 --dry-run --help", "2", "train.py -np 3 --dry-run --help"),
        ("-np 2 -m package.module -np 3 -m x", "2", "-m package.module -np 3 -m x"),
        ("-np 2 python3 -u train.py -np 3", "2", "python3 -u train.py -np 3"),
        ("-np 2 -- train.py -- a", "2", "train.py -- a"),
        ("-np 2 train.py -- a", "2", "train.py -- a"),
        ("--tee 0 --log-dir logs --grace 2 --device cpu train.py", "auto", "train.py"),
        ("-np -1 train.py", "-1", "train.py"),
        ("--dry-run", "auto", ""),
    ],
)
def test_everything_after_the_script_is_the_scripts(line, ranks, command):
    options = parse(line.split())
    assert (options.ranks, options.command) == (ranks, tuple(command.split()))


@pytest.mark.parametrize(
    "form", ["{script}", "python {script}", "python3 {script}", "python3 -u {script}", "-m script"]
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
        ("", "no script given"),
        ("missing.py", "there is no script missing.py"),
        ("python3 missing.py", "there is no script missing.py"),
        ("python3 -X dev missing.py", "there is no script missing.py"),
        ("python3", "python3 is given no script"),
        ("-m", "-m needs a module"),
        ("-m no_such_module_anywhere", "there is no module no_such_module_anywhere"),
        ("-np 0 script.py", "-np 0: a job has at least one rank"),
        ("-np -3 script.py", "-np -3: a job has at least one rank"),
        ("-np two script.py", "-np two: give a number"),
        ("-np 3 script.py", "3 ranks, but 2 GPUs are visible (0, 1); --device cpu"),
        ("-np gpu --device cpu script.py", "contradict"),
        ("--tee 5 script.py", "there is no rank 5"),
        ("--grace -1 script.py", "--grace -1"),
        ("--grace soon script.py", "--grace"),
        ("--stall-timeout -3 script.py", "--stall-timeout -3"),
        ("--stall-timeout nan script.py", "--stall-timeout nan"),
        ("--stall-timeout never script.py", "--stall-timeout"),
        ("--log-dir script.py/logs script.py", "--log-dir script.py/logs can't be written"),
        ("--no-such-option script.py", "--no-such-option"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(launch, line, words):
    launch.script("print('started')")
    code, stdout, stderr = launch(*line.split(), environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (code, stdout) == (2, b"")
    assert words in stderr.decode()
    assert stderr.count(b"\n") == 1 and stderr.startswith(b"collective.launch: ")


@pytest.mark.parametrize(
    "options, cuda, expected",
    [
        ([], None, [""]),
        ([], "", [""]),
        ([], "0,1", ["0", "1"]),
        ([], "1,GPU-x", ["1", "GPU-x"]),
        (["-np", "1"], "1,0", ["1"]),
        (["-np", "3", "--device", "cpu"], "0,1", ["", "", ""]),
        (["-np", "3"], "", ["", "", ""]),
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


def test_dry_run_prints_the_plan_and_starts_nothing(launch, tmp_path):
    script = launch.script("open('started', 'w')")
    code, stdout, stderr = launch(
        "--dry-run",
        "--log-dir",
        "logs",
        script,
        "--epochs",
        "3 4",
        environment={"CUDA_VISIBLE_DEVICES": "GPU-b,0"},
    )
    plan = stdout.decode()
    assert (code, stderr) == (0, b"")
    assert f"{sys.executable} {script} --epochs '3 4'" in plan
    assert "rank 0       on GPU GPU-b:" in plan and "rank 1       on GPU 0:" in plan
    assert "stall        after 600 s" in plan and "COLLECTIVE_PROGRESS=<" in plan
    assert "HOROVOD_RANK=1" in plan and "HOROVOD_CYCLE_TIME=0.1" in plan and "kept in logs" in plan
    assert not (tmp_path / "started").exists() and not (tmp_path / "logs").exists()


def test_help_is_the_manual(launch):
    code, stdout, _ = launch("--help")
    assert code == 0
    for word in (
        b"--grace",
        b"--stall-timeout",
        b"  124 ",
        b"COLLECTIVE_TERMINAL",
        b"CUDA_VISIBLE_DEVICES",
        b"128 + ",
    ):
        assert word in stdout


def test_check_tells_what_is_there(launch):
    code, stdout, stderr = launch("--check", environment={"CUDA_VISIBLE_DEVICES": ""})
    text = stdout.decode()
    assert (code, stderr) == (0, b"")
    for word in (
        "Python",
        "TensorFlow",
        "Horovod",
        "gloo yes",
        "CuPy",
        "GPUs",
        "cores",
        "memory",
        "/dev/shm",
    ):
        assert word in text


def test_check_tells_what_is_missing(launch, tmp_path):
    """A TensorFlow that breaks on import, and no Horovod: folders on the path that hide the real
    ones.
    """
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
        print(sorted(name for name in sys.modules if name.startswith("collective.") and "launch" not in name))
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
