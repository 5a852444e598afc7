"""Jobs whose processes have TensorFlow and this library loaded when they start.

A server is forked for each job, which is the launcher; where it would start Python for a rank, it
forks once more. So launcher, supervisor and ranks are processes as always, with their own ids,
pipes, signals and exit codes, but a rank is there in a tenth of a second instead of in four. What
isn't as always: a rank ends after its exit handlers, without the destructors of C++; what libraries
read from the environment when they are loaded (GLIBC_TUNABLES) is the server's; memory that is
shared with the server. Tests of these start real processes: `launch(..., pool=False)`.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.jobs.preloaded", "tests.jobs.pool"])


class Done(NamedTuple):
    returncode: int
    stdout: str  # and stderr


class Process:
    """A job that runs: the part of subprocess.Popen that tests use."""

    def __init__(self, process: Any, output: int):
        self._process = process
        self.stdout = open(output, encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code; None while the job runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the job", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def start(
    *arguments: Any, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Process:
    """Starts the launcher with these arguments."""
    return _start(_launch, arguments, environment, cwd)


def _start(
    target: Callable[..., None],
    arguments: Sequence[Any],
    environment: Mapping[str, str] | None,
    cwd: Path,
) -> Process:
    _check_server()
    given = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
    ours, theirs = os.pipe()
    output = multiprocessing.connection.Connection(theirs, readable=False)
    process = _context.Process(
        target=_begin,
        args=(target, [str(x) for x in arguments], given, str(cwd), output),
        daemon=True,
    )
    process.start()
    output.close()
    return Process(process, ours)


def launch(
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 240,
    pool: bool = True,
) -> Done:
    """Runs the launcher to its end; prints what the job wrote, for pytest to show.

    Args:
        arguments: the launcher's.
        environment: what to add to this process's own.
        cwd: where.
        timeout: seconds, after which the job is killed.
        pool: False starts real processes.
    """
    if pool:
        return _printed(to_its_end(start(*arguments, environment=environment, cwd=cwd), timeout))
    return _really(["-m", "collective.launch", *arguments], environment, cwd, timeout)


def python(
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 240,
    pool: bool = True,
) -> Done:
    """Runs a script to its end, without the launcher; else as `launch`."""
    if pool:
        return _printed(to_its_end(_start(_script, arguments, environment, cwd), timeout))
    return _really(arguments, environment, cwd, timeout)


def to_its_end(process: Process, timeout: float) -> Done:
    """Waits for the end of a job, and kills it after `timeout` seconds."""
    killer = threading.Timer(timeout, process.kill)
    killer.start()
    try:
        text = process.stdout.read()
        return Done(process.wait(timeout), text)
    finally:
        killer.cancel()
        process.kill()


def _really(
    arguments: Sequence[Any], environment: Mapping[str, str] | None, cwd: Path, timeout: float
) -> Done:
    given = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    return _printed(Done(done.returncode, done.stdout))


def _printed(done: Done) -> Done:
    print(done.stdout)
    return done


_checked = False
_checking = threading.Lock()


def _check_server() -> None:
    global _checked
    with _checking:
        if _checked:
            return
        _checked = True
        probe = _context.Process(target=_exit_unless_preloaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
            probe.start()  # and the server
        probe.join(120)
        assert probe.exitcode == 0, "the server of the jobs has not loaded tests/jobs/preloaded.py"


# In the launcher's process.


def _exit_unless_preloaded() -> None:
    preloaded = sys.modules.get("tests.jobs.preloaded")
    sys.exit(0 if preloaded is not None and preloaded.THREADS == 1 else 3)


def _begin(
    target: Callable[..., None],
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    output: Any,
) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, place in ((0, null), (1, output.fileno()), (2, output.fileno())):
        os.dup2(place, descriptor)
    output.close()
    _take_over(environment)
    os.chdir(cwd)
    target(arguments)


def _launch(arguments: list[str]) -> NoReturn:
    from collective.launch import cli
    from collective.launch.processes import supervisor

    sys.argv = ["collective.launch", *arguments]
    supervisor.subprocess = SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL)
    sys.exit(cli.main())


def _script(arguments: list[str]) -> NoReturn:
    _become_program(arguments)


def _take_over(environment: Mapping[str, str]) -> None:
    """Gives this process the environment and the streams of a new one."""
    # By this the server has loaded TensorFlow; a new process would set it as it loads it.
    of_keras = {name: os.environ[name] for name in (LEGACY_KERAS,) if name in os.environ}
    os.environ.clear()
    os.environ.update({**of_keras, **environment})
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "replace", write_through=True))


# In the supervisor's process, and in a rank's.


def _popen(command: Sequence[str], **how: Any) -> Any:
    if command[0] != sys.executable or command[1].startswith("-") and command[1] != "-m":
        return subprocess.Popen(command, **how)
    pid = os.fork()
    if pid == 0:
        _become_rank(list(command[1:]), **how)
    return SimpleNamespace(pid=pid)


def _become_rank(
    command: Sequence[str],
    env: Mapping[str, str],
    stdin: int | None,
    stdout: int,
    stderr: int,
    start_new_session: bool,
    preexec_fn: Any,
) -> NoReturn:
    try:
        if start_new_session:
            os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null if stdin == subprocess.DEVNULL else 0, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # Libraries that were loaded before close some of these yet: their numbers stay taken.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor != null:
                os.dup2(null, descriptor, inheritable=False)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        preexec_fn()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _take_over(env)
        sys.stdin = open(0, closefd=False)
        _become_program(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_program(command: Sequence[str]) -> NoReturn:
    """Runs a script, or a module after `-m`, as Python does, to the end of its exit handlers."""
    sys.modules["numpy"].random.seed()
    code = _run(command)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: Sequence[str]) -> int:
    """Runs the program; its exit code."""
    code = 0
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    return code
