"""Moving averages of what ranks see apart: each step all ranks take the mean of their values, so the averages stay alike.

That is the rule for batch normalisation (each rank normalises by its own batch, and all keep one average), for whatever else a
model adds to `tf.GraphKeys.UPDATE_OPS`, and for `tf.train.ExponentialMovingAverage` of tensors. Averages of variables need no
exchange: replicated ones are alike already, and those of a table are sharded as it is.

A value that is to become a mean is noted where it is written; before updates are made, or a session runs, what was noted gets
as few allreduces as its dependences allow.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variables

from collective import means
from collective.ops import communication
from collective.ops.gate import GraphGates, gates_of
from collective.ranks import runs
from collective.replicated import is_replicated
from collective.tables import whole
from collective.tables.grouping import lookups_of
from collective.tables.table import Sharded, shard_view

ASSIGNS = frozenset({'AssignVariableOp', 'AssignSubVariableOp', 'AssignAddVariableOp', 'Assign', 'AssignSub', 'AssignAdd'})
REDUCED = re.compile('Horovod(Grouped)?(Allreduce|Allgather)|HorovodBroadcast')       # whose results all ranks have
RANDOM = re.compile('Random|TruncatedNormal|Multinomial|Stateful(Uniform|Standard|Random)|.*CandidateSampler')
# What reads data, and what may do so in a function.
DATA = runs.SOURCES - runs.CALLS - {'Merge', 'Exit'} | {'Placeholder', 'PlaceholderWithDefault'}
READS = re.compile('Iterator|OptionalGetValue|Queue|ReaderRead|PyFunc|EagerPyFunc|(Ordered)?(Map)?Unstage')


class Own(NamedTuple):
    """A value of this rank's: input `place` of `op`, on its way to the variable `name`."""
    op: tf.Operation
    place: int
    name: str


class Averages:
    """Those of one graph: what is still to become a mean, and the operations of which a value is one."""

    def __init__(self) -> None:
        self.own: list[Own] = []
        self.known: set[tf.Operation] = set()

    def note(self, op: tf.Operation, place: int, name: str) -> None:
        self.own.append(Own(op, place, name))
        self.known.add(op)


def averages_of(graph: tf.Graph) -> Averages:
    """Those of `graph`; of the graph around it if it is a function's."""
    graph = communication.outermost(graph)
    if not hasattr(graph, '_collective_averages'):
        graph._collective_averages = Averages()
    found: Averages = graph._collective_averages
    return found


# -- what is noted ---------------------------------------------------------------------------------------------------------


def alike(variable: Any, value: Any) -> Any:
    """`value`, a tensor on its way to `variable`, or what will be the mean of it over ranks.

    Raises:
        NotImplementedError: it is computed in a branch or a loop.
    """
    graph = communication.outermost(tf.get_default_graph())
    if communication.size() == 1 or tf.executing_eagerly() or not is_replicated(variable):
        return value
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating or value.op in averages_of(graph).known:
        return value
    if value.graph is not graph or value.op._get_control_flow_context() is not None:
        raise NotImplementedError(
            f"The moving average '{variable.op.name}' is updated by '{value.op.name}', which is computed in tf.cond, "
            'tf.while_loop or a function. It becomes the mean over ranks: compute it outside, and update inside.')
    with tf.init_scope():
        own = tf.identity(value, name='collective/moving_average')
    averages_of(graph).note(own.op, 0, str(variable.op.name))
    return own


def assign_moving_average(original: Any, variable: Any, value: Any, decay: Any, *args: Any, **kwargs: Any) -> Any:
    """`moving_averages.assign_moving_average`: of a tensor, towards the mean of the ranks' tensors."""
    return original(variable, alike(variable, value), decay, *args, **kwargs)


def of_layer(original: Any, layer: Any, variable: Any, value: Any, *args: Any) -> Any:
    """`BatchNormalization._assign_moving_average` and `_assign_new_value`."""
    return original(layer, variable, alike(variable, value), *args)


def hold_updates(gates: GraphGates) -> None:
    """Before updates are made: those of `tf.GraphKeys.UPDATE_OPS` wait for the gate, too, as far as it doesn't wait for them,
    and what they assign to replicated variables becomes the mean over ranks."""
    graph = tf.get_default_graph()
    listed = (getattr(x, 'op', x) for x in tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    held = [op for op in listed if isinstance(op, tf.Operation)]
    if communication.size() == 1 or not held or hasattr(graph, 'outer_graph'):
        return
    needed, found = runs.upstream(check.bounds.op for check in gates.checks), averages_of(graph)
    holders = {(v.handle if hasattr(v, 'handle') else v).op: v for v in tf.global_variables()
               if isinstance(v, variables.Variable) and is_replicated(v)}
    for op in sorted(runs.upstream(held) - needed - found.known, key=lambda op: op._id):
        variable = holders.get(op.inputs[0].op) if op.inputs and runs.WRITES.match(op.type) else None
        if variable is None or op._get_control_flow_context() is not None or not _is_own(op.inputs[1:], found):
            continue
        if op.type not in ASSIGNS or not variable.dtype.base_dtype.is_floating:
            raise NotImplementedError(
                f"'{op.name}' ({op.type}), one of tf.GraphKeys.UPDATE_OPS, changes the replicated variable "
                f"'{variable.op.name}' by what this rank alone knows: its replicas would drift apart. Assign floating-point "
                "values, which become the mean over ranks; or make it each rank's own, a local variable: "
                'collections=[tf.GraphKeys.LOCAL_VARIABLES].')
        found.note(op, 1, str(variable.name))
    settle(graph)
    for op in held:
        if gates.gates and gates.level(op) == 0 and op not in needed and op._get_control_flow_context() is None:
            op._add_control_input(gates.gates[0].zero.op)
    gates.changed()


def _is_own(values: Iterable[tf.Tensor], found: Averages) -> bool:
    """Whether any of `values` comes from what this rank alone knows, other than by a mean: its data, its random numbers."""
    stack = [x.op for x in values]
    seen = set(stack)
    while stack:
        op = stack.pop()
        if op in found.known or REDUCED.match(op.type):
            continue
        if _takes_data(op) or RANDOM.match(op.type):
            return True
        new = {x.op for x in op.inputs} - seen
        seen |= new
        stack.extend(new)
    return False


def _takes_data(op: tf.Operation) -> bool:
    return op.type in DATA or op.type in runs.CALLS and runs.has_inside(op.graph, op, READS)


# -- and what becomes of it ------------------------------------------------------------------------------------------------


def settle(graph: tf.Graph) -> None:
    """Exchanges all that was noted: by one allreduce for what comes from the same data, and one more for what depends on that.

    Raises:
        NotImplementedError: a session has run the operations already, which then can't wait for anything else.
    """
    graph = communication.outermost(graph)
    found = averages_of(graph)
    if not found.own:
        return
    left = sorted(found.own, key=lambda own: (own.name, own.op._id))
    if any(own.op._id <= lookups_of(graph).run for own in left):
        raise NotImplementedError(f"A session had run the moving average '{left[0].name}' before the optimizer was made: its "
                                  'values would stay this rank\'s own. Build the whole graph before the first run.')
    found.own = []
    finalized = graph.finalized
    graph._unsafe_unfinalize()
    try:
        with graph.as_default(), tf.init_scope(), tf.device(None), tf.name_scope('collective/moving_averages/'):
            while left:
                behind = {own: runs.upstream([own.op.inputs[own.place].op]) for own in left}
                ready = [own for own in left if not any(other.op in behind[own] for other in left)]
                left = [own for own in left if own not in ready]
                for some in _by_data(ready, behind):
                    values = means.over_ranks('moving_averages', [(own.name, own.op.inputs[own.place]) for own in some])
                    for own, mean in zip(some, values):
                        own.op._update_input(own.place, mean)
                gates_of(graph).changed()
    finally:
        if finalized:
            graph.finalize()


def _by_data(ready: Iterable[Own], behind: dict[Own, set[tf.Operation]]) -> Iterable[Sequence[Own]]:
    """Those together that come from the same iterators and feeds and behind the same updates: a run that needs some of them
    takes no other data for it, and changes nothing else."""
    out: dict[tuple[str, ...], list[Own]] = {}
    for own in ready:
        out.setdefault(tuple(sorted(str(op.name) for op in behind[own] if _takes_data(op) or runs.WRITES.match(op.type))),
                       []).append(own)
    return [some for _, some in sorted(out.items())]


def apply_average(original: Any, average: Any, var_list: Any = None) -> tf.Operation:
    """`ExponentialMovingAverage.apply`: the average of a table is sharded as the table is, and looked up as one."""
    listed = tf.trainable_variables() if var_list is None else list(var_list)
    tables = [v for v in listed if isinstance(v, Sharded)]
    for table in tables:
        if table.rows is None:
            table.refuse('tf.train.ExponentialMovingAverage')
    if communication.size() == 1 or not tables:
        return original(average, var_list)
    with tf.control_dependencies([whole.agreed(tables[0], average.name)]), shard_view():
        return original(average, listed)
