"""The supervisor: a small process between launcher and ranks that no descendant can escape.

    launcher ──commands──▶ supervisor ──▶ rank 0 ──▶ its children, theirs, ...
             ◀──events────            └─▶ rank 1

A process that is killed with KILL can't clean up. So the launcher doesn't start the ranks itself:
it forks this process first, which starts them. The supervisor lives in its own session (no signal
of the terminal reaches it), adopts every orphan below it, and reads its commands from a pipe. End
of file means that the launcher is gone, for whatever reason; then everything below is killed at
once. If the supervisor itself is killed, the kernel kills the ranks (their parent-death signal),
and the launcher, which adopts orphans too, kills the rest. The ranks' own children survive only if
both are killed at the same moment.

The supervisor is forked without exec: it needs the modules that the launcher has already loaded,
and starting Python again would take as long as starting the launcher. So the fork must happen
before the launcher starts a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from collective.launch.processes import process_tree

# How many seconds to keep killing a process that doesn't die, e.g. because it waits for a dead
# network drive.
KILL_PATIENCE = 10.0
# Seconds before a loader starts again; twice as long each time, unless it has lasted.
_FIRST_PAUSE, _LONGEST_PAUSE, _LASTING = 0.5, 30.0, 60.0


@dataclass(frozen=True)
class RankSpec:
    """Describes a rank to start. The descriptors are the writing ends of its pipes.

    Attributes:
        cores: those that it may use; None: all that the launcher may use.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    stdout: int
    stderr: int
    cores: frozenset[int] | None = None


@dataclass(frozen=True)
class SupervisorEvent:
    """Carries a message from the supervisor to the launcher.

    Attributes:
        kind: one of
            "started" (rank, pid);
            "exited" (rank, pid, code, time);
            "loader" (rank is its number; pid, code, time, text): a loader ended while ranks work,
            and starts again after `text` seconds, or not at all if that is "";
            "undead" (pid): the process survived even KILL;
            "done": nothing is left;
            "broken" (text): the supervisor itself failed.
        rank: the rank's number.
        pid: the process.
        code: the exit code, or minus the signal.
        time: in seconds since the epoch.
        text: the failure.
    """

    kind: str
    rank: int = -1
    pid: int = 0
    code: int = 0
    time: float = 0.0
    text: str = ""

    def encode(self) -> bytes:
        text = self.text.replace("\n", " ")[:400]
        return f"{self.kind} {self.rank} {self.pid} {self.code} {self.time!r} {text}\n".encode()

    @classmethod
    def decode(cls, line: bytes) -> SupervisorEvent:
        kind, rank, pid, code, when, text = line.decode().split(" ", 5)
        return cls(kind, int(rank), int(pid), int(code), float(when), text)


class Supervisor:
    """Starts the supervisor and holds the launcher's ends of its two pipes.

    Attributes:
        pid: the supervisor's.
        events: the descriptor to wait for before `read_events`.
    """

    def __init__(
        self,
        ranks: Sequence[RankSpec],
        grace: float,
        stop_signals: Sequence[signal.Signals],
        has_stdin: bool,
        loaders: Sequence[RankSpec] = (),
    ) -> None:
        """Forks the supervisor, which starts the ranks at once, in their order.

        Args:
            ranks: the ranks to start.
            grace: seconds between TERM and KILL for processes that the ranks leave.
            stop_signals: the signals that tell the launcher to stop.
            has_stdin: whether the ranks inherit the launcher's stdin.
            loaders: the loaders to start before them, and again while they work.
        """
        process_tree.adopt_orphans()
        commands, self._commands = os.pipe()
        self.events, events = os.pipe()
        os.set_blocking(self.events, False)
        # The handlers write into the launcher's signal pipe, which the supervisor shares until it
        # has its own pipe.
        former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*stop_signals, signal.SIGCHLD))
        self.pid = os.fork()
        if self.pid == 0:
            loop = _SupervisorLoop(ranks, commands, events, grace, stop_signals, has_stdin, loaders)
            _run_supervisor(loop)
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        os.close(commands)
        os.close(events)
        self._received = b""

    def send_signal(self, signum: int, to_groups: bool = True) -> None:
        """Has `signum` sent to the ranks; KILL goes to every descendant.

        Args:
            signum: the signal.
            to_groups: whether the signal goes to their process groups, and so to their children,
                too.
        """
        try:
            os.write(self._commands, f"{int(signum) if to_groups else -int(signum)}\n".encode())
        except OSError:
            pass  # it is gone; the end of its events says so

    def close(self) -> None:
        """Closes the pipes of a supervisor that is done."""
        os.close(self._commands)
        os.close(self.events)

    def read_events(self) -> list[SupervisorEvent] | None:
        """Returns the events that have arrived; None when there will be no more."""
        try:
            chunk = os.read(self.events, 65536)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        return [SupervisorEvent.decode(line) for line in lines]


def _run_supervisor(loop: _SupervisorLoop) -> NoReturn:
    """Runs the forked process to its end: it never returns into the launcher's code."""
    code = 1
    try:
        try:
            loop.run()
            code = 0
        except BaseException as error:
            loop.report(SupervisorEvent("broken", text=repr(error)))
            raise
    finally:
        process_tree.kill_descendants(KILL_PATIENCE)
        os._exit(code)


class LoaderRestart:
    """Decides when a loader that has ended starts again.

    Attributes:
        due: when (monotonic time); None if it runs, or doesn't start again.
    """

    def __init__(self) -> None:
        self.due: float | None = None
        self._began = 0.0
        self._pause = _FIRST_PAUSE

    def begin(self, now: float) -> None:
        """Notes a start."""
        self.due, self._began = None, now

    def after(self, code: int, now: float) -> float | None:
        """Returns the pause before the next start; None for none, if it is done: exit code 0."""
        if code == 0:
            return None
        if now - self._began > _LASTING:
            self._pause = _FIRST_PAUSE
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self.due = now + pause
        return pause


class _SupervisorLoop:
    """Starts the ranks, reaps them, passes signals on, and ends processes that they leave."""

    def __init__(
        self,
        ranks: Sequence[RankSpec],
        commands: int,
        events: int,
        grace: float,
        stop_signals: Sequence[signal.Signals],
        has_stdin: bool,
        loaders: Sequence[RankSpec],
    ) -> None:
        self._ranks = ranks
        self._loaders = loaders
        self._running_loaders: dict[int, int] = {}  # pid -> number
        self._restarts: dict[int, LoaderRestart] = {
            number: LoaderRestart() for number in range(len(loaders))
        }
        self._has_stdin = has_stdin
        self._stop_signals = stop_signals
        self._commands = commands
        self._events = events
        self._grace = grace
        self._running: dict[int, int] = {}  # pid -> rank
        self._kill_at: float | None = None
        self._launcher_lives = True

    def run(self) -> None:
        self._detach()
        for number in range(len(self._loaders)):
            self._start_loader(number)
        for rank, spec in enumerate(self._ranks):
            self._start(rank, spec)
        self._release_standard_streams()
        while self._launcher_lives:
            self._reap()
            if not self._running and self._end_leftovers():
                return
            self._wait()

    def _detach(self) -> None:
        """Leaves the launcher's session, descriptors and signal handlers."""
        os.setsid()
        process_tree.adopt_orphans()
        # Else `pkill -KILL -f collective.launch` would kill launcher and supervisor together.
        process_tree.rename("collective-supervisor")
        self._wakeup, wakeup = os.pipe()
        for descriptor in (self._wakeup, wakeup):
            os.set_blocking(descriptor, False)
        needed = {0, self._commands, self._events, self._wakeup, wakeup}
        for spec in (*self._ranks, *self._loaders):
            needed.update((spec.stdout, spec.stderr))
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in needed:
                _close(int(name))
        self._nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        # Signals are for the launcher, which then tells the supervisor.
        for signum in self._stop_signals:
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _start(self, rank: int, spec: RankSpec) -> None:
        code, pid = self._spawn(spec, self._has_stdin)
        if pid:
            self._running[pid] = rank
            self.report(SupervisorEvent("started", rank, pid))
        else:
            self.report(SupervisorEvent("exited", rank, 0, code, time.time()))
        for descriptor in (spec.stdout, spec.stderr):
            _close(descriptor)

    def _start_loader(self, number: int) -> None:
        """Starts a loader; its pipes stay open for the next start."""
        self._restarts[number].begin(time.monotonic())
        code, pid = self._spawn(self._loaders[number], has_stdin=False)
        if pid:
            self._running_loaders[pid] = number
        else:
            self.report(SupervisorEvent("loader", number, 0, code, time.time()))

    def _loader_ended(self, number: int, pid: int, code: int) -> None:
        if not self._running or self._kill_at is not None:
            return  # the job is over
        pause = self._restarts[number].after(code, time.monotonic())
        text = "" if pause is None else f"{pause:g}"
        self.report(SupervisorEvent("loader", number, pid, code, time.time(), text))

    def _spawn(self, spec: RankSpec, has_stdin: bool) -> tuple[int, int]:
        """Starts a process. Returns 0 and its pid, or an exit code and 0 if it can't be started."""
        supervisor = os.getpid()

        def prepare() -> None:
            for signum in self._stop_signals:
                # A launcher under nohup ignores HUP, and so should its ranks. A shell without job
                # control starts background jobs with INT and QUIT ignored; those are passed on.
                if signum != signal.SIGHUP or not self._nohup:
                    signal.signal(signum, signal.SIG_DFL)
            process_tree.die_with_parent(supervisor)
            if spec.cores is not None:
                with contextlib.suppress(OSError):  # A core may have been taken away meanwhile.
                    os.sched_setaffinity(0, spec.cores)

        try:
            process = subprocess.Popen(
                spec.command,
                env=spec.environment,
                stdin=None if has_stdin else subprocess.DEVNULL,
                stdout=spec.stdout,
                stderr=spec.stderr,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            message = f"{spec.command[0]} can't be started: {error.strerror}\n"
            os.write(spec.stderr, message.encode())
            return (127 if isinstance(error, FileNotFoundError) else 126), 0  # as a shell does
        process.returncode = 0  # `_reap` waits for the process, not the destructor
        return 0, process.pid

    def _release_standard_streams(self) -> None:
        """Closes these streams, so that a reader of the launcher's output sees its end."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)

    def _reap(self) -> None:
        for pid, code in process_tree.reap():
            rank = self._running.pop(pid, None)
            if rank is not None:
                self.report(SupervisorEvent("exited", rank, pid, code, time.time()))
            elif pid in self._running_loaders:
                self._loader_ended(self._running_loaders.pop(pid), pid, code)

    def _end_leftovers(self) -> bool:
        """Ends the processes that the ranks left; returns whether that is done."""
        now = time.monotonic()
        if not process_tree.descendants(os.getpid()):
            self.report(SupervisorEvent("done"))
            return True
        if self._kill_at is None:
            self._kill_at = now + self._grace
            process_tree.signal_descendants(signal.SIGTERM)
        if now < self._kill_at:
            return False
        for pid in process_tree.kill_descendants(KILL_PATIENCE):
            self.report(SupervisorEvent("undead", pid=pid))
        self.report(SupervisorEvent("done"))
        return True

    def _wait(self) -> None:
        """Waits for a child to end, a command, a loader's turn, or the end of the grace period."""
        timeout = self._start_due_loaders()
        if not self._running and self._kill_at is not None:
            timeout = max(0.0, self._kill_at - time.monotonic())
        ready, _, _ = select.select([self._commands, self._wakeup], [], [], timeout)
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._commands in ready:
            words = os.read(self._commands, 4096).split()
            self._launcher_lives = bool(words)
            for word in words:
                self._pass_on(int(word))

    def _start_due_loaders(self) -> float | None:
        """Starts the loaders whose pause is over; returns the seconds to the next one's end."""
        if not self._running or self._kill_at is not None:
            return None
        now = time.monotonic()
        for number, restart in self._restarts.items():
            if restart.due is not None and restart.due <= now:
                self._start_loader(number)
        left = [each.due - now for each in self._restarts.values() if each.due is not None]
        return max(0.0, min(left)) if left else None

    def _pass_on(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill_at = time.monotonic()
            process_tree.signal_descendants(signum)
            return
        for pid in self._running:
            try:
                if signum < 0:
                    os.kill(pid, -signum)
                else:
                    os.killpg(pid, signum)
            except (ProcessLookupError, PermissionError):
                pass  # it is about to be reaped, or belongs to another user now

    def report(self, event: SupervisorEvent) -> None:
        try:
            os.write(self._events, event.encode())
        except OSError:
            self._launcher_lives = False


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # the descriptor that listed the folder is closed already
