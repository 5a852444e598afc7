"""k batches per update: a run adds its gradients to those of the runs before it, and every k-th run
applies their mean.

    batch ──► gradient ──► sum ──► mean ──► marker ──► clipping, … ──► optimizer      in every k-th
                            run
                            └──► kept for the next run                                in the others

A marker is what a script gets for a gradient. `apply_gradients` puts the mean over the batches
since the last update in front of it: what the script makes of the gradient, clipping say, it makes
of the mean, as it would of the gradient of a k times larger batch. Whoever fetches it sees the mean
so far; only a run of the update counts as a batch.

Gradients are reduced over ranks before they are added, in every run: the collectives of all runs
are the same, and none of them is inside a `tf.cond`. A table's sums stay with the owner of the
rows, as `IndexedSlices` of those that the batches touched, each once.

What is kept is in variables that no collection and no checkpoint knows. They need no initializer:
nothing is kept at first in a session, after a checkpoint was restored into it, and where an updated
variable has been initialized anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients.clipping import is_of_table, table_gradient
from collective.ops import collectives, graphs, shard_gradients
from collective.ops.graph_state import state_of
from collective.ops.sessions import raw_session, run_unpatched

SCOPE = "collective/local_steps"


@dataclasses.dataclass
class Marker:
    """A gradient that a script was given.

    Attributes:
        gradient: what was computed, a tensor or `IndexedSlices`.
        shown: what the script was given.
        sums: those whose mean it shows, once an update is there.
    """

    gradient: Any
    shown: Any
    sums: Sums | None = None


def mark(gradient: Any) -> Any:
    """`gradient`, a tensor or `IndexedSlices`, behind a marker.

    In a function or a branch it is returned as it is: there, nothing could be put in front of a
    marker later.
    """
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        return gradient
    with tf.name_scope(f"{SCOPE}/gradient"):
        if isinstance(gradient, tf.IndexedSlices):
            # Not an identity: the number of slices may be known, and is another one in the mean.
            values, indices = (
                tf.placeholder_with_default(x, tf.TensorShape([None]).concatenate(x.shape[1:]))
                for x in (gradient.values, gradient.indices)
            )
            shown = _slices_like(gradient, values, indices)
        else:
            shown = tf.identity(gradient)
    made = Marker(gradient, shown)
    _markers_of(graph).update((x.op, made) for x in _tensors(shown))
    return shown


def accumulate(
    steps: int,
    original: Callable[..., Any],
    optimizer: tf.train.Optimizer,
    grads_and_vars: Sequence[Any],
) -> tuple[Sequence[Any], Callable[..., Any]]:
    """Sums up gradients, of which every `steps`-th run applies the mean.

    Args:
        steps: k. With 1 there is nothing to sum up.
        original: `Optimizer.apply_gradients`.

    Returns:
        (the gradients of which an update is made, and their variables; what makes it of them,
        called as `original`).

    Raises:
        NotImplementedError: inside a branch, a loop or a function.
        ValueError: some of the gradients are already summed up for another update, others aren't.
    """
    updated = [v for g, v in grads_and_vars if g is not None]
    if steps == 1 or not updated:  # which TensorFlow refuses
        return grads_and_vars, original
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        raise NotImplementedError(
            f"apply_gradients of {optimizer.get_name()} inside tf.cond, "
            f"tf.while_loop or a function is "
            f"not possible with scope(local_steps={steps}): call it outside."
        )
    markers, marked = [], []
    for gradient, variable in grads_and_vars:
        if gradient is not None:
            gradient = tf.convert_to_tensor_or_indexed_slices(gradient)
            if not _upstream(gradient, graph):
                gradient = mark(gradient)
            markers += _upstream(gradient, graph)
        marked.append((gradient, variable))
    sums = _sums_of(list({id(marker): marker for marker in markers}.values()), steps, optimizer)
    sums.restart_with(updated)

    def apply(*args: Any, **kwargs: Any) -> Any:
        return _every_kth(sums, original, *args, **kwargs)

    return marked, apply


def restart(session: Any) -> None:
    """Nothing is kept any more in `session`."""
    every = {
        id(marker.sums): marker.sums
        for marker in _markers_of(session.graph).values()
        if marker.sums is not None
    }
    if every:
        run_unpatched(raw_session(session), [sums.restart for sums in every.values()])


class Sums:
    """What gradients have come to in the runs since the last update.

    Attributes:
        last: bool scalar: whether an update follows on this run.
        restart: the operation after which nothing is kept.
    """

    def __init__(self, markers: Sequence[Marker], steps: int):
        gradients = [marker.gradient for marker in markers]
        # Without what a script makes updates wait for, which may be downstream of a marker.
        with tf.init_scope(), tf.device(None), tf.name_scope(f"{SCOPE}/"):
            self._count = _variable(tf.int64, f"{collectives.ALIKE}local_steps_{steps}")
            self._kept = [
                [_variable(_added_in(x.dtype), f"{SCOPE}/sum") for x in _tensors(g)]
                for g in gradients
            ]
            # Not before the gradients are there: whatever may refuse the run comes first.
            with tf.control_dependencies([x for g in gradients for x in _tensors(g)]):
                started = tf.raw_ops.VarIsInitializedOp(resource=self._count)
            before = tf.cond(
                started,
                lambda: tf.raw_ops.ReadVariableOp(resource=self._count, dtype=tf.int64),
                lambda: tf.constant(0, tf.int64),
            )
            sums = tf.cond(
                before > 0,
                lambda: _flat(map(_added, gradients, self._kept)),
                lambda: _flat(map(_first, gradients)),
                strict=True,
            )
            self._sums, self._batches = list(sums), before + 1
            self.last = self._batches >= steps
            self.restart = _assign(self._count, tf.constant(0, tf.int64))
            sums = iter(self._sums)
            for marker in markers:
                for x, shown in zip(_tensors(marker.gradient), _tensors(marker.shown)):
                    shown.op._update_input(
                        0, self._mean(next(sums), x) if x.dtype.is_floating else next(sums)
                    )
                marker.sums = self

    def _mean(self, total: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        return tf.cast(total / tf.cast(self._batches, total.dtype), of.dtype)

    def keep(self) -> tf.Operation:
        """Keeps the sums for the next run."""
        kept = [variable for variables in self._kept for variable in variables]
        return tf.group(_assign(self._count, self._batches), *map(_assign, kept, self._sums))

    def forget(self) -> tf.Operation:
        """Keeps nothing."""
        return _assign(self._count, tf.constant(0, tf.int64))

    def restart_with(self, variables: Sequence[Any]) -> None:
        """Whoever initializes one of `variables` forgets the gradients of its old value."""
        for variable in variables:
            # TensorFlow takes no change of an operation that a session has seen.
            if variable.initializer._id > state_of(variable.initializer.graph).seen_by_session:
                variable.initializer._add_control_input(self.restart)


def _every_kth(
    sums: Sums,
    original: Callable[..., Any],
    optimizer: tf.train.Optimizer,
    grads_and_vars: Sequence[Any],
    global_step: Any = None,
    name: str | None = None,
) -> tf.Operation:
    with tf.init_scope():  # variables are not made in a branch
        optimizer._create_slots([v for g, v in grads_and_vars if g is not None])
    listed = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
    before = list(listed)

    def update() -> tf.Operation:
        return tf.group(original(optimizer, grads_and_vars, global_step, name), sums.forget())

    # All sums first: where a branch is part of the graph, its operations don't wait for each
    # other's inputs.
    with tf.control_dependencies(sums._sums):
        done = tf.cond(sums.last, update, sums.keep, name="local_steps")
    with tf.control_dependencies([done]):
        applied = tf.no_op(name or optimizer.get_name())
    listed[:] = [*before, applied]
    return applied


def _sums_of(markers: Sequence[Marker], steps: int, optimizer: tf.train.Optimizer) -> Sums:
    """The sums of all `markers`: new ones, or those of another optimizer, which shares them by a
    norm of all, say.
    """
    if all(marker.sums is None for marker in markers):
        return Sums(markers, steps)
    found = {id(marker.sums): marker.sums for marker in markers}
    sums = next(iter(found.values()))
    if len(found) > 1 or sums is None:
        raise ValueError(
            f"apply_gradients of {optimizer.get_name()}: some of its gradients "
            f"depend on gradients that another "
            f"optimizer's apply_gradients sums up over {steps} batches, others "
            f"don't. With local_steps, let two "
            "optimizers share all gradients (clipped by one norm) or none."
        )
    return sums


def _markers_of(graph: tf.Graph) -> dict[tf.Operation, Marker]:
    """By their operations."""
    return state_of(graphs.outermost(graph)).accumulation_markers


def _upstream(gradient: Any, graph: tf.Graph) -> list[Marker]:
    """The markers that `gradient` is computed from; not those that they are computed from, in a
    penalty say.
    """
    markers, run, found = _markers_of(graph), state_of(graph).seen_by_session, []
    stack = [x.op for x in _tensors(gradient)]
    seen = set(stack)
    while stack:
        op = stack.pop()
        marker = markers.get(op)
        # else a session has seen it as it is
        if marker is not None and (marker.sums is not None or op._id > run):
            found.append(marker)
            continue
        for x in op.inputs:
            if x.op not in seen:
                seen.add(x.op)
                stack.append(x.op)
    return found


def _tensors(gradient: Any) -> list[tf.Tensor]:
    return (
        [gradient.values, gradient.indices]
        if isinstance(gradient, tf.IndexedSlices)
        else [gradient]
    )


def _slices_like(
    gradient: tf.IndexedSlices, values: tf.Tensor, indices: tf.Tensor
) -> tf.IndexedSlices:
    """`IndexedSlices` of which is known what is known of `gradient`."""
    if shard_gradients.is_distinct(gradient.indices):
        shard_gradients.mark_distinct(indices)
    kind = table_gradient if is_of_table(gradient) else tf.IndexedSlices
    return kind(values, indices, gradient.dense_shape)


def _added_in(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _first(gradient: Any) -> list[tf.Tensor]:
    """What is to be kept of the first batch."""
    first = [tf.cast(x, _added_in(x.dtype)) for x in _tensors(gradient)]
    return list(shard_gradients.summed(*first)) if is_of_table(gradient) else first


def _added(gradient: Any, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What is to be kept of this batch and those before it."""
    new = [tf.cast(x, _added_in(x.dtype)) for x in _tensors(gradient)]
    old = [
        tf.raw_ops.ReadVariableOp(resource=variable, dtype=x.dtype)
        for variable, x in zip(kept, new)
    ]
    if not isinstance(gradient, tf.IndexedSlices):
        return [tf.add(*old, *new)]
    both = [tf.concat(pair, 0) for pair in zip(old, new)]
    # A replicated variable's slices stay apart, as they do in one larger batch.
    return list(shard_gradients.summed(*both)) if is_of_table(gradient) else both


def _variable(dtype: tf.DType, name: str) -> tf.Tensor:
    """The handle of a variable of its own, of any shape, not initialized."""
    with tf.name_scope(None):
        name = tf.get_default_graph().unique_name(name)
    return tf.raw_ops.VarHandleOp(
        dtype=dtype, shape=tf.TensorShape(None), shared_name=name, name=f"{name}/"
    )


def _assign(variable: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.AssignVariableOp(resource=variable, value=value)


def _flat(lists: Any) -> list[tf.Tensor]:
    return [x for some in lists for x in some]
