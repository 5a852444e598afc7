"""Determines from a graph what a session's run will use: pure, without ranks or a session."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import branch_choices
from collective.coordination.agreement import INITIALIZE
from collective.coordination.branch_choices import Choice
from collective.ops import native_library
from collective.ops.communication import collectives, fused_reductions
from collective.ops.communication.gate import Check, Gate, GraphGates, gates_of
from collective.ops.exchange import answered_exchange
from collective.ops.graph import graph_analysis
from collective.strategies.grouped_exchange import groups_of
from collective.strategies.required_operations import required_operations
from collective.tables.table import Sharded, Table

# Operations that take a batch; the library's own queues don't count as data.
_BATCHES = re.compile("IteratorGetNext|OptionalGetValue|QueueDequeue|ReaderRead|Unstage")
_SOURCES = graph_analysis.SOURCES | graph_analysis.FED


@dataclasses.dataclass(frozen=True)
class IdleRun:
    """Lets a rank without data take part in its peers' evaluation.

    It requests nothing, and sends the rows that they request.

    Attributes:
        operations: the collectives of the run.
        feeds: no keys instead of the run's, and an open first gate, because the ranks have agreed
            outside of the run.
        states: pairs (x, state): x is fed with the value of `state`, too.
    """

    operations: list[tf.Operation]
    feeds: list[tuple[tf.Tensor, Any]]
    states: list[tuple[tf.Tensor, tf.Tensor]]


def takes_batch(operations: Iterable[tf.Operation]) -> bool:
    """Tells whether one of `operations` takes a batch from an iterator or a queue."""
    return any(
        _BATCHES.search(op.type) and not op.name.startswith("collective/") for op in operations
    )


@dataclasses.dataclass(frozen=True)
class RunFootprint:
    """Describes the part of a graph that a run executes.

    Attributes:
        operations: everything that is executed.
        shared: the names of everything that all ranks must run, sorted: collectives; the calls,
            branches and loops that have some inside; the choices between branches that ranks
            compare; the lookups of groups that the run needs; variables that it initializes;
            operations named `collectives.ALIKE…`; options of scope().
        signature: 63 bits of these names, with which ranks compare their runs.
        initialized: the global variables whose initializers run.
        trains: whether it updates a table or a global variable. Other runs are evaluations.
        empty_feeds: the values fed for things that share its exchanges but aren't needed: lookups,
            values to be reduced over ranks, and ways that their sums don't take.
        broadcasts: whether it writes only values that one rank has broadcast: it trains, but isn't
            a training step.
        choices: when it comes to collectives in branches, as far as that is known before a gate.
        fed: the names of the tensors that are fed.
    """

    operations: frozenset[tf.Operation]
    shared: tuple[str, ...]
    signature: int
    initialized: tuple[Any, ...]
    trains: bool
    empty_feeds: tuple[tuple[tf.Tensor, np.ndarray], ...]
    broadcasts: bool = False
    choices: tuple[Choice, ...] = ()
    fed: frozenset[str] = frozenset()

    @property
    def is_step(self) -> bool:
        """Tells whether it is a training step."""
        return self.trains and not self.broadcasts

    @property
    def takes_data(self) -> bool:
        """Tells whether it takes a batch from an iterator or a queue."""
        return takes_batch(self.operations)

    @property
    def restores(self) -> bool:
        """Tells whether it reads variables from a checkpoint."""
        return any(op.type in ("RestoreV2", "Restore", "RestoreSlice") for op in self.operations)

    def comparing(self, names: Iterable[str]) -> RunFootprint:
        """Returns the footprint with which ranks also compare `names`."""
        shared = tuple(sorted([*self.shared, *names]))
        return dataclasses.replace(
            self, shared=shared, signature=signature_of(shared, self.trains, self.broadcasts)
        )

    def levels(self, gates: GraphGates) -> list[int]:
        """Returns the levels of the gates that the run passes, ascending."""
        return [gate.level for gate in gates.gates if gate.zero.op in self.operations]

    def checks(self, gates: GraphGates, level: int, first: bool) -> list[Check]:
        """Returns the checks of lookups that the gate of `level` waits for.

        Args:
            gates: the graph's.
            level: the gate's level.
            first: whether it is the first gate of the run.
        """
        names = set(self.shared)
        known = range(level) if first else [level - 1]
        return [
            check
            for check in gates.checks
            if check.collective in names and gates.level(check.bounds.op) in known
        ]

    def records(self, gates: GraphGates, gate: Gate) -> tf.Tensor | None:
        """Returns this rank's number of records that the run's weight at `gate` needs, if any.

        None, too, if the run doesn't take the data that have as many (what is computed from them is
        fed), or fills the queue from which they come.
        """
        is_weighed = any(op in self.operations for op in gate.weight.consumers())
        if not (is_weighed or gate.level == 1 and self.unweighed(gates)):
            return None
        assert gate.records is not None
        needed = graph_analysis.upstream([gate.records.op], self.fed)
        sources = {op for op in needed if op.type in _SOURCES}
        filled = self._queues_filled_late(gates)
        if sources <= self.operations and not any(
            op.inputs[0].op in filled for op in sources if op.inputs
        ):
            return gate.records
        return None

    def unweighed(self, gates: GraphGates) -> list[str]:
        """Returns the names of what counts alike on all ranks in the loss of a step."""
        parts = gates.unweighed.items() if self.is_step else ()
        return sorted({name for op, names in parts if op in self.operations for name in names})

    def _queues_filled_late(self, gates: GraphGates) -> set[tf.Operation]:
        """Returns the queues that the run fills after a gate: it can't wait for them before."""
        return {
            op.inputs[0].op
            for op in self.operations
            if "Enqueue" in op.type and gates.level(op) > 0
        }

    def sources(self, gates: GraphGates) -> list[tf.Operation]:
        """Returns the operations that may end or fail before any collective, ordered by name."""
        filled = self._queues_filled_late(gates)
        return _by_name(
            op
            for op in self.operations
            if _is_source_before_gates(op, gates) and not (op.inputs and op.inputs[0].op in filled)
        )

    def taking_nothing(self) -> list[tf.Operation]:
        """Returns the operations that use the feeds for what the run doesn't need."""
        return _by_name(
            {
                op
                for x, _ in self.empty_feeds
                for op in x.consumers()
                if op in self.operations and op._get_control_flow_context() is None
            }
        )

    def idle_run(self, gates: GraphGates) -> IdleRun | None:
        """Returns how a rank that is out of data takes part in the run; None if it can't."""
        scripts_own = any(map(collectives.is_scripts_own, self.operations))
        if self.trains or self.initialized or not self.shared or scripts_own:
            return None
        exchanges = _by_name(
            op
            for op in self.operations
            if collectives.collective_name(op) and not answered_exchange.awaits_rows(op)
        )
        feeds = self._idle_feeds(gates, exchanges)
        not_needed = {x.name for x, _ in self.empty_feeds}
        states = [
            (x, state)
            for name in self.shared
            for x, state in gates.states.get(name, ())
            if x.name not in not_needed
        ]
        fed = {x.name for x, _ in [*feeds, *states]} | not_needed
        required = graph_analysis.upstream(exchanges, fed)
        if self._exchanges_inside_control_flow(exchanges):
            return None
        if any(_is_source_before_gates(op, gates) for op in required):
            return None
        return IdleRun(exchanges, feeds, states)

    def _idle_feeds(
        self, gates: GraphGates, exchanges: Iterable[tf.Operation]
    ) -> list[tuple[tf.Tensor, Any]]:
        """Returns the feeds of a rank that requests nothing."""
        feeds: list[tuple[tf.Tensor, Any]] = []
        for level in self.levels(gates)[:1]:
            gate = gates.gates[level - 1]
            feeds += [(gate.zero, 0), (gate.weight, 0.0)]
        ranks = collectives.size()
        for op in exchanges:
            request = gates.key_requests.get(collectives.collective_name(op) or "")
            if request is not None:
                feeds.append((request.keys, np.zeros(ranks * request.empty_words, np.int64)))
                feeds.append((request.splits, np.full(ranks, request.empty_words, np.int32)))
        return feeds

    def _exchanges_inside_control_flow(self, exchanges: Iterable[tf.Operation]) -> bool:
        return any(op._get_control_flow_context() is not None for op in exchanges) or any(
            map(_calls_collectives, self.operations)
        )

    def exchanges_below(self, gates: GraphGates, level: int) -> list[tf.Operation]:
        """Returns the collectives that must be finished before ranks agree on the gate of `level`.

        These are the collectives that don't wait for it, and calls with such collectives inside:
        TensorFlow may not begin the call of a function after the run has been refused. (It
        completes branches and loops.)
        """
        return _by_name(
            op
            for op in self.operations
            if op._get_control_flow_context() is None
            and (
                collectives.collective_name(op)
                or collectives.is_scripts_own(op)
                or _calls_collectives(op)
            )
            and gates.level(op) < level
        )


def is_shared(graph: tf.Graph) -> bool:
    """Tells whether ranks train `graph` together; they may run other graphs separately."""
    return bool(gates_of(graph).gates) or any(
        isinstance(v, Table) for v in graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    )


def footprint_of(graph: tf.Graph, fetches: Iterable[Any], fed: Iterable[Any]) -> RunFootprint:
    """Returns what running `fetches` executes when `fed` (tensors, or their names) are given.

    Raises:
        Exception: whatever TensorFlow raises for something that isn't in the graph.
    """
    fed_names: set[str] = {name for leaf in fed for name in graph_analysis.tensor_names(leaf)}
    fetched: list[tf.Operation] = []
    for leaf in fetches:
        element = graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
        if isinstance(element, tf.Operation):
            fetched.append(element)
        elif element.name not in fed_names:
            fetched.append(element.op)
    groups = [group for group in groups_of(graph) if not group.prefetched]
    operations, empty_feeds = required_operations(
        fetched,
        fed_names,
        groups,
        fused_reductions.fused_values(graph),
        fused_reductions.joined_sums(graph),
    )
    variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    initialized = tuple(v for v in variables if v.initializer in operations)
    choices = branch_choices.choices_of(operations, gates_of(graph))
    shared = shared_names(graph, operations, {x.name for x, _ in empty_feeds})
    shared += [_initialization(v) for v in initialized]
    shared += branch_choices.descriptions(choices)
    names, writes = tuple(sorted(shared)), _writes(graph, operations)
    trains, broadcasts = bool(writes), bool(writes) and all(map(_assigns_broadcast, writes))
    return RunFootprint(
        frozenset(operations),
        names,
        signature_of(names, trains, broadcasts),
        initialized,
        trains,
        tuple(empty_feeds),
        broadcasts,
        choices,
        frozenset(fed_names),
    )


def _initialization(variable: Any) -> str:
    text = f"{INITIALIZE}{variable.name}"
    if isinstance(variable, Sharded):
        holder = variable.placement.holder
        text += "" if holder is None else f", whole on rank {holder}"
        text += f", made by {variable.made_by}" if variable.made_by else ""
    return text


def shared_names(
    graph: tf.Graph, operations: Iterable[tf.Operation], not_needed: Iterable[str]
) -> list[str]:
    """Returns the names of what all ranks must run alike, except for the initialized variables.

    Args:
        graph: the graph.
        operations: those that a run executes.
        not_needed: the names of tensors that are fed because the run doesn't need them.
    """
    operations, not_needed = set(operations), set(not_needed)
    collectives_used = [name for name in map(collectives.collective_name, operations) if name]
    names = list(collectives_used)
    found = filter(None, map(collectives.carrier_of, operations))
    chosen = {carrier.name for carrier in found if carrier.is_of_library}
    names += [f"scope(carrier={name!r})" for name in sorted(chosen)]
    for op in operations:
        name = str(op.name)
        if name.startswith(collectives.ALIKE) or collectives.is_scripts_own(op):
            names.append(name)
        if _calls_collectives(op):
            names.append(f"call of {name}")
    for group in groups_of(graph):
        group_name = group.name.split(".")[1]
        for i, member in enumerate(group.members):
            if member.ids.op in operations and member.ids.name not in not_needed:
                names.append(f"lookup {i:03} of {group_name}: {member.lookup}")
        used = {m.lookup.table.op.name for m in group.members if m.ids.op in operations}
        if used:
            # Lookups of two groups may be equal: this identifies the group that a rank runs.
            tables = ", ".join(f"'{name}'" for name in sorted(used))
            exchange = group.name.removeprefix(collectives.PREFIX).replace(".keys", "")
            kind = "tables" if len(used) > 1 else "table"
            names.append(f"rows of {kind} {tables} (exchange {exchange})")
    names += [
        each.described
        for each in fused_reductions.fused_values(graph)
        if each.flat.op in operations and each.flat.name not in not_needed
    ]
    requests = gates_of(graph).key_requests
    for name in collectives_used:
        if name in requests and requests[name].description:
            names.append(f"{name}: {requests[name].description}")
    return names


def signature_of(names: Iterable[str], trains: bool, broadcasts: bool) -> int:
    kind_of_run = "broadcasts" if broadcasts else str(trains)
    digest = hashlib.blake2b("\n".join([*names, kind_of_run]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def updates_weights(graph: tf.Graph, footprint: RunFootprint) -> bool:
    """Tells whether a run writes a trainable variable, other than to initialize it."""
    return bool(_writes(graph, footprint.operations, tf.GraphKeys.TRAINABLE_VARIABLES))


def _writes(
    graph: tf.Graph,
    operations: Iterable[tf.Operation],
    collection: str = tf.GraphKeys.GLOBAL_VARIABLES,
) -> list[tf.Operation]:
    """Returns the operations that write a variable of a collection, other than to initialize it."""
    variables = graph.get_collection(collection)
    holders = {graph_analysis.memory(v) for v in variables}
    initializers = {v.initializer for v in variables}
    return [
        op for op in operations if op not in initializers and _writes_one_of(holders, graph, op)
    ]


def _writes_one_of(holders: set[tf.Operation], graph: tf.Graph, op: tf.Operation) -> bool:
    if op.type in graph_analysis.CALLS:
        return graph_analysis.has_inside(graph, op, graph_analysis.WRITES.match) and any(
            graph_analysis.holder(x) in holders for x in op.inputs
        )
    return bool(
        op.inputs
        and graph_analysis.WRITES.match(op.type)
        and graph_analysis.holder(op.inputs[0]) in holders
    )


def _assigns_broadcast(op: tf.Operation) -> bool:
    """Tells whether `op` assigns a variable an unchanged value that one rank has broadcast."""
    if op.type not in graph_analysis.ASSIGNS:
        return False
    value = op.inputs[1]
    while value.op.type in ("Identity", "Cast", "Reshape"):
        value = value.op.inputs[0]
    return graph_analysis.collective_kind(str(value.op.type)) == "Broadcast"


def _is_source_before_gates(op: tf.Operation, gates: GraphGates) -> bool:
    return (
        op.type in graph_analysis.SOURCES
        and op._get_control_flow_context() is None
        and gates.level(op) == 0
    )


def _calls_collectives(op: tf.Operation) -> bool:
    """Tells whether `op` is a call, a branch or a loop with collectives inside."""
    return op.type in graph_analysis.CALLS and graph_analysis.has_inside(
        op.graph, op, graph_analysis.is_of_carrier
    )


def _by_name(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    return sorted(operations, key=lambda op: str(op.name))


def awaiting(exchanges: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Makes the operation that a run executes before its collectives; [] where none is needed.

    Args:
        exchanges: those of `rows_before_gradients`, all of which the run must execute.
    """
    if not exchanges:
        return []
    names = [collectives.collective_name(op) for op in exchanges]
    # A run may be prepared where another graph is the default one.
    with exchanges[0].graph.as_default(), tf.init_scope():
        return [native_library.on_host().collective_await_rows(collectives=names)]


def rows_before_gradients(
    gates: GraphGates, operations: Iterable[tf.Operation]
) -> list[tf.Operation]:
    """Returns the exchanges of rows that some exchange of gradients must wait for.

    Left out are those that wait for gradients themselves, as those after a later gate do, and
    those in loops and branches. A call whose functions exchange gradients counts as such an
    exchange: a later gate opens after it.

    Args:
        gates: the graph's.
        operations: those that a run executes.
    """
    operations = set(operations)
    phases = {op: op.get_attr("phase") for op in operations if _has_phase(op)}
    rows = [
        op
        for op, phase in phases.items()
        if phase == b"rows" and op._get_control_flow_context() is None
    ]
    gradients = [op for op, phase in phases.items() if phase == b"gradients"]
    if rows:
        gradients += [op for op in operations if _calls_exchanges_of_gradients(op)]
    if not rows or not gradients:
        return []
    first = min(map(gates.level, gradients))
    bits = {op: 1 << i for i, op in enumerate(rows)}
    after_gradients = 1 << len(rows)
    bits.update((op, after_gradients) for op in gradients)
    before = graph_analysis.marks_upstream(operations, bits, within=operations)
    free = [op for op in rows if gates.level(op) <= first and not before[op] & after_gradients]
    waiting = [op for op in free if any(not before[g] & bits[op] for g in gradients)]
    return sorted(waiting, key=lambda op: str(op.name))


def always_executed(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the collectives among `operations` that are in no branch or loop."""
    return _by_name(
        op
        for op in operations
        if graph_analysis.is_collective(op.type) and op._get_control_flow_context() is None
    )


def _calls_exchanges_of_gradients(op: tf.Operation) -> bool:
    return op.type in graph_analysis.CALLS and any(
        node.attr["phase"].s == b"gradients"
        for node in graph_analysis.nodes_inside(op.graph, op)
        if "phase" in node.attr
    )


def _has_phase(op: tf.Operation) -> bool:
    carrier = collectives.carrier_of(op)
    is_of_library = carrier is not None and carrier.is_of_library
    return is_of_library and op.type.endswith(("Alltoall", "AlltoallRows"))
