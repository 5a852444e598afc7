"""Describes a training step of a graph for the planner: its tables, ids, batch and network.

What a profile has measured is taken from there, what the graph says from the graph; everything else
is assumed, and each number says which it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import graph_state
from collective.plan import step_work
from collective.plan.builder import build_plan
from collective.plan.data import TablePlan
from collective.plan.known_runs import KnownRuns, MeasuredSteps
from collective.planner.machines import Origin
from collective.planner.workload import OPTIMIZERS, TYPE_BYTES, TableWork, Workload
from collective.strategies import Lookup
from collective.tables import automatic_placement
from collective.tables.grouping import lookups_of
from collective.tables.table import is_replicated, is_replicated_table

ASSUMED_BATCH = 8192
ASSUMED_ROWS = 1_000_000  # of a dynamic table
# TensorFlow's names of optimizers, with which the names of their slots begin.
OPTIMIZERS_BY_SLOT = {
    "Momentum": "momentum",
    "Adagrad": "adagrad",
    "Adam": "adam",
    "LazyAdam": "lazy_adam",
    "RMSProp": "rmsprop",
    "Adadelta": "adadelta",
    "Ftrl": "ftrl",
}
# Otherwise by how many slots have a number for each of a row's, and how many one for each row.
OPTIMIZERS_BY_SIZE = {(0, 0): "sgd", (0, 1): "rowwise_adagrad", (1, 0): "adagrad"}
MANY_SLOTS = "lazy_adam"


class Source(NamedTuple):
    """Says where a number of the workload comes from.

    Attributes:
        what: the number, in words.
        value: as text; '' if it is another one for each table.
        origin: who says so.
        source: how it was measured, or why it is assumed.
    """

    what: str
    value: str
    origin: Origin
    source: str


@dataclasses.dataclass(frozen=True)
class GraphWorkload:
    """Describes a training step of a graph.

    Attributes:
        workload: the step.
        remarks: where the numbers of a table come from, by the tables' names.
        sources: where the numbers come from, of all tables together; the first one is the batch's.
    """

    workload: Workload
    remarks: dict[str, str]
    sources: tuple[Source, ...]

    def of_batch(self, batch: int | str) -> GraphWorkload:
        """Returns a step of another batch, 4096 or '2x'.

        Raises:
            ValueError: it is neither.
        """
        workload = self.workload.of_batch(batch)
        given = Source("samples of a step", f"{workload.batch:,}", "given", f"batch={batch!r}")
        return GraphWorkload(workload, self.remarks, (given, *self.sources[1:]))


class NoTables(ValueError):
    """Says that a graph has no tables."""


def of_graph(graph: tf.Graph, session: tf.Session | None = None) -> GraphWorkload:
    """Returns the work of a training step of `graph`.

    Args:
        graph: the graph.
        session: in which this rank's rows of dynamic tables are counted, if no profile has.

    Raises:
        NoTables: the graph has none.
    """
    plans = build_plan(graph, session=session).tables
    if not plans:
        raise NoTables(
            "strategy.plan(devices=…): the graph has no tables. Build the model first, with its "
            "tables in strategy.embedding_scope(), and call it inside `with graph.as_default():`."
        )
    measured = graph_state.of(graph, KnownRuns).measured
    lookups: dict[str, list[Lookup]] = {}
    for written in lookups_of(graph).written:
        lookups.setdefault(written.lookup.table.op.name, []).append(written.lookup)
    batch, batch_source = _batch(measured, [x for each in lookups.values() for x in each])
    pooled = {
        section.table
        for group in build_plan(graph).groups
        for section in group.sections
        if section.pooled
    }
    has_optimizer = bool(graph.get_collection(tf.GraphKeys.TRAIN_OP))
    reader = _Reader(measured, batch, pooled, has_optimizer, _of_earlier_run(graph))
    variables = {v.op.name: v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
    tables, remarks = [], {}
    for plan in plans:
        table, remark = reader.table(plan, variables[plan.name], lookups.get(plan.name, []))
        tables.append(table)
        remarks[plan.name] = remark
    network = [
        variable.shape.num_elements() or 0
        for variable in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
        if is_replicated(variable) and not is_replicated_table(variable)
    ]
    sources = (batch_source, *reader.sources(len(tables)))
    return GraphWorkload(Workload(tuple(tables), batch, sum(network)), remarks, sources)


def _of_earlier_run(graph: tf.Graph) -> dict[str, TableWork]:
    """Returns the tables by which placement='auto:FILE' has placed those of a graph."""
    basis = automatic_placement.of_graph(graph).basis
    workload = None if basis is None else basis.workload
    return {} if workload is None else {table.name: table for table in workload.tables}


def _batch(measured: MeasuredSteps | None, lookups: Sequence[Lookup]) -> tuple[int, Source]:
    """Returns the samples of a step of all ranks, and where the number comes from."""
    samples: float | None = None
    if measured is not None and measured.samples:
        samples, origin, why = measured.samples, "measured", _steps(measured)
    else:
        of_rank = step_work.samples_of(lookups)
        if of_rank:
            samples, origin, why = of_rank * collectives.size(), "given", "the graph's shapes"
    if samples is None:
        samples, origin, why = ASSUMED_BATCH, "assumed", "give batch=…, or measure (profile=DIR)"
    batch = max(1, round(samples))
    return batch, Source("samples of a step", f"{batch:,}", origin, why)  # type: ignore[arg-type]


def _steps(measured: MeasuredSteps) -> str:
    ranks = counted(collectives.size(), "rank")
    if measured.first == measured.last:
        return f"step {measured.first} of {ranks}"
    return f"steps {measured.first} to {measured.last} of {ranks}"


class _Reader:
    """Reads the work of tables, and counts where their numbers come from."""

    def __init__(
        self,
        measured: MeasuredSteps | None,
        batch: int,
        pooled: set[str],
        has_optimizer: bool,
        earlier: Mapping[str, TableWork],
    ):
        self._measured, self._batch, self._pooled = measured, batch, pooled
        self._has_optimizer, self._earlier = has_optimizer, earlier
        self._counts: dict[tuple[str, Origin, str], int] = {}

    def table(
        self, plan: TablePlan, variable: Any, lookups: Sequence[Lookup]
    ) -> tuple[TableWork, str]:
        """Returns a table's work, and says where its numbers come from."""
        said: dict[str, str] = {}

        def note(what: str, origin: Origin, why: str) -> None:
            key = (what, origin, why)
            self._counts[key] = self._counts.get(key, 0) + 1
            said[what] = origin

        measured = self._measured
        ids = 1.0
        looked_up = 0.0 if measured is None else measured.ids.get(plan.name, 0.0)
        if measured is not None and looked_up:
            ids = looked_up / self._batch
            note("ids of a sample", "measured", _steps(measured))
        elif of_graph := _ids_of_sample(lookups):
            ids = of_graph
            note("ids of a sample", "given", "the graph's shapes")
        else:
            note("ids of a sample", "assumed", "one in each; scope(profile=DIR) measures it")
        distinct, distinct_at = None, None
        keys = 0.0 if measured is None else measured.distinct.get(plan.name, 0.0)
        if measured is not None and looked_up and keys and plan.name not in self._pooled:
            distinct = min(1.0, keys / looked_up)
            of_rank = looked_up / collectives.size()
            distinct_at = of_rank if of_rank > 1 else None
            note("distinct ids", "measured", _steps(measured))
        optimizer, why = _optimizer(plan, variable, self._has_optimizer)
        note("optimizer", "assumed" if why else "given", why or "the slots of tables")
        rows = plan.rows
        if rows is None:
            rows, why = self._rows_of_dynamic(plan)
            note("rows of dynamic tables", "assumed" if why else "measured", why or "so far")
        table = TableWork(
            plan.name,
            max(1, rows),
            plan.dim,
            type=plan.dtype if plan.dtype in TYPE_BYTES else "float32",
            ids=ids,
            distinct=distinct,
            optimizer=optimizer,
            imbalance=max(1.0, self._imbalance(plan)),
            dynamic=plan.rows is None,
            bounded="weight_bound" in plan.policy,
            distinct_at=distinct_at,
        )
        by_origin: dict[str, list[str]] = {}
        for what, origin in said.items():
            by_origin.setdefault(origin, []).append(what)
        text = "; ".join(f"{origin}: {', '.join(whats)}" for origin, whats in by_origin.items())
        return table, text

    def _imbalance(self, plan: TablePlan) -> float:
        """Returns the keys of the busiest owner by the mean if the table is by rows.

        Where it isn't, nobody can measure that, and what an earlier run has measured holds.
        """
        if plan.placement == "rows":
            return plan.key_imbalance or 1.0
        earlier = self._earlier.get(plan.name)
        return 1.0 if earlier is None else earlier.imbalance

    def _rows_of_dynamic(self, plan: TablePlan) -> tuple[int, str]:
        """Returns the rows of a dynamic table on all ranks, and why they are assumed; '' if not."""
        counts = {} if self._measured is None else self._measured.rows
        if counts.get(plan.name):
            return counts[plan.name], ""
        known = [rows for rows in plan.shard_rows if rows]
        if known:
            parts = collectives.size() if plan.placement == "rows" else 1
            return round(sum(known) / len(known) * parts), ""
        return ASSUMED_ROWS, "nobody has counted them: give session=…, or change them in the file"

    def sources(self, tables: int) -> list[Source]:
        """Returns where the numbers of the tables come from."""
        found = []
        for (what, origin, why), count in self._counts.items():
            of = "" if count == tables else f" of {count:,} of {counted(tables, 'table')}"
            found.append(Source(what + of, "", origin, why))
        return found


def _ids_of_sample(lookups: Sequence[Lookup]) -> float:
    """Returns the ids of a sample as far as shapes tell; 0 if they don't."""
    total = 0
    for lookup in lookups:
        shape = lookup.ids.shape
        if lookup.sparse_ids is not None or not shape.rank:
            return 0.0
        ids = shape[1:].num_elements()
        if ids is None:
            return 0.0
        total += ids
    return float(total)


def _optimizer(plan: TablePlan, variable: Any, has_optimizer: bool) -> tuple[str, str]:
    """Returns the optimizer with a table's slots, and why it is assumed; '' if it isn't."""
    if not plan.slots and not has_optimizer:
        return "adagrad", "the graph has none yet"
    size = TYPE_BYTES.get(plan.dtype, 4)
    extra = plan.row_bytes // size - plan.dim
    count = len(plan.slots)
    # Of these, `wide` have D numbers for a row, and the others one.
    wide = count if plan.dim == 1 else min(count, max(0, (extra - count) // (plan.dim - 1)))
    for slot in plan.slots:
        label = re.sub(r"(_\d+)?$", "", slot.rpartition("/")[2])
        known = OPTIMIZERS_BY_SLOT.get(label)
        if known and OPTIMIZERS[known].slots == wide and wide == count:
            return "lazy_adam" if known == "adam" and _is_lazy(variable) else known, ""
    by_size = OPTIMIZERS_BY_SIZE.get((wide, count - wide))
    if by_size is None:
        return MANY_SLOTS, f"{MANY_SLOTS} is the nearest to {counted(count, 'slot')}"
    return by_size, ""


def _is_lazy(variable: Any) -> bool:
    """Tells whether what updates a table like Adam leaves rows without a gradient alone.

    A `LazyAdamOptimizer` names its slots like TensorFlow's Adam.
    """
    updates = variable.handle.consumers()
    if is_replicated(variable):  # TensorFlow's Adam changes the whole variable
        kinds = {op.type for op in updates}
        return "ResourceScatterSub" in kinds and "AssignSubVariableOp" not in kinds
    return any(
        attribute.s == b"LazyAdam" for op in updates for attribute in op.node_def.attr.values()
    )
