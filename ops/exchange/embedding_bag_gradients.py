"""Registers gradients of the operations in `embedding_bag.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.exchange.dispatch import operations_given
from collective.ops.exchange.shard_gradients import gradient_scale, mark_distinct
from collective.ops.graph import graph_state

_LAYOUT = ("ranks", "section_tables", "kinds", "dims", "pooled", "weighted")
LOOKUPS = ("sections", "dims", "combiners", "weighted", "max_norms")

for _name in ("CollectiveBounds", "CollectiveMismatches", "CollectiveHear"):
    tf.no_gradient(_name)


@dataclasses.dataclass
class PooledMembers:
    """Records which members of a group have a gradient.

    Attributes:
        by_gradient: the members' numbers, by the operation that sums their gradients.
    """

    by_gradient: dict[tf.Operation, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@tf.RegisterGradient("CollectiveAsk")
def _ask_gradient(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Returns the gradients of weights that are only passed on; those that the owner multiplies
    by have none.
    """
    pooled, passed = op.get_attr("P"), op.get_attr("V")
    first = 3 + op.get_attr("M") + pooled
    scales, weights = gradients[first:][:pooled], gradients[first + pooled + op.get_attr("L") :]
    if all(map(_is_zero, scales)):
        return [*[None] * (len(op.inputs) - passed), *weights[:passed]]
    raise NotImplementedError(
        f"{op.name}: the gradient with respect to weights of a lookup that its owner pools is "
        "asked for after the lookup was built into an exchange; ask for it first, or use "
        "scope(grouping=False)"
    )


def _attributes(op: tf.Operation, *names: str) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in names}


def _layout(op: tf.Operation) -> dict[str, Any]:
    """Returns the attributes that describe the received message."""
    return _attributes(op, *_LAYOUT, "counted")


@tf.RegisterGradient("CollectiveGatherRows")
def _gather_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    """Returns `IndexedSlices` of distinct rows for each handle."""
    tables, inputs = op.get_attr("T"), list(op.inputs)
    message, splits, *headers = inputs[2 * tables :]
    handles, rows = inputs[:tables], inputs[tables : 2 * tables]
    slices = _sums_by_row(op, gradient, handles, rows, message, splits, headers)
    return [*slices, *[None] * (len(inputs) - tables)]


def _sums_by_row(
    op: tf.Operation,
    gradient: Any,
    handles: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    message: tf.Tensor,
    splits: tf.Tensor,
    headers: Sequence[tf.Tensor] = (),
) -> list[tf.IndexedSlices]:
    """Returns for each table the sums of what the ranks sent for each row.

    Args:
        op: the operation that gathered the rows.
        gradient: [E] float32, the gradient of these rows.
        handles, rows, message, splits, headers: the operation's inputs and results.
    """
    values, indices, _ = operations_given(headers).collective_reduce_rows(
        tf.convert_to_tensor(gradient),
        handles,
        rows,
        message,
        splits,
        list(headers),
        scale=gradient_scale(),
        **_attributes(op, "max_norms", "shapes"),
        **_layout(op),
    )
    shapes = [tf.TensorShape(shape) for shape in op.get_attr("shapes")]
    return [
        tf.IndexedSlices(
            v,
            mark_distinct(i),
            tf.constant(s.as_list(), tf.int64) if s.is_fully_defined() else None,
        )
        for v, i, s in zip(values, indices, shapes)
    ]


@tf.RegisterGradient("CollectiveSharedAlltoallKeys")
def _keys_gradient(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Returns `IndexedSlices` of distinct rows for each handle, like `_gather_gradient`."""
    tables, (message, splits) = op.get_attr("T"), op.outputs[:2]
    if gradients[2] is None:
        return [None] * len(op.inputs)
    handles, local_rows = list(op.inputs[2:]), list(op.outputs[-tables:])
    return [
        None,
        None,
        *_sums_by_row(op, gradients[2], handles, local_rows, message, splits),
    ]


@tf.RegisterGradient("CollectiveReduceRows")
def _reduce_gradient(op: tf.Operation, *gradients: Any) -> list[Any]:
    """Returns the gradient of the reduced values with respect to the gradient that was reduced.

    It is linear, except for max_norm.
    """
    if any(norm > 0 for norm in op.get_attr("max_norms")):
        raise NotImplementedError(
            f"{op.name}: there is no second derivative of a pooled lookup with max_norm; look the "
            "table up without max_norm, or without pooling by the owner"
        )
    tables, inputs = op.get_attr("T"), list(op.inputs)
    message, splits, *headers = inputs[1 + 2 * tables :]
    spread = operations_given(headers).collective_spread_rows(
        [tf.convert_to_tensor(gradient) for gradient in gradients[:tables]],
        list(op.outputs[2 * tables :]),
        inputs[1 : 1 + tables],
        inputs[1 + tables : 1 + 2 * tables],
        message,
        splits,
        headers,
        **_attributes(op, "scale", "max_norms", "shapes"),
        **_layout(op),
    )
    return [spread, *[None] * (len(inputs) - 1)]


@tf.RegisterGradient("CollectiveSpreadRows")
def _spread_gradient(op: tf.Operation, _: Any) -> None:
    raise NotImplementedError(f"{op.name}: there is no third derivative of a lookup")


def _is_zero(gradient: Any) -> bool:
    """Tells whether `gradient` is TensorFlow's placeholder for an output that nothing uses."""
    if gradient is None:
        return True
    if isinstance(gradient, tf.IndexedSlices):
        return False
    op = gradient.op
    if op.type not in ("Fill", "Const"):
        return bool(op.type == "ZerosLike")
    value = tf.get_static_value(op.inputs[1] if op.type == "Fill" else gradient)
    return value is not None and not np.any(value)


class PooledInputs(NamedTuple):
    """Holds the inputs of an operation that pools, forward or backward.

    `rows` is None for an update, which has other inputs, too. `counts` has two tensors on a GPU,
    none on a CPU. `early`, which only a pool has, holds what was pooled while rows still arrived;
    it may be empty. So may `handles` and `ids`, of tables that a pool reads itself.
    """

    rows: tf.Tensor | None
    positions: list[tf.Tensor]
    samples: list[tf.Tensor]
    weights: list[tf.Tensor]
    gradients: list[tf.Tensor]
    counts: list[tf.Tensor]
    early: list[tf.Tensor]
    handles: list[tf.Tensor]
    ids: list[tf.Tensor]


# The attributes with the sizes of the lists of inputs, in their order; 1: the rows.
_LISTS = {
    "CollectivePool": "1MPWCEHI",
    "CollectivePoolGradient": "1MPWGC",
    "CollectiveSparsePoolUpdate": "TSNRTMPWGC",
}
# Operations that sum the gradients of what was pooled.
GRADIENTS = ("CollectivePoolGradient", "CollectiveSparsePoolUpdate")


def pooled_inputs(op: tf.Operation) -> PooledInputs:
    """Returns the inputs of a CollectivePool, or of an operation of `GRADIENTS`."""
    inputs, parts = list(op.inputs), {}
    for name in _LISTS[op.type]:
        size = 1 if name == "1" else op.get_attr(name)
        parts[name], inputs = inputs[:size], inputs[size:]
    (rows,) = parts.get("1", [None])
    return PooledInputs(rows, *(parts.get(name, []) for name in "MPWGCEHI"))


def _pool_gradient(
    op: tf.Operation, rows: Any, members: Sequence[int], gradients: Sequence[Any]
) -> Any:
    """Returns (flat, weights' gradients): what `members` contribute to a pool.

    `op` is the pool, or its gradient.
    """
    _, positions, samples, weights, _, counts, *_, handles, _ = pooled_inputs(op)
    # Tables aren't updated before the pool has read them: a lookup that is fetched together with
    # its own update returns the value before.
    read = [op] if handles and op.graph is tf.get_default_graph() else []
    with tf.control_dependencies(read):
        pool_gradient = operations_given(counts).collective_pool_gradient(
            rows,
            positions,
            samples,
            weights,
            [tf.convert_to_tensor(g) for g in gradients],
            counts,
            members=members,
            without_rows=bool(handles),
            **_attributes(op, *LOOKUPS),
        )
    # Describes the exchange of gradients.
    op = pool_gradient.flat.op
    graph_state.of(op.graph, PooledMembers).by_gradient[op] = tuple(members)
    return pool_gradient


@tf.RegisterGradient("CollectivePool")
def _gradient_of_pool(op: tf.Operation, *gradients: Any) -> list[Any]:
    real = [
        (member, gradient) for member, gradient in enumerate(gradients) if not _is_zero(gradient)
    ]
    if not real:
        return [None] * len(op.inputs)
    pool_gradient = _pool_gradient(op, op.inputs[0], *zip(*real))
    of_inputs = [
        pool_gradient.flat,
        *[None] * (op.get_attr("M") + op.get_attr("P")),
        *pool_gradient.weight_gradients,
    ]
    return of_inputs + [None] * (len(op.inputs) - len(of_inputs))


@tf.RegisterGradient("CollectivePoolGradient")
def _gradient_of_pool_gradient(op: tf.Operation, of_flat: Any, *of_weights: Any) -> list[Any]:
    """Differentiates the flat gradient, which is linear in the gradients and in the weights."""
    members = op.get_attr("members")
    if not all(_is_zero(gradient) for gradient in of_weights):
        raise NotImplementedError(
            f"{op.name}: there is no derivative of the gradient of lookup weights; stop the "
            "gradient at the weights with tf.stop_gradient, or multiply the rows by them yourself"
        )
    if _is_zero(of_flat):
        return [None] * len(op.inputs)
    if any(op.get_attr("max_norms")[member] > 0 for member in members):
        raise NotImplementedError(
            f"{op.name}: there is no second derivative of a lookup with max_norm; clip the rows "
            "yourself"
        )
    of_flat = tf.convert_to_tensor(of_flat)
    _, positions, samples, weights, gradients, counts, *_ = pooled_inputs(op)
    pooled = operations_given(counts).collective_pool(
        of_flat, positions, samples, weights, counts, [], [], [], **_attributes(op, *LOOKUPS)
    )
    pool_gradient = _pool_gradient(op, of_flat, members, gradients)
    return [
        *[None] * (1 + len(positions) + len(samples)),
        *pool_gradient.weight_gradients,
        *(pooled[m] for m in members),
        *[None] * len(counts),
    ]
