"""Reduces gradients over ranks, once, where they are taken.

TensorFlow's `tf.gradients` and `compute_gradients` end in one function. With respect to a
replicated variable the gradient becomes the mean over ranks, with respect to a table the sum from
its exchange, divided by N; other gradients are unchanged. Training thus minimises the mean of the
ranks' losses. The means are differentiable, so a penalty on a gradient uses, and differentiates,
the global gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from collective.gradients import (
    accumulation,
    eager_gradients,
    given_rows,
    rank_parts,
    table_gradients,
    traced_gradients,
)
from collective.ops.communication import collectives, dense_allreduce, gate
from collective.ops.counting import counted
from collective.ops.exchange import shard_gradients, slice_means
from collective.ops.graph import graph_analysis, graphs, library_operations
from collective.replication import assignments, cross_replica
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.strategies.grouped_exchange import groups_of
from collective.strategies.required_operations import required_operations
from collective.tables import dense_view, traced_lookups
from collective.tables.table import Sharded, mark_shard, shard_view
from collective.tables.updates import fused_updates
from collective.tensorflow_internals.variables import variables

# Optimizers for which the slices of a row are as good as their sum.
_ADDING_UP = (tf.train.Optimizer, tf.train.GradientDescentOptimizer)
# The types of scope(dense_compression=…).
WIRE_TYPES = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


def _table_of(x: Any) -> Sharded | None:
    if isinstance(x, Sharded):
        return x
    for variable in tf.global_variables():
        if isinstance(variable, Sharded) and variable.handle is x:
            return variable
    return None


class Scale(Protocol):
    """Stands for the factor by which gradients were multiplied while they were taken."""

    def unscale(self, gradients: Sequence[Any], of_tables: Sequence[bool | None]) -> list[Any]:
        """Returns the gradients without the factor; None says that one is of no variable."""
        ...


def is_variable(x: Any) -> bool:
    """Tells whether gradients with respect to `x` are those of a variable."""
    if isinstance(x, variables.Variable):
        return True
    return tf.is_symbolic_tensor(x) and x.op.type in graph_analysis.VARIABLE_TYPES


def refuse_eager_gradients(xs: Sequence[Any]) -> None:
    """Refuses gradients with respect to variables that are taken eagerly.

    Each rank would train a separate model. Gradients with respect to anything else are a rank's own
    in graphs, too.

    Args:
        xs: with respect to what gradients are about to be taken.

    Raises:
        RuntimeError: a variable is among them, and execution is eager.
        NotImplementedError: the same, in a dataset's function.
    """
    names = [str(x.name).partition(":")[0] for x in xs if isinstance(x, variables.Variable)]
    if names:
        others = f" and {counted(len(names) - 1, 'other')}" if names[1:] else ""
        action = f"the gradient with respect to the variable '{names[0]}'{others} is taken"
        if graphs.is_of_dataset(tf.get_default_graph()):
            raise NotImplementedError(
                f"In a function of a tf.data.Dataset (a loop over it in a tf.function), {action}"
                ". Ranks may have different numbers of batches, and would wait for each other. "
                "Let the loop call a tf.function that takes the gradient."
            )
        graphs.refuse_eager("scope()", action)


def refuse_nested(sources: Any) -> None:
    """Refuses the gradient of a table inside of another gradient, on several ranks.

    TensorFlow would give a rank's rows of it to the other one, as if they were all.

    Args:
        sources: with respect to what a gradient is about to be taken, in any structure.

    Raises:
        NotImplementedError: a table is among them, and another gradient is being taken.
    """
    if not shard_gradients.is_taken() or collectives.size() == 1:
        return
    table = next((x for x in tf.nest.flatten(sources) if isinstance(x, Sharded)), None)
    if table is not None:
        raise NotImplementedError(
            f"The gradient of the table '{table.op.name}' is taken inside of another gradient, as "
            "tf.recompute_grad does, and a tf.custom_gradient that takes one itself. Look the rows "
            "up before such a function, and pass them to it."
        )


def refuse_jacobian(
    original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `tf.GradientTape.jacobian`: refuses that of a variable in eager code.

    It takes the gradients in a loop, where ranks can't exchange them.

    Raises:
        RuntimeError: a variable is among the sources, in eager code.
        NotImplementedError: the function or graph joins what ranks compute of their batches.
    """
    if tf.executing_eagerly_outside_functions():
        names = [x.name for x in tf.nest.flatten(sources) if isinstance(x, variables.Variable)]
        if names and not graphs.is_eager():
            raise NotImplementedError(
                f"tf.GradientTape.jacobian with respect to the variable '{names[0]}' takes "
                "gradients in a loop, where ranks can't exchange them. Take tape.gradient of one "
                "element at a time."
            )
        refuse_eager_gradients(tf.nest.flatten(sources))
    if collectives.size() > 1 and cross_replica.joins(tf.get_default_graph()):
        raise NotImplementedError(
            "tf.GradientTape.jacobian takes gradients in a loop, where ranks can't exchange those "
            "of synchronized batch normalisation, all_gather and all_reduce. Take tape.gradient "
            "of one element at a time."
        )
    return original(tape, target, sources, *args, **kwargs)


def compute_gradients(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `tf.train.Optimizer.compute_gradients`: refuses it eagerly."""
    graphs.refuse_eager("scope()", f"{type(optimizer).__name__} takes gradients")
    return original(optimizer, *args, **kwargs)


def reduce_gradients(
    take: Callable[[], Sequence[Any]],
    xs: Sequence[Any],
    scale: Scale | None = None,
) -> list[Any]:
    """Returns the gradients of all ranks.

    Args:
        take: computes this rank's gradients with respect to `xs`; None for an x that isn't
            connected.
        xs: variables, tables, tensors.
        scale: by which the gradients are multiplied; None if they aren't.
    """
    options, tables = SCOPES.options, [_table_of(x) for x in xs]
    scaling = 1 / collectives.size() if options.embedding_gradients == "mean" else 1.0
    with library_operations.noted(tf.get_default_graph()), shard_gradients.scaled(scaling):
        gradients = take()
    reduced, dense, sparse = list(gradients), [], []
    for i, (gradient, x) in enumerate(zip(gradients, xs)):
        if gradient is None or not is_variable(x):
            continue
        if tables[i] is not None:
            with library_operations.noted(tf.get_default_graph()):
                reduced[i] = _shard_gradient(gradient)
        elif collectives.size() == 1:
            continue
        elif isinstance(gradient, tf.IndexedSlices):
            sparse.append(i)
        else:
            dense.append(i)
    # By name: ranks may have made their variables in any order.
    for places in (dense, sparse):
        places.sort(key=lambda i: str(xs[i].name))
    own = [(str(xs[i].name), gradients[i]) for i in sparse]
    everyones = slice_means.mean_slices(own)
    for i, slices in zip(sparse, everyones):
        reduced[i] = slices
    matrices = _matrices([(gradients[i], xs[i]) for i in sparse])
    means = dense_allreduce.over_ranks(
        "dense_gradients",
        [
            *((str(xs[i].name), gradients[i]) for i in dense),
            *((f"{xs[i].name} as a matrix", each.given) for i, each in zip(sparse, matrices)),
        ],
        WIRE_TYPES[options.dense_compression],
        stays_open=True,
    )
    for i, mean in zip(dense, means):
        reduced[i] = mean
    if not matrices:
        slice_means.note_sums(own, everyones)
    for slices, each, mean in zip(everyones, matrices, means[len(dense) :]):
        each.mean = mean
        slice_means.note(slices, each)
    if scale is not None:
        with library_operations.noted(tf.get_default_graph()):
            kinds = [t is not None if is_variable(x) else None for t, x in zip(tables, xs)]
            reduced = scale.unscale(reduced, kinds)
    if options.local_steps > 1:
        for i, (gradient, x) in enumerate(zip(reduced, xs)):
            if gradient is not None and is_variable(x):
                reduced[i] = accumulation.proxy_of(gradient)
    call = table_gradients.next_call(tf.get_default_graph())
    for i, table in enumerate(tables):
        if table is not None and reduced[i] is not None:
            reduced[i] = table_gradients.present(reduced[i], table, call)
    return reduced


def _matrices(sparse: Sequence[tuple[tf.IndexedSlices, Any]]) -> list[slice_means.SliceMean]:
    """Returns what may travel of variables' sparse gradients in the allreduce of dense ones."""
    options = SCOPES.options
    if options.dense_compression != "none" or options.local_steps > 1:
        return []
    return slice_means.as_matrices([(slices, tf.TensorShape(x.shape)) for slices, x in sparse])


def _shard_gradient(gradient: Any) -> tf.IndexedSlices:
    if not isinstance(gradient, tf.IndexedSlices):
        # In a loop: TensorFlow adds up whole matrices there, and this the shard's.
        rows = tf.range(tf.shape(gradient, out_type=tf.int64)[0])
        return table_gradients.of_rows(gradient, shard_gradients.mark_distinct(rows))
    return table_gradients.of_rows(gradient.values, gradient.indices)


def deduplicated(
    original: Any, values: tf.Tensor, indices: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Stands in for `_deduplicate_indexed_slices` of TensorFlow's and Keras's legacy optimizers.

    The gradient of an exchange already has each row only once.
    """
    return (values, indices) if shard_gradients.is_distinct(indices) else original(values, indices)


def deduplicate_each(original: Any, optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Replaces `_deduplicate_sparse_grad` of Keras's new optimizers, in the same way."""
    return [
        gradient
        if isinstance(gradient, tf.IndexedSlices) and shard_gradients.is_distinct(gradient.indices)
        else original(optimizer, [gradient])[0]
        for gradient in gradients
    ]


def apply_to_shards(
    original: Any,
    optimizer: tf.train.Optimizer,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands in for `Optimizer.apply_gradients`: slots and updates of tables are the shards'."""
    graphs.refuse_eager("scope()", f"{type(optimizer).__name__} updates variables")
    grads_and_vars = _of_rows(optimizer, grads_and_vars)
    grads_and_vars = assignments.sync_gradients(of_shards(grads_and_vars))
    grads_and_vars, apply = accumulation.accumulate(
        SCOPES.options.local_steps,
        fused_updates.fuse_updates(original),
        optimizer,
        grads_and_vars,
    )
    with (
        updating_shards(grads_and_vars),
        library_operations.noted_as_optimizers(tf.get_default_graph(), optimizer),
    ):
        applied = apply(optimizer, grads_and_vars, *args, **kwargs)
    for _, variable in grads_and_vars:
        if isinstance(variable, Sharded):
            for name in optimizer.get_slot_names():
                slot = optimizer.get_slot(variable, name)
                # One number for the whole table is the same on every rank.
                if slot is not None and slot.shape.rank != 0:
                    mark_shard(slot, variable)
    return applied


def _of_rows(optimizer: tf.train.Optimizer, grads_and_vars: Any) -> list[Any]:
    """Returns gradients, of which those of small replicated variables have each row once."""
    adds_up_first = all(
        getattr(type(optimizer), name) in [getattr(kind, name) for kind in _ADDING_UP]
        for name in ("_apply_sparse_duplicate_indices", "_resource_apply_sparse_duplicate_indices")
    )
    return [
        (
            slice_means.of_rows(gradient)
            if adds_up_first and isinstance(gradient, tf.IndexedSlices)
            else gradient,
            variable,
        )
        for gradient, variable in grads_and_vars
    ]


def of_shards(grads_and_vars: Any) -> list[Any]:
    """Returns the gradients for an optimizer to apply, from those that a script passes.

    Raises:
        TableError: a gradient has this rank's rows, but those of all ranks are needed.
    """
    rank_parts.settle(tf.get_default_graph())
    return [
        (
            given_rows.shard_gradient(gradient, variable)
            if isinstance(variable, Sharded)
            else rank_parts.check_gradient(gradient, variable),
            variable,
        )
        for gradient, variable in grads_and_vars
    ]


@contextlib.contextmanager
def updating_shards(grads_and_vars: Sequence[Any]) -> Iterator[None]:
    """Makes tables look like their shards, so that an optimizer makes slots and updates.

    No update starts until everything that can refuse the step, upstream of any gradient, has let it
    pass: a refused step leaves nothing half-applied.

    Raises:
        RuntimeError: a table has a constraint.
        TableError: a loop has read all of a table before.
    """
    for _, variable in grads_and_vars:
        if not isinstance(variable, Sharded):
            continue
        dense_view.note_write(variable)
        if variable.constraint is not None:
            raise RuntimeError(
                f"table '{variable.op.name}': a constraint is not possible for a sparsely updated "
                "variable. To have one, make it outside embedding_scope(), and its gradient a "
                "matrix (tf.convert_to_tensor)."
            )
    graph = tf.get_default_graph()
    gates = gate.gates_of(graph)
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g, _ in grads_and_vars
        if g is not None
    ]
    if not graphs.is_traced(graph):
        assignments.sync_update_ops(gates)
    # Without what other lookups of a group wait for: a run of these updates may not be fed with it.
    required, _ = required_operations(
        [g.op for g in values if isinstance(g, tf.Tensor)], frozenset(), groups_of(graph)
    )
    refusing = [opened.zero.op for opened in gates.gates] + gates.checked
    work = f"the optimizer makes slots and updates of {counted(len(values), 'variable')}"
    with STARTUP.doing(graph, work), shard_view():
        with tf.control_dependencies([op for op in refusing if op in required]):
            yield


def reduce_tape(
    original: Any,
    tape: Any,
    target: Any,
    sources: Any,
    *args: Any,
    scale: Scale | None = None,
    **kwargs: Any,
) -> Any:
    """Stands in for `tf.GradientTape.gradient`: reduces gradients that a tape takes.

    In a graph, too: `minimize` of a callable loss uses one, and a `tf.function` has a graph.
    """
    if tf.executing_eagerly():
        return eager_gradients.take(original, tape, target, sources, *args, **kwargs)
    if graphs.is_eager():
        refuse_eager_gradients(tf.nest.flatten(sources))
        return original(tape, target, sources, *args, **kwargs)
    flat = tf.nest.flatten(sources)
    if tf.executing_eagerly_outside_functions():
        traced_lookups.refuse_half_precision("gradients are taken")
        traced_gradients.check(flat, *args, **kwargs)

    def take(xs: Any = sources) -> Sequence[Any]:
        gradients = original(tape, target, xs, *args, **kwargs)
        taken: list[Any] = tf.nest.flatten(
            gradients if isinstance(gradients, (list, tuple)) else [gradients]
        )
        return taken

    if graphs.is_traced(tf.get_default_graph()):
        if not any(is_variable(x) for x in flat):
            return original(tape, target, sources, *args, **kwargs)
        own = functools.partial(traced_gradients.take, take, flat)
        reduced = reduce_gradients(own, flat, scale=scale)
    else:
        reduced = reduce_gradients(take, flat, scale=scale)
    return tf.nest.pack_sequence_as(sources, reduced)
