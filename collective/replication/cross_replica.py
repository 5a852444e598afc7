"""Joins what each rank computes of its own batch, where a script needs it of the whole batch.

    statistics of a batch normalisation, sums        every rank gets the sum of the ranks' tensors
    candidates of a loss with in-batch negatives     every rank gets the tensors of all ranks

Both have gradients. The loss of a step is the mean of the ranks' losses, and the gradient of a
variable the mean of the ranks' gradients. So a rank's gradient of what it gave away is the sum of
what all ranks' losses have with respect to it, and the mean comes later.

It works in graphs, in functions that eager code calls, and in eager code itself, also for a tape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_values
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import (
    control_flow,
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
    nested_calls,
)
from collective.tables import eager_lookups, served_table, traced_lookups

# Not empty while this rank takes an eager step for its peers, by records that don't count.
_answering: list[bool] = []


@dataclasses.dataclass
class CrossReplica:
    """Records what ranks join of a graph.

    Attributes:
        is_used: whether they join anything that they compute.
        weights: what `weight_of` has returned.
    """

    is_used: bool = False
    weights: set[tf.Operation] = dataclasses.field(default_factory=set)


def joins(graph: tf.Graph) -> bool:
    """Tells whether `graph` joins what ranks compute of their batches."""
    return graph_state.of(graphs.outermost(graph), CrossReplica).is_used


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Inside, eager code adds nothing of this rank to sums, and gives no samples."""
    _answering.append(True)
    try:
        yield
    finally:
        _answering.pop()


def is_alone() -> bool:
    """Tells whether no other rank has a part: there is none, or nothing is computed here at all."""
    graph = tf.get_default_graph()
    is_scratch = traced_lookups.is_scratch(graph) and not graphs.is_of_dataset(graph)
    is_served = not tf.executing_eagerly() and served_table.served_graph(graph) is not None
    return collectives.size() == 1 or is_scratch or is_served


def can_join() -> bool:
    """Tells whether all ranks are certain to come by, once in a run, where code is now.

    A function that another one calls becomes a part of it first, if that is possible.

    Raises:
        NotImplementedError: the function that is being traced becomes a part of another one.
    """
    graph = tf.get_default_graph()
    if tf.executing_eagerly():
        return True
    if graphs.is_eager() or graphs.is_of_dataset(graph):
        return False
    if None not in control_flow.deciders():
        return True
    if nested_calls.want_inlining(graph):
        raise NotImplementedError("The tf.function has to become a part of the one that calls it.")
    return False


def sums(what: str, tensors: Sequence[tf.Tensor], of_samples: bool = True) -> list[tf.Tensor]:
    """Returns the sums over ranks of `tensors`, in one exchange.

    Args:
        what: says what they are; the same on all ranks.
        tensors: of one floating-point type; each has the same shape on all ranks.
        of_samples: whether they are sums over samples, so that a rank that is out of data in an
            evaluation has zeros; else such an evaluation is an error.

    Raises:
        NotImplementedError: it is made where ranks can't agree: in a loop, in a function of a
            graph, in a dataset's function or a tf.py_function; or this rank is out of data in an
            eager evaluation, and they are no sums over samples.
        ValueError, RankError: in eager code, another rank has other shapes, or does something else.
    """
    if is_alone():
        return [tf.identity(x) for x in tensors]
    if tf.executing_eagerly():
        if _answering and not of_samples:
            raise NotImplementedError(
                f"{what}: this rank is out of data in an evaluation, others are not, and it has "
                "nothing to add to a mean over ranks. Give every rank as many batches."
            )
        return list(_eager_sums(what, tensors))
    _check_place(what)
    with library_operations.noted(tf.get_default_graph()), device_scopes.anywhere():
        graph, name = tf.get_default_graph(), _name(what, *(x.shape for x in tensors))
        gates = gates_of(graph)
        has_shapes = all(x.shape.is_fully_defined() for x in tensors)
        if of_samples and has_shapes and graphs.is_outside(graph):
            if graphs.is_traced(graph):
                gates.sums[name] = list(tensors)
            else:
                tensors = [tf.placeholder_with_default(x, x.shape) for x in tensors]
                # (A sum in the order of ranks takes two collectives.)
                place = f"{name}.parts" if collectives.in_order() else name
                gates.states[place] = [(x, tf.zeros(x.shape, x.dtype)) for x in tensors]
        opened = gates.of_collective(tensors).zero
        return collectives.allreduce_sum(tensors, name, opened)


def weight_of(records: tf.Tensor) -> tf.Tensor:
    """Returns how often the mean over a rank's batch counts in the mean of the ranks' means.

    It is N times the share of its records, float64: 1 if ranks have as many. Ranks say how many
    they have when they agree on a run or on a call of a function: there it takes no exchange.

    Args:
        records: int64 scalar, how many this rank's batch has.

    Raises:
        NotImplementedError, RankError: as for `sums`.
    """
    weight = None
    if not tf.executing_eagerly():
        graph = tf.get_default_graph()
        known = not (gates_of(graph).level(records.op) or _needs_rows(graph, records))
        if known and graphs.is_outside(graph) and not graphs.is_eager():
            gate = gates_of(graph).at(1)
            weight = gate.weight_of(records) if gate.records is None else None
    if weight is None:
        own = tf.cast(records, tf.float64)
        (total,) = sums("records_of_a_batch", [own])
        weight = tf.div_no_nan(collectives.size() * own, total)
    if not tf.executing_eagerly():
        graph_state.of(graphs.outermost(graph), CrossReplica).weights.add(weight.op)
    return weight


def is_weight(x: tf.Tensor) -> bool:
    """Tells whether a graph's tensor comes from `weight_of`, perhaps as another type."""
    x = x.op.inputs[0] if x.op.type == "Cast" else x
    return x.op in graph_state.of(graphs.outermost(x.graph), CrossReplica).weights


def _needs_rows(graph: tf.Graph, x: tf.Tensor) -> bool:
    """Tells whether a tensor of a function depends on lookups, which may not have a gate yet."""
    lookups = {lookup.out for lookup in traced_lookups.lookups_in(graph)}
    return not lookups.isdisjoint(graph_analysis.upstream([x.op]))


def concatenated(what: str, x: tf.Tensor) -> tf.Tensor:
    """Returns the ranks' tensors one after another, in the order of the ranks.

    Args:
        what: says what they are; the same on all ranks.
        x: [b, ...]; ranks may have different b.

    Raises:
        NotImplementedError, ValueError, RankError: as for `sums`.
    """
    if is_alone():
        return tf.identity(x)
    if not (x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_complex or x.dtype.is_bool):
        raise TypeError(f"{what}: ranks exchange numbers and no {x.dtype.name}.")
    if tf.executing_eagerly():
        joined: tf.Tensor = _eagerly_concatenated(what, x)
        return joined
    _check_place(what)
    sent = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
    with library_operations.noted(tf.get_default_graph()), device_scopes.anywhere():
        opened = gates_of(tf.get_default_graph()).of_collective([sent]).zero
        joined = collectives.allgather(sent, _name(what, x.shape[1:]), opened)
        joined.set_shape([None, *x.shape[1:]])
    return tf.cast(joined, tf.bool) if x.dtype == tf.bool else joined


def _check_place(what: str) -> None:
    """Refuses an exchange where it isn't certain that all ranks come by, once in a run.

    Raises:
        NotImplementedError: it is in a loop, or in a function that may be called anywhere.
    """
    graph = tf.get_default_graph()
    graph_state.of(graphs.outermost(graph), CrossReplica).is_used = True
    if graphs.is_eager() or graphs.is_of_dataset(graph):
        raise NotImplementedError(
            f"{what} is of all ranks, and is made in a function that ranks don't call together: of "
            "a dataset, or traced outside of scope(). Make it in the training step."
        )
    if None in control_flow.deciders():
        nested_calls.want_inlining(graph)
        raise NotImplementedError(
            f"{what} is of all ranks, and is made in a loop, or in a function of a graph: ranks "
            "may come by at different times. Make it directly in the training step, or in the "
            "function that eager code calls."
        )


def _name(what: str, *shapes: tf.TensorShape) -> str:
    """Returns the name of an exchange, by which ranks find out that their shapes differ."""
    words = [re.sub(r"[^0-9,]", "", str(shape).replace(", ", ",")) for shape in shapes]
    text = ".".join(words).replace(",", "x")
    return collectives.unique_name(
        f"{what}.{text if len(text) < 40 else zlib.crc32(text.encode())}"
    )


def _eager_sums(what: str, tensors: Sequence[tf.Tensor]) -> Any:
    eager_lookups.refuse_own_threads(what)
    if not tf.executing_eagerly():
        raise NotImplementedError(
            f"{what} is taken in a loop (tf.GradientTape.jacobian), where ranks can't exchange it. "
            "Take tape.gradient of one element at a time."
        )

    @tf.custom_gradient
    def add(*own: tf.Tensor) -> Any:
        given = [np.zeros_like(x.numpy()) if _answering else x.numpy() for x in own]
        totals = eager_values.sums(what, given)
        return [tf.constant(total, x.dtype) for total, x in zip(totals, own)], (
            lambda *gradients: _eager_sums(
                f"the gradient of {what}", [tf.convert_to_tensor(each) for each in gradients]
            )
        )

    return add(*tensors)


def _eagerly_concatenated(what: str, x: tf.Tensor) -> Any:
    eager_lookups.refuse_own_threads(what)

    @tf.custom_gradient
    def join(own: tf.Tensor) -> Any:
        given = own.numpy()[: 0 if _answering else None]
        of_ranks = [part for (part,) in eager_values.parts(what, [given], other_lengths=True)]
        lengths = [len(part) for part in of_ranks]
        first = sum(lengths[: collectives.rank()])

        def of_own_part(gradient: Any) -> tf.Tensor:
            (total,) = _eager_sums(f"the gradient of {what}", [tf.convert_to_tensor(gradient)])
            return total[first : first + lengths[collectives.rank()]]

        return tf.constant(np.concatenate(of_ranks), own.dtype), of_own_part

    return join(x)
