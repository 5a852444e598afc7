"""Replicated variables stay alike: what a rank would write of what it alone knows becomes the mean over ranks first.

Optimizers write what `gradients` has reduced already. Everything else that changes a replicated variable (batch normalisation,
averages of a loss, a script's own `tf.assign`, a gradient with noise added) may depend on this rank's data or random numbers.
Such a value is noted where it is written; before updates are made, or a session runs, what was noted gets as few allreduces as
its dependences allow. In a branch or a function it gets one on the spot: nothing can be put in front of it later.

Variables that a script says are each rank's own (local variables, those of `VariableSynchronization.ON_READ`) are left alone,
as is a value fed directly, which is the script's to choose.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective import accumulation, control_flow, means
from collective.ops import communication, graphs
from collective.ops.gate import GraphGates, gates_of
from collective.ranks import runs
from collective.replicated import is_movable, is_replicated

ASSIGNS = frozenset({'AssignVariableOp', 'AssignSubVariableOp', 'AssignAddVariableOp', 'Assign', 'AssignSub', 'AssignAdd'})
REDUCED = re.compile('Horovod(Grouped)?(Allreduce|Allgather)|HorovodBroadcast')       # whose results all ranks have
RANDOM = re.compile('Random|TruncatedNormal|Multinomial|Stateful(Uniform|Standard|Random)|.*CandidateSampler')
# What reads data, and what may do so in a function.
READS = re.compile('Iterator|OptionalGetValue|Queue|ReaderRead|PyFunc|EagerPyFunc|(Ordered)?(Map)?Unstage')
FED = frozenset({'Placeholder', 'PlaceholderWithDefault'})
DATA = runs.SOURCES - runs.CALLS - {'Merge', 'Exit'} | FED
CHANGES = frozenset({'Cast', 'Reshape', 'ExpandDims', 'Squeeze'}) | runs.PASSES      # what is fed is still what is fed
DRIFTS = "Its replicas drift apart, and a checkpoint has rank 0's"
LOCAL = 'collections=[tf.GraphKeys.LOCAL_VARIABLES]'


class Own(NamedTuple):
    """A value of this rank's: input `place` of `op`, on its way to the variable `name`."""
    op: tf.Operation
    place: int
    name: str


class Written:
    """What is written to the replicated variables of one graph.

    Attributes:
        own: what is still to become a mean.
        known: the operations of which a value is, or will be, one.
        version: the graph's when its operations were last looked at.
    """

    def __init__(self) -> None:
        self.own: list[Own] = []
        self.known: set[tf.Operation] = set()
        self.version = 0

    def note(self, op: tf.Operation, place: int, name: str) -> None:
        self.own.append(Own(op, place, name))
        self.known.add(op)


def written_in(graph: tf.Graph) -> Written:
    """That of `graph`; of the graph around it if it is a function's."""
    return graphs.kept(graphs.outermost(graph), 'written', Written)


def replicated(graph: tf.Graph) -> list[Any]:
    """The global variables of `graph` that every rank has alike.

    Not among them are tables and their slots, and what a script says is each rank's own: local variables, and those with
    `VariableSynchronization.ON_READ`.
    """
    own = {id(v) for key in (tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES) for v in graph.get_collection(key)}
    return [v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if is_replicated(v) and is_movable(v) and id(v) not in own
            and getattr(v, 'synchronization', None) != tf.VariableSynchronization.ON_READ]


# -- what is noted ---------------------------------------------------------------------------------------------------------


def alike(variable: Any, value: Any) -> Any:
    """`value`, a tensor on its way to `variable`, or what will be the mean of it over ranks."""
    graph = graphs.outermost(tf.get_default_graph())
    if communication.size() == 1 or tf.executing_eagerly() or not is_replicated(variable):
        return value
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating or value.op in written_in(graph).known:
        return value
    if value.graph is not graph or value.op._get_control_flow_context() is not None:
        return _mean_inside(variable, value)
    with tf.init_scope():
        own = tf.identity(value, name='collective/written/value')
    written_in(graph).note(own.op, 0, str(variable.op.name))
    return own


def assign(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`assign`, `assign_add` and `assign_sub` of variables: in a branch or a function they write the mean over ranks.

    Outside of these they are found once the graph is there.
    """
    if communication.size() == 1 or tf.executing_eagerly() or graphs.is_outside(tf.get_default_graph()):
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    variable, value = list(given.arguments)[:2]
    given.arguments[value] = _written_inside(given.arguments[variable], given.arguments[value])
    return original(*given.args, **given.kwargs)


def _written_inside(variable: Any, value: Any) -> Any:
    around = graphs.outermost(tf.get_default_graph())
    memory = runs.holder(variable.handle if hasattr(variable, 'handle') else variable)
    held = next((v for v in replicated(around) if runs.memory(v) is memory), None)
    if held is None or not held.dtype.base_dtype.is_floating:
        return value
    value = tf.convert_to_tensor(value, held.dtype.base_dtype)
    return value if _is_fed(value) else _mean_inside(held, value)


def _mean_inside(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """In a branch, a loop or a function: the mean over ranks of a value of this rank's own, if all ranks come by."""
    found = written_in(value.graph)
    if not _is_own([value], found):
        return value
    if any(x is None or _is_own([tf.convert_to_tensor(x)], found) for x in control_flow.deciders()):
        _warn(f"The replicated variable '{variable.op.name}' is changed in a loop, or a branch that a rank takes by itself, by",
              DRIFTS)
        return value
    mean = means.over_ranks('written', [(str(variable.name), value)])[0]
    written_in(mean.graph).known.add(mean.op)
    return mean


def gradients(grads_and_vars: Sequence[Any]) -> list[Any]:
    """Of replicated variables: those that depend on what this rank alone knows, though they were reduced, or never were, become
    the mean over ranks once more."""
    graph = tf.get_default_graph()
    out = list(grads_and_vars)
    if communication.size() == 1 or not graphs.is_outside(graph):
        return out
    found = written_in(graph)
    for i, (gradient, variable) in enumerate(out):
        if isinstance(gradient, tf.Tensor) and is_replicated(variable) and _is_own([gradient], found):
            _warn(f"The gradient of the replicated variable '{variable.op.name}' depends on")
            out[i] = alike(variable, gradient), variable
    return out


def hold_updates(gates: GraphGates) -> None:
    """Before updates are made: those of `tf.GraphKeys.UPDATE_OPS` wait for the gate, too, as far as it doesn't wait for them,
    and what they assign to replicated variables becomes the mean over ranks.

    Raises:
        NotImplementedError: one of them writes what has no mean: integers, or some elements only.
    """
    graph = tf.get_default_graph()
    if communication.size() == 1 or hasattr(graph, 'outer_graph'):
        return
    held = _update_ops(graph)
    needed, found = _before_gates(graph), written_in(graph)
    for op, variable in _writes(graph, runs.upstream(held) - needed - found.known):
        if not _has_mean(op, variable):
            raise NotImplementedError(
                f"'{op.name}' ({op.type}), one of tf.GraphKeys.UPDATE_OPS, changes the replicated variable "
                f"'{variable.op.name}' by what this rank alone knows: its replicas would drift apart. Assign floating-point "
                f"values, which become the mean over ranks; or make it each rank's own, a local variable: {LOCAL}.")
        found.note(op, 1, str(variable.name))
    settle(graph)
    for op in held:
        if gates.gates and gates.level(op) == 0 and op not in needed and op._get_control_flow_context() is None:
            op._add_control_input(gates.gates[0].zero.op)
    gates.changed()


def _note_assignments(graph: tf.Graph, found: Written) -> None:
    """What was written since the last time, other than by optimizers; in a branch `assign` has seen to it."""
    if graph.version == found.version:      # as before nearly every step
        return
    listed = runs.upstream(_update_ops(graph))
    new = {op for op in graph.get_operations() if op._id > found.version + 1} - found.known
    found.version = graph.version
    for op, variable in _writes(graph, {op for op in new if runs.WRITES.match(op.type)}):
        if op.type.startswith(('ResourceApply', 'ResourceSparseApply', 'Apply', 'SparseApply')) or _is_fed(op.inputs[1]):
            continue
        what = f"The replicated variable '{variable.op.name}' is changed by '{op.name}' ({op.type}), which"
        if _has_mean(op, variable) and op not in _before_gates(graph):
            if op not in listed:
                _warn(f'{what} depends on')
            found.note(op, 1, str(variable.name))
        else:
            _warn(f'{what} has no mean over ranks, and depends on', DRIFTS)


def _update_ops(graph: tf.Graph) -> list[tf.Operation]:
    listed = (getattr(x, 'op', x) for x in graph.get_collection(tf.GraphKeys.UPDATE_OPS))
    return [op for op in listed if isinstance(op, tf.Operation)]


def _warn(what: str, then: str = 'It becomes the mean over ranks') -> None:
    if communication.rank() == 0:
        tf.logging.warning(f"{what} what each rank alone knows (its data, its random numbers). {then}. A variable that is "
                           f"meant to be each rank's own is a local one: {LOCAL}.")


def _before_gates(graph: tf.Graph) -> set[tf.Operation]:
    """What the gates wait for, and which can't wait for them."""
    return runs.upstream(check.bounds.op for check in gates_of(graph).checks)


def _writes(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[tuple[tf.Operation, Any]]:
    """Those of `operations` outside of branches that write a replicated variable, with it, what this rank alone knows."""
    holders = {runs.memory(v): v for v in replicated(graph)}
    initial = {v.initializer for v in holders.values()}
    out = []
    for op in sorted(operations, key=lambda op: op._id):
        variable = holders.get(op.inputs[0].op) if op.inputs and runs.WRITES.match(op.type) else None
        if variable is not None and op not in initial and op._get_control_flow_context() is None and (
                _is_own(op.inputs[1:], written_in(graph))):
            out.append((op, variable))
    return out


def _has_mean(op: tf.Operation, variable: Any) -> bool:
    return op.type in ASSIGNS and bool(variable.dtype.base_dtype.is_floating)


def _is_fed(value: tf.Tensor) -> bool:
    """Whether it is a placeholder's as it is."""
    op = value.op
    while op.type in CHANGES and op.inputs:
        op = op.inputs[0].op
    return op.type == 'Placeholder' and not hasattr(op.graph, 'outer_graph')


def _is_own(values: Iterable[tf.Tensor], found: Written) -> bool:
    """Whether any of `values` comes from what this rank alone knows, other than by a mean: its data, its random numbers.

    A placeholder of a single number is a setting (a rate, a switch), which ranks feed alike; so is one without a shape.
    """
    stack = [x.op for x in values]
    seen = set(stack)
    while stack:
        op = stack.pop()
        if op in found.known or REDUCED.match(op.type):
            continue
        new = {x.op for x in op.inputs}
        if op.type == 'Placeholder' and hasattr(op.graph, 'outer_graph'):       # in a function: what it is called with
            new = {outer.op for outer, inner in op.graph.captures if inner.op is op}
        elif accumulation.is_marker(op):
            pass
        elif RANDOM.match(op.type) or takes_data(op) and (op.type not in FED or op.outputs[0].shape.rank):
            return True
        stack.extend(new - seen)
        seen |= new
    return False


def takes_data(op: tf.Operation) -> bool:
    return op.type in DATA or op.type in runs.CALLS and runs.has_inside(op.graph, op, READS)


# -- and what becomes of it ------------------------------------------------------------------------------------------------


def settle(graph: tf.Graph) -> None:
    """Exchanges all that was noted: by one allreduce for what comes from the same data, one more for what depends on that."""
    graph = graphs.outermost(graph)
    if communication.size() == 1:
        return
    found = written_in(graph)
    _note_assignments(graph, found)
    if not found.own:
        return
    left = sorted(found.own, key=lambda own: (own.name, own.op._id))
    found.own = []
    with graphs.open_for_changes(graph), graph.as_default(), tf.init_scope(), tf.device(None), tf.name_scope(
            'collective/written/'):
        while left:
            behind = {own: runs.upstream([own.op.inputs[own.place].op]) for own in left}
            ready = [own for own in left if not any(other.op in behind[own] for other in left)]
            left = [own for own in left if own not in ready]
            for some in _by_data(ready, behind):
                values = means.over_ranks('written', [(own.name, own.op.inputs[own.place]) for own in some])
                for own, mean in zip(some, values):
                    own.op._update_input(own.place, mean)
            gates_of(graph).changed()


def _by_data(ready: Iterable[Own], behind: dict[Own, set[tf.Operation]]) -> Iterable[Sequence[Own]]:
    """Those together that come from the same iterators and feeds and behind the same updates: a run that needs some of them
    takes no other data for it, and changes nothing else."""
    out: dict[tuple[str, ...], list[Own]] = {}
    for own in ready:
        out.setdefault(tuple(sorted(str(op.name) for op in behind[own] if takes_data(op) or runs.WRITES.match(op.type))),
                       []).append(own)
    return [some for _, some in sorted(out.items())]
