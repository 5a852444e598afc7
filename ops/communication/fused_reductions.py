"""Lets reductions over ranks share collectives, however many values there are.

Code that needs a value of all ranks gets an identity at first. Before a session runs the graph,
values of one type that don't depend on each other get a common collective:

    value 1 ──► flat 1 ─┐               ┌─► result 1
    value 2 ──► flat 2 ─┴─► allreduce ──┴─► result 2

A run that needs only the second result feeds "flat 1" with an empty tensor, and doesn't compute
value 1 (`collective.strategies.required_operations`).

The sums of a training run travel in the allreduce of its gradients. Both ways are in the graph, and
each run feeds one of them with an empty tensor:

    flat ─┬─────────────────► allreduce ──► alone ─┐
          └─► offer ─┐                             ├─► sums
    gradients ───────┴─► allreduce ──────► joined ─┘
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, dense_allreduce, gate
from collective.ops.communication.dense_allreduce import OpenPlace
from collective.ops.graph import device_scopes, graph_analysis, graph_state, graphs

SCOPE = "collective/reductions/"
# Each run feeds the ways that its sums don't take.
_MOST_WAYS = 4


class Reduction(enum.Enum):
    """Says how the values of all ranks become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class WaitingValue(NamedTuple):
    """Stands for a value that is to be reduced over all ranks.

    Attributes:
        name: says what it is; the same on all ranks.
        value: this rank's value, of the same shape on every rank.
        result: the value that all ranks will have.
        reduction: how the ranks' values become one.
        state: what a rank without data puts in the place of `value`; None if it can compute that.
    """

    name: str
    value: tf.Tensor
    result: tf.Tensor
    reduction: Reduction
    state: tf.Tensor | None


class FusedValue(NamedTuple):
    """Stands for a value that has a collective, shared with others.

    Attributes:
        described: the description that ranks compare if a run needs the value.
        flat: [E], what this rank puts into the collective.
        result: the value that all ranks have.
    """

    described: str
    flat: tf.Tensor
    result: tf.Tensor


class Way(NamedTuple):
    """Stands for one way that sums may take: together with gradients.

    Attributes:
        offer: [E], what this rank puts into the gradients' allreduce.
        sums: [E], the result for it.
    """

    offer: tf.Tensor
    sums: tf.Tensor


class JoinedSums(NamedTuple):
    """Stands for sums over ranks that travel in their own collective or with gradients.

    Attributes:
        sums: [E], the sums, whichever way they took.
        values: [E], what this rank adds.
        alone: [E], the result of their own collective.
        ways: the other ways.
    """

    sums: tf.Tensor
    values: tf.Tensor
    alone: tf.Tensor
    ways: tuple[Way, ...]


@dataclasses.dataclass
class ReducedValues:
    """Records the values of a graph that are reduced over all ranks.

    Attributes:
        by_operation: the values, by the operations that return their reductions.
        joined: sums that travel alone or with gradients.
    """

    by_operation: dict[tf.Operation, WaitingValue | FusedValue] = dataclasses.field(
        default_factory=dict
    )
    joined: list[JoinedSums] = dataclasses.field(default_factory=list)


def joined_sums(graph: tf.Graph) -> list[JoinedSums]:
    """Returns the sums of a graph that may travel with gradients."""
    return graph_state.of(graph, ReducedValues).joined


def fused_values(graph: tf.Graph) -> list[FusedValue]:
    """Returns the values of a graph that have collectives."""
    values = graph_state.of(graph, ReducedValues).by_operation.values()
    return [each for each in values if isinstance(each, FusedValue)]


def is_reduction(op: tf.Operation) -> bool:
    """Tells whether `op` returns a value of all ranks, in the place of each rank's own."""
    return op in graph_state.of(op.graph, ReducedValues).by_operation


def of_all_ranks(
    name: str, value: tf.Tensor, reduction: Reduction, state: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the reduction of the ranks' `value`, of its shape.

    Args:
        name: says what it is, for the collective's name and for errors.
        value: of the same shape on every rank.
        reduction: how the ranks' values become one.
        state: what a rank without data puts in the place of `value`.
    """
    graph = tf.get_default_graph()
    opened = gate.gates_of(graph).of_collective([value]).zero
    if not graphs.is_outside(graph):
        return _reduce([value], reduction, collectives.unique_name(name), opened)[0]
    with tf.control_dependencies([opened]):
        # Until there is a collective, only a session of scope() can run it.
        kept = tf.identity(value)
    result = tf.identity(kept)
    collectives.note_replicated([result])
    values = graph_state.of(graph, ReducedValues).by_operation
    values[result.op] = WaitingValue(name, value, result, reduction, state)
    return result


def fuse(graph: tf.Graph) -> None:
    """Gives the values of a graph that have no collective yet a common one.

    A value that depends on another's result gets a later collective; so does a value that waits for
    another gate.
    """
    reduced = graph_state.of(graph, ReducedValues).by_operation.values()
    waiting = [each for each in reduced if isinstance(each, WaitingValue)]
    if not waiting:
        return
    results = {each.result.op: [each.value.op] for each in waiting}
    depths: dict[tf.Operation, int] = {}
    by_depth: dict[int, list[WaitingValue]] = collections.defaultdict(list)
    for each in waiting:
        depth = graph_analysis.level(each.value.op, depths, results)
        by_depth[depth].append(each)
    gates = gate.gates_of(graph)
    with (
        graphs.open_for_changes(graph),
        graph.as_default(),
        graphs.outside(),
        device_scopes.anywhere(),
        tf.name_scope(SCOPE),
        tf.control_dependencies(None),
    ):
        for _, values in sorted(by_depth.items()):
            by_kind: dict[tuple[Any, ...], list[WaitingValue]] = collections.defaultdict(list)
            for each in values:
                level, dtype = gates.of_collective([each.value]).level, each.value.dtype.name
                # Runs need either what they compute from their data or what exists already, seldom
                # both.
                is_there = each.state is None
                by_kind[level, is_there, dtype, each.reduction.value].append(each)
            for _, together in sorted(by_kind.items()):
                _fuse(together)
            gates.changed()


def _fuse(values: Sequence[WaitingValue]) -> None:
    """Gives `values`, of the same type and kind, a collective."""
    gates = gate.gates_of(values[0].value.graph)
    values = sorted(values, key=lambda each: (each.name, each.result.op._id))
    flat = [tf.placeholder_with_default(tf.reshape(each.value, [-1]), [None]) for each in values]
    name = values[0].name
    if len(values) > 1:
        listed = "\n".join(f"{each.name} {each.value.shape}" for each in values)
        name = f"reductions.{hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()}"
    name, reduction = collectives.unique_name(name), values[0].reduction
    opened = gates.of_collective([each.value for each in values]).zero
    states: list[tuple[tf.Tensor, tf.Tensor]] = []
    places = _places_for(values) if reduction is Reduction.SUM else []
    reduced = (
        _sums_by_any_way(flat, name, opened, places)
        if places
        else _reduce(flat, reduction, name, opened)
    )
    for each, own, whole in zip(values, flat, reduced):
        shape = each.value.shape
        if not shape.is_fully_defined():
            shape = tf.shape(each.value if each.state is None else each.state)
        each.result.op._update_input(0, tf.reshape(whole, shape))
        described = f"the ranks' {reduction.value} of '{each.name}'"
        values_of_graph = graph_state.of(own.graph, ReducedValues).by_operation
        values_of_graph[each.result.op] = FusedValue(described, own, each.result)
        if each.state is not None:
            states.append((own, tf.reshape(each.state, [-1])))
    if states:
        # (A sum in the order of ranks takes two collectives.)
        is_in_order = reduction is Reduction.SUM and collectives.in_order()
        gates.states[f"{name}.parts" if is_in_order else name] = states


def _places_for(values: Sequence[WaitingValue]) -> list[OpenPlace]:
    """Returns the places for `values`, of one type, in allreduces of gradients.

    Neither may wait for the other, and the values may not wait for a later gate.
    """
    graph = values[0].value.graph
    gates, results = gate.gates_of(graph), {each.result.op for each in values}
    upstream = graph_analysis.upstream([each.value.op for each in values])
    level = gates.of_collective([each.value for each in values]).level
    if any(_takes_what_a_run_puts_in(op, gates) for op in upstream):
        return []
    return [
        place
        for place in dense_allreduce.open_places(graph)[-_MOST_WAYS:]
        if place.sums.dtype == values[0].value.dtype
        and gates.level(place.sums.op) >= level
        and place.given.op not in upstream
        and results.isdisjoint(graph_analysis.upstream([place.sums.op]))
    ]


def _takes_what_a_run_puts_in(op: tf.Operation, gates: gate.GraphGates) -> bool:
    """Tells whether `op` takes something from a queue that a run fills with exchanged data."""
    return (
        "QueueDequeue" in op.type
        and bool(op.inputs)
        and any(
            "Enqueue" in user.type and gates.level(user) > 0
            for user in op.inputs[0].op.outputs[0].consumers()
        )
    )


def _sums_by_any_way(
    flat: Sequence[tf.Tensor], name: str, opened: tf.Tensor, places: Sequence[OpenPlace]
) -> list[tf.Tensor]:
    """Returns the sums over ranks of `flat`, through their own collective or with gradients."""
    values = tf.concat(flat, 0)
    (alone,) = collectives.allreduce_sum([values], name, opened)
    offers = [tf.placeholder_with_default(values, [None]) for _ in places]
    ways = [Way(offer, place.add(offer)) for offer, place in zip(offers, places)]
    # All but one are empty.
    sums = tf.concat([alone, *(way.sums for way in ways)], 0)
    joined_sums(values.graph).append(JoinedSums(sums, values, alone, tuple(ways)))
    return tf.split(sums, [tf.size(x) for x in flat], num=len(flat))


def _reduce(
    values: Sequence[tf.Tensor], reduction: Reduction, name: str, opened: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the reductions of `values`, of one type, through one collective."""
    if reduction is Reduction.SUM:
        return collectives.allreduce_sum(values, name, opened)
    flat = tf.concat([tf.reshape(x, [-1]) for x in values], 0)
    everyones = collectives.allgather(flat[None], name, opened)
    choose = tf.reduce_max if reduction is Reduction.MAX else tf.reduce_min
    pieces = tf.split(choose(everyones, 0), [tf.size(x) for x in values], num=len(values))
    return [tf.reshape(piece, tf.shape(x)) for piece, x in zip(pieces, values)]
