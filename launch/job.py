"""A job: an attempt, and another one after each failure that a restart may fix.

attempt ──ends well, is stopped, is preempted──────────────────▶ exit code
   ▲  └──fails──▶ policy ──no restart──────────────────────────▶ exit code
   │                └──restart──▶ pause ──told to stop─────────▶ 128 + signal
   └───────────────────────────────┘
"""

from __future__ import annotations

import sys

from collective.job.errors import UsageError
from collective.launch.attempt import Attempt
from collective.launch.other_hosts.remote_hosts import LOST, RemoteHosts
from collective.launch.planning.devices import driver_gpus, visible_gpus
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes.loader_ports import LoaderPorts
from collective.launch.processes.signals import SignalPipe, stop_signals
from collective.launch.restarts import (
    HostsLeftOut,
    RestartPolicy,
    gone,
    stopped_before_restart,
)


class Job:
    """Runs a planned job, with its restarts."""

    def __init__(
        self,
        plan: LaunchPlan,
        signals: SignalPipe | None = None,
        remote: RemoteHosts | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            plan: the job's plan.
            signals: the launcher's signals, if it has used them to wait for other hosts.
            remote: the other hosts, if there are any.
        """
        self._plan = plan
        self._signals = signals or SignalPipe(stop_signals(plan.preempt_signal))
        self._remote = remote or RemoteHosts({}, plan)

    def run(self) -> int:
        """Runs the job and returns the launcher's exit code.

        Raises:
            UsageError: the logs can't be written, or there are too many ranks for this system.
            HostsLeftOut: it starts again on fewer hosts.
        """
        try:
            code = self._run_attempts()
        except HostsLeftOut:
            self._remote.finish(1)
            raise
        except UsageError as error:
            self._remote.say(f"collective launch: {error}")
            self._remote.finish(2)
            raise
        self._remote.finish(code)
        return code

    def _run_attempts(self) -> int:
        ports = LoaderPorts(self._plan.loaders)
        try:
            return self._run_with(ports.plan_with_them(self._plan))
        finally:
            ports.close()

    def _run_with(self, plan: LaunchPlan) -> int:
        signals, remote = self._signals, self._remote
        policy = RestartPolicy(lambda: visible_gpus(plan.launcher_environment, driver_gpus()))
        while True:
            attempt = Attempt(plan, signals, policy, remote)
            code = attempt.run()
            restart = attempt.restart
            if attempt.left_out:
                raise HostsLeftOut(attempt.left_out, plan.restart_count + 1)
            if restart is None:
                return code
            stop = remote.pause(signals, restart.pause)
            if remote.lost:
                words = f"collective launch: no restart after all: {gone(remote.lost)}"
                print(words, file=sys.stderr, flush=True)
                remote.say(words)
                return LOST
            if stop is not None:
                return stopped_before_restart(stop, plan)
            plan = restart.plan
