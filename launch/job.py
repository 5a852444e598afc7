"""A job: an attempt, and another one after each failure that restarts may help against.

attempt ──ends well, is stopped, is preempted──────────────────▶ exit code
   ▲  └──fails──▶ policy ──no restart──────────────────────────▶ exit code
   │                └──restart──▶ pause ──told to stop─────────▶ 128 + signal
   └───────────────────────────────┘
"""

from __future__ import annotations

from .attempt import Attempt
from .devices import driver_gpus, visible_gpus
from .plan import LaunchPlan
from .restarts import RestartPolicy, stopped_before_restart
from .signals import SignalPipe, stop_signals


class Job:
    """Runs a planned job, with its restarts."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan

    def run(self) -> int:
        """Runs it and returns the launcher's exit code.

        Raises:
          UsageError: the logs can't be written, or there are too many ranks for this system.
        """
        plan = self._plan
        signals = SignalPipe(stop_signals(plan.preempt_signal))
        policy = RestartPolicy(lambda: visible_gpus(plan.launcher_environment, driver_gpus()))
        while True:
            attempt = Attempt(plan, signals, policy)
            code = attempt.run()
            restart = attempt.restart
            if restart is None:
                return code
            stop = signals.wait(restart.pause)
            if stop is not None:
                return stopped_before_restart(stop, plan)
            plan = restart.plan
