"""Weighs the means over a rank's batch, of which a loss consists, by the rank's records.

An update takes the mean of the ranks' gradients. If ranks have different numbers of records, as in
the last batch of an epoch, or where N doesn't divide a batch, that isn't the gradient of the mean
over all records: with b records on a rank, and B on all, a rank's mean has to count N * b/B times.
The graph of a session, or of a function that eager code calls, shows the means:

    loss ── sums, constant factors ── a mean over the batch ── … ── data of b records
                                      (tf.reduce_mean, tf.losses, a sum divided by its number)

Only their gradients are weighed, not what is fetched. Ranks say how many records they have when
they agree on the run, so it takes no exchange. If a mean has a factor that is trained, all of the
loss is weighed: what is the same on all ranks counts once in any case, as the weights' mean is 1.

A sum over the batch, and what ranks exchange, count alike on all ranks, as they should. So does any
other part of a loss (a mean inside of a root, one that isn't seen to be a mean), which is right
only if ranks have as many records: a run in which they haven't warns of it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients import record_weights
from collective.gradients.reduction import is_variable
from collective.ops.communication.gate import gates_of
from collective.ops.graph import (
    dimension_origins,
    graph_analysis,
    graph_state,
    graphs,
)
from collective.ops.graph.dimension_origins import Dimension
from collective.replication import cross_replica
from collective.replication.analysis import ReplicationAnalysis
from collective.replication.pending_syncs import analysis_of
from collective.tables.grouping import lookups_of
from collective.tensorflow_internals.graphs import attr_value_pb2, gradient_registry

_GRADIENT = "CollectiveMeanOverBatch"
_OVERRIDE = "_gradient_op_type"
# Operations whose result is linear in their inputs; shapes and places are no part of a loss.
_LINEAR = frozenset(
    "Identity Neg Cast Reshape Squeeze ExpandDims CheckNumerics EnsureShape Print Add AddV2 AddN "
    "Sub Pack ConcatV2 Sum Mean StridedSlice Slice Unpack Split SplitV GatherV2 Transpose Tile "
    "BroadcastTo".split()
)
_PRODUCTS = frozenset({"Mul", "MatMul", "BatchMatMulV2"})
_QUOTIENTS = frozenset({"RealDiv", "DivNoNan"})
_CONSTANT = frozenset({"StopGradient", "PreventGradient"})
_INVERSES = frozenset({"Reciprocal", "Inv"})
# Operations whose result is one of their inputs.
_CHOICES = frozenset({"Minimum", "Maximum", "ClipByValue"})
_SELECTIONS = frozenset({"Select", "SelectV2"})
_REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "L2Loss"})
_TERMS = frozenset({"Neg", "Add", "AddV2", "AddN", "Sub"})
# As many operations upstream of a part of a loss are searched for data.
_NEAR = 200


@dataclasses.dataclass
class BatchMeans:
    """Records the means of a graph whose gradients are weighed.

    Attributes:
        weights: of each mean, or loss, by what its gradient is multiplied.
    """

    weights: dict[tf.Operation, tf.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Weighing:
    """Describes how gradients of a loss are weighed.

    Attributes:
        means: the means, or the loss, whose gradients are multiplied by a weight.
        whole: the weight if it is that of the whole loss.
        doubts: the names of what counts alike on all ranks, but should by records.
    """

    means: list[tf.Operation] = dataclasses.field(default_factory=list)
    whole: tf.Tensor | None = None
    doubts: list[str] = dataclasses.field(default_factory=list)

    def settled(self, gradients: Any) -> Any:
        """Returns gradients of the loss as they are to be reduced over ranks.

        Runs that compute them warn of what counts alike. Where a rank has no records, a mean is no
        number, and neither is the gradient of its factor: it is 0.

        Args:
            gradients: of this rank, in any structure.
        """
        if self.whole is not None:
            has_records = tf.sign(self.whole)
            gradients = tf.nest.map_structure(
                lambda x: (
                    tf.math.multiply_no_nan(x, tf.cast(has_records, x.dtype))
                    if isinstance(x, tf.Tensor)
                    else x
                ),
                gradients,
            )
        for x in tf.nest.flatten(gradients, expand_composites=True) if self.doubts else ():
            if x is not None:
                gates_of(x.graph).unweighed[x.op] = tuple(self.doubts)
        return gradients


@dataclasses.dataclass
class LossParts:
    """Holds what a loss consists of, as far as that depends on a rank's data.

    Attributes:
        means: those over the batch, on which it depends linearly, and their weights.
        has_sums: whether it has sums over samples.
        others: what is neither: it counts alike, which is right only for batches of one size.
        trained: the products and quotients of these whose other factor has gradients, too.
        nested: the means of which others are computed: they would be weighed twice there.
    """

    means: dict[tf.Operation, tf.Tensor] = dataclasses.field(default_factory=dict)
    has_sums: bool = False
    others: list[tf.Operation] = dataclasses.field(default_factory=list)
    trained: list[tf.Operation] = dataclasses.field(default_factory=list)
    nested: list[tf.Operation] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def weighed(target: Any, sources: Any) -> Iterator[Weighing]:
    """Inside, the gradients of a loss with respect to variables weigh its means.

    Args:
        target: what is differentiated, tensors in any structure.
        sources: with respect to what.

    Yields:
        What settles the gradients.
    """
    weighing = Weighing()
    graph = tf.get_default_graph()
    is_own = cross_replica.is_alone() or not graphs.is_outside(graph)
    if not is_own and any(is_variable(x) for x in tf.nest.flatten(sources)):
        weighing = _weighing(graph, target)
    # A copy of the graph is to have the gradients of TensorFlow.
    for mean in weighing.means:
        mean._set_attr(_OVERRIDE, attr_value_pb2.AttrValue(s=_GRADIENT.encode()))
    try:
        yield weighing
    finally:
        for mean in weighing.means:
            mean._clear_attr(_OVERRIDE)


def taped(target: Any, sources: Any, weights: Any) -> tuple[Any, Any, Weighing]:
    """Returns what a tape differentiates in a graph or traced function, so that means are weighed.

    To the loss come its means, of each the weight less 1 times what it counts in the loss.

    Args:
        target: what is differentiated, tensors in any structure.
        sources: with respect to what.
        weights: by what the gradients of `target` are multiplied; None: 1.

    Returns:
        Targets and weights; and what settles the gradients.
    """
    graph = tf.get_default_graph()
    losses = tf.nest.flatten(target)
    is_own = cross_replica.is_alone() or not graphs.is_outside(graph)
    if is_own or not any(is_variable(x) for x in tf.nest.flatten(sources)):
        return target, weights, Weighing()
    if not all(isinstance(loss, tf.Tensor) for loss in losses):
        return target, weights, Weighing()  # Several tensors in one, such as a tf.RaggedTensor.
    times = [None] * len(losses) if weights is None else tf.nest.flatten(weights)
    means, of_means, both = [], [], Weighing()
    for loss, each in zip(losses, times):
        weighing = _weighing(graph, loss)
        both.doubts += weighing.doubts
        both.whole = weighing.whole if len(losses) == 1 else None
        for op in weighing.means:
            mean, weight = op.outputs[0], graph_state.of(graph, BatchMeans).weights[op]
            (share,) = tf.gradients(loss, mean, each)
            if share is not None:  # else it is rounded to whole numbers
                means.append(mean)
                of_means.append(share * tf.cast(weight - 1, share.dtype))
    if not means:
        return target, weights, both
    times = [tf.ones_like(y) if each is None else each for y, each in zip(losses, times)]
    return [*losses, *means], [*times, *of_means], both


def _weighing(graph: tf.Graph, target: Any) -> Weighing:
    """Returns how the gradients of a loss are weighed, once the weights are noted."""
    analysis = analysis_of(graph)
    losses = [
        loss
        for loss in tf.nest.flatten(target)
        if isinstance(loss, tf.Tensor) and loss.graph is graph
    ]
    found: dict[tf.Operation, tf.Tensor] = {}
    weighing = Weighing()
    for loss in losses:
        parts = _parts(loss, analysis)
        together = [*parts.trained, *parts.nested]
        if together and len(losses) == 1 and _is_whole(loss, parts):
            weighing.whole = next(iter(parts.means.values()))
            found[loss.op] = weighing.whole
            continue
        doubtful = [*parts.others, *together]
        weighing.doubts += [f"'{op.name}' ({op.type})" for op in doubtful if _counts(op, analysis)]
        found.update(parts.means)
    graph_state.of(graph, BatchMeans).weights.update(found)
    weighing.means = list(found)
    return weighing


def _is_whole(loss: tf.Tensor, parts: LossParts) -> bool:
    """Tells whether one weight is right for all of a loss, whose gradient can be weighed."""
    weights = {weight.name for weight in parts.means.values()}
    return len(weights) == 1 and not (parts.has_sums or parts.others) and _may_be_weighed(loss.op)


def _may_be_weighed(op: tf.Operation) -> bool:
    try:
        gradient_registry.lookup(op.type)
    except LookupError:
        return False
    return len(op.outputs) == 1 and _OVERRIDE not in op.node_def.attr


def _counts(op: tf.Operation, analysis: ReplicationAnalysis) -> bool:
    """Tells whether ranks say how many records a part of a loss is computed from.

    They are those of the nearest data upstream; nothing is compared where none are seen.
    """
    lookups = {each.out: each.lookup for each in lookups_of(op.graph).written}
    queue, seen = collections.deque([op]), {op}
    for _ in range(_NEAR):
        if not queue:
            return False
        each = queue.popleft()
        dimensions = dimension_origins.reduced(each) if each.type in _REDUCTIONS else []
        dimensions += [(x, 0) for x in each.outputs if x.shape.rank]
        weight = record_weights.weight_of(op.graph, dimensions, may_exchange=False)
        if weight is not None and weight is gates_of(op.graph).at(1).weight:
            return True
        # Lookups that share an exchange are computed from the ids of all.
        of_each = [lookups[each].ids] if each in lookups else each.inputs
        inputs = [x.op for x in of_each if x.op not in seen and analysis.is_rank_local([x])]
        seen.update(inputs)
        queue += inputs
    return False


@tf.RegisterGradient(_GRADIENT)
def _weighed_gradient(op: tf.Operation, gradient: tf.Tensor) -> Any:
    weight = graph_state.of(op.graph, BatchMeans).weights[op]
    return gradient_registry.lookup(op.type)(op, gradient * tf.cast(weight, gradient.dtype))


def _parts(loss: tf.Tensor, analysis: ReplicationAnalysis) -> LossParts:
    """Returns what a loss consists of."""
    parts = LossParts()
    stack, seen = [loss], set()
    while stack:
        x = stack.pop()
        op = x.op
        if op in seen:
            continue
        seen.add(op)
        if op._get_control_flow_context() is not None:
            parts.others.append(op)
            continue
        if _OVERRIDE in op.node_def.attr and op.get_attr(_OVERRIDE).startswith(b"Collective"):
            parts.has_sums = True  # of all ranks, as of tf.losses with weights
            continue
        weight = record_weights.weight_of(op.graph, _averaged(op, analysis))
        if weight is not None and _may_be_weighed(op):
            parts.means[op] = weight
            continue
        terms = _terms(op, analysis)
        if terms is not None:
            stack += terms
            if terms and op.type in _PRODUCTS | _QUOTIENTS and _is_trained(op, terms):
                parts.trained.append(op)
        elif op.type in _CONSTANT or not analysis.is_rank_local([x]):
            continue
        elif op.type in ("Sum", "L2Loss") or analysis.is_per_sample([x]):
            parts.has_sums = True
        else:
            parts.others.append(op)
    if len(parts.means) > 1:
        before = graph_analysis.upstream([x.op for op in parts.means for x in op.inputs])
        parts.nested = [op for op in parts.means if op in before]
    return parts


def _terms(op: tf.Operation, analysis: ReplicationAnalysis) -> Sequence[tf.Tensor] | None:
    """Returns the inputs in which an operation is linear, as far as a rank knows more of them.

    None if it isn't linear in all of what a rank has of its own.
    """
    if op.type in ("Mean", "Sum", "MatMul", "BatchMatMulV2") and analysis.is_per_sample(op.inputs):
        return None
    if op.type in _LINEAR | _SELECTIONS:
        return [x for x in op.inputs if x.dtype.is_floating]
    if any(map(cross_replica.is_weight, op.inputs)):
        return []  # It counts by records already: the loss of `compile`.
    local = [x for x in op.inputs if analysis.is_rank_local([x])]
    if op.type in _QUOTIENTS and op.inputs[1].name in {x.name for x in local}:
        return None
    is_linear = op.type in _PRODUCTS | _QUOTIENTS | _CHOICES and len(local) == 1
    return local if is_linear else None


def _is_trained(op: tf.Operation, terms: Sequence[tf.Tensor]) -> bool:
    """Tells whether a product's other factors than `terms` have gradients of variables."""
    names = {x.name for x in terms}
    others = [x.op for x in op.inputs if x.name not in names]

    def stop(each: tf.Operation) -> bool:
        return each.type in _CONSTANT or graph_analysis.is_collective(each.type)

    walked = graph_analysis.walk(others, stop=stop, control=False)
    return any(
        each.type in graph_analysis.VARIABLE_TYPES
        or any(x.dtype == tf.resource for x in each.outputs)  # a variable in a function
        for each in walked
    )


def _averaged(op: tf.Operation, analysis: ReplicationAnalysis) -> list[Dimension]:
    """Returns the dimensions over which an operation's result is the mean; none if it is none."""
    if op.type == "Mean" and analysis.is_rank_local([op.inputs[0]]):
        return dimension_origins.reduced(op)
    divided = [(_sums(x, analysis), number) for x, number in _quotients(op)]
    if op.type == "Sum":  # of what is divided, one by one
        divided = [([op], number) for _, number in _quotients(op.inputs[0].op)]
    for sums, number in divided:
        if number.shape.rank != 0:
            continue
        over = [dimension_origins.reduced(each) for each in sums]
        found = [
            [each for each in dims if record_weights.is_number_of(number, *each)] for dims in over
        ]
        if found and all(found):
            return found[0]
        if over and (counted := record_weights.counted(number)) is not None:
            return [counted]
    return []


def _quotients(op: tf.Operation) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns how an operation divides: (numerator, divisor) each."""
    if op.type in _QUOTIENTS:
        return [(op.inputs[0], op.inputs[1])]
    found = []
    for x, factor in itertools.permutations(op.inputs) if op.type == "Mul" else ():
        inverse = factor.op
        if inverse.type in _INVERSES:
            found.append((x, inverse.inputs[0]))
        elif inverse.type in _QUOTIENTS and tf.get_static_value(inverse.inputs[0]) is not None:
            found.append((x, inverse.inputs[1]))
    return found


def _sums(x: tf.Tensor, analysis: ReplicationAnalysis) -> list[tf.Operation]:
    """Returns the sums over what a rank knows that `x` consists of; none if there is more in it."""
    stack, found = [x], []
    while stack:
        op = _passed_on(stack.pop()).op
        local = [each for each in op.inputs if analysis.is_rank_local([each])]
        if op.type in ("Sum", "L2Loss") and local:
            found.append(op)
            continue
        is_multiple = op.type == "Mul" and len(local) == 1
        if not (is_multiple or op.type in _TERMS and len(local) == len(op.inputs)):
            return []
        stack += local
    return found


def _passed_on(x: tf.Tensor) -> tf.Tensor:
    """Returns the number that is passed on as `x`."""
    while x.op.type in ("Identity", "Cast", "Reshape") or (
        x.op.type == "Sum" and x.op.inputs[0].shape.rank == 0
    ):
        x = x.op.inputs[0]
    return x
