"""Prepares runs: determines what a run executes, and adds the agreements that open its gates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import agreement, batch_counter, reduced_reads, run_analysis
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_analysis import RunFootprint
from collective.coordination.run_context import RunContext
from collective.ops.communication import collectives
from collective.ops.communication.gate import GraphGates
from collective.ops.graph import graphs, update_settings
from collective.tables.policies import next_step
from collective.tables.table import Sharded


def prepared_run(
    context: RunContext, leaves: list[Any], fed: list[Any], compared: tuple[str, ...]
) -> PreparedRun | None:
    """Returns the run for these fetches and feeds, prepared when it is first asked for.

    Args:
        context: that of the session's runs.
        leaves: the fetches.
        fed: the tensors that are fed, or their names.
        compared: options that ranks compare before they train.

    Returns:
        None if TensorFlow refuses the fetches or feeds: it then does so itself.
    """
    graph, prepared_runs = context.graph, context.state.prepared_runs
    key = (
        tuple([leaf if isinstance(leaf, str) else id(leaf) for leaf in leaves]),
        tuple([x if isinstance(x, str) else id(x) for x in fed]),
        len(context.gates.gates),
        len(context.groups),
        context.reads.refusals,
        compared,
    )
    prepared = prepared_runs.get(key)
    if prepared is None:
        with graphs.by_one_thread:
            try:
                footprint = run_analysis.footprint_of(graph, leaves, fed)
            except Exception:
                return None
            _refuse_shards(graph, leaves)
            reduced_reads.refuse(graph, footprint.operations, leaves)
            if footprint.is_step:
                next_step.check(graph, footprint.operations)
            if footprint.trains:
                settings = update_settings.described(footprint.operations, _trained(graph))
                footprint = footprint.comparing([*compared, *settings])
            counted = batch_counter.counted_run(graph, footprint.operations, leaves, fed)
            prepared = _prepare(context, footprint, (leaves, fed))
            prepared.counted = counted
            prepared_runs[key] = prepared
    return prepared


def _trained(graph: tf.Graph) -> list[Any]:
    """Returns the trainable variables of a graph that are no tables.

    Ranks may update tables by different operations, if some miss the compiled ones.
    """
    trainable = graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    return [variable for variable in trainable if not isinstance(variable, Sharded)]


def _refuse_shards(graph: tf.Graph, leaves: list[Any]) -> None:
    """Refuses fetches that read a table's resource, by its name or by hand: it is a shard."""
    tables = {
        v.handle.op: v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if isinstance(v, Sharded)
        and (v.rows is None or collectives.size() > 1 and not v.shows_shard)
    }
    for leaf in leaves:
        op = graph.as_graph_element(leaf)
        op = op if isinstance(op, tf.Operation) else op.op
        if op.type == "ReadVariableOp" and op.inputs[0].op in tables:
            tables[op.inputs[0].op].refuse("Fetching the value")


def _prepare(context: RunContext, footprint: RunFootprint, keep_alive: Any) -> PreparedRun:
    """Prepares a run: adds to the graph the agreements that open its gates."""
    graph, gates = context.graph, context.gates
    extended = context.extended.extension.takes_part_in(footprint.operations)
    run = PreparedRun(footprint, keep_alive, extended=extended)
    run.unweighed = footprint.unweighed(gates)
    run.is_step = footprint.is_step and not footprint.restores
    run.kept = footprint.taking_nothing()
    run.feeds = {x.name: value for x, value in footprint.empty_feeds}
    awaited = run_analysis.rows_before_gradients(gates, footprint.operations)
    with graphs.open_for_changes(graph):
        for level in footprint.levels(gates):
            run.targets.append(_agreement(context, run, level, awaited))
            run.tickets.append(gates.gates[level - 1].ticket)
            run.gate = run.gate or gates.gates[level - 1]
        run.idle_run = footprint.idle_run(gates) if context.ranks > 1 else None
        if run.targets:
            # The graph optimizer drops an exchange whose result a rank's constants make useless (a
            # mask of zeros), but not on a rank with others, nor on one that awaits or answers it.
            run.targets += run_analysis.always_executed(footprint.operations)
        if run.idle_run:
            run.idle_targets = [
                _idle_agreement(gates, run, level) for level in footprint.levels(gates)[1:]
            ]
    return run


def _agreement(
    context: RunContext,
    run: PreparedRun,
    level: int,
    awaited: Sequence[tf.Operation],
) -> tf.Tensor:
    """Makes the agreement that opens the gate of `level`.

    Args:
        context: that of the session's runs.
        run: the run.
        level: the gate's level.
        awaited: exchanges of rows that the run's gradients wait for.
    """
    first, gates = run.gate is None, context.gates
    checks = run.footprint.checks(gates, level, first)
    if first:
        prerequisites = run.footprint.sources(gates)
        run.repeatable = not prerequisites
        prerequisites += run_analysis.awaiting(awaited)
    else:
        prerequisites = run.footprint.exchanges_below(gates, level)
    return agreement.agree(
        gates.gates[level - 1],
        {gates.checks.index(check): check for check in checks},
        prerequisites,
        functools.partial(run.refused, first=first),
        first,
        context.extended.extension.when_agreed if first and run.extended else tf.no_op,
        run.footprint.choices if first else (),
        run.footprint.records(gates, gates.gates[level - 1]),
    )


def _idle_agreement(gates: GraphGates, run: PreparedRun, level: int) -> tf.Tensor:
    """Makes the agreement that opens the gate of `level`, for a rank that answers its peers."""
    assert run.idle_run is not None
    below = run.footprint.exchanges_below(gates, level)
    return agreement.agree(
        gates.gates[level - 1],
        {},
        [op for op in below if op in run.idle_run.operations],
        functools.partial(run.refused, first=False),
        first=False,
    )
