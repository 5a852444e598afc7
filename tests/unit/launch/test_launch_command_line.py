"""Tests the command line: what is run, refused, or only shown. Nothing is started here."""

from __future__ import annotations

import dataclasses
import os
import py_compile
import re
import resource
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import collective
from collective.job.errors import UsageError
from collective.launch import cli, job
from collective.launch.attempt import announcement
from collective.launch.cli import make_plan, parse_options, parse_rank_list
from collective.launch.command_line.rank_command import (
    as_framework,
    check_is_kept,
    misplaced_option,
    rank_command,
)
from collective.launch.output.logs import open_logs
from collective.launch.planning.environment import rank_environment
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes.local_ranks import LocalRanks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path, monkeypatch):
    """No driver tells of GPUs, and nothing may be started."""

    def start(plan):
        raise AssertionError("a job was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "driver_gpus", lambda: ())
    monkeypatch.setattr(job, "Job", start)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.joinpath("script.py").touch()
    for folder in ("empty_folder", "half_folder", "whole_folder"):
        tmp_path.joinpath(folder).mkdir()
    for name in ("half.py", "half.txt", "half", "half_folder/__main__.py"):
        tmp_path.joinpath(name).write_text("import os\nsize = 1 +\n")
    for name in ("whole", "whole_folder/__main__.py"):
        tmp_path.joinpath(name).write_text("size = 1\n")
    tmp_path.joinpath("program").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9))
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", "size = 1")
    py_compile.compile(str(tmp_path / "whole"), str(tmp_path / "compiled"))
    os.mkfifo(tmp_path / "pipe")
    tmp_path.joinpath("space").mkdir()


@pytest.mark.parametrize(
    "line, ranks, command",
    [
        ("train.py", None, "train.py"),
        ("-np 2 train.py", "2", "train.py"),
        ("--nproc-per-node=gpu train.py", "gpu", "train.py"),
        ("-np 2 train.py -np 3 --dry-run --help", "2", "train.py -np 3 --dry-run --help"),
        ("-np 2 -m package.module -np 3 -m x", "2", "-m package.module -np 3 -m x"),
        ("-np 2 python3 -u train.py -np 3", "2", "python3 -u train.py -np 3"),
        ("-np 2 -- train.py -- a", "2", "train.py -- a"),
        ("-np 2 train.py -- a", "2", "train.py -- a"),
        ("--tee 0 --log-dir logs --grace 2 --device cpu train.py", None, "train.py"),
        ("-np -1 train.py", "-1", "train.py"),
        ("-n 2 train.py -n 3", "2", "train.py -n 3"),
        ("-n2 train.py", "2", "train.py"),
        ("-np2 train.py -np3", "2", "train.py -np3"),
        ("-npauto train.py", "auto", "train.py"),
        ("--nproc_per_node 2 train.py", "2", "train.py"),
        ("--verbose --no-python -n 2 ./run.sh --verbose", "2", "./run.sh --verbose"),
        ("--dry-run", None, ""),
    ],
)
def test_everything_after_the_script_is_the_scripts(line, ranks, command):
    options = parse_options(line.split())
    assert (options.ranks, options.command) == (ranks, tuple(command.split()))


def test_options_and_their_defaults():
    assert vars(parse_options(["train.py"])) == {
        "ranks": None,
        "nodes": None,
        "node": None,
        "master": None,
        "port": None,
        "hosts": None,
        "hostfile": None,
        "ssh_port": None,
        "ssh_identity_file": None,
        "standalone": False,
        "interface": None,
        "start_timeout": None,
        "host_timeout": None,
        "secret_file": None,
        "device": "auto",
        "bind": "auto",
        "log_dir": None,
        "tee": "all",
        "grace": None,
        "preempt_signal": 15,
        "max_restarts": 0,
        "restart_pause": None,
        "elastic": False,
        "min_ranks": None,
        "stall_timeout": 600.0,
        "verbose": False,
        "no_python": False,
        "independent": False,
        "test_mode": False,
        "metrics_port": None,
        "data_loaders": None,
        "framework": None,
        "embedding_scope": "script",
        "dry_run": False,
        "check": False,
        "settings": None,
        "job_schema": False,
        "no_restart_after": None,
        "leave_out_host_after": None,
        "emit": None,
        "job_name": None,
        "image": None,
        "replicas": None,
        "gpus_per_replica": None,
        "cpus_per_replica": None,
        "memory_per_replica": None,
        "volume": None,
        "volume_size": None,
        "secret": None,
        "own_runtime": None,
        "env": None,
        "words": (),
        "command": ("train.py",),
        "job": None,
    }


@pytest.mark.parametrize(
    "words, command",
    [
        ("script.py", [sys.executable, "script.py"]),
        ("python script.py", [sys.executable, "script.py"]),
        ("python3 -u script.py", [sys.executable, "-u", "script.py"]),
        (
            "python3 -X dev -W error script.py",
            [sys.executable, *"-X dev -W error script.py".split()],
        ),
        ("python3 -c pass", [sys.executable, "-c", "pass"]),
        ("-m script", [sys.executable, "-m", "script"]),
        *((name, [sys.executable, name]) for name in ("whole", "archive", "compiled")),
        ("whole_folder", [sys.executable, "whole_folder"]),
        ("-m json.tool", [sys.executable, "-m", "json.tool"]),
        ("-m unittest", [sys.executable, "-m", "unittest"]),
        ("-m os.path", [sys.executable, "-m", "os.path"]),  # that os.py makes itself
        ("-m space.of.names", [sys.executable, "-m", "space.of.names"]),
        ("-m sys", [sys.executable, "-m", "sys"]),
        # Another interpreter is taken at its word, also for the modules that it has.
        ("python3.9 script.py", ["python3.9", "script.py"]),
        ("/opt/python3 -m theirs", ["/opt/python3", "-m", "theirs"]),
    ],
)
def test_command_forms(words, command):
    assert rank_command([*words.split(), "--help"]) == (*command, "--help")


def test_which_scripts_each_rank_can_read(tmp_path):
    for path in ("script.py", "whole_folder", "archive", "", "missing.py", "/dev/shm"):
        check_is_kept(path)
    for path in ("pipe", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "/dev/null"):
        with pytest.raises(UsageError, match=f"^{path} can be read only once"):
            check_is_kept(path)


def test_a_script_may_be_called_python(tmp_path):
    tmp_path.joinpath("python").touch()
    assert rank_command(["./python", "-u"]) == (sys.executable, "./python", "-u")


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
        ("-m no_such_package.module", "there is no module no_such_package.module"),
        ("-m json.none", "there is no module json.none (looked in "),
        ("-m json.tool.none", "tool.py isn't a package"),
        ("-m json", "json is a package, and can't be run without __main__.py in "),
        ("half.py", "half.py, line 2: SyntaxError: invalid syntax"),
        ("python3 -u half.py", "half.py, line 2: SyntaxError"),
        ("half.txt", "half.txt, line 2: SyntaxError: invalid syntax; --no-python runs what is no"),
        ("half", "half, line 2: SyntaxError"),
        ("empty_folder", "empty_folder is a folder, and can't be run without __main__.py in it"),
        ("python3 empty_folder", "empty_folder is a folder, and"),
        ("half_folder", "half_folder/__main__.py, line 2: SyntaxError"),
        ("program", "program isn't a Python script: --no-python runs other programs"),
        ("-np 2 /dev/stdin", "/dev/stdin can be read only once"),
        ("-np 2 python3 pipe", "pipe can be read only once"),
        ("-np 0 script.py", "-np 0: a job has at least one rank"),
        ("-np -3 script.py", "-np -3: a job has at least one rank"),
        ("-np 100000000000000000000 script.py", "a host has 4096 ranks at most"),
        ("-np two script.py", "-np two: give a number"),
        ("-np2x script.py", "-np 2x: give a number"),
        ("-np= script.py", "-np '': give a number"),  # of a shell's variable that isn't set
        ("-np 3 script.py", "3 ranks, but 2 GPUs are visible (0, 1); --device cpu"),
        ("-np gpu --device cpu script.py", "contradict"),
        ("--tee 5 script.py", "there is no rank 5"),
        ("-np 2 --tee 1-0 script.py", "--tee 1-0: 1-0 names no rank"),
        ("-H= script.py", "-H"),  # of a shell's variable that isn't set
        ("--log-dir= script.py", "--log-dir '': give a folder"),
        ("--grace -1 script.py", "--grace -1"),
        ("--grace soon script.py", "--grace"),
        ("--preempt-signal USR9 script.py", "--preempt-signal: 'USR9' is no signal"),
        ("--preempt-signal KILL script.py", "SIGKILL can't announce a preemption"),
        ("--preempt-signal 200 script.py", "--preempt-signal"),
        ("--max-restarts -1 script.py", "--max-restarts -1"),
        ("--restart-pause -1 script.py", "--restart-pause -1"),
        ("--restart-pause inf script.py", "--restart-pause inf"),
        ("--elastic script.py", "give --max-restarts, too"),
        ("--min-np 1 script.py", "give that, too"),
        ("-np 2 --elastic --max-restarts 1 --min-np 3 script.py", "starts with 2; give 1 to 2"),
        ("-np 2 --elastic --max-restarts 1 --min-np 0 script.py", "--min-np 0"),
        ("--stall-timeout -3 script.py", "--stall-timeout -3"),
        ("--stall-timeout nan script.py", "--stall-timeout nan"),
        (
            "--stall-timeout never script.py",
            "--stall-timeout: 'never' is not a duration; give seconds",
        ),
        ("--grace 1x script.py", "--grace: '1x' is not a duration"),
        ("--grace 1m30 script.py", "--grace: '1m30' is not a duration"),
        ("--grace -1m script.py", "--grace"),
        ("--no-python -m script", "--no-python and -m contradict"),
        ("--no-python script.py", "there is no program script.py that can be executed"),
        ("--no-python", "no script given"),
        ("--no-such-option script.py", "--no-such-option"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(line, words, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cli.main(line.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and words in stderr
    assert stderr.count("\n") == 1 and stderr.startswith("collective launch: ")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("90", 90),
        ("90s", 90),
        ("1m", 60),
        ("2h", 7200),
        ("1.5m", 90),
        ("1h30m", 5400),
        ("500ms", 0.5),
        ("1d", 86400),
        ("0", 0),
    ],
)
def test_durations(text, expected):
    options = parse_options(["--grace", text, f"--stall-timeout={text}", "script.py"])
    assert (options.grace, options.stall_timeout) == (expected, expected)


def test_a_program_that_is_no_script(tmp_path):
    program = tmp_path / "run.sh"
    program.touch(mode=0o755)
    plan = make_plan(parse_options(["--no-python", "./run.sh", "-m", "x"]), {})
    assert plan.command == ("./run.sh", "-m", "x")
    assert rank_command(["sh", "-c", "true"], no_python=True) == ("sh", "-c", "true")


def test_an_interrupt_before_there_is_a_job_ends_quietly():
    """Ctrl-C in the first moments comes while modules are imported."""
    program = """
    import os, runpy, signal, sys
    class Interrupter:
        def find_spec(self, name, *_):
            if name == "collective.launch.cli":
                os.kill(os.getpid(), signal.SIGINT)
    sys.meta_path.insert(0, Interrupter())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("collective.launch", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert (end.returncode, end.stdout, end.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(
    "place, code, words",
    [
        ("/dev/full", 2, b"collective launch: stdout can't be written: No space left on device\n"),
        ("a pipe", 141, b""),
    ],
)
def test_a_plan_that_nobody_can_read(place, code, words):
    """It goes to a full disk, or to a program that has ended."""
    if place == "a pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(place, os.O_WRONLY)
    command = [sys.executable, "-m", "collective.launch", "--dry-run", "--device", "cpu"]
    script = os.path.abspath("script.py")
    end = subprocess.run(
        [*command, script], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert (end.returncode, end.stderr) == (code, words)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"collective {collective.__version__}\n"


def test_logs_that_cannot_be_written():
    plan = make_plan(parse_options(["--log-dir", "script.py/logs", "script.py"]), {})
    with pytest.raises(UsageError, match="--log-dir script.py/logs can't be written"):
        open_logs(plan)


def test_the_current_folder_may_be_gone(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(UsageError, match=r"no script a.py \(seen from a folder that has been del"):
        rank_command(["a.py"])
    with pytest.raises(UsageError, match="there is no module no_such_module_anywhere"):
        rank_command(["-m", "no_such_module_anywhere"])
    assert rank_command(["-m", "json.tool"])


@pytest.mark.parametrize("ranks", [1, 2, 500])
def test_too_few_files_may_be_open(ranks):
    """Nothing is started then: neither this process nor the supervisor would come far."""
    plan = make_plan(parse_options(["-np", str(ranks), "script.py"]), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (19, hard))
    try:
        with pytest.raises(UsageError, match=f"-np {ranks} needs 4 pipe ends a rank and 16 files"):
            LocalRanks(plan, signals=None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
def test_each_rank_sees_its_own_device_only(options, cuda, expected):
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    plan = make_plan(parse_options([*options, "script.py"]), environment)
    devices = [
        rank_environment(plan, rank, rendezvous_port="1", board="")["CUDA_VISIBLE_DEVICES"]
        for rank in range(plan.size)
    ]
    assert devices == expected


@pytest.mark.parametrize(
    "name, values",
    [
        ("COLLECTIVE_INDEPENDENT", ["no", "true", "-1"]),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", ["0", "-1", "10m", "1.5"]),
        ("TF_NUM_INTRAOP_THREADS", ["-3", "two"]),
    ],
)
def test_a_variable_that_ranks_would_die_of(name, values, capsys, monkeypatch):
    for value in values:
        monkeypatch.setenv(name, value)
        assert cli.main(["-np", "2", "script.py"]) == 2
        assert f"{name}={value}: give " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, expected",
    [("all", {0, 1, 2, 3}), ("none", set()), ("0", {0}), ("0,2-3", {0, 2, 3}), ("1-1", {1})],
)
def test_ranks_that_are_shown(text, expected):
    assert parse_rank_list(text, 4) == expected


@pytest.mark.parametrize("text", ["", "4", "0-4", "x", "-1", "1-", "0,,1"])
def test_ranks_that_cannot_be_shown(text):
    with pytest.raises(UsageError, match="--tee"):
        parse_rank_list(text, 4)


def test_help_names_every_option_on_two_screens(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"], "collective launch")
    assert end.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 2 * 24 and max(map(len, lines)) <= 100
    for action in cli.launcher_parser("x")._actions:
        names = [re.escape(name) for name in action.option_strings]
        assert re.search(rf"(?<![\w-])({'|'.join(names)})(?![\w-])", text), action.option_strings
    assert "  --help all " in text


@pytest.mark.parametrize("words", [["--help", "all"], ["-np", "2", "-h", "all"]])
def test_help_all_is_the_manual(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "--grace",
        "--stall-timeout",
        "  124 ",
        "COLLECTIVE_TERMINAL",
        "CUDA_VISIBLE_DEVICES",
        "128 + ",
    ):
        assert word in text


def test_dry_run_prints_the_plan(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert cli.main(["--dry-run", "--log-dir", "logs", "script.py", "--epochs", "3 4"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert f"command      {sys.executable} script.py --epochs '3 4'\n" in stdout
    assert "rank 0       on GPU GPU-b:" in stdout and "rank 1       on GPU 0:" in stdout
    assert "stall        after 600 s" in stdout and "kept in logs" in stdout
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "source, words, is_misplaced",
    [
        ("pass", "script.py --dry-run", True),
        ("pass", "python3 -u script.py 3 --tee 0", True),
        ("pass", "script.py --verbose --device cpu --log-dir x", False),
        ("add('--dry-run')", "script.py --dry-run", False),
        ("DEFINE_boolean('dry_run')", "script.py --dry-run", False),
        ("pass", "-m module --dry-run", False),
    ],
)
def test_an_option_after_the_script_is_noted(tmp_path, monkeypatch, source, words, is_misplaced):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(source)
    note = misplaced_option(words.split())
    assert ("stands after script.py, so it is the script's" in note) == is_misplaced
    assert bool(note) == is_misplaced


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null", "/proc/x/y"])
def test_dry_run_finds_that_logs_cannot_be_written(capsys, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert cli.main(["--device", "cpu", "--dry-run", "--log-dir", folder, "script.py"]) == 2
    assert f"--log-dir {folder} can't be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "size, terminal, gpus, text",
    [
        (1, True, False, ""),
        (2, False, False, ""),
        (2, True, False, "starting 2 ranks on 2 cores"),
        (2, True, True, "starting 2 ranks on 2 GPUs"),
        (8, False, True, ""),
        (8, False, False, "starting 8 ranks on 2 cores: they share them, and a step takes longer"),
    ],
)
def test_the_launcher_says_that_it_starts(size, terminal, gpus, text):
    plan = LaunchPlan(
        command=("python3", "train.py"),
        devices=tuple(str(rank) if gpus else None for rank in range(size)),
        launcher_environment={},
        cores=2,
        terminal=terminal,
        shown_ranks=frozenset(range(size)),
    )
    assert announcement(plan).startswith(text) and bool(announcement(plan)) == bool(text)
    assert announcement(dataclasses.replace(plan, shown_ranks=frozenset())) == ""


def test_a_script_of_another_framework():
    """Its command is the same, by way of what gives it the framework's names."""
    runner = ["-m", "collective.run_script", "--as", "sok", "--embedding-scope", "auto", "--"]
    for words in (["-m", "json.tool", "-h"], ["script.py", "--as", "x"]):
        command = as_framework(rank_command(words), "sok", "auto")
        assert command == (sys.executable, *runner, *words)
    words = ["python", "-u", "-W", "ignore", "script.py"]
    command = as_framework(rank_command(words), "sok", "auto")
    assert command == (sys.executable, *words[1:4], *runner, "script.py")
    given = "--device cpu --as deeprec script.py --epochs 3".split()
    plan = make_plan(parse_options(given), {})
    assert plan.command[4] == "deeprec" and plan.command[-2:] == ("--epochs", "3")


@pytest.mark.parametrize(
    "line, message",
    [
        ("--as x script.py", "invalid choice: 'x'"),
        ("--as sok --no-python /bin/true", "--as is for Python scripts"),
        ("--as sok python -c pass", "put the code after -c into a file"),
        ("--embedding-scope auto script.py", "give --as, too"),
    ],
)
def test_what_another_framework_is_refused_for(line, message):
    with pytest.raises(UsageError, match=message):
        make_plan(parse_options(line.split()), {})


@pytest.mark.parametrize(
    "line, words",
    [
        ("--max-restarts -3", "--max-restarts -3: give 0 or more"),
        ("-np 2 --tee 7", "--tee 7: there is no rank 7"),
        ("-np 0", "-np 0: a job has at least one rank"),
        ("--stall-timeout -1", "--stall-timeout -1"),
        ("-np 2 --elastic --max-restarts 1 --min-np 3", "--min-np 3: the job starts with 2"),
    ],
)
def test_a_check_of_what_no_machine_makes_good_is_refused_at_once(line, words, capsys, monkeypatch):
    monkeypatch.setattr(
        "collective.launch.check.diagnostics.check", lambda job: pytest.fail("inspects")
    )
    assert cli.main([*line.split(), "--check"]) == 2
    assert words in capsys.readouterr().err
