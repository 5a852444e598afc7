"""The plan of a graph, read off it. Nothing is added to the graph."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import agreement, run_analysis
from collective.ops import collectives, graph_analysis
from collective.ops.collective_names import (
    AGREEMENT,
    DENSE,
    GRADIENTS,
    KEYS,
    OTHER,
    PHASES,
    ROWS,
    short,
    split_name,
)
from collective.ops.gate import Gate, gates_of
from collective.ops.graph_state import state_of
from collective.plan.formatting import imbalance
from collective.plan.plan import AlonePlan, ExchangePlan, GroupPlan, Plan, SectionPlan, TablePlan
from collective.prefetch.enable import split_of
from collective.prefetch.graph_split import key_run
from collective.strategies.grouped_exchange import Group, GroupMember, groups_of
from collective.tables.grouping import WrittenLookup, lookups_of
from collective.tables.table import Table, shard_of

WAITING = "it waits: lookups are grouped when gradients are taken or a session runs the graph"


def plan(
    graph: tf.Graph, footprint: run_analysis.RunFootprint | None = None, session: Any = None
) -> Plan:
    """The plan of `graph` (see `CollectiveStrategy.plan`).

    Args:
        graph: the graph.
        reach: of the run whose exchanges are wanted; by default the first training run there was.
        session: in which dynamic tables are counted, on this rank.
    """
    footprint = footprint or state_of(graph).training_run
    tables = tuple(
        _table(table, session)
        for table in sorted(
            (
                v
                for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
                if isinstance(v, Table)
            ),
            key=lambda t: str(t.op.name),
        )
    )
    whole = [[table.shard_bytes[r] for table in tables] for r in range(collectives.size())]
    totals = [sum(b for b in parts if b is not None) for parts in whole]
    return Plan(
        backend=(os.environ.get("COLLECTIVE_STRATEGY") or "hb").lower(),
        ranks=collectives.size(),
        tables=tables,
        groups=tuple(_group(group, graph) for group in groups_of(graph)),
        alone=tuple(_alone(graph, footprint)),
        exchanges=tuple(_exchanges(graph, footprint)) if collectives.size() > 1 else (),
        imbalance=imbalance(totals)
        if all(b is not None for parts in whole for b in parts)
        else None,
        notes=dict(state_of(graph).plan_notes),
    )


def announce(session: Any, footprint: run_analysis.RunFootprint, quiet: bool) -> None:
    """Notes that `reach` is a training step; rank 0 prints the plan to stderr if it is the graph's
    first, and isn't alone.
    """
    graph = session.graph
    if state_of(graph).training_run is not None:
        return
    state_of(graph).training_run = footprint
    if quiet or collectives.rank() > 0 or collectives.size() == 1:
        return
    try:
        print(plan(graph, footprint, session), file=sys.stderr, flush=True)
    # the others go on to train, and would wait for a rank that stops here
    except Exception as error:
        warnings.warn(
            f"the plan can not be printed: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


# ---- Tables


def _table(table: Any, session: Any) -> TablePlan:
    ranks, graph = collectives.size(), table.graph
    slots = [
        v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if shard_of(v) is table and v is not table
    ]
    row_bytes = sum(_row_bytes(v, table) for v in [table, *slots])
    if table.rows is None:
        shard_rows: list[int | None] = [None] * ranks
        shard_rows[collectives.rank()] = _count(table, session)
    else:
        shard_rows = [len(range(r, table.rows, ranks)) for r in range(ranks)]
    shard_bytes = tuple(None if rows is None else rows * row_bytes for rows in shard_rows)
    sizes = [b for b in shard_bytes if b is not None]
    asked = state_of(graph).keys_per_owner.get(table.op.name)
    groups = [g for g in groups_of(graph) if any(t is table for t in g.layout.tables)]
    return TablePlan(
        name=table.op.name,
        rows=table.rows,
        dim=table.dim,
        dtype=table.dtype.base_dtype.name,
        slots=tuple(sorted(v.op.name for v in slots)),
        row_bytes=row_bytes,
        shard_rows=tuple(shard_rows),
        shard_bytes=shard_bytes,
        groups=tuple(short(g.name) for g in groups),
        packed=max((len(g.layout.tables) for g in groups), default=1),
        imbalance=imbalance(sizes) if len(sizes) == ranks else None,
        keys_per_owner=tuple(asked) if asked else None,
        key_imbalance=imbalance(asked) if asked else None,
    )


def _row_bytes(variable: Any, table: Any) -> int:
    # What a row has is behind the first dimension, which of a dynamic table has no number.
    row = [table.dim] if variable is table else variable.shape.as_list()[1:]
    return int(np.prod(row)) * int(variable.dtype.base_dtype.size)


def _count(table: Any, session: Any) -> int | None:
    try:
        return None if session is None else int(table.local_count(session))
    except (tf.errors.OpError, RuntimeError):  # it isn't initialized
        return None


# ---- Lookups


def _group(group: Group, graph: tf.Graph) -> GroupPlan:
    sections = tuple(
        SectionPlan(
            group.layout.tables[s.table].op.name, s.dim, s.pooled, group.layout.members.count(i)
        )
        for i, s in enumerate(group.layout.sections)
    )
    return GroupPlan(short(group.name), _level(graph, group.pool), len(group.members), sections)


def _level(graph: tf.Graph, op: tf.Operation) -> int:
    return max(1, gates_of(graph).level(op))


def _alone(graph: tf.Graph, footprint: run_analysis.RunFootprint | None) -> Iterable[AlonePlan]:
    if collectives.size() == 1:  # nothing is exchanged
        return
    lookups = lookups_of(graph)
    for written in lookups.written:
        if written.group is None:
            why = written.reason_ungrouped or (
                "grouping is off" if state_of(graph).seen_by_session else WAITING
            )
            yield AlonePlan(written.out.name, written.lookup.table.op.name, why)
    for name, request in gates_of(graph).key_requests.items():
        if request.keys.graph is not graph:
            yield AlonePlan("", short(name), "it is in a function, a branch or a loop")


# ---- Exchanges


def _exchanges(
    graph: tf.Graph, footprint: run_analysis.RunFootprint | None
) -> Iterable[ExchangePlan]:
    """In the order of a step: the agreement, then by level and phase."""
    carriers = _carriers(graph, footprint)
    gates, split = gates_of(graph), split_of(graph)
    passed: list[Gate] = [
        gate for gate in gates.gates if footprint is None or gate.zero.op in footprint.operations
    ]
    operations = set(_whole(graph) if footprint is None else footprint.operations)
    # its keys are exchanged in a run of their own
    if split is not None and split.stage.take in operations:
        operations |= key_run(split).footprint.operations
        passed += filter(None, [gates.ahead])
    found = [
        ExchangePlan(
            agreement.NAME + gate.channel,
            "Allgather",
            AGREEMENT,
            "",
            gate.level,
            0,
            0,
            0,
            "int64",
            8 * agreement.WIDTH,
            True,
        )
        for gate in passed
    ]
    found += [
        _exchange(graph, op, carriers) for op in operations if collectives.collective_name(op)
    ]
    received = state_of(graph).received_bytes
    return [
        dataclasses.replace(x, received=received.get(x.name))
        for x in sorted(
            found,
            key=lambda x: (
                x.phase in (GRADIENTS, DENSE, OTHER),
                x.level,
                PHASES.index(x.phase),
                x.name,
            ),
        )
    ]


def _whole(graph: tf.Graph) -> list[tf.Operation]:
    """All collectives but those that a group has taken the place of, and agreements, of which each
    way to run has its own.
    """
    used = graph_analysis.upstream(w.out for w in lookups_of(graph).written)

    def counts(op: tf.Operation) -> bool:
        phase = split_name(collectives.collective_name(op) or "")[0]
        return phase not in (KEYS, ROWS) or op in used

    return [
        op
        for op in graph.get_operations()
        if collectives.collective_name(op)
        and counts(op)
        and not str(collectives.collective_name(op)).startswith(agreement.NAME)
    ]


def _carriers(
    graph: tf.Graph, footprint: run_analysis.RunFootprint | None
) -> dict[str, tuple[Group | WrittenLookup, list[GroupMember]]]:
    """What each name of a group, or of a lookup on its own, stands for, and the members that the
    run needs.
    """
    fed = set() if footprint is None else {x.name for x, _ in footprint.empty_feeds}
    found: dict[str, tuple[Group | WrittenLookup, list[GroupMember]]] = {
        short(group.name): (
            group,
            [
                m
                for m in group.members
                if footprint is None
                or group.ahead
                or m.ids.op in footprint.operations
                and m.ids.name not in fed
            ],
        )
        for group in groups_of(graph)
    }
    asked = {x.keys.op: name for name, x in gates_of(graph).key_requests.items()}
    for written in lookups_of(graph).written:
        if written.group is None:
            for op in graph_analysis.upstream(
                [written.out], {x.name for x in written.lookup.inputs}
            ):
                if op in asked:
                    found[short(asked[op])] = (written, [])
    return found


def _exchange(
    graph: tf.Graph,
    op: tf.Operation,
    carriers: dict[str, tuple[Group | WrittenLookup, list[GroupMember]]],
) -> ExchangePlan:
    name = collectives.collective_name(op) or ""
    phase, of = split_name(name)
    sent, level = op.inputs[0], _level(graph, op)
    dtype = _wire_dtype(sent)
    kind = re.sub("Horovod(Grouped)?", "", str(op.type))
    carrier, members = carriers.get(of, (None, []))
    if phase not in (KEYS, ROWS, GRADIENTS) or carrier is None:
        elements = sent.shape.num_elements()
        return ExchangePlan(
            name,
            kind,
            phase,
            of,
            level,
            0,
            0,
            0,
            dtype.name,
            None if elements is None else elements * dtype.size,
            elements is not None,
        )
    if isinstance(carrier, WrittenLookup):
        lookups, sections, header = [carrier.lookup], 1, 0
    else:
        if phase == GRADIENTS:
            members = _with_gradient(graph, op, carrier)
        lookups = [member.lookup for member in members]
        sections = len(
            {s for s, member in zip(carrier.layout.members, carrier.members) if member in members}
        )
        header = 16 * len(carrier.layout.sections) * collectives.size() if phase == KEYS else 0
    return ExchangePlan(
        name,
        kind,
        phase,
        of,
        level,
        len({id(x.table) for x in lookups}),
        sections,
        len(lookups),
        dtype.name,
        _most(lookups, phase, dtype, header),
        False,
    )


def _wire_dtype(sent: tf.Tensor) -> tf.DType:
    """Of what travels, also where its bits stand for those of another type (see `communication`)."""
    while sent.op.type == "Identity":
        sent = sent.op.inputs[0]
    return sent.op.inputs[0].dtype if sent.op.type == "Bitcast" else sent.dtype


def _most(lookups: Sequence[Any], phase: str, dtype: tf.DType, header: int) -> int | None:
    ids = [lookup.ids.shape.num_elements() for lookup in lookups]
    if any(n is None for n in ids):
        return None
    return header + sum(
        n * int(dtype.size) * (1 if phase == KEYS else int(x.table.dim))
        for n, x in zip(ids, lookups)
    )


def _with_gradient(graph: tf.Graph, op: tf.Operation, group: Group) -> list[GroupMember]:
    """The lookups whose gradients the exchange `op` carries."""
    pools: dict[tf.Operation, tuple[int, ...]] = state_of(graph).pool_gradients
    stack = [op.inputs[0].op]
    seen: set[tf.Operation] = set()
    found: set[int] = set()
    while stack:
        top = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        if top in pools:
            found.update(pools[top])
        elif top.type in ("Identity", "Cast", "Bitcast", "AddN", "AddV2"):
            stack += [x.op for x in top.inputs]
    return [member for i, member in enumerate(group.members) if i in found] or list(group.members)
