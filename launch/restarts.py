"""Decides whether a failed job starts again, when, and on how many ranks.

A restart resumes from the latest checkpoint, which the program itself restores. It doesn't help if
the failure will repeat:

    a host is gone                                               no restart
    the program can't be started, or refuses its arguments      no restart
    the same step as at the failure before, nothing saved since  no restart
    a rank has written a line of --no-restart-after              no restart
    as many restarts as --max-restarts allows                    no restart
    fewer GPUs than --min-np                                     no restart
    else                                                         after a pause of 1, 2, 4 … s

An elastic job continues without a CPU rank that died, if --min-np allows it. GPUs are counted
again, and a GPU whose rank was the root cause twice in a row is left out. A host on which a rank
has written a line of --leave-out-host-after is left out, too, if the launcher starts the hosts.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from collective.job.milestones import Milestones
from collective.launch.output.log_patterns import Match
from collective.launch.output.outcome import JobOutcome
from collective.launch.planning.plan import LONGEST_PAUSE, LaunchPlan
from collective.launch.progress.preemption import newest

_NOT_STARTED = (126, 127)
_BAD_USAGE = 2
# Errors that mean a faulty program, if they come before it has trained.
_PROGRAM_ERRORS = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError")


@dataclass(frozen=True)
class Failure:
    """Describes how an attempt failed.

    Attributes:
        rank: the root cause; None if the job stalled.
        code: its exit code, as a shell reports it.
        error: the class of the error that it raised, "" if unknown.
        last_step: the global step that was completed last.
        checkpoint: the path of the newest checkpoint, "" if there is none.
        checkpoint_step: the global step of that checkpoint.
        has_trained: whether any rank has completed a step.
        lost_host: the host whose loss was the failure, "" for none.
        matches: lines that the options about restarts name.
    """

    rank: int | None
    code: int = 1
    error: str = ""
    last_step: int = 0
    checkpoint: str = ""
    checkpoint_step: int = 0
    has_trained: bool = False
    lost_host: str = ""
    matches: tuple[Match, ...] = ()


@dataclass(frozen=True)
class Restart:
    """Says how a job continues: with `plan`, after `pause` seconds."""

    plan: LaunchPlan
    pause: float


@dataclass(frozen=True)
class Decision:
    """Holds the restart (None for none), and the lines about it at the end of the report.

    Attributes:
        restart: how the same launchers continue.
        left_out: hosts without which the launchers start again; instead of `restart`.
        text: the lines.
    """

    restart: Restart | None = None
    text: str = ""
    left_out: frozenset[str] = frozenset()


class HostsLeftOut(Exception):
    """Ends a job that starts again on fewer hosts.

    Attributes:
        hosts: those that are left out.
        restart_count: of the next attempt.
    """

    def __init__(self, hosts: frozenset[str], restart_count: int):
        super().__init__(f"without {', '.join(sorted(hosts))}")
        self.hosts = hosts
        self.restart_count = restart_count


def failure_of(
    outcome: JobOutcome,
    milestones: Sequence[Milestones],
    lost_host: str = "",
    matches: Sequence[Match] = (),
) -> Failure:
    """Returns the facts on which a restart depends.

    Args:
        outcome: how the ranks ended.
        milestones: each rank's milestones.
        lost_host: a host that was lost, maybe after its ranks had already ended.
        matches: lines that the options about restarts name.
    """
    cause = outcome.root_cause()
    # The failed rank itself knows best how far it had come.
    of_cause = milestones[cause.rank] if cause else Milestones()
    best = max((each.last_step for each in milestones), default=0)
    checkpoint = newest(milestones)
    return Failure(
        rank=cause.rank if cause else None,
        code=cause.shell_code if cause else 1,
        error=cause.error.chain[-1].partition(":")[0] if cause and cause.error else "",
        last_step=of_cause.last_step if of_cause.pid else best,
        checkpoint=checkpoint.checkpoint,
        checkpoint_step=checkpoint.step,
        has_trained=any(each.steps for each in milestones),
        lost_host=next((end.host for end in outcome.exits if end.lost_by), lost_host),
        matches=tuple(matches),
    )


class RestartPolicy:
    """Decides after each attempt, and remembers the previous failure."""

    def __init__(self, visible_gpus: Callable[[], tuple[str, ...]]) -> None:
        """Begins without a previous failure.

        Args:
            visible_gpus: returns the GPUs that the job may use now.
        """
        self._visible_gpus = visible_gpus
        self._previous: Failure | None = None
        self._suspect: str | None = None  # the GPU of the previous root cause
        self._condemned: set[str] = set()

    def decide(self, failure: Failure, plan: LaunchPlan) -> Decision:
        """Decides how a job continues.

        Args:
            failure: how the attempt failed.
            plan: the attempt's plan.
        """
        if not plan.max_restarts:
            return Decision()
        previous, self._previous = self._previous, failure
        reason = _futility(failure, previous, plan)
        devices = plan.devices
        if not reason and plan.min_ranks:
            devices = self._devices_left(failure, plan)
            if len(devices) < plan.min_ranks:
                are = "GPU is" if len(devices) == 1 else "GPUs are"
                reason = f"{len(devices)} {are} left, and --min-np asks for {plan.min_ranks}"
        if reason:
            return Decision(text=f"  no restart: {reason}")
        count = plan.restart_count + 1
        blamed = {plan.placements[m.rank].host: m for m in failure.matches if m.leaves_out_host}
        if blamed:
            without = "; ".join(f"host {host}: {match}" for host, match in blamed.items())
            text = (
                f"  restart    {count} of {plan.max_restarts}, {_from(failure)}, without {without}"
            )
            return Decision(text=text, left_out=frozenset(blamed))
        pause = min(LONGEST_PAUSE, plan.restart_pause * 2 ** min(plan.restart_count, 30))
        shown = plan.shown_ranks & frozenset(range(len(devices)))
        next_plan = replace(plan, devices=devices, restart_count=count, shown_ranks=shown)
        size = f" on {len(devices)} ranks" if len(devices) != plan.size else ""
        text = f"  restart    {count} of {plan.max_restarts} in {pause:g} s{size}, {_from(failure)}"
        return Decision(Restart(next_plan, pause), text)

    def _devices_left(self, failure: Failure, plan: LaunchPlan) -> tuple[str | None, ...]:
        """Returns the devices of an elastic job's next attempt."""
        if plan.devices[0] is None:
            left = plan.size if failure.rank is None else plan.size - 1
            return (None,) * max(left, plan.min_ranks)
        blamed = None if failure.rank is None else plan.devices[failure.rank]
        if blamed is not None and blamed == self._suspect:
            self._condemned.add(blamed)
        self._suspect = blamed
        gpus = [gpu for gpu in self._visible_gpus() if gpu not in self._condemned]
        return tuple(gpus[: plan.most_ranks])


def stopped_before_restart(signum: signal.Signals, plan: LaunchPlan) -> int:
    """Says that a signal arrived before the restart; returns the launcher's exit code."""
    print(
        f"collective launch: {signum.name} before the restart: the job ends. Resume with the same "
        "command",
        file=sys.stderr,
        flush=True,
    )
    return 128 + (signal.SIGTERM if signum == plan.preempt_signal else signum)


def gone(host: str) -> str:
    """Says why there is no restart after the loss of a host."""
    return f"host {host} is gone: start the job again, on the hosts that are left"


def _futility(failure: Failure, previous: Failure | None, plan: LaunchPlan) -> str:
    """Returns why a restart wouldn't help; "" if it may."""
    if failure.lost_host:
        return gone(failure.lost_host)
    if failure.code in _NOT_STARTED:
        return "the program can't be started"
    if not failure.has_trained and failure.code == _BAD_USAGE:
        return f"exit code {_BAD_USAGE} before the first step is bad usage of the program"
    if not failure.has_trained and failure.error in _PROGRAM_ERRORS:
        return f"{failure.error} before the first step comes again"
    for match in failure.matches:
        if not match.leaves_out_host:
            return str(match)
    if plan.restart_count >= plan.max_restarts:
        return f"that was the last of --max-restarts {plan.max_restarts}"
    if (
        previous is not None
        and failure.last_step == previous.last_step
        and failure.checkpoint_step <= previous.checkpoint_step
    ):
        where = f"after step {failure.last_step}" if failure.last_step else "before the first step"
        return f"it has failed {where} twice in a row, and has saved nothing new in between"
    return _without_hosts(failure, plan)


def _without_hosts(failure: Failure, plan: LaunchPlan) -> str:
    """Returns why a job can't go on without the hosts that are to be left out; "" if it can."""
    matches = [match for match in failure.matches if match.leaves_out_host]
    blamed = {plan.placements[match.rank].host for match in matches}
    if not matches:
        return ""
    if not plan.hosts or len(blamed) == len(plan.hosts):
        return f"{matches[0]}, and there is no other host"
    if not plan.starts_hosts:
        return (
            f"{matches[0]}: start the job again without host {', '.join(sorted(blamed))}; a "
            "launcher that starts the hosts, by -H, does that itself"
        )
    return ""


def _from(failure: Failure) -> str:
    if failure.checkpoint:
        return f"from step {failure.checkpoint_step}, '{failure.checkpoint}'"
    return "from the beginning: no checkpoint is known"
