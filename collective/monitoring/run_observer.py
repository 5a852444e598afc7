"""Observes training runs: prints the plan, measures where time goes, checks replicas and input.

See `CollectiveStrategy.scope`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

from collective.coordination import test_mode
from collective.coordination.prepared_run import PreparedRun
from collective.monitoring import (
    consistency_check,
    dealing_check,
    eviction_schedule,
    input_check,
    step_meter,
    storage_limit,
)
from collective.monitoring.step_meter import StepMeter
from collective.options import ScopeOptions
from collective.options.scopes import PlanOutput
from collective.plan import builder
from collective.profiling import profiler
from collective.profiling.profiler import Profiler
from collective.profiling.run_tracer import Original
from collective.startup import STARTUP
from collective.tables.rows import rows_in_file


@dataclasses.dataclass(frozen=True)
class RunObserver:
    """Says what is observed of the runs of sessions.

    Attributes:
        plan: of scope(plan=…), how the plan is printed.
        profiler: measures training runs for scope(profile=…), if that is given.
        meter: measures some for the metrics of the job, if it serves any.
        check: after so many training runs the ranks compare replicated variables; 0 for never.
        compared_options: options that ranks compare before they train together.
    """

    plan: PlanOutput
    profiler: Profiler | None
    meter: StepMeter | None
    check: int
    compared_options: tuple[str, ...]

    @property
    def measures(self) -> bool:
        return self.profiler is not None or self.meter is not None

    def __call__(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
    ) -> Any:
        """Carries out a run.

        Args:
            original: `Session.run`.
            session: the session.
            run: the run.
            carry_out: carries it out by `original`, or by what the profiler puts in its place.
        """
        if tables := rows_in_file.tables_of(session.graph):
            with storage_limit.between_runs(session, tables):
                return self._observe(original, session, run, carry_out)
        return self._observe(original, session, run, carry_out)

    def _observe(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
    ) -> Any:
        if not run.footprint.is_step:
            return carry_out(original)
        if STARTUP.follows(session.graph):
            with STARTUP.doing(session.graph, "the first training step"):
                out = self._train(original, session, run, carry_out)
            STARTUP.over(session.graph)
            return out
        return self._train(original, session, run, carry_out)

    def _train(
        self,
        original: Original,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
    ) -> Any:
        builder.announce(session, run.footprint, self.plan)
        carry_out = eviction_schedule.with_eviction(
            session, input_check.watched(session, run, carry_out)
        )
        if self.meter is not None:
            carry_out = functools.partial(self._metered, self.meter, session, run, carry_out)
        if self.profiler is None:
            out = carry_out(original)
        else:
            out = self.profiler.watch(original, session, run, carry_out)
        dealing_check.after_training(session)
        if self.check:
            consistency_check.after_training(session, self.check)
        return out

    @staticmethod
    def _metered(
        meter: StepMeter,
        session: Any,
        run: PreparedRun,
        carry_out: Callable[[Original], Any],
        original: Original,
    ) -> Any:
        return meter.watch(original, session, run, carry_out)


def of_options(options: ScopeOptions) -> RunObserver:
    """Returns the observer that the options of scope() ask for."""
    every = options.runs_between_checks
    compared = []
    if every:
        compared.append(f"scope(check={every})")
    meter = step_meter.of_process()
    if meter is not None:
        compared.append("metrics (--metrics-port)")
    if options.deterministic:
        compared.append("scope(deterministic=True)")
    if test_mode.is_on():
        compared.append("--test-mode")
    measured = profiler.of_options(options), meter
    return RunObserver(options.plan, *measured, every, tuple(compared))
