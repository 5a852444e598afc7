"""Accumulates gradients: each run adds its gradients, and every k-th run applies the mean.

    batch ──► gradient ──► sum ──► mean ──► proxy ──► clipping, … ──► optimizer       in every k-th
                            run
                            └──► kept for the next run                                in the others

A script gets a proxy instead of a gradient. `apply_gradients` makes the proxy show the mean over
the batches since the last update: what the script does with the gradient, such as clipping, applies
to the mean, as it would to the gradient of a batch k times as large. A fetch of it returns the mean
so far; only a run of the update counts as a batch.

Gradients are reduced over ranks before they are added, in every run: the collectives of all runs
are the same, and none of them is inside a `tf.cond`. A table's sums stay with the owner of the
rows, as `IndexedSlices` of the distinct rows that the batches touched.

Sums are kept in variables that are in no collection and no checkpoint. They need no initializer:
they are empty at first in a session, after a checkpoint was restored into it, and after an updated
variable was initialized again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients.table_gradients import ShardGradient
from collective.ops.communication import collectives
from collective.ops.exchange import shard_gradients
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
    seen_operations,
)
from collective.ops.graph.sessions import raw_session, run_unpatched
from collective.replication.analysis import note_shown_means
from collective.tables.rows import rows_in_file, waiting_gradients

SCOPE = "collective/local_steps"


@dataclasses.dataclass
class GradientProxy:
    """Stands in for a gradient in a script.

    Attributes:
        gradient: the computed gradient, a tensor or `IndexedSlices`.
        shown: what the script received.
        accumulator: computes the mean that it shows, once there is an update.
    """

    gradient: Any
    shown: Any
    accumulator: GradientAccumulator | None = None


@dataclasses.dataclass
class GradientProxies:
    """Records what a graph's scripts get for gradients that are summed over several batches."""

    by_operation: dict[tf.Operation, GradientProxy] = dataclasses.field(default_factory=dict)


def proxy_of(gradient: Any) -> Any:
    """Returns a proxy for `gradient`, a tensor or `IndexedSlices`.

    In a function or a branch it is `gradient` itself, because nothing could be inserted there
    later.
    """
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        return gradient
    with library_operations.noted(graph), tf.name_scope(f"{SCOPE}/gradient"):
        if isinstance(gradient, tf.IndexedSlices):
            # Not an identity: the number of slices may be known, and differs in the mean.
            values, indices = (
                tf.placeholder_with_default(x, tf.TensorShape([None]).concatenate(x.shape[1:]))
                for x in (gradient.values, gradient.indices)
            )
            shown = _slices_like(gradient, values, indices)
        else:
            shown = tf.identity(gradient)
    proxy = GradientProxy(gradient, shown)
    operations = [x.op for x in _tensors(shown)]
    _proxies_of(graph).update(dict.fromkeys(operations, proxy))
    note_shown_means(operations)
    return shown


def accumulate(
    steps: int,
    original: Callable[..., Any],
    optimizer: tf.train.Optimizer,
    grads_and_vars: Sequence[Any],
) -> tuple[Sequence[Any], Callable[..., Any]]:
    """Sums up gradients; every `steps`-th run applies their mean.

    Args:
        steps: k. With 1 there is nothing to sum.
        original: `Optimizer.apply_gradients`.
        optimizer: the optimizer.
        grads_and_vars: its gradients and their variables.

    Returns:
        The gradients to apply, and their variables; and the function that applies them, called like
        `original`.

    Raises:
        NotImplementedError: inside a branch, a loop or a function.
        TableError: rows of a table move between runs.
        ValueError: some of the gradients are already summed up for another update, others aren't.
    """
    updated = [v for g, v in grads_and_vars if g is not None]
    if steps == 1 or not updated:
        # TensorFlow refuses an update of nothing.
        return grads_and_vars, original
    rows_in_file.check_rows_stay(updated, f"scope(local_steps={steps})")
    graph = tf.get_default_graph()
    if not graphs.is_outside(graph):
        raise NotImplementedError(
            f"apply_gradients of {optimizer.get_name()} inside tf.cond, tf.while_loop or a "
            f"function is not possible with scope(local_steps={steps}): call it outside."
        )
    proxies: dict[int, GradientProxy] = {}
    shown = []
    for gradient, variable in grads_and_vars:
        if gradient is not None:
            gradient = tf.convert_to_tensor_or_indexed_slices(gradient)
            if not _proxies_upstream(gradient, graph):
                gradient = proxy_of(gradient)
            proxies.update((id(proxy), proxy) for proxy in _proxies_upstream(gradient, graph))
        shown.append((gradient, variable))
    accumulator = _accumulator_of(list(proxies.values()), steps, optimizer)
    accumulator.restart_with(updated)

    def apply(*args: Any, **kwargs: Any) -> Any:
        return _apply_every_kth(accumulator, original, *args, **kwargs)

    return shown, apply


def restart(session: Any) -> None:
    """Drops all sums that are kept in `session`."""
    accumulators = {
        id(proxy.accumulator): proxy.accumulator
        for proxy in _proxies_of(session.graph).values()
        if proxy.accumulator is not None
    }
    if accumulators:
        run_unpatched(raw_session(session), [each.restart for each in accumulators.values()])


class GradientAccumulator:
    """Adds up gradients over the runs since the last update.

    Attributes:
        sums: the sums, this run's gradients included.
        last: bool scalar: whether an update follows on this run.
        restart: the operation that drops what is kept.
    """

    def __init__(self, proxies: Sequence[GradientProxy], steps: int):
        gradients = [proxy.gradient for proxy in proxies]
        # Without the control inputs that a script adds to updates, which may be downstream of a
        # proxy.
        graph = graphs.outermost(tf.get_default_graph())
        with (
            library_operations.noted(graph),
            tf.init_scope(),
            device_scopes.anywhere(),
            tf.name_scope(f"{SCOPE}/"),
        ):
            self._count = _variable(tf.int64, f"{collectives.ALIKE}local_steps_{steps}")
            self._kept = [
                [_variable(_sum_type(x.dtype), f"{SCOPE}/sum") for x in _tensors(g)]
                for g in gradients
            ]
            before = self._batches_before(gradients)
            sums = tf.cond(
                before > 0,
                lambda: _flat(map(_added, gradients, self._kept)),
                lambda: _flat(map(_first, gradients)),
                strict=True,
            )
            self.sums, self._batches = list(sums), before + 1
            self.last = self._batches >= steps
            self.restart = self._assign_count(tf.constant(0, tf.int64))
            self._show_means(proxies)
            waiting_gradients.note(graph, self._batches_before([]))

    def _batches_before(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Returns how many batches are kept; it is known once the gradients are computed.

        So everything that may refuse the run comes first.
        """
        with tf.control_dependencies(_flat(map(_tensors, gradients))):
            started = tf.raw_ops.VarIsInitializedOp(resource=self._count)
        return tf.cond(
            started,
            lambda: tf.raw_ops.ReadVariableOp(resource=self._count, dtype=tf.int64),
            lambda: tf.constant(0, tf.int64),
        )

    def _show_means(self, proxies: Sequence[GradientProxy]) -> None:
        """Lets the proxies show the mean of the sums."""
        sums = iter(self.sums)
        for proxy in proxies:
            for x, shown in zip(_tensors(proxy.gradient), _tensors(proxy.shown)):
                total = next(sums)
                if x.dtype.is_floating:
                    mean = total / tf.cast(self._batches, total.dtype)
                    total = tf.cast(mean, x.dtype)
                shown.op._update_input(0, total)
            proxy.accumulator = self

    def keep(self) -> tf.Operation:
        """Returns an operation that keeps the sums for the next run."""
        return tf.group(
            self._assign_count(self._batches), *map(_assign, _flat(self._kept), self.sums)
        )

    def forget(self) -> tf.Operation:
        """Returns an operation that keeps nothing."""
        return self._assign_count(tf.constant(0, tf.int64))

    def restart_with(self, variables: Sequence[Any]) -> None:
        """Drops the sums when one of `variables` is initialized: they are of its old value."""
        for variable in variables:
            # TensorFlow accepts no change of an operation that a session has seen.
            if variable.initializer._id > seen_operations.last(variable.initializer.graph):
                variable.initializer._add_control_input(self.restart)

    def _assign_count(self, value: tf.Tensor) -> tf.Operation:
        return _assign(self._count, value)


def _apply_every_kth(
    accumulator: GradientAccumulator,
    original: Callable[..., Any],
    optimizer: tf.train.Optimizer,
    grads_and_vars: Sequence[Any],
    global_step: Any = None,
    name: str | None = None,
) -> tf.Operation:
    # Variables are not made in a branch.
    with tf.init_scope():
        optimizer._create_slots([v for g, v in grads_and_vars if g is not None])
    train_ops = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
    before = list(train_ops)

    def update() -> tf.Operation:
        applied = original(optimizer, grads_and_vars, global_step, name)
        return tf.group(applied, accumulator.forget())

    # All sums first: if a branch is part of the graph, its operations don't wait for each other's
    # inputs.
    with tf.control_dependencies(accumulator.sums), device_scopes.anywhere():
        done = tf.cond(accumulator.last, update, accumulator.keep, name="local_steps")
    with tf.control_dependencies([done]):
        applied = tf.no_op(name or optimizer.get_name())
    train_ops[:] = [*before, applied]
    return applied


def _accumulator_of(
    proxies: Sequence[GradientProxy], steps: int, optimizer: tf.train.Optimizer
) -> GradientAccumulator:
    """Returns the accumulator of all `proxies`.

    It is a new one, or that of another optimizer that shares the gradients, for example by a global
    norm.
    """
    if all(proxy.accumulator is None for proxy in proxies):
        return GradientAccumulator(proxies, steps)
    accumulators = {id(proxy.accumulator): proxy.accumulator for proxy in proxies}
    accumulator = next(iter(accumulators.values()))
    if len(accumulators) > 1 or accumulator is None:
        raise ValueError(
            f"apply_gradients of {optimizer.get_name()}: some of its gradients depend on gradients "
            f"that another optimizer's apply_gradients sums up over {steps} batches, others don't. "
            "With local_steps, let two optimizers share all gradients (clipped by one norm) or "
            "none."
        )
    return accumulator


def _proxies_of(graph: tf.Graph) -> dict[tf.Operation, GradientProxy]:
    """Returns the proxies of `graph` by their operations."""
    return graph_state.of(graphs.outermost(graph), GradientProxies).by_operation


def _proxies_upstream(gradient: Any, graph: tf.Graph) -> list[GradientProxy]:
    """Returns the proxies that `gradient` is computed from.

    Proxies from which these are computed, for example in a penalty, are left out.
    """
    proxies, seen_by_session = _proxies_of(graph), seen_operations.last(graph)

    def is_usable(op: tf.Operation) -> bool:
        # A session has already seen the other ones.
        proxy = proxies.get(op)
        return proxy is not None and (proxy.accumulator is not None or op._id > seen_by_session)

    start = [x.op for x in _tensors(gradient)]
    walked = graph_analysis.walk(start, stop=is_usable, control=False)
    usable = sorted(filter(is_usable, walked), key=lambda op: op._id)
    return [proxies[op] for op in usable]


def _tensors(gradient: Any) -> list[tf.Tensor]:
    return (
        [gradient.values, gradient.indices]
        if isinstance(gradient, tf.IndexedSlices)
        else [gradient]
    )


def _slices_like(
    gradient: tf.IndexedSlices, values: tf.Tensor, indices: tf.Tensor
) -> tf.IndexedSlices:
    """Returns `IndexedSlices` with everything the library knows about `gradient`."""
    if shard_gradients.is_distinct(gradient.indices):
        shard_gradients.mark_distinct(indices)
    kind = ShardGradient if isinstance(gradient, ShardGradient) else tf.IndexedSlices
    return kind(values, indices, gradient.dense_shape)


def _sum_type(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _first(gradient: Any) -> list[tf.Tensor]:
    """Returns what is kept of the first batch."""
    first = [tf.cast(x, _sum_type(x.dtype)) for x in _tensors(gradient)]
    return list(shard_gradients.summed(*first)) if isinstance(gradient, ShardGradient) else first


def _added(gradient: Any, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what is kept of this batch and those before it."""
    new = [tf.cast(x, _sum_type(x.dtype)) for x in _tensors(gradient)]
    old = [
        tf.raw_ops.ReadVariableOp(resource=variable, dtype=x.dtype)
        for variable, x in zip(kept, new)
    ]
    if not isinstance(gradient, tf.IndexedSlices):
        return [tf.add(*old, *new)]
    both = [tf.concat(pair, 0) for pair in zip(old, new)]
    # A replicated variable's slices stay separate, as in one larger batch.
    return list(shard_gradients.summed(*both)) if isinstance(gradient, ShardGradient) else both


def _variable(dtype: tf.DType, name: str) -> tf.Tensor:
    """Makes a variable of any shape that nothing initializes, and returns its handle."""
    with tf.name_scope(None):
        name = tf.get_default_graph().unique_name(name)
    return tf.raw_ops.VarHandleOp(
        dtype=dtype, shape=tf.TensorShape(None), shared_name=name, name=f"{name}/"
    )


def _assign(variable: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.AssignVariableOp(resource=variable, value=value)


def _flat(lists: Iterable[Iterable[tf.Tensor]]) -> list[tf.Tensor]:
    return [x for each in lists for x in each]
