"""One attempt at a job, from start to end: an event loop over pipes, signals and deadlines.

    running ──a rank fails──▶ settling ──the root cause is certain──▶ stopping ──"done"──▶ over
       │                                                                  ▲                  ▲
       ├──INT, TERM, HUP, QUIT; nobody reads the output; a stall──────────┘                  │
       └──"done": every rank has left with 0─────────────────────────────────────────────────┘

"done" means that the supervisor, and every other host, has said that no process is left. Each
state ends even if the ranks don't cooperate: settling takes CAUSE_DELAY seconds at most; stopping
ends with KILL after the grace period. If "done" doesn't come even then, the launcher kills the
supervisor and everything that is left, and treats hosts that say nothing as lost. No thread is left
after that, so that another attempt can be made.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from dataclasses import replace

from collective.job import schedulers
from collective.job.key_value_store import Entry
from collective.job.milestones import Milestones
from collective.job.progress_board import ProgressRecord
from collective.launch.command_line.rank_command import is_interpreter
from collective.launch.connection.channel import Channel
from collective.launch.other_hosts.remote_hosts import RemoteHosts
from collective.launch.output.outcome import CAUSE_DELAY, JobOutcome, RankExit
from collective.launch.output.rank_output import Console
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes import process_tree
from collective.launch.processes.local_ranks import LocalRanks
from collective.launch.processes.shutdown import ShutdownSchedule
from collective.launch.processes.signals import SignalPipe
from collective.launch.processes.supervisor import KILL_PATIENCE, SupervisorEvent
from collective.launch.progress import rank_stacks, stall_detector
from collective.launch.progress.preemption import departure
from collective.launch.progress.stall_detector import StallDetector
from collective.launch.restarts import Restart, RestartPolicy, failure_of, stopped_before_restart

# How many seconds a launcher that was told to stop waits for a reader of its last output.
_LAST_OUTPUT_TIMEOUT = 2.0
# How many seconds after KILL it waits for the supervisor to say that nothing is left.
_SUPERVISOR_PATIENCE = 2 * KILL_PATIENCE
_MOST_STACKS = 8  # of missing ranks in a report; each may take a second
_UNABLE = 2  # the exit code if a host can't start its ranks, as for bad usage


class Attempt:
    """Runs a planned job once.

    Attributes:
        restart: how to continue after a failure; None if the job ends with this attempt.
        left_out: hosts without which it starts again; none if it doesn't.
    """

    def __init__(
        self, plan: LaunchPlan, signals: SignalPipe, policy: RestartPolicy, remote: RemoteHosts
    ) -> None:
        """Starts nothing yet.

        Args:
            plan: the job's plan.
            signals: the launcher's signals.
            policy: decides about restarts.
            remote: the job's other hosts.
        """
        self.restart: Restart | None = None
        self.left_out: frozenset[str] = frozenset()
        self._plan = plan
        self._signals = signals
        self._policy = policy
        self._remote = remote
        self._outcome = JobOutcome(plan.size)
        self._is_under_slurm = schedulers.ends_jobs_itself(plan.launcher_environment)
        self._shutdown = ShutdownSchedule(plan.grace, plan.time_to_save, self._is_under_slurm)
        self._settle_until = math.inf
        self._exit_code: int | None = None  # of an end that no rank caused
        self._stall_report = ""
        self._local_done = False

    def run(self) -> int:
        """Runs the attempt and returns the launcher's exit code.

        Raises:
            UsageError: the logs can't be written, or there are too many ranks for this system.
        """
        self._start()
        while not (self._local_done and self._remote.done):
            self._wait(self._next_time())
            self._do_what_is_due(time.monotonic())
        code = self._finish()
        if self.restart is not None or self.left_out:
            self._close()
        return code

    def _start(self) -> None:
        plan = self._plan
        publish = self._remote.publish if self._remote else None
        self._local = LocalRanks(plan, self._signals, publish)
        self._milestones = self._local.milestones
        self._local_done = self._local.supervisor is None
        self._stall_detector = StallDetector(
            plan.size, plan.stall_timeout, time.monotonic(), plan.on_gpus
        )
        self._console = Console(
            plan, self._local.pipes, self._local.logs, self._signals.wake, self._local.loaders
        )
        words = announcement(plan)
        if words:
            self._say(words)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._on_wakeup)
        if self._local.supervisor is not None:
            events = self._local.supervisor.events
            self._selector.register(events, selectors.EVENT_READ, self._on_events)
        self._remote.start(plan, self, self._selector, self._signals.wake)

    def _next_time(self) -> float:
        return min(
            self._settle_until,
            self._shutdown.next_time(),
            self._shutdown.deadline(_SUPERVISOR_PATIENCE),
            self._console.next_flush(),
            math.inf if self._ending else self._stall_detector.next_check(),
            self._remote.next_time(),
        )

    @property
    def _ending(self) -> bool:
        return self._shutdown.begun or self._outcome.root_cause() is not None

    def _wait(self, until: float) -> None:
        """Handles the next events, or none if none arrive before `until`."""
        self._console.watch(self._selector)
        self._remote.watch()
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _do_what_is_due(self, now: float) -> None:
        self._console.flush_due(now)
        self._remote.look(now, self._console.congested)
        if now >= self._stall_detector.next_check() and not self._ending:
            self._check_for_stall(now)
        if now >= self._settle_until:
            self._settle_until = math.inf
            if self._outcome.is_preempted:
                self._shutdown.ask_to_save(signal.SIGTERM, now)
            else:
                self._end_ranks(now)
        for signum in self._shutdown.take_due(now):
            is_over = self._local_done and self._remote.done
            if signum == signal.SIGKILL and self._outcome.any_running and not is_over:
                self._say(f"{self._outcome.running_text()} still there: KILL")
            # Processes that a rank has started work for it until it has saved.
            to_groups = not self._asked_to_save(signum)
            self._local.send_signal(signum, to_groups)
            self._remote.send_signal(signum, to_groups)
        if now >= self._shutdown.deadline(_SUPERVISOR_PATIENCE):
            if not self._local_done:
                self._end_without_supervisor("doesn't answer")
            self._remote.give_up("its ranks don't end")

    def _asked_to_save(self, signum: signal.Signals) -> bool:
        """Tells whether a signal asks the ranks to save; then it goes only to the ranks."""
        asks = signum in (signal.SIGINT, signal.SIGTERM) and not self._milestones.is_ending
        return asks and is_interpreter(self._plan.command[0])

    def _end_ranks(self, now: float) -> None:
        """Ends the ranks without a save, which couldn't complete: some ranks are missing."""
        self._mark_ending()
        self._shutdown.begin(signal.SIGTERM, now)

    def _mark_ending(self) -> None:
        self._milestones.mark_ending()
        self._remote.mark_ending()

    def _check_for_stall(self, now: float) -> None:
        """Warns about a stalled job, and stops it when its time is up."""
        stall = self._stall_detector.check(
            now,
            self._records(),
            {rank_exit.rank: rank_exit.manner() for rank_exit in self._outcome.exits},
            self._console.congested,
        )
        if stall is None:
            return
        stacks = {
            rank: rank_stacks.stack_of(rank)
            for rank in stall.missing[:_MOST_STACKS]
            if rank in self._local.ranks and rank not in stall.exited
        }
        stall = replace(stall, stacks=stacks)
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
        self._end_ranks(now)

    def _records(self) -> list[ProgressRecord | None]:
        records = stall_detector.read_records(self._local.board, self._plan.size)
        return [self._remote.records.get(rank, record) for rank, record in enumerate(records)]

    # The selector's callbacks, and the messages of other hosts.

    def _on_wakeup(self) -> None:
        for signum in self._signals.take():
            if signum in self._signals.stop_signals:
                self.on_stop_signal(signum)
            elif signum == signal.SIGCHLD:
                process_tree.reap()  # the supervisor, or orphans after it
        error = self._console.write_error
        if error and not self._shutdown.begun:
            # As for a program that writes to a pipe itself: SIGPIPE ends it.
            self._exit_code = 128 + signal.SIGPIPE
            self._say(f"the output can't be written ({error.strerror}): the job ends")
            self._end_ranks(time.monotonic())

    def on_stop_signal(self, signum: signal.Signals, host: str = "") -> None:
        name = signum.name
        if signum == self._plan.preempt_signal:
            signum = signal.SIGTERM
        if self._exit_code is None and self._outcome.root_cause() is None:
            self._exit_code = 128 + signum
        self._settle_until = math.inf
        self._console.expect_interrupts()
        now = time.monotonic()
        if self._outcome.root_cause() is not None and not self._outcome.is_preempted:
            self._end_ranks(now)
        elif signum not in (signal.SIGINT, signal.SIGTERM):
            self._mark_ending()
        may_save = not (self._shutdown.begun or self._milestones.is_ending)
        self._shutdown.request(signum, now, host)
        time_to_save = ""
        if may_save and self._plan.time_to_save:
            time_to_save = (
                f"; a rank that trains may save, for {self._plan.time_to_save:g} s at most; "
                f"{'INT' if self._is_under_slurm else 'a second signal'} ends all at once"
            )
        self._say(f"{name}: stopping {self._outcome.running_text()}{time_to_save}")

    def _on_events(self) -> None:
        assert self._local.supervisor is not None
        events = self._local.supervisor.read_events()
        if events is None:
            self._end_without_supervisor("has died")
            return
        for event in events:
            if event.kind == "exited":
                self._on_local_exit(event)
            elif event.kind == "loader":
                self._say(_end_of_loader(event))
            elif event.kind == "undead":
                self._say(f"process {event.pid} can't be killed")
            elif event.kind == "broken":
                self._say(f"the launcher's supervisor process failed: {event.text}")
            elif event.kind == "done":
                self._end_local()

    def _end_local(self) -> None:
        """Stops waiting for events of the supervisor."""
        self._local_done = True
        assert self._local.supervisor is not None
        self._selector.unregister(self._local.supervisor.events)

    def _on_local_exit(self, event: SupervisorEvent) -> None:
        rank = self._local.rank_of(event)
        words, source = self._console.last_lines(rank)
        host = self._plan.placements[rank].host if self._plan.hosts else ""
        self.on_rank_exit(
            RankExit(
                rank,
                event.pid,
                event.code,
                event.time,
                last_lines=words,
                last_lines_from=source,
                host=host,
            )
        )

    def on_rank_exit(self, rank_exit: RankExit) -> None:
        requested = self._shutdown.begun
        self._outcome.add(replace(rank_exit, requested=requested))
        cause = self._outcome.root_cause()
        if cause is not None and not cause.is_victim:
            self._console.expect_lost_peers()
        if requested or cause is None:
            return
        now = time.monotonic()
        if self._outcome.cause_is_certain() and not self._outcome.is_preempted:
            self._settle_until = now
        else:
            self._settle_until = min(self._settle_until, now + CAUSE_DELAY)

    def on_output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._console.take(rank, is_error, data)

    def on_milestones(self, rank: int, milestones: Milestones) -> None:
        self._milestones.post(rank, milestones)

    def on_trouble(self, text: str) -> None:
        self._say(text)

    def apply(self, entry: Entry) -> None:
        self._local.rendezvous.apply(entry)

    def on_host_lost(self, name: str, ranks: range, reason: str) -> None:
        ended = {rank_exit.rank for rank_exit in self._outcome.exits}
        running = [rank for rank in ranks if rank not in ended]
        self._say(f"host {name} was lost: {reason}")
        for rank in running:
            self.on_rank_exit(
                RankExit(rank, 0, -signal.SIGKILL, time.time(), host=name, lost_by=reason)
            )

    def on_host_unable(self, name: str, ranks: range, reason: str) -> None:
        """Ends the job because this host can't start its ranks: a restart wouldn't help."""
        self._report(f"collective launch: host {name}: {reason}")
        now = time.time()
        for rank in ranks:
            self._outcome.add(RankExit(rank, 0, _UNABLE, now, requested=True, host=name))
        if self._exit_code is None and self._outcome.root_cause() is None:
            self._exit_code = _UNABLE
        self._end_ranks(time.monotonic())

    def _end_without_supervisor(self, reason: str) -> None:
        """Kills the supervisor and everything else: the launcher has adopted its orphans."""
        self._end_local()
        assert self._local.supervisor is not None
        survivors = self._local.kill()
        self._say(
            f"the launcher's supervisor process {self._local.supervisor.pid} {reason}: "
            "the job was killed"
        )
        self._shutdown.begin(signal.SIGKILL, time.monotonic())
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
            self._report(self._stall_report)
        cause = self._outcome.root_cause()
        code = self._exit_code
        if code is None:
            code = cause.shell_code if cause else 0
            if cause and not self._outcome.left_preempted:
                self._report(self._outcome.failure_report())
        self._say_what_is_next(code)
        stop = self._write_out()
        if stop is not None and (self.restart is not None or self.left_out):
            self.restart, self.left_out = None, frozenset()
            return stopped_before_restart(stop, self._plan)
        return code

    def _say_what_is_next(self, code: int) -> None:
        """Says whether the job continues, and from where, unless it is done."""
        milestones = [self._milestones.read(rank) for rank in range(self._plan.size)]
        if self._outcome.is_preempted or self._shutdown.was_requested:
            words = departure(milestones, self._outcome.left_preempted)
            if words:
                self._report(f"collective launch: {words}")
        elif code and (self._exit_code is None or self._stall_report):
            matches = self._console.patterns.matches
            failure = failure_of(self._outcome, milestones, self._remote.lost, matches)
            decision = self._policy.decide(failure, self._plan)
            self.restart, self.left_out = decision.restart, decision.left_out
            if decision.text:
                self._report(decision.text)

    def _close(self) -> None:
        """Ends the threads, and closes what belongs to this attempt."""
        if self._console.written:
            self._console.close()
        self._selector.close()
        self._local.close()
        self._local.wait_for_threads()

    def _write_out(self) -> signal.Signals | None:
        """Waits for the readers of the output, for as long as they take unless a signal says stop.

        Returns:
            The signal, or None.
        """
        deadline = math.inf
        if self._exit_code is not None:
            deadline = time.monotonic() + _LAST_OUTPUT_TIMEOUT
        while not self._console.written and time.monotonic() < deadline:
            until = min(deadline, self._remote.next_time())
            timeout = None if until == math.inf else max(0.0, until - time.monotonic())
            self._remote.watch()
            for key, _ in self._selector.select(timeout):
                if isinstance(key.fileobj, Channel):
                    key.data()
            self._remote.look(time.monotonic(), congested=True)
            for signum in self._signals.take():
                if signum in self._signals.stop_signals:
                    return signum
        return None

    def _report(self, text: str) -> None:
        """Says on every host how the attempt went."""
        self._console.say(text)
        self._remote.say(text)

    def _say(self, text: str) -> None:
        self._console.say(f"collective launch: {text}")


def _end_of_loader(event: SupervisorEvent) -> str:
    """Returns the line about a loader that ended while ranks work."""
    next_start = f"it starts again in {event.text} s" if event.text else "it isn't started again"
    manner = RankExit(event.rank, event.pid, event.code, event.time).manner()
    return f"loader {event.rank} ended with {manner}: {next_start}"


# With more ranks per core than this, the user should know why the job is slow.
_MOST_RANKS_A_CORE = 2


def announcement(plan: LaunchPlan) -> str:
    """Returns the line that announces the start; "" if nobody waits for one.

    A terminal gets the line because somebody watches it. A file gets it only as a warning: the
    launcher writes nothing of its own to the file of a job that goes well.
    """
    if plan.size == 1 or not plan.shown_ranks:
        return ""
    if len(plan.hosts) > 1:
        text = f"starting {plan.size} ranks on {len(plan.hosts)} hosts"
        return text if plan.terminal else ""
    on_gpus = all(device is not None for device in plan.devices)
    unit, count = ("GPU", plan.size) if on_gpus else ("core", plan.cores)
    text = f"starting {plan.size} ranks on {count} {unit}{'' if count == 1 else 's'}"
    if not on_gpus and plan.size > _MOST_RANKS_A_CORE * plan.cores:
        return f"{text}: they share them, and a step takes longer than with fewer ranks"
    return text if plan.terminal else ""
