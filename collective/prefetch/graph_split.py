"""Splits a graph after the exchange of keys, so that a separate run executes what comes before.

    iterator ──► ids ──► ask ══keys══► hear ──► stage      a run of keys, for batch i + 1
        │                                         ·
        └─ · · · · · labels, … · · · · · · · · ·  ·
                                                  ▼
                                           unstage ──► rows, network, gradients, updates
                                                           a run of the script, for batch i

Only runs of keys execute the iterator and the computation from it to the keys. All other users of
these tensors in the graph are redirected to the staged tensors, and so are a script's fetches
(`GraphSplit.staged_fetch`). Tensors in a GPU's memory are staged there. No operation is copied, so
random operations draw the same numbers as without the split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.coordination import agreement, run_analysis
from collective.coordination.agreement import Header
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_analysis import RunFootprint
from collective.ops.communication import collectives, gate
from collective.ops.graph import device_scopes, graphs, memory_types, seen_operations
from collective.ops.graph.graph_analysis import SOURCES, VARIABLE_TYPES, upstream, walk
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
_LOOKUP_TABLES = frozenset(
    {
        "MutableHashTableV2",
        "MutableHashTable",
        "MutableDenseHashTableV2",
        "MutableDenseHashTable",
        "MutableHashTableOfTensorsV2",
        "MutableHashTableOfTensors",
    }
)
_LIBRARY_PREFIX = "collective/"
NO_GROUP = "no lookup with gradients shares an exchange"
OUTSIDE = (
    "This run uses a batch that is taken ahead, with scope(prefetch_keys=True), but no session of "
    "strategy.scope() runs it. Run it inside `with strategy.scope():`, or leave prefetch_keys out."
)


class NotPossible(Exception):
    """Says why keys aren't exchanged ahead."""


class TakenOutside(NotPossible):
    """Says which tables' gradients were taken outside of the scope that prefetches their keys."""

    def __init__(self, tables: Iterable[str]) -> None:
        super().__init__(
            "gradients were taken where prefetch_keys was not set; take them inside "
            "scope(prefetch_keys=True), too"
        )
        self.tables = sorted(set(tables))


class Start(NamedTuple):
    """Holds what starts a run of keys.

    Attributes:
        wait: fed with 1, a run of keys starts at once; else it waits for `release` or `refuse`.
        started: the operation that a run of keys executes first.
        releases: bool scalar placeholder, False by default: whether `release` does anything.
        queue: the queue on which a run of keys waits.
        refuse: the operation that ends the run of keys that waits, as if it had never been started.
    """

    wait: tf.Tensor
    started: tf.Operation
    releases: tf.Tensor
    queue: tf.queue.FIFOQueue
    refuse: tf.Operation

    def release(self) -> tf.Operation:
        """Makes the operation that lets the run of keys go that waits, if `releases` is True."""
        return tf.cond(self.releases, lambda: tf.group(self.queue.enqueue(1)), tf.no_op)


class Stage(NamedTuple):
    """Holds what keeps a batch between the run of its keys and the run that uses it.

    Attributes:
        number: int64 scalar placeholder, the number under which a run of keys stages its batch.
        put: the operation that stages it, the last of a run of keys.
        batch: int64 scalar placeholder, the number of the batch that a run of the script takes.
            Unfed, it refuses the run.
        take: the operation that takes it.
        tensors: by the names of what depends on the batch, the tensor as it was staged.
        clear: the operation that drops all that is staged.
    """

    number: tf.Tensor
    put: tf.Operation
    batch: tf.Tensor
    take: tf.Operation
    tensors: dict[str, tf.Tensor]
    clear: tf.Operation


@dataclasses.dataclass
class GraphSplit:
    """Describes a graph that was split.

    Attributes:
        graph: the graph.
        iterator: the resource of the iterator that gives the batches.
        prefetched: the operations that only runs of keys execute, as far as they depend on the
            batch.
        feedable: the names of all that a run of keys computes, and a script may feed.
        groups: the number of groups whose keys are exchanged ahead.
        start: starts runs of keys.
        stage: keeps their batches.
        redirected: the highest number of an operation that uses what is staged, or needn't.
        key_runs: the runs of keys, by the names of what they are fed with.
    """

    graph: tf.Graph
    iterator: tf.Operation
    prefetched: frozenset[tf.Operation]
    feedable: frozenset[str]
    groups: int
    start: Start
    stage: Stage
    redirected: int = 0
    key_runs: dict[tuple[str, ...], PreparedRun] = dataclasses.field(default_factory=dict)

    def staged_fetch(self, leaf: Any) -> Any:
        """Returns what a script fetches in the place of `leaf`: a tensor, operation or name."""
        element = self.graph.as_graph_element(leaf)
        if isinstance(element, tf.Operation):
            return self.stage.take if element in self.prefetched else leaf
        return self.stage.tensors.get(element.name, leaf)

    def is_restarted_by(self, operations: Iterable[tf.Operation]) -> bool:
        """Tells whether any of `operations` restarts the iterator.

        Batches that were taken ahead are void then.
        """
        return any(
            op.type in ("MakeIterator", "DeserializeIterator")
            and any(x.op is self.iterator for x in op.inputs)
            for op in operations
        )

    def redirect_new_operations(self) -> None:
        """Redirects what was added to the graph since it was split.

        Raises:
            NotImplementedError: it uses something that isn't staged.
        """
        if self.graph.version + 1 > self.redirected:
            operations = self.graph.get_operations()
            self.redirect(op for op in operations if op._id > self.redirected)
            self.has_redirected_all()

    def has_redirected_all(self) -> None:
        """Notes that nothing of the graph is left to be redirected."""
        # TensorFlow numbers operations from 2.
        self.redirected = self.graph.version + 1

    def redirect(self, users: Iterable[tf.Operation]) -> None:
        """Lets `users` take what they use of the batch as it was staged."""
        for op in users:
            for i, x in enumerate(op.inputs):
                if x.op in self.prefetched:
                    op._update_input(i, self._staged_tensor(x, op))
            others = [x for x in op.control_inputs if x not in self.prefetched]
            if len(others) < len(op.control_inputs):
                op._remove_all_control_inputs()
                op._add_control_inputs([*others, self.stage.take])

    def _staged_tensor(self, x: tf.Tensor, user: tf.Operation) -> tf.Tensor:
        if x.name not in self.stage.tensors:
            raise NotImplementedError(
                f"'{user.name}' was added after the graph had been run, and uses '{x.name}', which "
                "is not kept with scope(prefetch_keys=True). Build the whole graph before the "
                "first run, or leave prefetch_keys out."
            )
        return self.stage.tensors[x.name]


def split_graph(graph: tf.Graph) -> GraphSplit | None:
    """Splits `graph`, before a session runs it; None: it has no lookup yet that could be split off.

    Keys of those groups are exchanged ahead which gradients were taken of, and whose keys depend on
    no other lookup.

    Raises:
        NotPossible: the graph can't be split; the message says why.
    """
    groups = _trained_groups(graph)
    if not groups:
        if seen_operations.last(graph):
            raise NotPossible(NO_GROUP)
        return None
    if any(group.answered for group in groups):
        raise TakenOutside(m.lookup.table.op.name for group in groups for m in group.members)
    with graphs.open_for_changes(graph), graph.as_default():
        split = _split(graph, groups)
        key_run(split)
    return split


def key_run(split: GraphSplit, fed: Sequence[str] = ()) -> PreparedRun:
    """Returns the run that exchanges keys and stages a batch.

    Args:
        split: the graph, split.
        fed: the names of the tensors that a script feeds it with.

    Raises:
        ValueError: the rest of the batch would come from the iterator.
    """
    split.redirect_new_operations()
    if tuple(fed) not in split.key_runs:
        footprint = _key_footprint(split, fed)
        split.key_runs[tuple(fed)] = _prepare_key_run(split, footprint)
        split.has_redirected_all()
    return split.key_runs[tuple(fed)]


def _key_footprint(split: GraphSplit, fed: Sequence[str]) -> RunFootprint:
    footprint = run_analysis.footprint_of(split.graph, [split.stage.put], [split.start.wait, *fed])
    if not fed:
        return footprint
    if any(op.type in ITERATORS for op in footprint.operations):
        raise ValueError(
            f"{', '.join(fed)}: with scope(prefetch_keys=True) keys are exchanged before the run "
            "that is fed. Feed all that the model takes of the batch, or leave prefetch_keys out."
        )
    # The collectives are those of any run of keys, but the batch is another one.
    return dataclasses.replace(footprint, signature=footprint.signature ^ 1)


def _prepare_key_run(split: GraphSplit, footprint: RunFootprint) -> PreparedRun:
    run, gates = PreparedRun(footprint, split), gate.gates_of(split.graph)
    run.gate = gates.prefetch_gate
    if run.gate is None:  # One rank agrees with nobody.
        return run
    checks = footprint.checks(gates, 1, first=True)
    numbered = {gates.checks.index(check): check for check in checks}
    with graphs.open_for_changes(split.graph):
        agreed = agreement.agree(
            run.gate,
            numbered,
            footprint.sources(gates),
            functools.partial(_note_disagreement, run),
            first=True,
        )
    run.targets.append(agreed)
    run.tickets.append(run.gate.ticket)
    return run


def _note_disagreement(run: PreparedRun, headers: list[Header]) -> None:
    run.disagreement = headers


def _trained_groups(graph: tf.Graph) -> list[Group]:
    """Returns the groups of which gradients were taken, and whose keys depend on no lookup."""
    pools_with_gradient = {
        op.inputs[1].op for op in graph.get_operations() if op.type == "CollectivePoolGradient"
    }
    return [
        group
        for group in groups_of(graph)
        if group.level == 1 and group.pool.inputs[1].op in pools_with_gradient
    ]


def _split(graph: tf.Graph, groups: Sequence[Group]) -> GraphSplit:
    """Splits `graph` after the keys of `groups`."""
    gates, seen_by_session = gate.gates_of(graph), seen_operations.last(graph)
    closed = gates.at(1).zero if collectives.size() > 1 else None
    ends = [op for group in groups for op in group.keys]
    path = upstream(ends, set() if closed is None else {closed.name})
    iterator = _iterator(path)
    prefetched = _depending_on_batch(path - upstream([iterator]))
    _refuse_unmovable(prefetched, seen_by_session)
    with tf.init_scope(), device_scopes.on_host(), tf.name_scope("collective/ahead/"):
        start = _make_start()
        _let_wait(prefetched, start.started)
        if closed is not None:
            _replace_input(path, closed, gates.open_ahead().zero)
        operations = graph.get_operations()
        users = [op for op in operations if op not in path and op._id > seen_by_session]
        stage = _make_stage(_kept(prefetched, users), users)
    outputs = {x.name for op in path if not _is_librarys(op) for x in op.outputs}
    split = GraphSplit(
        graph, iterator, frozenset(prefetched), frozenset(outputs), len(groups), start, stage
    )
    split.redirect(users)
    gates.changed()
    for group in groups:
        group.prefetched = True
    split.has_redirected_all()
    return split


def _iterator(path: Iterable[tf.Operation]) -> tf.Operation:
    """Returns the resource of the one iterator in `path`.

    Raises:
        NotPossible: something in `path` isn't known a batch ahead.
    """
    for op in sorted(path, key=lambda op: op._id):
        if op.type == "Placeholder":
            raise NotPossible(f"keys depend on the placeholder '{op.name}'")
        if op.type in VARIABLE_TYPES:
            raise NotPossible(f"keys depend on the variable '{op.name}'")
        if op.type in _LOOKUP_TABLES:
            raise NotPossible(f"keys depend on the table '{op.name}', which may change")
        if op.type in SOURCES - ITERATORS - _CALLS - {"Merge", "Exit"}:
            raise NotPossible(
                f"keys come from '{op.name}' ({op.type}), not from a tf.data iterator"
            )
    iterators = sorted((op for op in path if op.type in ITERATORS), key=lambda op: str(op.name))
    if not iterators:
        raise NotPossible("keys come from no tf.data iterator")
    if len(iterators) > 1:
        names = ", ".join(f"'{op.name}'" for op in iterators)
        raise NotPossible(f"keys come from several iterators: {names}")
    return iterators[0].inputs[0].op


def _depending_on_batch(path: Set[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations of `path` whose results belong to a batch.

    These are iterators, what draws or counts something, and what uses these.
    """
    users: dict[tf.Operation, list[tf.Operation]] = {}
    for op in path:
        for producer in [x.op for x in op.inputs] + list(op.control_inputs):
            users.setdefault(producer, []).append(op)
    origins = [op for op in path if _is_new_in_each_run(op)]
    return walk(origins, lambda op: users.get(op, []), control=False)


def _is_new_in_each_run(op: tf.Operation) -> bool:
    if op.type in ITERATORS:
        return True
    if not op.op_def.is_stateful or op.type == "PlaceholderWithDefault":
        return False
    return not any(x.dtype == tf.resource or x.dtype._is_ref_dtype for x in op.outputs)


def _refuse_unmovable(prefetched: Set[tf.Operation], seen_by_session: int) -> None:
    for op in sorted(prefetched, key=lambda op: op._id):
        if op._id <= seen_by_session:
            raise NotPossible(f"a session had run '{op.name}' before the model was complete")
        if op._get_control_flow_context() is not None:
            raise NotPossible(f"keys pass through tf.cond or tf.while_loop ('{op.name}')")


def _make_start() -> Start:
    queue = tf.queue.FIFOQueue(1, [tf.int32], shapes=[[]], name="go")
    wait = tf.placeholder_with_default(queue.dequeue(), [], "wait")
    started = tf.raw_ops.Assert(
        condition=tf.equal(wait, 1), data=[tf.constant("the run of keys is not needed")]
    )
    releases = tf.placeholder_with_default(False, [], "releases")
    return Start(wait, started, releases, queue, queue.enqueue(0))


def _let_wait(prefetched: Set[tf.Operation], started: tf.Operation) -> None:
    """Lets nothing of a run of keys begin before it has started."""
    for op in prefetched:
        producers = [x.op for x in op.inputs] + list(op.control_inputs)
        if not any(producer in prefetched for producer in producers):
            op._add_control_input(started)


def _replace_input(users: Iterable[tf.Operation], old: tf.Tensor, new: tf.Tensor) -> None:
    for op in users:
        for i, x in enumerate(op.inputs):
            if x is old:
                op._update_input(i, new)


def _kept(prefetched: Set[tf.Operation], users: Iterable[tf.Operation]) -> list[tf.Tensor]:
    """Returns what is staged: what `users` need, and whatever a script may fetch."""
    used = {x.name for op in users for x in op.inputs if x.op in prefetched}
    return [
        x
        for op in sorted(prefetched, key=lambda op: op._id)
        for x in op.outputs
        if x.dtype != tf.resource and (x.name in used or not _is_librarys(op))
    ]


def _make_stage(kept: Sequence[tf.Tensor], users: Iterable[tf.Operation]) -> Stage:
    number = tf.placeholder(tf.int64, [], "number")
    refused = tf.raw_ops.Assert(condition=tf.constant(False), data=[tf.constant(OUTSIDE)])
    with tf.control_dependencies([refused]):
        nothing = tf.identity(tf.constant(0, tf.int64))
    batch = tf.placeholder_with_default(nothing, [], "batch")
    there = _on_device(kept, users)
    here = [x for x in kept if x.name not in there]
    maps = [
        _StagingMap(name, device, tensors)
        for name, device, tensors in (
            ("collective/ahead_on_device", "/gpu:0", [x for x in kept if x.name in there]),
            ("collective/ahead", "/cpu:0", here),
        )
        if tensors
    ]
    # A run of keys stages all or nothing, and a run of the script takes all.
    with tf.control_dependencies([one.await_all() for one in maps]):
        put = tf.group(*(one.put(number) for one in maps))
    tensors: dict[str, tf.Tensor] = {}
    takes: list[tf.Operation] = []
    for one in maps:
        with tf.control_dependencies(takes):
            takes.append(one.take(batch))
    for one in maps:
        with tf.control_dependencies(takes[-1:]):
            tensors.update(one.staged())
    return Stage(number, put, batch, takes[-1], tensors, tf.group(*(one.clear() for one in maps)))


def _on_device(kept: Sequence[tf.Tensor], users: Iterable[tf.Operation]) -> set[str]:
    """Returns the names of those of `kept` that are made on the GPU.

    So are those of the library's that `users` take there, wherever their carrier leaves them.
    """
    taken = {
        x.name
        for op in users
        if memory_types.is_on_gpu(op)
        for place, x in enumerate(op.inputs)
        if _is_librarys(x.op) and memory_types.is_taken_on_device(op, place)
    }
    return {x.name for x in kept if x.name in taken or memory_types.is_on_device(x)}


class _StagingMap:
    """Keeps tensors in the memory of one device.

    Args:
        name: of the map, in a session.
        device: the device.
        kept: the tensors.
    """

    def __init__(self, name: str, device: str, kept: Sequence[tf.Tensor]) -> None:
        self._device, self._kept, self._indices = device, kept, tf.range(len(kept))
        self._about = {"dtypes": [x.dtype for x in kept], "shared_name": name}

    def await_all(self) -> tf.Operation:
        """Returns an operation that waits for the tensors, not for the producer of a fed one."""
        with device_scopes.on(self._device):
            # Of all operations that do nothing this one leaves int32 in the memory of a GPU.
            self._awaited: list[tf.Tensor] = tf.raw_ops.IdentityN(input=self._kept)
        return self._awaited[0].op

    def put(self, number: tf.Tensor) -> tf.Operation:
        with device_scopes.on(self._device):
            put: tf.Operation = tf.raw_ops.MapStage(
                key=number, indices=self._indices, values=self._awaited, **self._about
            )
        return put

    def take(self, batch: tf.Tensor) -> tf.Operation:
        with device_scopes.on(self._device):
            taken = tf.raw_ops.MapUnstage(key=batch, indices=self._indices, **self._about)
        self._taken: list[tf.Tensor] = taken
        return taken[0].op

    def staged(self) -> dict[str, tf.Tensor]:
        """Returns what was taken, after the control dependencies, by the names of `kept`."""
        with device_scopes.on(self._device):
            passed = tf.raw_ops.IdentityN(input=self._taken)
            return {x.name: _of_shape(y, x) for x, y in zip(self._kept, passed)}

    def clear(self) -> tf.Operation:
        with device_scopes.on(self._device):
            cleared: tf.Operation = tf.raw_ops.MapClear(**self._about)
        return cleared


def _of_shape(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns `y` with the shape of `x`.

    What TensorFlow's graph optimizer makes of the rest depends on it, to the last bit of the
    numbers.
    """
    if x.shape.ndims is None:
        return y
    if x.dtype in (tf.int32, tf.bool) and memory_types.is_on_gpu(y.op):
        y.set_shape(x.shape)  # The other way ends in the host's memory.
        return y
    return tf.ensure_shape(y, x.shape)


def _is_librarys(op: tf.Operation) -> bool:
    return str(op.name).startswith(_LIBRARY_PREFIX)
