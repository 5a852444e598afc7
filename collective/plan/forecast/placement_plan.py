"""Defines what `strategy.plan(devices=…)` returns: the planner's answer for a graph's tables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state
from collective.plan import graph_workload, job_machines
from collective.plan.forecast import data, picture, text
from collective.plan.graph_workload import GraphWorkload
from collective.plan.known_runs import KnownRuns
from collective.plan.plan import Plan
from collective.planner import published, search, tables_file
from collective.planner.search import Forecast
from collective.planner.step_model import StepModel
from collective.planner.workload import Placement

HEAD = """Tables of a training step, for `collective plan --tables`.
A comment on each table says where its numbers come from."""


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """Says where the rows of a graph's tables are best on some machines, and predicts a step.

    `str(plan)` is what `collective plan` prints.

    Attributes:
        forecast: what was chosen: `step_seconds`, memory and the choice for each table are there.
        described: the graph's training step, and where its numbers come from.
    """

    forecast: Forecast
    described: GraphWorkload

    @property
    def placements(self) -> Mapping[str, Placement]:
        """The best placement of each table by its name: 'rows', 'replicated', or 'whole:K' if rank
        K is to have all rows."""
        return self.forecast.placements

    @property
    def step_ms(self) -> float:
        """The predicted milliseconds of a step."""
        return 1e3 * self.forecast.parts.seconds

    def to_text(self, full: bool = False) -> str:
        """Returns the plan as text.

        Args:
            full: lists every table; otherwise those that take most memory.
        """
        return "\n".join(text.lines_of(self.forecast, full, self.described.sources))

    def to_dict(self) -> dict[str, Any]:
        """Returns what `collective plan --json` prints for these machines, and the sources."""
        sources = [source._asdict() for source in self.described.sources]
        return {**data.values_of(self.forecast), "workload": sources}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_svg(self) -> str:
        """Returns a picture of the memory of ranks, as the text of an SVG file."""
        return picture.svg(self.forecast)

    def save_tables(self, path: str | os.PathLike[str]) -> None:
        """Writes the tables to a file, which `collective plan --tables` reads.

        Call it on one rank. A file that is there is replaced at once, or not at all.

        Args:
            path: the file, YAML.

        Raises:
            OSError: it can't be written.
        """
        write_tables(path, self.described)

    def __str__(self) -> str:
        return self.to_text()


def write_tables(path: str | os.PathLike[str], described: GraphWorkload) -> None:
    """Writes a file of tables.

    Args:
        path: the file.
        described: the tables.

    Raises:
        OSError: it can't be written.
    """
    content = tables_file.text_of(described.workload, HEAD, described.remarks)
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(partial, path)


def with_prediction(plan: Plan, graph: tf.Graph) -> Plan:
    """Returns a plan that also has the predicted time of a step next to the measured one.

    Without a profile it is the same plan.

    Args:
        plan: of the graph.
        graph: the graph.
    """
    measured = graph_state.of(graph, KnownRuns).measured
    if measured is None or not plan.tables:
        return plan
    placements = {table.name: table.placement for table in plan.tables}
    machines = job_machines.of_job()
    step = StepModel(graph_workload.of_graph(graph).workload, machines).step(placements)
    steps = f"steps {measured.first} to {measured.last}"
    note = (
        f"predicts {text.milliseconds(step.seconds)} ms a step for {machines.name}; measured: "
        f"{text.milliseconds(measured.ms / 1e3)} ms ({steps})"
    )
    return dataclasses.replace(plan, notes={**plan.notes, "planner": note})


def plan_for(
    graph: tf.Graph,
    devices: str,
    hosts: int | None = None,
    batch: int | str | None = None,
    session: tf.Session | None = None,
) -> PlacementPlan:
    """Plans a graph's tables for other machines (see `CollectiveStrategy.plan`)."""
    if devices == job_machines.THIS_JOB:
        if hosts is not None:
            raise ValueError(
                f"plan(hosts={hosts}): the hosts of {devices!r} are known. Leave it out."
            )
        machines = job_machines.measured()
    else:
        machines = published.cluster(devices, hosts)
    described = graph_workload.of_graph(graph, session)
    if batch is not None:
        described = described.of_batch(batch)
    return PlacementPlan(search.forecast(described.workload, machines), described)
