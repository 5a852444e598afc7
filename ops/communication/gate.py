"""Holds every collective of a run back until all ranks have said that they can take part.

A collective that one rank starts and another never reaches hangs both. A rank may learn that it
can't go on from the end of its data, from an id outside a table, or from a peer that has left or
runs something else. All of this can be known before the first collective, so it is settled there.
Every collective depends on the gate of its graph, an operation that waits for a token. The code
that runs the graph (`collective.coordination.run_preparation`) adds an operation to each run that
exchanges the ranks' headers, and that puts the token there if all ranks are well. So either all
ranks carry out a step, or none does and nothing is applied.

    data, ids ──► header ──► allgather of headers ──► token ──► gate ──► keys ──► rows ──►
    gradients, allreduce ──► updates

Ids that depend on rows of another lookup are known only after that lookup. The gate of the first
lookup has level 1; the gate of the second has level 2, and opens once level 1 is fully exchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.graph import device_scopes, graph_analysis, graph_state, graphs
from collective.ops.graph.graphs import outermost

CLOSED = (
    "This run uses tables sharded over several ranks, but no session of strategy.scope() runs it. "
    "Create the session, and run it, inside `with strategy.scope():`. If the graph is an imported "
    "one (tf.train.import_meta_graph), build the model by its code: ranks can't agree on the runs "
    "of a graph that was built elsewhere."
)


# How many integers a gate's ticket has.
TICKET = 5
# Stands for the value in the messages of `ops/native/checks.cc`.
VALUE = "<value>"
IDS = "table '{table}': id {value} is not in [0, {rows})"
PLACES = (
    "table '{table}': the number of sp_ids' indices less that of its values is {value:+d}; there "
    "must be one for each"
)
ORDER = (
    "table '{table}': sp_ids has a sample below the one before it, or below 0 (places: {value}); "
    "order it with tf.sparse.reorder"
)
WEIGHTS = (
    "table '{table}': the number of sp_weights less that of sp_ids is {value:+d}; there must be "
    "one weight for each id"
)


@dataclasses.dataclass(frozen=True)
class Check:
    """Compares n values that an exchange gets with the ranges [0, rows).

    Attributes:
        collective: the name of the exchange's first collective: the check matters to the runs that
            reach it.
        tables: [n] the tables' names, for the message.
        rows: [n] the ends of the ranges: for ids, V of their tables.
        bounds: [n, 2] int64, the smallest and the largest value (int64's largest and smallest if
            there are none).
        wrong: [n] the message about a value outside, with {table}, {value} and {rows}; by default
            the message about ids.
    """

    collective: str
    tables: tuple[str, ...]
    rows: tuple[int, ...]
    bounds: tf.Tensor
    wrong: tuple[str, ...] = ()

    def made_now(self) -> tf.Operation:
        """Makes the operation that refuses a value outside of its range.

        It raises an InvalidArgumentError with the text of `says`.
        """
        # A number that stands for any value; its digits occur once in a message.
        stand_in = 1234567890123456789
        refuse: tf.Operation = native_library.on_host().collective_refuse(
            self.bounds,
            ends=self.rows,
            messages=[
                self.says(place, stand_in).replace(str(stand_in), VALUE)
                for place in range(len(self.rows))
            ],
        )
        return refuse

    def says(self, place: int, value: int) -> str:
        """Describes the error in `value`, the value number `place` of n."""
        wrong = self.wrong[place] if self.wrong else IDS
        return wrong.format(table=self.tables[place], value=value, rows=self.rows[place])


@dataclasses.dataclass(frozen=True)
class KeyRequest:
    """Holds the keys that a rank sends to its peers to request rows.

    Attributes:
        keys: int64, the words for rank 0 first.
        splits: [N] int32, the number of words for each rank.
        empty_words: the number of words, all zero, that a rank without keys sends to each rank.
        description: must be the same on all ranks, like the collective's name.
    """

    keys: tf.Tensor
    splits: tf.Tensor
    empty_words: int = 0
    description: str = ""


class Gate:
    """Holds back the collectives of one level in one graph.

    Attributes:
        level: 1 or higher.
        channel: distinguishes the names of the agreements of different gates; '' for level 1.
        ticket: [TICKET] int64, fed by the code that runs the graph: (1, number of the session,
            signature of the run, this rank's clock, its wish to stop). Unfed, the gate refuses to
            open.
        zero: int32 scalar 0, which exists once the gate is open.
        records: int64 scalar, how many records this rank's batch has; None if nothing asks.
        weight: float64 scalar, N times their share of all ranks' records, as ranks say when they
            agree. It exists once the gate is open; 1 in runs that don't say.
        start: sets `count` to 0, once in every session.
        count: int64 scalar, shared by the gates of all levels of a graph: how many runs of the
            session have reached `counted`. It tells whether a failed run had started its
            collectives.
    """

    def __init__(self, level: int, ahead: bool = False):
        self.level = level
        self.channel = ".ahead" if ahead else f".level{level}" if level > 1 else ""
        with (
            tf.init_scope(),
            tf.name_scope(f"collective/gate{'_ahead' if ahead else level}/"),
            device_scopes.on_host(),
        ):
            self.ticket = tf.placeholder_with_default(
                tf.constant([0] * TICKET, tf.int64), [TICKET], "ticket"
            )
            self.records: tf.Tensor | None = None
            self._tokens = tf.queue.FIFOQueue(
                1, [tf.int32, tf.float64], shapes=[[], []], name="tokens"
            )
            # Not tf.Assert, which builds a branch for the message.
            fed = tf.raw_ops.Assert(condition=tf.equal(self.ticket[0], 1), data=[CLOSED])
            with tf.control_dependencies([fed]):
                self.zero, self.weight = self._tokens.dequeue("zero")
            self._counter = tf.raw_ops.VarHandleOp(
                dtype=tf.int64,
                shape=[],
                shared_name="collective/counter" + ("_ahead" if ahead else ""),
            )
            self.start = tf.raw_ops.AssignVariableOp(
                resource=self._counter, value=tf.constant(0, tf.int64)
            )
            self.count = tf.raw_ops.ReadVariableOp(resource=self._counter, dtype=tf.int64)

    def counted(self, header: tf.Tensor) -> tf.Tensor:
        """Returns `header`, counted before it goes to the peers."""
        with tf.control_dependencies([header]):
            counted = tf.raw_ops.AssignAddVariableOp(
                resource=self._counter, value=tf.constant(1, tf.int64)
            )
        with tf.control_dependencies([counted]):
            return tf.identity(header)

    def open(self, weight: tf.Tensor | None = None) -> tf.Operation:
        """Returns the operation that lets this run's collectives start.

        Args:
            weight: `weight` in this run; None: 1.
        """
        weight = tf.constant(1.0, tf.float64) if weight is None else weight
        return self._tokens.enqueue([tf.constant(0), weight])

    def weight_of(self, records: tf.Tensor) -> tf.Tensor:
        """Returns N times the share of `records`, which are known before the gate opens."""
        self.records = records
        return self.weight


class TracedGate(Gate):
    """Holds back the collectives of a traced function (`collective.ops.graph.graphs`).

    The ranks agree once in a call, before any of its collectives: it has one level only.

    Attributes:
        level: 1.
        zero: int32 scalar 0, which exists once the gate is open. When the function is traced to its
            end, its input becomes the agreement (`collective.coordination.functions.calls`).
        records: int64 scalar, how many records this rank's batch has; None if nothing asks.
        weight: float64 scalar, N times their share of all ranks' records, as ranks say when they
            agree; its input, too, becomes the agreement. None if nothing asks.
    """

    weight: tf.Tensor | None

    def __init__(self) -> None:
        # What sessions need of a gate, it doesn't have.
        self.level, self.channel = 1, ""
        self.records = None
        self.weight = None
        with graphs.outside(), tf.name_scope("collective/gate1/"), device_scopes.on_host():
            self.zero = tf.identity(tf.placeholder_with_default(tf.constant(0), []), "zero")

    def weight_of(self, records: tf.Tensor) -> tf.Tensor:
        """Returns N times the share of `records`, which are known before the gate opens."""
        self.records = records
        with graphs.outside(), tf.name_scope("collective/gate1/"), device_scopes.on_host():
            later = tf.placeholder_with_default(tf.constant(1.0, tf.float64), [])
            with tf.control_dependencies([self.zero]):
                self.weight = tf.identity(later, "weight")
        return self.weight


SECOND_LEVEL = (
    "Ids of a lookup depend on the rows of another lookup, on what ranks exchange, or on "
    "what is written after that. Inside a tf.function ranks agree on all ids before they exchange "
    "anything: take the ids from the function's inputs, or make two functions of it, of which the "
    "second gets them as an input."
)


@dataclasses.dataclass
class GraphGates:
    """Records the gates and checks of a graph.

    Attributes:
        gates: one for each level, from 1: `Gate`s, or a `TracedGate`.
        prefetch_gate: the gate of keys that are exchanged one batch ahead, in separate runs (see
            `collective.prefetch`); else None.
        checks: the checks of lookups whose ids the gates wait for.
        checked: operations that, with one rank, check the ids of single lookups on the spot.
        key_requests: this rank's inputs of the collectives that carry keys to their owners, by the
            collectives' names: a rank that is out of data sends no keys.
        states: pairs (input, value) of the collectives that reduce metrics' states, or add up what
            ranks compute of their batches, by the collectives' names: a rank that is out of data
            sends these values, current states or zeros.
        unweighed: by operations of gradients, the names of what counts alike on all ranks in their
            losses, which is right only if ranks have as many records.
        sums: what ranks add up of their batches in a traced function, by the collectives' names: a
            rank that is out of data sends zeros.
    """

    gates: list[Gate] = dataclasses.field(default_factory=list)
    prefetch_gate: Gate | None = None
    checks: list[Check] = dataclasses.field(default_factory=list)
    checked: list[tf.Operation] = dataclasses.field(default_factory=list)
    key_requests: dict[str, KeyRequest] = dataclasses.field(default_factory=dict)
    states: dict[str, list[tuple[tf.Tensor, tf.Tensor]]] = dataclasses.field(default_factory=dict)
    unweighed: dict[tf.Operation, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    sums: dict[str, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    _levels: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)

    def after(self, tensors: Sequence[Any]) -> Gate:
        """Returns the gate of a lookup whose ids are `tensors`.

        It has the first level for which none of them waits.
        """
        return self.at(1 + max((self.level(x.op) for x in tensors), default=0))

    def of_collective(self, tensors: Sequence[Any]) -> Gate:
        """Returns the gate of any other collective of `tensors`.

        It is the last gate for which they wait, else the first.
        """
        return self.at(max([1] + [self.level(x.op) for x in tensors]))

    def at(self, level: int, table: str = "") -> Gate:
        """Returns the gate of `level`, from 1.

        Args:
            level: of a collective that waits for it.
            table: the name of the table that is looked up, for errors.

        Raises:
            NotImplementedError: the graph is a traced function's, and the level isn't 1.
        """
        while len(self.gates) < level:
            traced = graphs.is_traced(outermost(tf.get_default_graph()))
            if traced and level > 1:
                named = f"table '{table}': " if table else ""
                raise NotImplementedError(named + SECOND_LEVEL)
            self.gates.append(TracedGate() if traced else Gate(len(self.gates) + 1))
            self._levels[self.gates[-1].zero.op] = len(self.gates)
        return self.gates[level - 1]

    def open_ahead(self) -> Gate:
        """Makes the gate of keys that are exchanged one batch ahead."""
        self.prefetch_gate = Gate(1, ahead=True)
        self.changed()
        return self.prefetch_gate

    def after_checks(
        self, checks: Sequence[Check], tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns `tensors`, delayed until `checks` are done: with one rank no gate checks them."""
        if not checks:
            return list(tensors)
        # The checked tensors are in the host's memory, and stay there.
        with device_scopes.on_host():
            made = [check.made_now() for check in checks]
            self.checked += made
            with tf.control_dependencies(made):
                return [tf.identity(x) for x in tensors]

    def level(self, op: tf.Operation) -> int:
        """Returns the highest level of a gate upstream of `op`, 0 for none."""
        return graph_analysis.level(op, self._levels)

    def levels_of(self, exchanges: Mapping[tf.Operation, Sequence[tf.Operation]]) -> list[int]:
        """Returns the levels of the gates of exchanges that are yet to be built.

        Args:
            exchanges: maps the operation that each exchange is to provide to the operations that
                the exchange waits for.
        """
        levels = self._known_levels()
        return [graph_analysis.level(op, levels, exchanges) for op in exchanges]

    def changed(self) -> None:
        """Forgets the levels: operations of the graph now wait for something else."""
        self._levels = self._known_levels()

    def _known_levels(self) -> dict[tf.Operation, int]:
        gates = filter(None, [*self.gates, self.prefetch_gate])
        return {gate.zero.op: gate.level for gate in gates}


def gates_of(graph: tf.Graph) -> GraphGates:
    """Returns the gates of `graph`, or of the graph around it if it is a function's."""
    return graph_state.of(outermost(graph), GraphGates)
