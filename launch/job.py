"""One job from start to end: an event loop over the keeper's events, the ranks' pipes, signals and
deadlines.

    running ──a rank fails──▶ settling ──it is known who is to blame──▶ stopping ──"done"──▶ over
       │                                                                 ▲                    ▲
       ├──INT, TERM, HUP, QUIT; nobody reads our output; a stall─────────┘                    │
       └──"done": every rank has left with 0──────────────────────────────────────────────────┘

"done" is the keeper's word that nothing is left. Each state has an end that doesn't depend on the
ranks' good will: settling takes SETTLING seconds at most, stopping ends with KILL after the grace,
and if even then no "done" comes, the launcher kills the keeper and all that is left by itself.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time

from . import processes, stall
from .board import OwnBoard
from .console import Console, open_logs
from .fate import SETTLING, Exit, Fate
from .keeper import PATIENCE, Child, Event, Keeper
from .plan import Plan
from .rendezvous import Rendezvous
from .stopping import Stopping
from .usage import UsageError
from .wakeup import ASKING, Wakeup

# For how long a launcher that was told to stop waits for a reader of its last output.
_LAST_WRITE = 2.0


class Job:
    """A planned job that runs, once."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._fate = Fate(plan.size)
        self._stopping = Stopping(plan.grace)
        self._settle_until = math.inf
        self._exit_code: int | None = None  # of an end that wasn't a rank's failure
        self._report = ""  # on that end
        self._over = False

    def run(self) -> int:
        """Runs it and returns the launcher's exit code.

        Raises:
          UsageError: the logs can't be written, or there are too many ranks for this system.
        """
        self._start()
        while not self._over:
            self._wait(self._next_time())
            self._act(time.monotonic())
        return self._finish()

    def _start(self) -> None:
        logs = open_logs(self._plan)
        # Who exec'ed us from a shell may have had children, which are ours now but not of this job.
        self._strangers = frozenset(processes.children().get(os.getpid(), ()))
        self._wakeup = Wakeup()
        rendezvous = Rendezvous(self._plan.size)
        try:
            self._board = OwnBoard(self._plan.size)
            pipes = [(os.pipe(), os.pipe()) for _ in range(self._plan.size)]
        except OSError as error:
            raise UsageError(
                f"-np {self._plan.size} needs four pipe ends a rank: {error.strerror}"
            ) from None
        environments = [
            self._plan.environment(rank, str(rendezvous.port), self._board.place)
            for rank in range(self._plan.size)
        ]
        self._keeper = Keeper(
            [
                Child(self._plan.command, environments[rank], stdout[1], stderr[1])
                for rank, (stdout, stderr) in enumerate(pipes)
            ],
            self._plan.grace,
        )
        self._watch = stall.Watch(self._plan.size, self._plan.stall_timeout, time.monotonic())
        for pair in pipes:
            for _, end in pair:
                os.close(end)
        # Threads may start only now that the keeper is forked.
        rendezvous.serve()
        self._console = Console(
            self._plan, [[end for end, _ in pair] for pair in pipes], logs, self._wakeup.wake
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.descriptor, selectors.EVENT_READ, self._on_wakeup)
        self._selector.register(self._keeper.events, selectors.EVENT_READ, self._on_keeper)

    def _next_time(self) -> float:
        stop = self._stopping
        return min(
            self._settle_until,
            stop.next_time(),
            stop.gave_up_at(2 * PATIENCE),
            self._console.next_flush(),
            math.inf if self._ending else self._watch.next_look(),
        )

    @property
    def _ending(self) -> bool:
        return self._stopping.begun or self._fate.cause() is not None

    def _wait(self, until: float) -> None:
        """Handles what happens next, or nothing if nothing does until then."""
        self._console.watch(self._selector)
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _act(self, now: float) -> None:
        """Does what is due."""
        self._console.flush_due(now)
        if now >= self._watch.next_look() and not self._ending:
            self._look(now)
        if now >= self._settle_until:
            self._settle_until = math.inf
            self._stopping.begin(signal.SIGTERM, now)
        for signum in self._stopping.due(now):
            if signum == signal.SIGKILL and self._fate.living:
                self._say(f"{self._fate.living_text()} still there: KILL")
            self._keeper.signal(signum)
        if now >= self._stopping.gave_up_at(2 * PATIENCE):
            self._do_without_keeper("doesn't answer")

    def _look(self, now: float) -> None:
        """Sees whether the ranks go on, and ends a job that stands still."""
        gone = {ended.rank: ended.manner() for ended in self._fate.exits}
        found = self._watch.look(
            now, stall.posted(self._board, self._plan.size), gone, self._console.congested
        )
        if found is None:
            return
        report = found.block(self._plan.stall_timeout)
        if not found.over:
            self._console.say(report)
            return
        self._report = report  # comes last, as that on a root cause does
        self._exit_code = stall.EXIT_CODE
        self._say(
            f"no progress for {found.waited:.0f} s, {found.who()}: stopping "
            f"{self._fate.living_text()}"
        )
        self._stopping.begin(signal.SIGTERM, now)

    # What the selector calls.

    def _on_wakeup(self) -> None:
        for signum in self._wakeup.signals():
            if signum in ASKING:
                self._on_signal(signum)
            elif signum == signal.SIGCHLD:
                processes.reap()  # the keeper, or orphans after it
        broken = self._console.broken
        if broken and not self._stopping.begun:
            # As a program that writes to a pipe itself: SIGPIPE ends it.
            self._exit_code = 128 + signal.SIGPIPE
            self._say(f"the output can't be written ({broken.strerror}): the job ends")
            self._stopping.begin(signal.SIGTERM, time.monotonic())

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._exit_code is None and self._fate.cause() is None:
            self._exit_code = 128 + signum
        self._settle_until = math.inf
        self._stopping.ask(signum, time.monotonic())
        self._say(f"{signum.name}: stopping {self._fate.living_text()}")

    def _on_keeper(self) -> None:
        events = self._keeper.read()
        if events is None:
            self._do_without_keeper("has died")
            return
        for event in events:
            if event.kind == "exited":
                self._on_exit(event)
            elif event.kind == "undead":
                self._say(f"process {event.pid} can't be killed")
            elif event.kind == "broken":
                self._say(f"the keeper failed: {event.text}")
            elif event.kind == "done":
                self._over = True

    def _on_exit(self, event: Event) -> None:
        words, source = self._console.last_words(event.rank)
        asked = self._stopping.begun
        self._fate.add(Exit(event.rank, event.pid, event.code, event.at, asked, words, source))
        if asked or self._fate.cause() is None:
            return
        now = time.monotonic()
        self._settle_until = (
            now if self._fate.settled() else min(self._settle_until, now + SETTLING)
        )

    def _do_without_keeper(self, how: str) -> None:
        """Ends everything without the keeper's help: its orphans are ours."""
        self._over = True
        try:
            os.kill(self._keeper.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        left = processes.kill_descendants(PATIENCE, self._strangers)
        self._say(f"the launcher's helper process {self._keeper.pid} {how}: the job was killed")
        for pid in left:
            self._say(f"process {pid} can't be killed")
        if self._exit_code is None and self._fate.cause() is None:
            self._exit_code = 128 + signal.SIGKILL

    # The end.

    def _finish(self) -> int:
        self._console.end(self._selector)
        cause = self._fate.cause()
        code = self._exit_code
        if self._report:
            self._console.say(self._report)
        if code is None:
            code = cause.shell_code if cause else 0
            if cause:
                self._console.say(self._fate.block())
        self._write_out()
        return code

    def _write_out(self) -> None:
        """Waits for the readers of our output. They may take their time, unless we are told to
        stop.
        """
        deadline = math.inf if self._exit_code is None else time.monotonic() + _LAST_WRITE
        while not self._console.written and time.monotonic() < deadline:
            timeout = None if deadline == math.inf else deadline - time.monotonic()
            self._selector.select(timeout)
            if any(signum in ASKING for signum in self._wakeup.signals()):
                return

    def _say(self, text: str) -> None:
        self._console.say(f"collective.launch: {text}")
