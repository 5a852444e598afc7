"""The graph, cut behind the exchange of keys, so that a run of its own may execute what comes
before.

    iterator ──► ids ──► ask ══keys══► hear ──► stage      a run of keys, for batch i + 1
        │                                         ·
        └─ · · · · · labels, … · · · · · · · · ·  ·
                                                  ▼
                                            take ──► rows, network, gradients, updates      a run of
                                            the script, for batch i

What the iterator gives, and what is computed of it on the way to the keys, is executed by runs of
keys only. Whatever else of the graph uses any of it is pointed to the same tensor as it was staged,
and so are a script's fetches (`Cut.stand_in`). No operation is copied: random ones draw the numbers
that they would draw anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import agreement, run_analysis
from collective.coordination.agreement import Header
from collective.coordination.prepared_run import PreparedRun
from collective.ops import gate, graphs, op_attributes
from collective.ops.graph_analysis import SOURCES, VARIABLE_TYPES, upstream
from collective.ops.graph_state import state_of
from collective.strategies.grouped_exchange import Group, groups_of

ITERATORS = frozenset({"IteratorGetNext", "IteratorGetNextSync"})
_CALLS = frozenset(
    {
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "If",
        "Case",
        "While",
        "StatefulPartitionedCall",
        "PartitionedCall",
        "RemoteCall",
    }
)
# also where a function or a branch reads them
_CHANGING = frozenset(
    {
        "MutableHashTableV2",
        "MutableHashTable",
        "MutableDenseHashTableV2",
        "MutableDenseHashTable",
        "MutableHashTableOfTensorsV2",
        "MutableHashTableOfTensors",
    }
)
_OURS = "collective/"


class NotPossible(Exception):
    """Why keys aren't exchanged ahead."""


@dataclasses.dataclass
class GraphSplit:
    """What was made of a graph.

    Attributes:
        graph: the graph.
        iterator: the resource of the iterator that gives the batches.
        before: the operations that only runs of keys execute, as far as they depend on the batch.
        number: int64 scalar placeholder, the number under which a run of keys stages its batch.
        stage: the operation that stages it, the last of a run of keys.
        wait: fed with 1, a run of keys starts at once; else it waits for `release` or `refuse`.
        release: makes the operation that lets the run of keys go that waits, if `releases` is fed
            with True.
        releases: bool scalar placeholder, False by default.
        refuse: the operation that ends the run of keys that waits, as if it had never been started.
        batch: int64 scalar placeholder, the number of the batch that a run of the script takes.
        take: the operation that takes it.
        stand_ins: by the names of what depends on the batch, what it is for the rest of the graph.
        feedable: the names of all that a run of keys computes, and a script may feed.
        forget: the operation that drops all that is staged.
        groups: the number of groups whose keys are exchanged ahead.
        followed: the highest number of an operation that has been pointed to what is staged, or
            needn't be.
        runs: of keys, by the names of what they are fed with.
    """

    graph: tf.Graph
    iterator: tf.Operation
    before: frozenset[tf.Operation]
    number: tf.Tensor
    stage: tf.Operation
    wait: tf.Tensor
    release: Any
    releases: tf.Tensor
    refuse: tf.Operation
    batch: tf.Tensor
    take: tf.Operation
    stand_ins: dict[str, tf.Tensor]
    feedable: frozenset[str]
    forget: tf.Operation
    groups: int
    followed: int = 0
    runs: dict[tuple[str, ...], PreparedRun] = dataclasses.field(default_factory=dict)

    def stand_in(self, leaf: Any) -> Any:
        """`leaf`, a tensor, an operation or a name of the graph, or what stands for it behind the
        cut.
        """
        element = self.graph.as_graph_element(leaf)
        if isinstance(element, tf.Operation):
            return self.take if element in self.before else leaf
        return self.stand_ins.get(element.name, leaf)

    def restarts(self, operations: Iterable[tf.Operation]) -> bool:
        """Whether any of `operations` starts the iterator anew: batches that were taken ahead are
        void.
        """
        return any(
            op.type in ("MakeIterator", "DeserializeIterator")
            and any(x.op is self.iterator for x in op.inputs)
            for op in operations
        )


def cut(graph: tf.Graph) -> GraphSplit | None:
    """Cuts `graph`, before a session runs it; None: no lookup that could be cut off is there yet.

    Keys of those groups are exchanged ahead which gradients were taken of, and whose keys depend on
    no other lookup.

    Raises:
        NotPossible: the graph can't be cut; the message says why.
    """
    trained = _trained(graph)
    if not trained:
        if state_of(graph).seen_by_session:
            raise NotPossible("no lookup with gradients shares an exchange")
        return None
    with graphs.open_for_changes(graph), graph.as_default():
        made = _cut(graph, trained)
        run_of_keys(made)
    return made


def follow(made: GraphSplit) -> None:
    """Points what was added to the graph since it was cut to what is staged.

    Raises:
        NotImplementedError: it uses something that isn't.
    """
    if made.graph.version + 1 > made.followed:
        _point([op for op in made.graph.get_operations() if op._id > made.followed], made)
        made.followed = made.graph.version + 1  # TensorFlow numbers operations from 2


def run_of_keys(made: GraphSplit, fed: Sequence[str] = ()) -> PreparedRun:
    """The run that exchanges keys and stages a batch.

    Args:
        made: the cut.
        fed: the names of the tensors that a script feeds it with.

    Raises:
        ValueError: the rest of the batch would come from the iterator.
    """
    follow(made)
    if tuple(fed) not in made.runs:
        footprint = run_analysis.footprint_of(made.graph, [made.stage], [made.wait, *fed])
        if fed and any(op.type in ITERATORS for op in footprint.operations):
            raise ValueError(
                f"{', '.join(fed)}: with scope(prefetch_keys=True) keys are "
                f"exchanged before the run that is fed. "
                "Feed all that the model takes of the batch, or leave prefetch_keys "
                "out."
            )
        if fed:  # the same collectives, but of another batch
            footprint = dataclasses.replace(footprint, signature=footprint.signature ^ 1)
        out = made.runs[tuple(fed)] = PreparedRun(footprint, made)

        def disagreed(headers: list[Header]) -> None:
            out.disagreement = headers

        gates = gate.gates_of(made.graph)
        assert gates.ahead is not None
        numbered = {
            gates.checks.index(check): check for check in footprint.checks(gates, 1, first=True)
        }
        with graphs.open_for_changes(made.graph):
            out.targets.append(
                agreement.agree(
                    gates.ahead, numbered, footprint.sources(gates), disagreed, first=True
                )
            )
        out.tickets.append(gates.ahead.ticket)
        out.gate = gates.ahead
        made.followed = made.graph.version + 1
    return made.runs[tuple(fed)]


def _trained(graph: tf.Graph) -> list[Group]:
    with_gradient = {
        op.inputs[1].op
        for op in graph.get_operations()
        if op_attributes.kind(op) == "CollectivePoolGradient"
    }
    return [
        group
        for group in groups_of(graph)
        if group.level == 1 and group.pool.inputs[1].op in with_gradient
    ]


def _cut(graph: tf.Graph, groups: Sequence[Group]) -> GraphSplit:
    gates, run = gate.gates_of(graph), state_of(graph).seen_by_session
    closed = gates.at(1).zero
    path = upstream([op for group in groups for op in group.keys], {closed.name})
    iterator = _iterator(path)
    before = _depending(path - upstream([iterator]))
    for op in sorted(before, key=lambda op: op._id):
        if op._id <= run:
            raise NotPossible(f"a session had run '{op.name}' before the model was complete")
        if op._get_control_flow_context() is not None:
            raise NotPossible(f"keys pass through tf.cond or tf.while_loop ('{op.name}')")
    with tf.init_scope(), tf.device("/cpu:0"), tf.name_scope("collective/ahead/"):
        go = tf.queue.FIFOQueue(1, [tf.int32], shapes=[[]], name="go")
        wait = tf.placeholder_with_default(go.dequeue(), [], "wait")
        started = tf.raw_ops.Assert(
            condition=tf.equal(wait, 1), data=[tf.constant("the run of keys is not needed")]
        )
        for op in before:
            if not any(x.op in before for x in op.inputs) and not any(
                x in before for x in op.control_inputs
            ):
                op._add_control_input(started)
        opened = gates.open_ahead().zero
        for op in path:
            for i, x in enumerate(op.inputs):
                if x is closed:
                    op._update_input(i, opened)
        users = [op for op in graph.get_operations() if op not in path and op._id > run]
        used = {x.name for op in users for x in op.inputs if x.op in before}
        kept = [
            x
            for op in sorted(before, key=lambda op: op._id)
            for x in op.outputs
            if x.dtype != tf.resource and (x.name in used or not op.name.startswith(_OURS))
        ]
        number, batch = (tf.placeholder(tf.int64, [], name) for name in ("number", "batch"))
        releases = tf.placeholder_with_default(False, [], "releases")
        which, about = (
            tf.range(len(kept)),
            {"dtypes": [x.dtype for x in kept], "shared_name": "collective/ahead"},
        )
        stage = tf.raw_ops.MapStage(key=number, indices=which, values=kept, **about)
        taken = tf.raw_ops.MapUnstage(key=batch, indices=which, **about)
        # With its shape: what TensorFlow's graph optimizer makes of the rest depends on it, to the
        # last bit of the numbers.
        stand_ins = {
            x.name: tf.ensure_shape(y, x.shape) if x.shape.ndims is not None else y
            for x, y in zip(kept, taken)
        }
        made = GraphSplit(
            graph,
            iterator,
            frozenset(before),
            number,
            stage,
            wait,
            lambda: tf.cond(releases, lambda: tf.group(go.enqueue(1)), tf.no_op),
            releases,
            go.enqueue(0),
            batch,
            taken[0].op,
            stand_ins,
            frozenset(x.name for op in path for x in op.outputs if not op.name.startswith(_OURS)),
            tf.raw_ops.MapClear(**about),
            len(groups),
        )
    _point(users, made)
    gates.changed()
    for group in groups:
        group.ahead = True
    made.followed = graph.version + 1
    return made


def _iterator(path: Iterable[tf.Operation]) -> tf.Operation:
    """The resource of the one iterator in `path`.

    Raises:
        NotPossible: something in `path` isn't known a batch ahead.
    """
    given = sorted((op for op in path if op.type in ITERATORS), key=lambda op: str(op.name))
    for op in sorted(path, key=lambda op: op._id):
        if op.type == "Placeholder":
            raise NotPossible(f"keys depend on the placeholder '{op.name}'")
        if op.type in VARIABLE_TYPES:
            raise NotPossible(f"keys depend on the variable '{op.name}'")
        if op.type in _CHANGING:
            raise NotPossible(f"keys depend on the table '{op.name}', which may change")
        if op.type in SOURCES - ITERATORS - _CALLS - {"Merge", "Exit"}:
            raise NotPossible(
                f"keys come from '{op.name}' ({op.type}), not from a tf.data iterator"
            )
    if len(given) != 1:
        raise NotPossible(
            "keys come from no tf.data iterator"
            if not given
            else "keys come from several iterators: " + ", ".join(f"'{op.name}'" for op in given)
        )
    return given[0].inputs[0].op


def _depending(path: set[tf.Operation]) -> set[tf.Operation]:
    """The operations of `path` whose results belong to a batch: iterators, what draws or counts
    something, what uses these.
    """
    users: dict[tf.Operation, list[tf.Operation]] = {}
    for op in path:
        for before in [x.op for x in op.inputs] + list(op.control_inputs):
            users.setdefault(before, []).append(op)
    stack = [
        op
        for op in path
        if op.type in ITERATORS
        or op.op_def.is_stateful
        and op.type != "PlaceholderWithDefault"
        and not any(x.dtype == tf.resource or x.dtype._is_ref_dtype for x in op.outputs)
    ]
    found = set(stack)
    while stack:
        for user in users.get(stack.pop(), []):
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _point(users: Iterable[tf.Operation], made: GraphSplit) -> None:
    for op in users:
        for i, x in enumerate(op.inputs):
            if x.op in made.before and op is not made.stage:
                if x.name not in made.stand_ins:
                    raise NotImplementedError(
                        f"'{op.name}' was added after the graph had been run, and uses "
                        f"'{x.name}', which is not kept with "
                        "scope(prefetch_keys=True). Build the whole graph before the first run, "
                        "or leave prefetch_keys out."
                    )
                op._update_input(i, made.stand_ins[x.name])
        waited = [x for x in op.control_inputs if x in made.before]
        if waited and op is not made.stage:
            others = [x for x in op.control_inputs if x not in made.before]
            op._remove_all_control_inputs()
            op._add_control_inputs([*others, made.take])
