"""A job from start to end: an event loop over events, pipes, signals and deadlines.

    running ──a rank fails──▶ settling ──the root cause is certain──▶ stopping ──"done"──▶ over
       │                                                                  ▲                  ▲
       ├──INT, TERM, HUP, QUIT; nobody reads the output; a stall──────────┘                  │
       └──"done": every rank has left with 0─────────────────────────────────────────────────┘

"done" is the supervisor's word that no process is left. Each state has an end that doesn't depend
on the ranks' good will: settling takes CAUSE_DELAY seconds at most, stopping ends with KILL after
the grace, and if even then no "done" comes, the launcher kills the supervisor and all that is left
by itself.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time

from . import process_tree, stall_detector
from .announcement import announcement
from .environment import rank_environment
from .errors import UsageError
from .logs import open_logs
from .outcome import CAUSE_DELAY, JobOutcome, RankExit
from .output import Console
from .plan import LaunchPlan
from .progress_board import LauncherBoard
from .rendezvous import Rendezvous
from .shutdown import ShutdownSchedule
from .signals import STOP_SIGNALS, SignalPipe
from .stall_detector import StallDetector
from .supervisor import KILL_PATIENCE, RankSpec, Supervisor, SupervisorEvent

# For how many seconds a launcher that was told to stop waits for a reader of its last output.
_LAST_OUTPUT_TIMEOUT = 2.0
# For how many seconds after KILL it waits for the supervisor's word that nothing is left.
_SUPERVISOR_PATIENCE = 2 * KILL_PATIENCE


class Job:
    """Runs a planned job, once."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._outcome = JobOutcome(plan.size)
        self._shutdown = ShutdownSchedule(plan.grace)
        self._settle_until = math.inf
        self._exit_code: int | None = None  # of an end that wasn't a rank's failure
        self._stall_report = ""
        self._over = False

    def run(self) -> int:
        """Runs it and returns the launcher's exit code.

        Raises:
          UsageError: the logs can't be written, or there are too many ranks for this system.
        """
        self._start()
        while not self._over:
            self._wait(self._next_time())
            self._do_what_is_due(time.monotonic())
        return self._finish()

    def _start(self) -> None:
        size = self._plan.size
        logs = open_logs(self._plan)
        # A shell that exec'ed the launcher may have had children: the launcher's now, but not of
        # this job.
        self._strangers = frozenset(process_tree.children_by_parent().get(os.getpid(), ()))
        self._signals = SignalPipe()
        rendezvous = Rendezvous(size)
        try:
            self._board = LauncherBoard(size)
            pipes = [(os.pipe(), os.pipe()) for _ in range(size)]
        except OSError as error:
            raise UsageError(
                f"-np {size} needs four pipe ends a rank: {error.strerror}; "
                "start fewer ranks, or allow more open files (ulimit -n)"
            ) from None
        specs = []
        for rank, (stdout, stderr) in enumerate(pipes):
            environment = rank_environment(
                self._plan,
                rank,
                rendezvous_port=str(rendezvous.port),
                board=self._board.path,
            )
            specs.append(RankSpec(self._plan.command, environment, stdout[1], stderr[1]))
        self._supervisor = Supervisor(specs, self._plan.grace)
        self._stall_detector = StallDetector(size, self._plan.stall_timeout, time.monotonic())
        for stdout, stderr in pipes:
            os.close(stdout[1])
            os.close(stderr[1])
        # Threads may start only now that the supervisor is forked.
        rendezvous.serve()
        self._console = Console(
            self._plan,
            [(stdout[0], stderr[0]) for stdout, stderr in pipes],
            logs,
            self._signals.wake,
        )
        words = announcement(self._plan)
        if words:
            self._say(words)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._on_wakeup)
        self._selector.register(self._supervisor.events, selectors.EVENT_READ, self._on_events)

    def _next_time(self) -> float:
        return min(
            self._settle_until,
            self._shutdown.next_time(),
            self._shutdown.deadline(_SUPERVISOR_PATIENCE),
            self._console.next_flush(),
            math.inf if self._ending else self._stall_detector.next_check(),
        )

    @property
    def _ending(self) -> bool:
        return self._shutdown.begun or self._outcome.root_cause() is not None

    def _wait(self, until: float) -> None:
        """Handles the next events, or none if none comes until then."""
        self._console.watch(self._selector)
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _do_what_is_due(self, now: float) -> None:
        self._console.flush_due(now)
        if now >= self._stall_detector.next_check() and not self._ending:
            self._check_for_stall(now)
        if now >= self._settle_until:
            self._settle_until = math.inf
            self._shutdown.begin(signal.SIGTERM, now)
        for signum in self._shutdown.take_due(now):
            if signum == signal.SIGKILL and self._outcome.any_running:
                self._say(f"{self._outcome.running_text()} still there: KILL")
            self._supervisor.send_signal(signum)
        if now >= self._shutdown.deadline(_SUPERVISOR_PATIENCE):
            self._end_without_supervisor("doesn't answer")

    def _check_for_stall(self, now: float) -> None:
        """Warns of a job that stands still, and in the end stops it."""
        stall = self._stall_detector.check(
            now,
            stall_detector.read_records(self._board, self._plan.size),
            {rank_exit.rank: rank_exit.manner() for rank_exit in self._outcome.exits},
            self._console.congested,
        )
        if stall is None:
            return
        report = stall.report(self._plan.stall_timeout)
        if not stall.expired:
            self._console.say(report)
            return
        self._stall_report = report  # comes last, as the report on a root cause does
        self._exit_code = stall_detector.EXIT_CODE
        self._say(
            f"no progress for {stall.waited:.0f} s, {stall.summary()}: "
            f"stopping {self._outcome.running_text()}"
        )
        self._shutdown.begin(signal.SIGTERM, now)

    # The selector's callbacks.

    def _on_wakeup(self) -> None:
        for signum in self._signals.take():
            if signum in STOP_SIGNALS:
                self._on_stop_signal(signum)
            elif signum == signal.SIGCHLD:
                process_tree.reap()  # the supervisor, or orphans after it
        error = self._console.write_error
        if error and not self._shutdown.begun:
            # As a program that writes to a pipe itself: SIGPIPE ends it.
            self._exit_code = 128 + signal.SIGPIPE
            self._say(f"the output can't be written ({error.strerror}): the job ends")
            self._shutdown.begin(signal.SIGTERM, time.monotonic())

    def _on_stop_signal(self, signum: signal.Signals) -> None:
        if self._exit_code is None and self._outcome.root_cause() is None:
            self._exit_code = 128 + signum
        self._settle_until = math.inf
        self._console.expect_interrupts()
        self._shutdown.request(signum, time.monotonic())
        self._say(f"{signum.name}: stopping {self._outcome.running_text()}")

    def _on_events(self) -> None:
        events = self._supervisor.read_events()
        if events is None:
            self._end_without_supervisor("has died")
            return
        for event in events:
            if event.kind == "exited":
                self._on_rank_exit(event)
            elif event.kind == "undead":
                self._say(f"process {event.pid} can't be killed")
            elif event.kind == "broken":
                self._say(f"the launcher's supervisor process failed: {event.text}")
            elif event.kind == "done":
                self._over = True

    def _on_rank_exit(self, event: SupervisorEvent) -> None:
        last_words, source = self._console.last_words(event.rank)
        requested = self._shutdown.begun
        self._outcome.add(
            RankExit(event.rank, event.pid, event.code, event.time, requested, last_words, source)
        )
        cause = self._outcome.root_cause()
        if cause is not None and not cause.is_victim:
            self._console.expect_lost_peers()
        if requested or cause is None:
            return
        now = time.monotonic()
        if self._outcome.cause_is_certain():
            self._settle_until = now
        else:
            self._settle_until = min(self._settle_until, now + CAUSE_DELAY)

    def _end_without_supervisor(self, reason: str) -> None:
        """Kills the supervisor and everything else: its orphans are the launcher's."""
        self._over = True
        try:
            os.kill(self._supervisor.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        survivors = process_tree.kill_descendants(KILL_PATIENCE, self._strangers)
        self._say(
            f"the launcher's supervisor process {self._supervisor.pid} {reason}: the job was killed"
        )
        for pid in survivors:
            self._say(f"process {pid} can't be killed")
        if self._exit_code is None and self._outcome.root_cause() is None:
            self._exit_code = 128 + signal.SIGKILL

    def _finish(self) -> int:
        self._console.end(self._selector)
        interruption = self._console.interruption()
        if interruption:
            self._say(interruption)
        losses = self._console.losses()
        if losses:
            self._say(losses)
        if self._stall_report:
            self._console.say(self._stall_report)
        code = self._exit_code
        if code is None:
            cause = self._outcome.root_cause()
            code = cause.shell_code if cause else 0
            if cause:
                self._console.say(self._outcome.failure_report())
        self._write_out()
        return code

    def _write_out(self) -> None:
        """Waits for the readers of the output, who may take their time unless a stop is asked."""
        deadline = math.inf
        if self._exit_code is not None:
            deadline = time.monotonic() + _LAST_OUTPUT_TIMEOUT
        while not self._console.written and time.monotonic() < deadline:
            timeout = None if deadline == math.inf else deadline - time.monotonic()
            self._selector.select(timeout)
            if any(signum in STOP_SIGNALS for signum in self._signals.take()):
                return

    def _say(self, text: str) -> None:
        self._console.say(f"collective.launch: {text}")
