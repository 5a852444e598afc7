"""Collects the inputs of a group's lookups, flattened, and checks them.

Ids, samples and weights are in the host's memory, where they are checked; otherwise TensorFlow
would copy them to a GPU and back. Only weights that the model learns are on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from collective.ops.communication import gate
from collective.ops.exchange import dispatch, embedding_bag
from collective.ops.graph import device_scopes, host_inputs
from collective.strategies.base import Lookup


@dataclasses.dataclass(frozen=True)
class GroupInputs:
    """Holds the inputs of a group's lookups; None where a lookup has none.

    Attributes:
        ids: int64 [K] for each lookup.
        samples: int64 [K] of lookups that are combined.
        weights: float32 [K] of those that have weights.
    """

    ids: list[tf.Tensor]
    samples: list[tf.Tensor | None]
    weights: list[tf.Tensor | None]


def inputs_of(group: Sequence[Lookup], optional: bool) -> GroupInputs:
    """Returns the inputs of `group`.

    Args:
        group: lookups.
        optional: a run can leave any of them out.
    """
    flat = _optional_input if optional else _flat

    def weights_of(lookup: Lookup) -> tf.Tensor | None:
        if lookup.sparse_weights is None:
            return None
        learned = lookup.weights_have_gradients
        with device_scopes.anywhere() if learned else device_scopes.on_host():
            return flat(tf.cast(lookup.sparse_weights.values, tf.float32), "weights")

    if dispatch.launch_kernels():
        host_inputs.keep_on_host(x for lookup in group for x in lookup.inputs)
    with device_scopes.on_host():
        ids = [flat(lookup.ids, "ids") for lookup in group]
        samples = [
            None if x.sparse_ids is None else flat(x.sparse_ids.indices[:, 0], "samples")
            for x in group
        ]
    return GroupInputs(ids, samples, [weights_of(lookup) for lookup in group])


def _flat(x: tf.Tensor, name: str) -> tf.Tensor:
    return tf.reshape(x, [-1], name)


def _optional_input(x: tf.Tensor, name: str) -> tf.Tensor:
    """Returns `x`, flat, passed through a placeholder by which a run can leave the lookup out."""
    return tf.placeholder_with_default(_flat(x, "flat"), [None], name)


def checks_of(name: str, group: Sequence[Lookup], inputs: GroupInputs) -> list[gate.Check]:
    """Returns the checks of `inputs`; `name` is that of the exchange's first collective."""
    return _bound_checks(name, group, inputs) + _mismatch_checks(name, group, inputs)


def _bound_checks(name: str, group: Sequence[Lookup], inputs: GroupInputs) -> list[gate.Check]:
    """Checks that ids of static tables are in their tables."""
    static = [i for i, lookup in enumerate(group) if lookup.unchecked]
    if not static:
        return []
    return [
        gate.Check(
            name,
            tuple(group[i].table.op.name for i in static),
            tuple(group[i].table.rows for i in static),
            embedding_bag.bounds([inputs.ids[i] for i in static]),
        )
    ]


def _mismatch_checks(name: str, group: Sequence[Lookup], inputs: GroupInputs) -> list[gate.Check]:
    """Checks that indices, weights and ids of the lookups that combine rows belong together.

    So all that comes before these inputs has succeeded, too, before anything moves.
    """
    combined = [i for i, x in enumerate(inputs.samples) if x is not None]
    if not combined:
        return []
    weighted = [
        (place, i, inputs.weights[i])
        for place, i in enumerate(combined)
        if inputs.weights[i] is not None
    ]
    mismatches = embedding_bag.mismatches(
        [inputs.ids[i] for i in combined],
        [inputs.samples[i] for i in combined],
        [weights for _, _, weights in weighted],
        [place for place, _, _ in weighted],
    )
    tables = [group[i].table.op.name for i in combined for _ in range(2)]
    tables += [group[i].table.op.name for _, i, _ in weighted]
    wrong = [gate.PLACES, gate.ORDER] * len(combined) + [gate.WEIGHTS] * len(weighted)
    with device_scopes.on_host():
        bounds = tf.stack([mismatches, mismatches], 1)
    return [gate.Check(name, tuple(tables), (1,) * len(wrong), bounds, tuple(wrong))]
