"""The programs of docker/: what a container starts, its health, what an image leaves out."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from collective.job.progress_board import VARIABLE, Label, LauncherBoard, Phase, ProgressRecord

DOCKER = Path(__file__).resolve().parents[3] / "docker"
AWAY, WORKING, RUNNING = Phase.AWAY, Phase.WORKING, Phase.RUNNING


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# entrypoint.sh.


@pytest.fixture
def started(tmp_path: Path):
    """Returns a function that starts a container's words, and returns the program that ran."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "tensorboard"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho $$ {name} "$@"\nexit 7\n')
        program.chmod(0o755)

    def start(*words: str) -> str:
        container = subprocess.Popen(
            [DOCKER / "entrypoint.sh", *words],
            env={"PATH": f"{programs}:/usr/bin:/bin"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        printed, _ = container.communicate(timeout=60)
        assert container.returncode == 7
        pid, _, program = printed.strip().partition(" ")
        assert int(pid) == container.pid  # signals reach the program: no shell stands before it
        return program

    return start


@pytest.mark.parametrize(
    "words, program",
    [
        (["train.py", "--epochs", "2"], "python -m collective.launch train.py --epochs 2"),
        (["-np", "4", "a b.py"], "python -m collective.launch -np 4 a b.py"),
        (["/models/train.py"], "python -m collective.launch /models/train.py"),
        (["-m", "package.train"], "python -m collective.launch -m package.train"),
        (["--check"], "python -m collective.launch --check"),
        (["-np", "2", "python", "x.py"], "python -m collective.launch -np 2 python x.py"),
        (["no-program-of-this-name"], "python -m collective.launch no-program-of-this-name"),
        (["python", "-m", "collective.checkpoint"], "python -m collective.checkpoint"),
        (["tensorboard", "--logdir", "/out"], "tensorboard --logdir /out"),
        (["sh", "-c", "echo $$ here; exit 7"], "here"),
        ([], "python -m collective.launch"),
    ],
)
def test_a_container_runs_programs_as_they_are_and_the_rest_by_the_launcher(
    started, words: list[str], program: str
):
    assert started(*words) == program


def test_a_script_that_is_called_as_a_program_is_launched(started, tmp_path: Path):
    """Only the PATH counts, on which the current folder is not."""
    (tmp_path / "test.py").write_text("")
    assert started("test.py") == "python -m collective.launch test.py"


# health_check.py.


def record(phase: Phase, seconds_ago: float, now: float = 1000.0) -> ProgressRecord:
    return ProgressRecord(os.getpid(), phase, 0, int((now - seconds_ago) * 1e9))


@pytest.mark.parametrize(
    "records, words",
    [
        ([], ""),
        ([None, None], ""),
        ([record(AWAY, 900), record(AWAY, 800)], ""),  # they prepare data, or are debugged
        ([record(RUNNING, 59), record(RUNNING, 900)], ""),
        ([record(RUNNING, 900), record(WORKING, 800)], ""),  # it saves
        ([record(RUNNING, 61), record(AWAY, 90), None], "no progress for 61 s: of 3 .*: 1, 2$"),
        ([record(RUNNING, 70), record(RUNNING, 80)], "for 70 s: all 2 ranks are in a run"),
        ([record(RUNNING, 70)] + [None] * 99, " 20 and 79 more$"),
    ],
)
def test_a_job_is_unhealthy_while_ranks_wait(records: list, words: str):
    text = load("health_check").complaint(records, 1000.0)
    if words:
        assert re.search(words, text)
    else:
        assert text == ""


@pytest.mark.parametrize("seconds_ago, code", [(5, 0), (300, 1)])
def test_the_board_is_found_by_a_ranks_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds_ago: int, code: int
):
    board = LauncherBoard(2)
    since = time.monotonic_ns() - seconds_ago * 10**9
    board.post(0, (os.getpid(), RUNNING, 0, since), Label("runs x"), False)
    variables = {"LANG": "C", VARIABLE: board.path, "LOCAL_WORLD_SIZE": "2"}
    for pid in ("17", "18"):
        (tmp_path / pid).mkdir()
        text = "".join(f"{name}={value}\0" for name, value in variables.items())
        (tmp_path / pid / "environ").write_text(text)
    (tmp_path / "19").mkdir()
    (tmp_path / "19" / "environ").write_text(f"{VARIABLE}=\0LOCAL_WORLD_SIZE=1\0")
    assert load("health_check").main(tmp_path) == code
    printed = capsys.readouterr().out
    assert printed.count("no progress for 300 s: of 2 ranks, these are in no run: 1") == code


def test_a_container_without_a_job_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert load("health_check").main(tmp_path) == 0
    assert capsys.readouterr().out == ""


# ssh_server.py.


def test_sessions_have_the_containers_environment(tmp_path: Path):
    container = {
        "PATH": "/opt/collective/.venv/bin:/usr/bin",
        "COLLECTIVE_SECRET_FILE": "/etc/collective/secret",
        "TITLE": "two words, it's # no comment",
        "HOME": "/root",  # a session's own is another user's
        "QUOTES": 'a "b"',
        "LINES": "a\nPermitRootLogin yes",
    }
    text = load("ssh_server").server_configuration("/run/key", container)
    lines = text.splitlines()
    assert lines[0] == "HostKey /run/key"
    (given,) = [line for line in lines if line.startswith("SetEnv ")]
    assert given == (
        'SetEnv "PATH=/opt/collective/.venv/bin:/usr/bin" '
        '"COLLECTIVE_SECRET_FILE=/etc/collective/secret" "TITLE=two words, it\'s # no comment"'
    )
    assert lines[2:] == (DOCKER / "sshd_config").read_text().splitlines()


def test_ranks_are_known_by_their_launcher(tmp_path: Path):
    """A rank's children have its environment, and are none: they work until it has saved."""
    processes = {
        1: (0, False),
        5: (1, False),
        7: (5, True),
        8: (5, True),
        9: (7, True),
        10: (9, True),
    }
    for number, (parent, launched) in processes.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\tx\nPid:\t{number}\nPPid:\t{parent}\n")
        (folder / "environ").write_bytes(b"A=1\0COLLECTIVE_LAUNCHED=1\0" if launched else b"A=1\0")
    assert sorted(load("ssh_server").ranks_in(tmp_path)) == [7, 8]
    assert load("ssh_server").ancestors(9, tmp_path) == {9, 7, 5, 1}


SESSION = """
# A launcher, with a rank that takes TERM for a wish to save.
env COLLECTIVE_LAUNCHED=1 bash -c '
    trap "sleep 0.5; echo saved; exit 143" TERM
    echo ready
    while true; do sleep 0.05; done'
echo reported $?
"""


def test_a_container_that_ends_lets_its_ranks_save():
    """The ranks below the server: on this machine there are others, also of this test's process."""
    server = load("ssh_server")
    session = subprocess.Popen(
        ["bash", "-c", 'bash -c "$0"; exit', SESSION],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert session.stdout.readline() == "ready\n"
        waiter = threading.Thread(target=server.stop_ranks, args=(session.pid,), daemon=True)
        waiter.start()
        rest, _ = session.communicate(timeout=30)  # which reaps it, as process 1 would
        assert rest == "saved\nreported 143\n"
        waiter.join(30)
        assert not waiter.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.pid, signal.SIGKILL)
        session.communicate()


def test_a_server_that_fails_ends_the_container(tmp_path: Path):
    program = f"""if True:
        import importlib.util, sys
        place = {str(DOCKER / "ssh_server.py")!r}
        spec = importlib.util.spec_from_file_location("ssh_server", place)
        server = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(server)
        server._SERVER = sys.argv[1]
        server.host_key = lambda folder: "key"
        sys.exit(server.main())
    """
    for text, code in (("exit 3", 3), ("echo ready; exec sleep 60", 0)):
        fake = tmp_path / "sshd"
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o755)
        words = [sys.executable, "-c", program, str(fake)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            if code == 0:
                assert process.stdout.readline() == "ready\n"
                process.terminate()
            process.communicate(timeout=30)
            assert process.returncode == code
        finally:
            process.kill()


# unneeded_packages.py.


@pytest.fixture(scope="module")
def unneeded() -> set[str]:
    roots = ("collective-strategy[data,datasets,serve,tensorboard]", "horovod", "pip")
    finished = subprocess.run(
        [sys.executable, "docker/unneeded_packages.py", *roots],
        cwd=DOCKER.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(finished.stdout.split())


def test_what_builds_and_tests_is_left_out(unneeded: set[str]):
    assert {"cmake", "clang-format", "hypothesis", "mypy", "pytest", "ruff"} <= unneeded


def test_what_training_needs_is_kept(unneeded: set[str]):
    assert not unneeded & {
        "cloudpickle",
        "horovod",
        "jinja2",
        "keras",
        "numpy",
        "packaging",
        "pip",
        "psutil",
        "pyarrow",
        "pyyaml",
        "setuptools",
        "tensorboard",
        "tensorflow",
        "tensorflow-datasets",
        "tqdm",
        "werkzeug",
    }


def test_extras_bring_their_requirements_only_where_they_are_asked_for():
    module = load("unneeded_packages")
    requirements = {
        name: [module.Requirement(text) for text in texts]
        for name, texts in {
            "a": ["b", 'c ; extra == "x"', 'd ; python_version < "3"'],
            "b": ["a", "e"],
            "c": [],
            "d": [],
            "e": [],
        }.items()
    }

    def names(*roots: str) -> set[str]:
        return module.reached(requirements, [module.Requirement(root) for root in roots])

    assert names("a") == {"a", "b", "e"}
    assert names("a[x]") == {"a", "b", "c", "e"}
    assert names("b", "a[x]") == {"a", "b", "c", "e"}
    with pytest.raises(KeyError, match="f is not installed"):
        names("f")


def test_every_pin_of_the_gpus_is_kept():
    """CUDA's libraries are requirements of TensorFlow's and of this package's extras."""
    module = load("unneeded_packages")
    project, requirements = module.requirements_of_project(DOCKER.parent / "pyproject.toml")
    root = module.Requirement(f"{project}[data,gpu]")
    tensorflow = module.requirements_of_packages()["tensorflow"]
    reached = module.reached(
        {project: requirements, "tensorflow": tensorflow},
        [root, module.Requirement("tensorflow[and-cuda]")],
    )
    pins = DOCKER.parent / "tools" / "pins" / "tensorflow2.15"
    lines = (pins / "gpu.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert pinned - reached == {"fastrlock"}  # CuPy's
