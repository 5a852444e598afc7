"""Gradients are reduced once, where they are taken: TensorFlow's `tf.gradients` and
`compute_gradients` end in one function.

With respect to a replicated variable the gradient becomes the mean over ranks, with respect to a
table the sum that its exchange gives divided by N; with respect to anything else it stays as it is.
Training thus minimises the mean of the ranks' losses. The means are differentiable, so a penalty on
a gradient sees, and differentiates, the global one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective import accumulation, alike, means
from collective.clipping import table_gradient
from collective.ops import communication, gate, slices
from collective.ranks import runs
from collective.replicated import mark_shard
from collective.strategies.together import groups_of
from collective.tables.table import Sharded, shard_view

VARIABLE_OPS = ("VarHandleOp", "VariableV2", "Variable")


class Options(NamedTuple):
    """What scope() says of gradients.

    Attributes:
        mean: a table's gradient is the mean of the ranks' gradients; else their sum.
        wire: the type in which dense gradients travel; None: their own.
        local_steps: how many batches an update is made of.
    """

    mean: bool
    wire: tf.DType | None
    local_steps: int


def _table_of(x: Any) -> Sharded | None:
    if isinstance(x, Sharded):
        return x
    for variable in tf.global_variables():
        if isinstance(variable, Sharded) and variable.handle is x:
            return variable
    return None


def _is_variable(x: Any) -> bool:
    if isinstance(x, variables.Variable):
        return True
    return isinstance(x, tf.Tensor) and x.op.type in VARIABLE_OPS


def reduce_gradients(
    take: Callable[[], Sequence[Any]], xs: Sequence[Any], options: Options, taped: bool = False
) -> list[Any]:
    """The gradients of all ranks.

    Args:
        take: computes them on this rank, with respect to `xs`; `None` for what isn't connected.
        xs: variables, tables, tensors.
        options: of the scope.
        taped: whether a tape takes them, which knows nothing of the gradients that our operations
            have.
    """
    with slices.scaled(1 / communication.size() if options.mean else 1.0):
        gradients = [
            slices.of_shard(g)
            if taped and isinstance(g, tf.IndexedSlices) and _table_of(x) is not None
            else g
            for g, x in zip(take(), xs)
        ]
    out, dense = list(gradients), []
    for i, (gradient, x) in enumerate(zip(gradients, xs)):
        if gradient is None or not _is_variable(x):
            continue
        if _table_of(x) is not None:
            out[i] = _table_gradient(gradient)
        elif communication.size() == 1:
            continue
        elif isinstance(gradient, tf.IndexedSlices):
            out[i] = mean_slices(gradient, x)
        else:
            dense.append(i)
    # whatever the order in which this rank made its variables
    dense.sort(key=lambda i: str(xs[i].name))
    reduced = means.over_ranks(
        "dense_gradients", [(str(xs[i].name), gradients[i]) for i in dense], options.wire
    )
    for i, mean in zip(dense, reduced):
        out[i] = mean
    if options.local_steps > 1:
        out = [
            accumulation.mark(g) if g is not None and _is_variable(x) else g
            for g, x in zip(out, xs)
        ]
    return out


def _table_gradient(gradient: Any) -> tf.IndexedSlices:
    # a loop's: TensorFlow adds up whole matrices there, here the shard's
    if not isinstance(gradient, tf.IndexedSlices):
        shape = tf.shape(gradient)
        gradient = tf.IndexedSlices(gradient, tf.range(shape[0]), shape)
    return table_gradient(gradient.values, gradient.indices, gradient.dense_shape)


def deduplicated(
    original: Any, values: tf.Tensor, indices: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """`optimizer._deduplicate_indexed_slices`: an exchange's gradient names each row once already."""
    return (values, indices) if slices.is_distinct(indices) else original(values, indices)


def mean_slices(gradient: tf.IndexedSlices, x: Any) -> tf.IndexedSlices:
    """A replicated variable's sparse gradient stays sparse: every rank gets everyone's slices."""
    name, zero = x.name.partition(":")[0], means.opened([gradient.values, gradient.indices])
    values = communication.allgather(
        gradient.values / tf.cast(communication.size(), gradient.dtype),
        communication.unique_name(f"{name}/gradient_values"),
        zero,
    )
    indices = communication.allgather(
        gradient.indices, communication.unique_name(f"{name}/gradient_indices"), zero
    )
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def apply_to_shards(
    local_steps: int,
    original: Any,
    optimizer: tf.train.Optimizer,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`Optimizer.apply_gradients`, in which tables present themselves as their shards: slots and
    updates are local.
    """
    grads_and_vars = alike.gradients(grads_and_vars, mean_slices)
    grads_and_vars, apply = accumulation.accumulate(
        local_steps, original, optimizer, grads_and_vars
    )
    with updating_shards(grads_and_vars):
        applied = apply(optimizer, grads_and_vars, *args, **kwargs)
    for _, variable in grads_and_vars:
        if isinstance(variable, Sharded):
            for slot in optimizer.get_slot_names():
                mark_shard(optimizer.get_slot(variable, slot), variable)
    return applied


@contextlib.contextmanager
def updating_shards(grads_and_vars: Sequence[Any]) -> Iterator[None]:
    """Where an optimizer makes slots and updates: tables present themselves as their shards.

    No update starts before everything that can refuse the step, upstream of any of the gradients,
    has let it pass: a step that can't be taken leaves nothing half-applied.

    Raises:
        RuntimeError: a table has a constraint.
    """
    for _, variable in grads_and_vars:
        if isinstance(variable, Sharded) and variable.constraint is not None:
            raise RuntimeError(
                f"table '{variable.op.name}': a constraint is not possible for a "
                f"sparsely updated variable. To "
                "have one, make it outside embedding_scope(), and its gradient a "
                "matrix (tf.convert_to_tensor)."
            )
    graph = tf.get_default_graph()
    gates = gate.gates_of(graph)
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g, _ in grads_and_vars
        if g is not None
    ]
    alike.hold_updates(gates)
    # Not what is upstream for other lookups of a group only: a run of these updates may not be
    # given what they need.
    upstream, _ = runs.needed(
        [g.op for g in values if isinstance(g, tf.Tensor)], frozenset(), groups_of(graph)
    )
    refusing = [opened.zero.op for opened in gates.gates] + gates.checked
    with shard_view(), tf.control_dependencies([op for op in refusing if op in upstream]):
        yield


def reduce_tape(
    options: Options, original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """`tf.GradientTape.gradient` in a graph, and `minimize` of a callable loss, which uses it:
    reduced like any gradient.
    """
    if tf.executing_eagerly():
        return original(tape, target, sources, *args, **kwargs)

    def take() -> Sequence[Any]:
        gradients = original(tape, target, sources, *args, **kwargs)
        found: list[Any] = tf.nest.flatten(
            gradients if isinstance(gradients, (list, tuple)) else [gradients]
        )
        return found

    return tf.nest.pack_sequence_as(
        sources, reduce_gradients(take, tf.nest.flatten(sources), options, taped=True)
    )
