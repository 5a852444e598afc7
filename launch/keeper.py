"""The keeper: a small process between the launcher and the ranks that lets no descendant escape.

    launcher ──commands──▶ keeper ──▶ rank 0 ──▶ its children, theirs, ...
             ◀──events────        └─▶ rank 1

A process that is killed with KILL can't clean up after itself; therefore the launcher doesn't start
the ranks but forks this process first, which does. It lives in a session of its own (no signal of
the terminal reaches it), adopts every orphan below it, and reads its commands from a pipe: end of
file means that the launcher is gone, however it went, and everything below is killed at once.
Should the keeper itself be killed, the kernel kills the ranks (their parent-death signal), and the
launcher, who adopts orphans too, the rest. Only who kills both at one moment leaves the ranks' own
children behind.

The fork comes without exec: the keeper needs what the launcher has loaded already, and starting
Python again would cost as much as the whole launcher. That is why it must happen before the
launcher starts a thread.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import processes

# How long to go on killing what doesn't die, e.g. a process that waits for a dead network drive.
PATIENCE = 10.0

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Child:
    """A rank to start. The descriptors are the writing ends of its pipes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    stdout: int
    stderr: int


@dataclass(frozen=True)
class Event:
    """What the keeper tells the launcher.

    kind: "started" (rank, pid); "exited" (rank, pid, code, at); "undead" (pid): it survived even
        KILL; "done": nothing
    is left; "broken" (text): the keeper itself failed.
    """

    kind: str
    rank: int = -1
    pid: int = 0
    code: int = 0  # exit code, or minus the signal
    at: float = 0.0  # seconds since the epoch
    text: str = ""

    def encode(self) -> bytes:
        text = self.text.replace("\n", " ")[:400]
        return f"{self.kind} {self.rank} {self.pid} {self.code} {self.at!r} {text}\n".encode()

    @classmethod
    def decode(cls, line: bytes) -> Event:
        kind, rank, pid, code, at, text = line.decode().split(" ", 5)
        return cls(kind, int(rank), int(pid), int(code), float(at), text)


class Keeper:
    """The launcher's end of the two pipes."""

    def __init__(self, children: Sequence[Child], grace: float):
        """Forks the keeper, which starts `children` at once, in the order of their ranks.

        Args:
          children: one for each rank. A single one inherits the launcher's stdin.
          grace: seconds between TERM and KILL for what the ranks leave behind.
        """
        processes.adopt_orphans()
        commands, self._commands = os.pipe()
        self.events, events = os.pipe()
        os.set_blocking(self.events, False)
        # The handlers write into the launcher's wake-up pipe, which the keeper shares until it has
        # its own.
        outer = signal.pthread_sigmask(signal.SIG_BLOCK, (*_HANDLED, signal.SIGCHLD))
        self.pid = os.fork()
        if self.pid == 0:
            _become_keeper(children, commands, events, grace)
        signal.pthread_sigmask(signal.SIG_SETMASK, outer)
        os.close(commands)
        os.close(events)
        self._received = b""

    def signal(self, signum: int) -> None:
        """Sends `signum` to the process groups of the living ranks; KILL goes to everything below
        the keeper.
        """
        try:
            os.write(self._commands, f"{int(signum)}\n".encode())
        except OSError:
            pass  # it is gone; the end of its events says so

    def read(self) -> list[Event] | None:
        """The events that have come, None when there will be no more."""
        try:
            chunk = os.read(self.events, 65536)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        return [Event.decode(line) for line in lines]


def _become_keeper(children: Sequence[Child], commands: int, events: int, grace: float) -> None:
    """What the forked process does; it never returns into the launcher's code."""
    code = 1
    try:
        watch = _Watch(children, commands, events, grace)
        try:
            watch.run()
            code = 0
        except BaseException as error:
            watch.tell(Event("broken", text=repr(error)))
            raise
    finally:
        processes.kill_descendants(PATIENCE)
        os._exit(code)


class _Watch:
    """The keeper's own loop: starts the ranks, buries them, passes signals on, and clears up at the
    end.
    """

    def __init__(self, children: Sequence[Child], commands: int, events: int, grace: float):
        self._children = children
        self._commands = commands
        self._events = events
        self._grace = grace
        self._ranks: dict[int, int] = {}  # pid -> rank, of those that live
        self._kill_at: float | None = None
        self._launcher_lives = True

    def run(self) -> None:
        self._settle_in()
        for rank, child in enumerate(self._children):
            self._start(rank, child)
        self._let_go_of_the_terminal()
        while self._launcher_lives:
            self._bury()
            if not self._ranks and not self._clear_up():
                return
            self._wait()

    def _settle_in(self) -> None:
        os.setsid()
        processes.adopt_orphans()
        # Else `pkill -KILL -f collective.launch` would end launcher and keeper together.
        processes.rename("collective-keeper")
        self._wakeup, wakeup = os.pipe()
        for descriptor in (self._wakeup, wakeup):
            os.set_blocking(descriptor, False)
        needed = {0, self._commands, self._events, self._wakeup, wakeup}
        needed.update(end for child in self._children for end in (child.stdout, child.stderr))
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in needed:
                _close(int(name))
        self._nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        # The launcher is told what to do by signals, the keeper by the launcher.
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _start(self, rank: int, child: Child) -> None:
        keeper = os.getpid()

        def prepare() -> None:
            for signum in _HANDLED:
                # A launcher under nohup ignores HUP, and so shall its ranks; but a shell without
                # job control starts background jobs with INT and QUIT ignored, and those we pass
                # on.
                if signum != signal.SIGHUP or not self._nohup:
                    signal.signal(signum, signal.SIG_DFL)
            processes.die_with_parent(keeper)

        try:
            process = subprocess.Popen(
                child.command,
                env=child.environment,
                stdin=None if len(self._children) == 1 else subprocess.DEVNULL,
                stdout=child.stdout,
                stderr=child.stderr,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            os.write(
                child.stderr, f"{child.command[0]} can't be started: {error.strerror}\n".encode()
            )
            code = 127 if isinstance(error, FileNotFoundError) else 126  # as a shell does
            self.tell(Event("exited", rank, 0, code, time.time()))
        else:
            process.returncode = 0  # it is ours to reap, not the destructor's
            self._ranks[process.pid] = rank
            self.tell(Event("started", rank, process.pid))
        for descriptor in (child.stdout, child.stderr):
            _close(descriptor)

    def _let_go_of_the_terminal(self) -> None:
        """So that a reader of the launcher's output sees its end when the launcher ends."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)

    def _bury(self) -> None:
        for pid, code in processes.reap():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self.tell(Event("exited", rank, pid, code, time.time()))

    def _clear_up(self) -> bool:
        """After the last rank: ends what the ranks left behind. Returns whether there is more to
        do.
        """
        now = time.monotonic()
        if not processes.descendants(os.getpid()):
            self.tell(Event("done"))
            return False
        if self._kill_at is None:
            self._kill_at = now + self._grace
            processes.signal_descendants(signal.SIGTERM)
        if now < self._kill_at:
            return True
        for pid in processes.kill_descendants(PATIENCE):
            self.tell(Event("undead", pid=pid))
        self.tell(Event("done"))
        return False

    def _wait(self) -> None:
        """Until a child ends, a command comes, or (only when clearing up) the grace is over."""
        timeout = (
            None
            if self._ranks or self._kill_at is None
            else max(0.0, self._kill_at - time.monotonic())
        )
        ready, _, _ = select.select([self._commands, self._wakeup], [], [], timeout)
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._commands in ready:
            words = os.read(self._commands, 4096).split()
            self._launcher_lives = bool(words)
            for word in words:
                self._pass_on(int(word))

    def _pass_on(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill_at = time.monotonic()
            processes.signal_descendants(signum)
            return
        for pid in self._ranks:
            try:
                os.killpg(pid, signum)
            except (ProcessLookupError, PermissionError):
                pass  # it is about to be reaped, or another user's by now

    def tell(self, event: Event) -> None:
        try:
            os.write(self._events, event.encode())
        except OSError:
            self._launcher_lives = False


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # the one that listed the folder is closed already
