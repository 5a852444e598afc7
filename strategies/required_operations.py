"""Reads off a graph what a run needs of exchanges that values and lookups share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication.fused_reductions import FusedValue, JoinedSums
from collective.ops.exchange import embedding_bag_gradients
from collective.strategies.grouped_exchange import Group

Feeds = list[tuple[tf.Tensor, np.ndarray]]


def required_operations(
    operations: Iterable[tf.Operation],
    fed: Set[str],
    groups: Sequence[Group],
    reduced: Sequence[FusedValue] = (),
    joined: Sequence[JoinedSums] = (),
) -> tuple[set[tf.Operation], Feeds]:
    """Returns what a run of `operations` needs, and feeds for what it doesn't need.

    A group's exchange waits for the inputs of all its lookups, and a reduction for all its values.
    But a lookup whose rows reach nothing, neither forward nor by its gradient, isn't needed:
    nothing is looked up for it, and the operations that its inputs come from aren't run. Nor is a
    value needed whose result reaches nothing. Sums that may travel with gradients do so in a run
    that needs an allreduce of gradients; else they travel alone.

    Args:
        operations: the operations to be run.
        fed: the names of tensors that are fed.
        groups: the groups of lookups that may be left out.
        reduced: the values that may be left out of reductions over ranks.
        joined: the sums that travel alone, or with gradients.

    Returns:
        (`operations` and all that they wait for, (tensor, value) to be fed for lookups of `groups`
        and values of `reduced` that are left out, and for ways that sums don't take).
    """
    walk = _Walk(fed, groups, reduced, joined)
    walk.go(operations)
    return walk.seen, walk.choose_ways() + walk.left_out()


class _Walk:
    """Walks upstream, and goes on to what only some members of an exchange need if one needs it.

    Attributes:
        seen: what the walk has met.
    """

    def __init__(
        self,
        fed: Set[str],
        groups: Sequence[Group],
        reduced: Sequence[FusedValue],
        joined: Sequence[JoinedSums],
    ):
        members = [(group, i, member) for group in groups for i, member in enumerate(group.members)]
        self.seen: set[tf.Operation] = set()
        self._fed, self._joined = fed, joined
        self._inputs = [
            *([x for x in (m.ids, m.samples, m.weights) if x is not None] for _, _, m in members),
            *([each.flat] for each in reduced),
        ]
        self._member_by_input = {x.op: i for i, each in enumerate(self._inputs) for x in each}
        # Every operation that pools, forward or backward, has the group's positions as inputs.
        self._member_by_output = {
            (_positions(group.pool), i): number for number, (group, i, _) in enumerate(members)
        }
        self._member_by_result = {
            each.result.op: len(members) + i for i, each in enumerate(reduced)
        }
        # The inputs that the walk has met of members that nothing needs so far.
        self._held_inputs: dict[int, list[tf.Operation]] = {}
        self._needed: set[int] = set()
        self._values_of_sums = {each.sums.op: each.values for each in joined}
        self._offers = {way.offer.op for each in joined for way in each.ways}
        self._stack: list[tf.Operation] = []

    def go(self, operations: Iterable[tf.Operation]) -> None:
        """Walks upstream from `operations`."""
        for op in operations:
            self._push(op)
        while self._stack:
            op = self._stack.pop()
            member = self._member_by_input.get(op)
            if member is not None and member not in self._needed:
                self._held_inputs.setdefault(member, []).append(op)
            elif op in self._values_of_sums:
                # Whatever way they take, and that is known in the end.
                self._push(self._values_of_sums[op].op)
            elif op not in self._offers:
                self._go_on_from(op)

    def choose_ways(self) -> Feeds:
        """Lets sums take one way each, and returns what is fed for the others."""
        feeds: list[tf.Tensor] = []
        for each in self._joined:
            met = [way for way in each.ways if way.offer.op in self.seen]
            taken = met[:1] if each.sums.op in self.seen else []
            feeds += [way.offer for way in met if way not in taken]
            if each.sums.op in self.seen:
                feeds += [way.sums for way in each.ways if way not in taken]
                feeds += [each.alone] if taken else []
                self.go([way.sums.op for way in taken] or [each.alone.op])
        return [_nothing(x) for x in feeds]

    def left_out(self) -> Feeds:
        """Returns what is fed for members that nothing needs."""
        return [_nothing(x) for member in self._held_inputs for x in self._inputs[member]]

    def _push(self, op: tf.Operation) -> None:
        if op not in self.seen:
            self.seen.add(op)
            self._stack.append(op)

    def _need(self, member: int | None) -> None:
        if member is not None and member not in self._needed:
            self._needed.add(member)
            self._stack.extend(self._held_inputs.pop(member, []))

    def _go_on_from(self, op: tf.Operation) -> None:
        self._need(self._member_by_result.get(op))
        if self._member_by_output and op.type in embedding_bag_gradients.GRADIENTS:
            for i in op.get_attr("members"):
                self._need(self._member_by_output.get((_positions(op), i)))
        produced = [x for x in op.inputs if x.name not in self._fed]
        for x in produced:
            if self._member_by_output and x.op.type == "CollectivePool":
                self._need(self._member_by_output.get((_positions(x.op), x.value_index)))
        for producer in [*(x.op for x in produced), *op.control_inputs]:
            self._push(producer)


def _positions(op: tf.Operation) -> str:
    """Returns the name of the first positions of an operation that pools."""
    return str(embedding_bag_gradients.pooled_inputs(op).positions[0].name)


def _nothing(x: tf.Tensor) -> tuple[tf.Tensor, np.ndarray]:
    return x, np.empty(0, x.dtype.as_numpy_dtype)
