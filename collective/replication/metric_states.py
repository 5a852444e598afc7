"""Finds out how to combine a metric's states of several ranks.

A state is a metric's variable. The operations that write it determine what it is: a sum over
records if it is only added to, a largest or smallest value if each update keeps the larger or
smaller one. The graph shows all of this: the functions are pure and need no session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication.fused_reductions import Reduction, is_reduction
from collective.ops.graph import graph_analysis, graph_state
from collective.replication.analysis import is_fed
from collective.replication.pending_syncs import analysis_of

# What an operation that writes keeps of the variable.
_WRITES = {
    **dict.fromkeys(
        (
            "AssignAddVariableOp",
            "AssignSubVariableOp",
            "AssignAdd",
            "AssignSub",
            "ResourceScatterAdd",
            "ResourceScatterSub",
            "ScatterAdd",
            "ScatterSub",
            "ResourceScatterNdAdd",
            "ResourceScatterNdSub",
            "ScatterNdAdd",
            "ScatterNdSub",
        ),
        Reduction.SUM,
    ),
    **dict.fromkeys(
        ("ResourceScatterMax", "ScatterMax", "ResourceScatterNdMax", "ScatterNdMax"), Reduction.MAX
    ),
    **dict.fromkeys(
        ("ResourceScatterMin", "ScatterMin", "ResourceScatterNdMin", "ScatterNdMin"), Reduction.MIN
    ),
}
# What an assigned value keeps that was computed from the variable and something else.
_VALUES = {
    "Add": Reduction.SUM,
    "AddV2": Reduction.SUM,
    "Sub": Reduction.SUM,
    "Maximum": Reduction.MAX,
    "Minimum": Reduction.MIN,
}
# Operations that give what they are given.
_PASSES = graph_analysis.PASSES | {"StopGradient", "EnsureShape", "Snapshot"}
# Operations that use a variable, but neither its value nor change it.
_ASIDE = frozenset(
    {"VarIsInitializedOp", "IsVariableInitialized", "VariableShape", "DestroyResourceOp"}
)
_SAVES = frozenset({"Save", "SaveV2", "SaveSlices"})
NEEDS = (
    "A metric over all ranks needs a state that is a sum from 0 (assign_add, scatter_add), a "
    "largest value (v.assign(tf.maximum(v, x))) or a smallest one (tf.minimum). Or use a metric of "
    "tf.metrics or tf.keras.metrics."
)
NO_SUM = "is a sum that doesn't start from 0"


# Tells whether a tensor depends on the state of a metric.
Depends = Callable[[tf.Tensor], bool]


@dataclasses.dataclass
class MetricState:
    """Describes one state.

    Attributes:
        variable: the metric's variable.
        reduction: how to combine the ranks' states; None if nothing updates the variable, or if
            they can't be combined.
        obstacle: why they can't, as in "metric variable 'x', which …"; '' if they can.
        is_final: whether no later operation of the graph can change that.
        reads: tensors with the state as this rank has it, before or after an update.
        own_updates: the operations of updates that take the state as this rank has it.
        compared: tensors with which an assigned value was compared, or to which it was added.
        set_alike: assignments of values equal on all ranks (fed, constant), except for zero.
        read_inside: whether a branch, a loop or a function gives something computed of it.
    """

    variable: Any
    reduction: Reduction | None = None
    obstacle: str = ""
    is_final: bool = False
    reads: list[tf.Tensor] = dataclasses.field(default_factory=list)
    own_updates: set[tf.Operation] = dataclasses.field(default_factory=set)
    compared: list[tf.Tensor] = dataclasses.field(default_factory=list)
    set_alike: list[tf.Operation] = dataclasses.field(default_factory=list)
    read_inside: bool = False

    @property
    def name(self) -> str:
        """Returns the variable's name."""
        return str(self.variable.op.name)


@dataclasses.dataclass
class MetricVariables:
    """Records variables of a graph's metrics.

    Attributes:
        more: variables that are in no collection: those of Keras's metrics, and those that the
            metrics of an Estimator read.
        obstacles: why the ranks' states of a metric can't be combined, by the variables' names.
    """

    more: list[tf.Variable] = dataclasses.field(default_factory=list)
    obstacles: dict[str, str] = dataclasses.field(default_factory=dict)


def note(graph: tf.Graph, variables: Iterable[tf.Variable]) -> None:
    """Notes that `variables`, which are in no collection, are metrics'."""
    graph_state.of(graph, MetricVariables).more.extend(variables)


def metric_variables(graph: tf.Graph) -> list[Any]:
    """Returns the variables of metrics: those of `tf.metrics`, of Keras, and a script's own."""
    collected = graph.get_collection_ref(tf.GraphKeys.METRIC_VARIABLES)
    unique = {id(v): v for v in [*collected, *graph_state.of(graph, MetricVariables).more]}
    return sorted(unique.values(), key=lambda v: str(v.op.name))


def states_of(graph: tf.Graph) -> list[MetricState]:
    """Returns the states of a graph's metrics, in the order of the variables' names."""
    variables = metric_variables(graph)
    depends = _depending_on([graph_analysis.memory(v).outputs[0] for v in variables])
    states, known = [], graph_state.of(graph, MetricVariables).obstacles
    for variable in variables:
        state = _state_of(variable, depends)
        if state.is_final:
            # Once what the state depends on is the value of all ranks, it isn't seen.
            known.setdefault(state.name, state.obstacle)
        state.obstacle = known.get(state.name, state.obstacle)
        if state.obstacle:
            state.reduction = None
        states.append(state)
    _pass_obstacles_on(states)
    return states


def _pass_obstacles_on(states: Sequence[MetricState]) -> None:
    """Finds largest and smallest values that are taken of a state which can't become one."""
    found = True
    while found:
        reads = [x for state in states if state.obstacle for x in state.reads]
        depending = dependents(reads)
        found = False
        for state in states:
            if state.reduction and any(x.op in depending for x in state.compared):
                state.reduction, found = None, True
                state.obstacle = (
                    "is compared with another metric's state, which ranks do not have in common"
                )


def _depending_on(references: Sequence[tf.Tensor]) -> Depends:
    """Returns what tells whether a tensor depends on variables, or is one of their references."""
    depending = dependents(references)
    holders = {x.op for x in references}
    return lambda x: x.op in depending or x.op in holders


def users(x: tf.Tensor) -> Iterator[tuple[tf.Operation, int]]:
    """Yields the operations that `x` is an input of, with its place among their inputs.

    They come in the order in which they were made, which is the same on all ranks: TensorFlow's
    order isn't.
    """
    for op in sorted(set(x.consumers()), key=lambda op: op._id):
        for place, given in enumerate(op.inputs):
            if given is x:
                yield op, place


def dependents(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations with a result that depends on any of `tensors`.

    What was reduced over ranks depends on none of them.
    """
    reached: set[tf.Operation] = set()
    stack = list(tensors)
    while stack:
        for op in stack.pop().consumers():
            if op not in reached and not is_of_all_ranks(op):
                reached.add(op)
                stack.extend(op.outputs)
    return reached


def is_of_all_ranks(op: tf.Operation) -> bool:
    """Tells whether `op` gives what ranks have exchanged, or will have."""
    return graph_analysis.is_of_carrier(op.type) or is_reduction(op)


def is_aside(op: tf.Operation) -> bool:
    """Tells whether `op` uses a variable without a look at its value, or only to save it."""
    return op.type in _ASIDE or op.type in _SAVES


def is_saved(op: tf.Operation) -> bool:
    """Tells whether `op` saves a value, or only brings it to where it is saved."""
    while op.type in graph_analysis.PASSES:
        consumers = [each for x in op.outputs for each in x.consumers()]
        if len(consumers) != 1:
            return False
        op = consumers[0]
    return op.type in _SAVES


def _is_reference(x: tf.Tensor) -> bool:
    return x.dtype == tf.resource or bool(x.dtype._is_ref_dtype)


class _Uses:
    """Finds what a graph, or the body of a function, does with one variable.

    Attributes:
        writes: the operations that write it.
        reads: tensors with its value.
        calls: operations that hand it to functions, with its place among their inputs.
        others: operations that do something else with it.
    """

    def __init__(self, reference: tf.Tensor):
        self.writes: list[tf.Operation] = []
        self.reads: list[tf.Tensor] = []
        self.calls: list[tuple[tf.Operation, int]] = []
        self.others: list[tf.Operation] = []
        stack = [reference]
        while stack:
            x = stack.pop()
            if x.dtype != tf.resource:
                self.reads.append(x)
            for op, place in users(x):
                if graph_analysis.WRITES.match(op.type) and place == 0:
                    self.writes.append(op)
                    stack.extend(y for y in op.outputs if _is_reference(y))
                elif op.type in graph_analysis.PASSES:
                    references = [y for y in op.outputs if _is_reference(y)]
                    stack.extend(references)
                    self.reads.extend(op.outputs if not references else [])
                elif op.type == "ReadVariableOp":
                    self.reads.extend(op.outputs)
                elif op.type in graph_analysis.CALLS or op.type.endswith("Dataset"):
                    self.calls.append((op, place))
                elif x.dtype == tf.resource and not is_aside(op):
                    self.others.append(op)

    def passed_on(self) -> dict[str, list[tf.Operation]]:
        """Returns by the names of tensors with the value what has passed it on, if anything."""
        passed: dict[str, list[tf.Operation]] = {x.name: [] for x in self.reads}
        stack = list(self.reads)
        while stack:
            x = stack.pop()
            for op, _ in users(x):
                if op.type in _PASSES:
                    for y in op.outputs:
                        if y.name not in passed:
                            passed[y.name] = [*passed[x.name], op]
                            stack.append(y)
        return passed


def _state_of(variable: Any, depends: Depends) -> MetricState:
    state = MetricState(variable)
    uses = _Uses(graph_analysis.memory(variable).outputs[0])
    kept = Kept(uses, depends)
    for op in uses.writes:
        if not _starts(op, variable):
            kept.add(op)
    for op, place in uses.calls:
        state.read_inside |= _kept_by_call(op, place, depends, kept)
    kept.obstacles += [f"is used by '{op.name}' ({op.type})" for op in uses.others]
    state.own_updates, state.set_alike = kept.own_updates, kept.set_alike
    state.compared = kept.compared
    updated = (x for op in kept.own_updates for x in op.outputs if not _is_reference(x))
    state.reads = list(dict.fromkeys([*uses.reads, *updated]))
    state.obstacle, state.is_final = _obstacle(variable, kept), bool(kept.obstacles)
    if kept.reductions and not state.obstacle:
        (state.reduction,) = kept.reductions
    return state


def _starts(op: tf.Operation, variable: Any) -> bool:
    """Tells whether `op` gives `variable` its initial value, or one from a checkpoint."""
    if op is variable.initializer or op.name == f"{variable.op.name}/Assign":
        return True
    value = op.inputs[1] if len(op.inputs) > 1 else None
    while value is not None and value.op.type in graph_analysis.PASSES:
        value = value.op.inputs[0]
    return value is not None and value.op.type in ("RestoreV2", "Restore", "RestoreSlice")


class Kept:
    """Collects what the updates of a variable keep of it.

    Attributes:
        reductions: what they keep.
        obstacles: updates that keep nothing that ranks could reduce.
        own_updates: the operations that take the variable's value as it is here.
        compared: tensors with which an assigned value was compared, or to which it was added.
        set_alike: assignments of values equal on all ranks (fed, constant), except for zero.
        is_last: whether one of them isn't constant.
    """

    def __init__(self, uses: _Uses, depends: Depends):
        self._passed, self._depends = uses.passed_on(), depends
        self._depending = dependents(uses.reads)
        self.reductions: set[Reduction] = set()
        self.obstacles: list[str] = []
        self.own_updates: set[tf.Operation] = set()
        self.compared: list[tf.Tensor] = []
        self.set_alike: list[tf.Operation] = []
        self.is_last = False

    def add(self, op: tf.Operation, inside: bool = False) -> None:
        """Adds what `op`, which writes the variable, keeps of it."""
        reduction = _WRITES.get(op.type)
        if op.type in graph_analysis.ASSIGNS:
            self._add_assigned(op, inside)
        elif reduction is None:
            self.obstacles.append(f"is updated by '{op.name}' ({op.type})")
        elif any(map(self._depends, op.inputs[1:])):
            self.obstacles.append(
                f"is updated by '{op.name}' ({op.type}) with a value that depends on the state of "
                "a metric"
            )
        else:
            self.reductions.add(reduction)

    def _add_assigned(self, op: tf.Operation, inside: bool) -> None:
        value, passing = op.inputs[1], set()
        if not self._depends(value):
            self._add_set(op, inside)
            return
        while value.op.type in _PASSES and value.name not in self._passed:
            passing.add(value.op)
            value = value.op.inputs[0]
        operands = list(value.op.inputs)
        places = [i for i, x in enumerate(operands) if x.name in self._passed]
        reduction = _VALUES.get(value.op.type)
        if reduction is None or len(places) != 1 or (value.op.type == "Sub" and places != [0]):
            self._refuse_value(op, value)
            return
        rest = operands[1 - places[0]]
        # A largest value may be one of another metric's, which is that of all ranks.
        if rest.op in self._depending or (reduction is Reduction.SUM and self._depends(rest)):
            self._refuse_value(op, value)
            return
        self.reductions.add(reduction)
        self.compared.append(rest)
        self.own_updates |= {op, value.op, *passing, *self._passed[operands[places[0]].name]}

    def _refuse_value(self, op: tf.Operation, value: tf.Tensor) -> None:
        self.obstacles.append(f"is assigned '{value.op.name}' ({value.op.type}) by '{op.name}'")

    def _add_set(self, op: tf.Operation, inside: bool) -> None:
        """Adds an assignment of a value that depends on no metric."""
        value = op.inputs[1]
        constant = tf.get_static_value(value)
        if constant is not None and not np.any(constant):
            return
        is_alike = constant is not None or is_fed(value)
        if inside or not (is_alike or not analysis_of(op.graph).is_rank_local([value])):
            self._refuse_value(op, value)
            return
        self.set_alike.append(op)
        self.is_last |= constant is None


def kept_inside(references: Sequence[tf.Tensor]) -> list[Kept]:
    """Returns what a traced function keeps of each of the states that it captures."""
    depends = _depending_on(references)
    return [_kept_inside(_Uses(reference), depends)[0] for reference in references]


def _kept_inside(uses: _Uses, depends: Depends) -> tuple[Kept, bool]:
    """Returns what a function's body keeps of a variable.

    Returns:
        That; and whether a function that it calls may give something that depends on its value.
    """
    kept, gives_value = Kept(uses, depends), False
    for write in uses.writes:
        kept.add(write, inside=True)
    for call, place in uses.calls:
        gives_value |= _kept_by_call(call, place, depends, kept)
    return kept, gives_value


def _kept_by_call(op: tf.Operation, place: int, depends: Depends, kept: Kept) -> bool:
    """Adds to `kept` what the functions do that `op` calls with a variable.

    Returns:
        Whether they may give something that depends on its value.
    """
    chooses = op.type in ("If", "StatelessIf", "Case")
    gives_value = False
    for name, body in _bodies(op):
        if body is None:
            kept.obstacles.append(
                f"is used by '{op.name}' ({op.type}), whose function was imported"
            )
            continue
        # What the function gets comes last among the operation's inputs.
        first = len(op.inputs) - len(body.inputs)
        states = [
            inner
            for outer, inner in zip(list(op.inputs)[max(first, 0) :], body.inputs[max(-first, 0) :])
            if depends(outer)
        ]
        uses = _Uses(body.inputs[place - first])
        inner_kept, gives = _kept_inside(uses, _depending_on(states))
        gives_value |= gives
        if uses.writes and chooses and depends(op.inputs[0]):
            kept.obstacles.append(f"decides by '{op.name}' ({op.type}) whether it is updated")
        kept.reductions |= inner_kept.reductions
        kept.obstacles += inner_kept.obstacles
        given = {x.op for x in body.outputs if x.dtype not in (tf.resource, tf.variant)}
        gives = not given.isdisjoint(dependents(uses.reads) | {x.op for x in uses.reads})
        if gives and name == "cond":
            kept.obstacles.append(f"decides by '{op.name}' ({op.type}) how often it is updated")
        gives_value |= gives
    return gives_value


def _bodies(op: tf.Operation) -> Iterator[tuple[str, Any]]:
    """Yields the graphs of the functions that `op` calls, with the names of its attributes.

    A function that was imported has no graph: None.
    """
    for attribute, value in op.node_def.attr.items():
        for name in [value.func.name, *(f.name for f in value.list.func)]:
            if name:
                yield attribute, getattr(_function(op.graph, name), "graph", None)


def _function(graph: Any, name: str) -> Any:
    while graph is not None:
        if name in graph._functions:
            return graph._functions[name]
        graph = getattr(graph, "outer_graph", None)
    return None


def _obstacle(variable: Any, kept: Kept) -> str:
    """Returns why the ranks' states can't become one; '' if they can."""
    if obstacle := obstacle_of(kept.reductions, kept.obstacles):
        return obstacle
    if not kept.reductions:
        return f"is given its last value by '{kept.set_alike[0].name}'" if kept.is_last else ""
    if Reduction.SUM not in kept.reductions:
        is_local = analysis_of(variable.graph).is_rank_local([variable.initial_value])
        return "starts from what each rank alone knows" if is_local else ""
    return "" if _is_zero(variable.initial_value) else NO_SUM


def obstacle_of(reductions: Set[Reduction], obstacles: Sequence[str]) -> str:
    """Returns why states that are updated in these ways can't become one; '' if they may."""
    if obstacles:
        return obstacles[0]
    if len(reductions) > 1:
        names = " and ".join(sorted(each.value for each in reductions))
        return f"is updated in several ways ({names})"
    return ""


def _is_zero(value: Any) -> bool:
    """Tells whether `value` is known to be zero."""
    while value.op.type in _PASSES:
        value = value.op.inputs[0]
    if value.op.type == "ZerosLike":
        return True
    constant = tf.get_static_value(value.op.inputs[1] if value.op.type == "Fill" else value)
    return constant is not None and not np.any(constant)
