"""Builds the plan of a graph by reading it. Nothing is added to the graph."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import agreement
from collective.coordination.run_analysis import RunFootprint
from collective.ops import kernel_device, native_library
from collective.ops.communication import carrier_choice, collectives, hierarchy
from collective.ops.communication.collective_names import (
    AGREEMENT,
    DENSE,
    GRADIENTS,
    KEYS,
    OTHER,
    PHASES,
    ROWS,
    is_near,
    near,
    short,
    split_name,
)
from collective.ops.communication.gate import Gate, gates_of
from collective.ops.counting import counted
from collective.ops.exchange.embedding_bag_gradients import PooledMembers
from collective.ops.graph import graph_analysis, graph_state, seen_operations
from collective.options.scopes import PlanOutput
from collective.plan import step_estimate, step_work
from collective.plan.data import (
    ExchangePlan,
    GroupPlan,
    SectionPlan,
    StepEstimate,
    TablePlan,
    UngroupedLookupPlan,
)
from collective.plan.formatting import imbalance
from collective.plan.known_runs import KnownRuns
from collective.plan.plan import Plan
from collective.prefetch import enable
from collective.prefetch.enable import split_of
from collective.prefetch.graph_split import key_run
from collective.scope import SCOPES
from collective.strategies import Lookup
from collective.strategies.grouped_exchange import Group, GroupMember, groups_of
from collective.tables import automatic_placement
from collective.tables.grouping import lookups_of
from collective.tables.table import (
    Table,
    is_replicated_table,
    name_of,
    replicated_slots,
    shard_of,
)

NAMED = 5  # Tables in a note.
NOT_YET = "it waits: lookups are grouped when gradients are taken or a session runs the graph"


def build_plan(graph: tf.Graph, footprint: RunFootprint | None = None, session: Any = None) -> Plan:
    """Builds the plan of `graph` (see `CollectiveStrategy.plan`).

    Args:
        graph: the graph.
        footprint: that of the run whose exchanges are listed; by default the first training run.
        session: the session in which this rank's rows of dynamic tables are counted.
    """
    footprint = footprint or graph_state.of(graph, KnownRuns).training
    variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    slots_by_table = _slots_by_table(graph)

    def slots_of(table: Any) -> Sequence[Any]:
        if is_replicated_table(table):
            return replicated_slots(table, variables)
        return slots_by_table.get(id(table), [])

    tables = [v for v in variables if isinstance(v, Table) or is_replicated_table(v)]
    return plan_of_tables(tables, slots_of, graph, graph, footprint, session)


def plan_of_tables(
    tables: Sequence[Any],
    slots_of: Callable[[Any], Sequence[Any]],
    made_in: tf.Graph,
    graph: tf.Graph,
    footprint: RunFootprint | None,
    session: Any = None,
) -> Plan:
    """Builds the plan of tables, and of the graph that trains them.

    Args:
        tables: the tables, and the variables that are replicated tables.
        slots_of: returns the slots of one.
        made_in: the graph in which they were made.
        graph: the graph that looks them up.
        footprint, session: as for `build_plan`.
    """
    tables = sorted(tables, key=name_of)
    plans = [
        _replicated_table_plan(table, slots_of(table))
        if is_replicated_table(table)
        else _table_plan(graph, table, slots_of(table), session)
        for table in tables
    ]
    choices = automatic_placement.of_graph(made_in).by_name
    plans = [
        dataclasses.replace(plan, why=choices[plan.name].why) if plan.name in choices else plan
        for plan in plans
    ]
    table_plans = tuple(plans)
    ranks = collectives.size()
    carried = _carried_by_name(graph, footprint) if ranks > 1 else {}
    exchanges = tuple(_exchange_plans(graph, footprint, carried)) if ranks > 1 else ()
    ungrouped = tuple(_ungrouped_lookups(graph))
    return Plan(
        backend=(os.environ.get("COLLECTIVE_STRATEGY") or "hb").lower(),
        ranks=ranks,
        tables=table_plans,
        groups=tuple(_group_plan(group, graph) for group in groups_of(graph)),
        alone=ungrouped,
        exchanges=exchanges,
        imbalance=_memory_imbalance(table_plans, ranks),
        notes=_notes(graph, made_in, tables),
        estimate=_estimate(
            graph,
            footprint,
            carried,
            # Memory takes next to no time compared with the network.
            sum(exchange.reach != "within host" for exchange in exchanges),
            ungrouped,
        ),
    )


def _notes(graph: tf.Graph, made_in: tf.Graph, tables: Sequence[Any]) -> dict[str, str]:
    notes = {}
    if prefetched := enable.note_of(graph):
        notes["prefetch_keys"] = prefetched
    precision = SCOPES.options.mixed_precision
    if precision:
        scaled = ", its gradients scaled" if precision == "float16" else ""
        notes["mixed precision"] = f"the dense part computes in {precision}{scaled}"
    missing = native_library.missing()
    if missing:
        notes["compiled operations"] = f"missing, so every lookup is alone; {missing}"
    if collectives.size() > 1:
        notes["carrier"] = carrier_choice.explanation()
        between_hosts = _between_hosts(groups_of(graph))
        if between_hosts:
            notes["hierarchical"] = between_hosts
    chosen = automatic_placement.note_of(made_in)
    if chosen:
        notes["placement='auto'"] = chosen
    in_host = _in_host_memory([table for table in tables if isinstance(table, Table)])
    if in_host:
        notes["dynamic tables"] = in_host
    return notes


def _between_hosts(groups: Sequence[Group]) -> str:
    """Says whether groups merge their messages between hosts, and why; '' for a job on one host.

    Each follows the scope in which it was built. If there is none, the current scope applies.
    """
    names_by_reason: dict[str, list[str]] = {}
    for group in groups:
        names_by_reason.setdefault(group.between_hosts, []).append(short(group.name))
    if not names_by_reason:
        return hierarchy.explanation()
    if len(names_by_reason) == 1:
        return next(iter(names_by_reason))
    return "; ".join(f"{', '.join(names)} {why}" for why, names in names_by_reason.items())


def _in_host_memory(tables: Sequence[Any]) -> str:
    """Says which dynamic tables aren't on the GPU, though there is one, and why; '' for none."""
    if kernel_device.chosen() == "cpu":
        return ""
    names = [f"'{t.op.name}'" for t in tables if t.rows is None and t.bridge is None]
    if not names:
        return ""
    why = "their type isn't float32"
    if not kernel_device.on_device(dynamic=True):
        why = f"{kernel_device.DYNAMIC}=host"
    more = f" and {counted(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    named = ", ".join(names[:NAMED])
    return f"in the host's memory, and their policies act there ({why}): {named}{more}"


def announce(session: Any, footprint: RunFootprint, output: PlanOutput) -> None:
    """Records the first training run of a graph; rank 0 then prints the plan to stderr.

    Args:
        session: the session of the run.
        footprint: that of the run.
        output: the option scope(plan=…): 'quiet' prints nothing, 'full' everything.
    """
    known = graph_state.of(session.graph, KnownRuns)
    if known.training is not None:
        return
    known.training = footprint
    if output == "quiet" or collectives.rank() > 0 or collectives.size() == 1:
        return
    try:
        plan = build_plan(session.graph, footprint, session)
        print(plan.to_text(full=output == "full"), file=sys.stderr, flush=True)
    # The others go on to train, and would wait for a rank that stops here.
    except Exception as error:
        warnings.warn(
            f"the plan can not be printed: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


# ---- Tables


def _slots_by_table(graph: tf.Graph) -> dict[int, list[Any]]:
    """Returns the slots of each table, by the table's identity."""
    slots: dict[int, list[Any]] = {}
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        table = shard_of(variable)
        if table is not None and table is not variable:
            slots.setdefault(id(table), []).append(variable)
    return slots


def _table_plan(graph: tf.Graph, table: Any, slots: Sequence[Any], session: Any) -> TablePlan:
    ranks = collectives.size()
    row_bytes = sum(_row_bytes(v, table) for v in [table, *slots])
    if table.rows is None:
        shard_rows: list[int | None] = [None] * ranks
        shard_rows[collectives.rank()] = _local_count(table, session)
    else:
        shard_rows = table.row_placement.counts(table.rows)
    shard_bytes = [None if rows is None else rows * row_bytes for rows in shard_rows]
    known_bytes = [size for size in shard_bytes if size is not None]
    keys_per_owner = graph_state.of(graph, KnownRuns).keys_per_owner.get(table.op.name)
    groups = [g for g in groups_of(graph) if any(t is table for t in g.layout.tables)]
    return TablePlan(
        name=table.op.name,
        rows=table.rows,
        dim=table.dim,
        dtype=table.dtype.base_dtype.name,
        slots=tuple(sorted(map(name_of, slots))),
        row_bytes=row_bytes,
        shard_rows=tuple(shard_rows),
        shard_bytes=tuple(shard_bytes),
        groups=tuple(short(g.name) for g in groups),
        packed=max((len(g.layout.tables) for g in groups), default=1),
        imbalance=imbalance(known_bytes) if len(known_bytes) == ranks else None,
        keys_per_owner=tuple(keys_per_owner) if keys_per_owner else None,
        key_imbalance=imbalance(keys_per_owner) if keys_per_owner else None,
        policy=_policy_options(table),
        placement=_placement_of(table),
    )


def _placement_of(table: Any) -> str:
    holder = table.placement.holder
    return "rows" if holder is None else f"whole:{holder}"


def _replicated_table_plan(variable: Any, slots: Sequence[Any]) -> TablePlan:
    """Describes a table that is an ordinary variable on every rank."""
    ranks, name = collectives.size(), name_of(variable)
    rows, dim = variable.shape.as_list()
    row_bytes = sum(int(v.shape[1]) * int(v.dtype.base_dtype.size) for v in (variable, *slots))
    return TablePlan(
        name=name,
        rows=rows,
        dim=dim,
        dtype=variable.dtype.base_dtype.name,
        slots=tuple(sorted(map(name_of, slots))),
        row_bytes=row_bytes,
        shard_rows=(rows,) * ranks,
        shard_bytes=(rows * row_bytes,) * ranks,
        groups=(),
        packed=1,
        imbalance=1.0 if rows else None,
        placement="replicated",
    )


def _policy_options(table: Any) -> dict[str, float | str]:
    """Returns the options of a table's policy, and where keys are counted if not on a GPU."""
    options: dict[str, float | str] = table.policy.options()
    if getattr(table, "admission", None) is not None and kernel_device.on_device(dynamic=False):
        options["admission"] = "host"
    return options


def _row_bytes(variable: Any, table: Any) -> int:
    # A row comes after the first dimension, which for a dynamic table is not a number of rows.
    row_shape = [table.dim] if variable is table else variable.shape.as_list()[1:]
    return int(np.prod(row_shape)) * int(variable.dtype.base_dtype.size)


def _local_count(table: Any, session: Any) -> int | None:
    try:
        known = session is not None or table.is_eager
        return int(table.local_count(session)) if known else None
    except (tf.errors.OpError, RuntimeError):  # it isn't initialized
        return None


def _memory_imbalance(tables: Sequence[TablePlan], ranks: int) -> float | None:
    """Returns the largest rank's bytes divided by the mean; None if some aren't known."""
    totals = [0] * ranks
    for table in tables:
        for rank, size in enumerate(table.shard_bytes):
            if size is None:
                return None
            totals[rank] += size
    return imbalance(totals)


# ---- Lookups


def _group_plan(group: Group, graph: tf.Graph) -> GroupPlan:
    layout, sections = group.layout, []
    for i, section in enumerate(layout.sections):
        table_name = layout.tables[section.table].op.name
        lookups = layout.members.count(i)
        sections.append(SectionPlan(table_name, section.dim, section.pooled, lookups))
    level = _level(graph, group.pool)
    lookups = len(group.members)
    return GroupPlan(short(group.name), level, lookups, tuple(sections), group.two_levels)


def _level(graph: tf.Graph, op: tf.Operation) -> int:
    return max(1, gates_of(graph).level(op))


def _ungrouped_lookups(graph: tf.Graph) -> Iterator[UngroupedLookupPlan]:
    if collectives.size() == 1:  # nothing is exchanged
        return
    not_grouped = "grouping is off" if seen_operations.last(graph) else NOT_YET
    for written in lookups_of(graph).written:
        if written.group is None:
            why = written.reason_ungrouped or not_grouped
            yield UngroupedLookupPlan(written.out.name, written.lookup.table.op.name, why)
    for name, request in gates_of(graph).key_requests.items():
        if request.keys.graph is not graph:
            yield UngroupedLookupPlan("", short(name), "it is in a function, a branch or a loop")


# ---- Exchanges


class Carried(NamedTuple):
    """Says what the exchanges of a group, or of an ungrouped lookup, carry.

    Attributes:
        lookups: those that the run needs.
        group: None for an ungrouped lookup.
        members: the members of the group that the run needs.
    """

    lookups: list[Lookup]
    group: Group | None = None
    members: Sequence[GroupMember] = ()


def _exchange_plans(
    graph: tf.Graph, footprint: RunFootprint | None, carried: dict[str, Carried]
) -> list[ExchangePlan]:
    """Returns the exchanges in the order of a step: the agreement, then by level and phase."""
    gates, split = gates_of(graph), split_of(graph)
    operations = _all_collectives(graph) if footprint is None else set(footprint.operations)
    passed: list[Gate] = [
        gate for gate in gates.gates if footprint is None or gate.zero.op in operations
    ]
    if split is not None and split.stage.take in operations:
        # The keys are exchanged in a run of their own.
        operations |= key_run(split).footprint.operations
        passed += filter(None, [gates.prefetch_gate])
    plans = [_agreement_plan(gate) for gate in passed]
    for op in operations:
        if collectives.collective_name(op):
            plans.append(_exchange_plan(graph, op, carried))
    received = graph_state.of(graph, KnownRuns).received_bytes
    names = {p.name for p in plans}
    plans = [
        dataclasses.replace(p, received=received.get(p.name), reach=_reach(p.name, names))
        for p in plans
    ]

    def order(plan: ExchangePlan) -> tuple[Any, ...]:
        is_late = plan.phase in (GRADIENTS, DENSE, OTHER)
        return is_late, plan.level, PHASES.index(plan.phase), plan.name

    return sorted(plans, key=order)


def _reach(name: str, names: Set[str]) -> str:
    """Returns how far a collective reaches if it takes a second one to cover all hosts."""
    if is_near(name):
        return "within host"
    return "between hosts" if near(name) in names else ""


def _all_collectives(graph: tf.Graph) -> set[tf.Operation]:
    """Returns all collectives except agreements and those that a group has replaced.

    Each way to run a graph has its own agreements.
    """
    used = graph_analysis.upstream(written.out for written in lookups_of(graph).written)
    operations = set()
    for op in graph.get_operations():
        name = collectives.collective_name(op)
        if name and not name.startswith(agreement.NAME):
            if op in used or split_name(name)[0] not in (KEYS, ROWS):
                operations.add(op)
    return operations


def _carried_by_name(graph: tf.Graph, footprint: RunFootprint | None) -> dict[str, Carried]:
    """Returns what the exchanges of each group and of each ungrouped lookup carry."""
    unneeded = set() if footprint is None else {x.name for x, _ in footprint.empty_feeds}

    def is_needed(member: GroupMember) -> bool:
        if footprint is None:
            return True
        return member.ids.op in footprint.operations and member.ids.name not in unneeded

    carried: dict[str, Carried] = {}
    for group in groups_of(graph):
        members = [m for m in group.members if group.prefetched or is_needed(m)]
        carried[short(group.name)] = Carried([m.lookup for m in members], group, members)
    request_names = {
        request.keys.op: name for name, request in gates_of(graph).key_requests.items()
    }
    for written in lookups_of(graph).written:
        if written.group is None:
            inputs = {x.name for x in written.lookup.inputs}
            for op in graph_analysis.upstream([written.out], inputs):
                if op in request_names:
                    carried[short(request_names[op])] = Carried([written.lookup])
    return carried


def _agreement_plan(gate: Gate) -> ExchangePlan:
    return ExchangePlan(
        name=agreement.NAME + gate.channel,
        kind="Allgather",
        phase=AGREEMENT,
        of="",
        level=gate.level,
        tables=0,
        sections=0,
        members=0,
        dtype="int64",
        bytes=8 * agreement.WIDTH,
        exact=True,
    )


def _exchange_plan(
    graph: tf.Graph, op: tf.Operation, carried_by_name: dict[str, Carried]
) -> ExchangePlan:
    name = collectives.collective_name(op) or ""
    phase, of = split_name(name)
    kind, dtype = graph_analysis.collective_kind(str(op.type)), _wire_dtype(op.inputs[0])
    sent = op.inputs if kind == "Allreduce" else op.inputs[:1]
    elements, is_exact = _elements(sent)
    plan = ExchangePlan(
        name=name,
        kind=kind,
        phase=phase,
        of=of,
        level=_level(graph, op),
        tables=0,
        sections=0,
        members=0,
        dtype=dtype.name,
        bytes=None if elements is None else elements * dtype.size,
        exact=is_exact,
    )
    carried = carried_by_name.get(of)
    if phase not in (KEYS, ROWS, GRADIENTS) or carried is None:
        return plan
    lookups, sections, header_bytes = carried.lookups, 1, 0
    if carried.group is not None:
        group, members = carried.group, carried.members
        if phase == GRADIENTS:
            members = _members_with_gradient(graph, op, group)
            lookups = [member.lookup for member in members]
        section_of = zip(group.layout.members, group.members)
        carried_members = {id(member) for member in members}  # comparing them compares tensors
        sections = len({section for section, member in section_of if id(member) in carried_members})
        if phase == KEYS:
            header_bytes = 16 * len(group.layout.sections) * collectives.size()
    return dataclasses.replace(
        plan,
        tables=len({id(lookup.table) for lookup in lookups}),
        sections=sections,
        members=len(lookups),
        bytes=_most_bytes(lookups, phase, dtype, header_bytes),
        exact=False,
    )


def _estimate(
    graph: tf.Graph,
    footprint: RunFootprint | None,
    carried: dict[str, Carried],
    exchanges: int,
    ungrouped: Sequence[UngroupedLookupPlan],
) -> StepEstimate | None:
    """Estimates a training step compared with one rank's; None if that isn't possible."""
    if exchanges == 0 or footprint is None or not footprint.trains:
        return None
    in_functions = any(not lookup.lookup for lookup in ungrouped)
    # Keys that are exchanged ahead of a step take less of its time than the model says.
    if in_functions or split_of(graph) is not None:
        return None
    lookups = [lookup for part in carried.values() for lookup in part.lookups]
    work = step_work.of_step(graph, footprint, lookups, exchanges)
    return None if work is None else step_estimate.estimate(work)


def _wire_dtype(sent: tf.Tensor) -> tf.DType:
    """Returns the type that is sent, even if it is sent as the bits of another type."""
    while sent.op.type == "Identity":
        sent = sent.op.inputs[0]
    return sent.op.inputs[0].dtype if sent.op.type == "Bitcast" else sent.dtype


def _elements(sent: Iterable[tf.Tensor]) -> tuple[int | None, bool]:
    """Returns how many elements are sent, None if that depends on the data, and if that is exact.

    It isn't if there are some that a run leaves out if it doesn't need them: it feeds them.
    """
    total, is_exact = 0, True
    for x in sent:
        given = x
        while given.op.type == "PlaceholderWithDefault":
            given = given.op.inputs[0]
        count, known = given.shape.num_elements(), True
        if count is None and given.op.type == "ConcatV2":
            count, known = _elements(given.op.inputs[:-1])
        if count is None:
            return None, False
        total += count
        is_exact &= known and (given is x or not count)
    return total, is_exact


def _most_bytes(
    lookups: Sequence[Lookup], phase: str, dtype: tf.DType, header_bytes: int
) -> int | None:
    """Returns the bytes if no key repeats; None if the number of ids depends on the data."""
    total = header_bytes
    for lookup in lookups:
        ids = lookup.ids.shape.num_elements()
        if ids is None:
            return None
        total += ids * int(dtype.size) * (1 if phase == KEYS else int(lookup.table.dim))
    return total


def _members_with_gradient(
    graph: tf.Graph, op: tf.Operation, group: Group
) -> Sequence[GroupMember]:
    """Returns the lookups whose gradients the exchange `op` carries."""
    pool_gradients = graph_state.of(graph, PooledMembers).by_gradient
    passes_on = ("Identity", "Cast", "Bitcast", "AddN", "AddV2", "ConcatV2")
    # Between hosts. What follows the first input says where rows are.
    moves = ("SplitV", "CollectiveSharedAlltoall", "CollectiveSumMerged")

    def passed_on(op: tf.Operation) -> list[tf.Operation]:
        inputs = op.inputs if op.type in passes_on else op.inputs[:1] if op.type in moves else ()
        return [x.op for x in inputs]

    upstream = graph_analysis.walk(
        [op.inputs[0].op],
        inputs=passed_on,
        stop=lambda op: op in pool_gradients,
        control=False,
    )
    numbers = {number for op in upstream for number in pool_gradients.get(op, ())}
    return [m for i, m in enumerate(group.members) if i in numbers] or list(group.members)
