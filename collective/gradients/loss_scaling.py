"""Scales gradients in float16, in which small ones would vanish, and skips steps that overflow.

    ys × scale ──► gradients ──► of all ranks ──► ÷ scale ──► what a script gets
                                     │
                                     └─► are they finite? ──► whether optimizers apply them
                                                         └──► the next scale

All ranks decide the same, as a row's gradient overflows only on its owner. A skipped step changes
no variable, table or slot. The rule is that of `tf.train.experimental.DynamicLossScale`, after
Micikevicius et al., "Mixed Precision Training" (https://arxiv.org/abs/1710.03740): the scale starts
at 2^15, doubles after 2000 steps in a row that were applied, and halves, down to 1, with each step
that was skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients import reduction
from collective.ops.communication import collectives, fused_reductions
from collective.ops.graph import (
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
    optional_variables,
)
from collective.scope import SCOPES
from collective.tables.updates import own_rules

FIRST_SCALE = 2.0**15
STEPS_TO_DOUBLE = 2000


class LossScale:
    """Scales the gradients of one loss, and decides whether they are applied.

    Optimizers that share a loss share its scale, and apply their gradients all or none.

    Attributes:
        scale: float32 scalar.
        good_steps: int64 scalar, how many steps in a row were applied since the scale changed.
        finite: bool scalar, whether the gradients of this run are finite on all ranks.
        update: changes the scale after a run.
        gradients: the operations that give the unscaled gradients.

    Args:
        number: how many others the graph has.
    """

    def __init__(self, number: int):
        # Not by tf.get_variable: an open variable scope may have a partitioner, or reuse variables.
        with tf.init_scope(), tf.name_scope(f"loss_scale{f'_{number}' if number else ''}/"):
            self.scale = self._variable("scale", FIRST_SCALE, tf.float32)
            self.good_steps = self._variable("good_steps", 0, tf.int64)
            # Its input is replaced whenever more gradients of the loss are taken.
            self.finite = tf.identity(tf.constant(True))
            self.update = self._make_update()
        self.gradients: set[tf.Operation] = set()

    @staticmethod
    def _variable(name: str, first: float, dtype: tf.DType) -> tf.Variable:
        variable = tf.Variable(
            tf.constant(first, dtype), trainable=False, use_resource=True, name=name
        )
        optional_variables.let_be_missing(variable)
        return variable

    def _make_update(self) -> tf.Operation:
        scale, good_steps = self.scale.read_value(), self.good_steps.read_value() + 1
        doubled, grows = scale * 2, good_steps >= STEPS_TO_DOUBLE
        after_good = tf.where(tf.logical_and(grows, tf.is_finite(doubled)), doubled, scale)
        new_scale = tf.where(self.finite, after_good, tf.maximum(scale / 2, 1.0))
        new_good = tf.where(
            tf.logical_and(self.finite, tf.logical_not(grows)),
            good_steps,
            tf.zeros_like(good_steps),
        )
        with tf.control_dependencies([new_scale, new_good]):
            return tf.group(
                self.scale.assign(new_scale, read_value=False),
                self.good_steps.assign(new_good, read_value=False),
            )

    def unscale(self, gradients: Sequence[Any], of_tables: Sequence[bool | None]) -> list[Any]:
        """Returns the gradients without their factor, and has the decision depend on them.

        Args:
            gradients: of all ranks, times the factor of `scaled`; None where there is none.
            of_tables: for each whether it has this rank's rows, which other ranks don't know; None
                if it is with respect to no variable. The decision doesn't depend on that one, which
                is this rank's own and isn't applied.
        """
        inverse = collectives.size() / self.scale.read_value()
        unscaled = [g if g is None else _times(g, inverse) for g in gradients]
        rows = [_values(g) for g, part in zip(unscaled, of_tables) if g is not None and part]
        others = [
            _values(g) for g, part in zip(unscaled, of_tables) if g is not None and part is False
        ]
        flags = [_all_finite(others)] if others else []
        if rows:
            infinite = tf.cast(tf.logical_not(_all_finite(rows)), tf.float32)
            ranks = fused_reductions.of_all_ranks(
                "gradients_are_infinite", infinite, fused_reductions.Reduction.SUM
            )
            flags.append(tf.equal(ranks, 0))
        if flags:
            flags.append(self.finite.op.inputs[0])
            self.finite.op._update_input(0, tf.reduce_all(tf.stack(flags)))
        self.gradients.update(x.op for x in (*rows, *others))
        return unscaled


@dataclasses.dataclass
class LossScales:
    """Records the scales of a graph.

    Attributes:
        by_loss: by the names of the losses.
        is_applying: whether updates are being made that a run may skip.
    """

    by_loss: dict[tuple[str, ...], LossScale] = dataclasses.field(default_factory=dict)
    is_applying: bool = False


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    values = _values(gradient)
    values = values * tf.cast(factor, values.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    return values


def _all_finite(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.is_finite(x)) for x in values]))


def scale_of(ys: Any, xs: Sequence[Any]) -> LossScale | None:
    """Returns the scale by which to take gradients; None if they are taken as they are.

    Gradients with respect to other tensors than variables are: a script's penalty uses them in the
    forward pass.

    Raises:
        NotImplementedError: they are taken inside a branch, loop or function, or are summed over
            batches.
    """
    if SCOPES.options.mixed_precision != "float16":
        return None
    losses = [y for y in tf.nest.flatten(ys) if getattr(y, "dtype", tf.int32).is_floating]
    if not losses or not any(reduction.is_variable(x) for x in xs):
        return None
    local_steps = SCOPES.options.local_steps
    if local_steps > 1:
        raise NotImplementedError(
            f"scope(mixed_precision='float16') decides at each run whether its gradients are "
            f"applied, and local_steps={local_steps} adds them up over runs. Use one of the two, "
            "or mixed_precision='bfloat16', which needs no scale."
        )
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        raise NotImplementedError(
            "scope(mixed_precision='float16') scales gradients with respect to variables only "
            f"outside of branches, loops and functions; those of '{losses[0].name}' are taken "
            "inside one. Take them outside, or use mixed_precision='bfloat16', which needs no "
            "scale."
        )
    by_loss = graph_state.of(graph, LossScales).by_loss
    key = tuple(y.name for y in losses)
    if key not in by_loss:
        with library_operations.noted(graph), tf.control_dependencies(None):
            by_loss[key] = LossScale(len(by_loss))
    return by_loss[key]


def scaled(scale: LossScale, ys: Any, grad_ys: Any) -> list[Any]:
    """Returns the gradients with respect to `ys` to start from, times the scale, divided by N.

    Args:
        scale: the scale.
        ys: one or more tensors.
        grad_ys: as `tf.gradients` takes it: None, or for each of `ys` a tensor or None.
    """
    ys = list(ys) if isinstance(ys, (list, tuple)) else [ys]
    given = list(grad_ys) if isinstance(grad_ys, (list, tuple)) else [grad_ys]
    given = given if given != [None] else [None] * len(ys)
    # A rank's loss counts 1 / N in the loss of all ranks: its gradients then have the size that
    # they have in one process, and overflow where they do there.
    read = scale.scale.read_value() / collectives.size()
    return [
        (tf.ones_like(y) if first is None else first) * tf.cast(read, y.dtype)
        if y.dtype.is_floating
        else first
        for y, first in zip(ys, given)
    ]


def refuse_second_scale(
    original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces methods of TensorFlow's and Keras's optimizers that scale: refuses a second scale.

    Raises:
        NotImplementedError: scope(mixed_precision='float16') scales, too.
    """
    if SCOPES.options.mixed_precision == "float16":
        raise NotImplementedError(
            f"{type(optimizer).__name__} scales the loss, and so does "
            "scope(mixed_precision='float16'). Use one of the two: the optimizer that is inside, "
            "or a scope without mixed_precision."
        )
    return original(optimizer, *args, **kwargs)


def apply_gradients(
    original: Any,
    optimizer: tf.train.Optimizer,
    grads_and_vars: Any,
    global_step: Any = None,
    name: Any = None,
) -> Any:
    """Replaces `tf.train.Optimizer.apply_gradients`: applies scaled gradients if all are finite."""
    grads_and_vars = list(grads_and_vars)
    own_rules.check(optimizer, grads_and_vars)

    def apply() -> Any:
        return reduction.apply_to_shards(original, optimizer, grads_and_vars, global_step, name)

    return if_finite(grads_and_vars, apply)


def if_finite(grads_and_vars: Sequence[Any], apply: Callable[[], Any]) -> Any:
    """Makes the updates by gradients; a run skips them if a scaled one isn't finite.

    Args:
        grads_and_vars: the gradients that are applied, and their variables.
        apply: makes the updates, and returns their operation.

    Returns:
        The operation of the updates.

    Raises:
        NotImplementedError: it is called inside a branch, loop or function, where it isn't known
            which scale the gradients had.
    """
    graph = tf.get_default_graph()
    record = graph_state.of(graphs.outermost(graph), LossScales)
    if not record.by_loss or record.is_applying:
        return apply()
    if not graphs.is_outside(graph):
        raise NotImplementedError(
            "scope(mixed_precision='float16') skips steps whose gradients overflow, so gradients "
            "can't be applied inside branches, loops and functions. Apply them outside, or use "
            "mixed_precision='bfloat16', which skips none."
        )
    applied = [_values(g).op for g, _ in grads_and_vars if g is not None]
    upstream = graph_analysis.upstream(applied)
    scales = [
        scale for scale in record.by_loss.values() if not upstream.isdisjoint(scale.gradients)
    ]
    if not scales:
        return apply()
    finite = tf.reduce_all(tf.stack([scale.finite for scale in scales]))

    def updates() -> tf.Operation:
        record.is_applying = True
        try:
            return tf.group(apply())
        finally:
            record.is_applying = False

    before = set(map(id, tf.get_collection(tf.GraphKeys.TRAIN_OP)))
    done = tf.group(tf.cond(finite, updates, tf.no_op), *(scale.update for scale in scales))
    collection = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
    collection[:] = [op for op in collection if id(op) in before] + [done]
    return done
