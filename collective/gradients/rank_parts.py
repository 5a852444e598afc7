"""Extends what a script computes from tables' gradients to all ranks.

A rank has its part of a table's gradient: the rows that it owns. Computations row by row (scaling,
clipping by value, the decay of the same rows) are correct as they are. Where a script combines rows
(a norm, a count, a matrix of all rows), the rows of all ranks are needed. The graph shows this
(`collective.gradients.part_rules`), from the gradients downwards, whichever TensorFlow functions
built it:

    part ── reduction                  part ── reduction of this rank ── allgather ── reduction
    part ── scatter of rows by id      part ── allgather ── scatter
    part ── what can't be told         a run that needs it is refused

This happens before gradients are taken or applied, and before a session runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.reduced_reads import reads_of
from collective.errors import TableError
from collective.gradients import part_exchanges, part_rules
from collective.gradients.part_kinds import BY_ROW, NOTHING, SIZES, Kind, Part, Verdict
from collective.gradients.table_gradients import TableGradients, gradients_of, is_of_table
from collective.ops.communication import collectives, gate
from collective.ops.graph import (
    device_scopes,
    graph_analysis,
    graph_state,
    graphs,
    library_operations,
    seen_operations,
)
from collective.replication import assignments, drifts, pending_syncs
from collective.replication.analysis import ShownMeans, is_fed
from collective.tables.grouping import lookups_of
from collective.tables.table import Sharded, is_replicated, shard_of

SCOPE = "collective/gradient_parts/"
ADVICE = (
    "Reduce it (tf.reduce_sum, tf.reduce_max, tf.norm, …), clip it (tf.clip_by_norm, "
    "tf.clip_by_global_norm), or take it whole: tf.convert_to_tensor(gradient), a matrix of all "
    "rows. To add up gradients over several batches, use strategy.scope(local_steps=…)."
)


def owners_of(table: Sharded) -> str:
    """Returns a value that is the same for tables of which a rank owns the same keys."""
    return str(table.op.name) if table.rows is None else repr(table.placement)


class GradientParts:
    """Tracks what a graph computes from tables' gradients.

    Attributes:
        settled: operations that already use the rows of all ranks.
        warned: summaries with a warning that they show one rank's rows.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph, self._gradients = graph, gradients_of(graph)
        self.settled: set[tf.Operation] = set()
        self._parts: dict[str, Part] = {}
        self._work: list[tuple[tf.Operation, Verdict, Mapping[int, Part]]] = []
        self._version: tuple[int, int] = (-1, -1)
        self._is_changing = False
        self._gathered: dict[str, tf.Tensor] = {}
        self.warned: set[tf.Operation] = set()
        self._mixed: list[tuple[tf.Operation, Part, list[tf.Tensor]]] = []
        self._same: set[tf.Operation] = set()
        self._mixed_in_function: list[tuple[tf.Operation, Part, list[tf.Tensor]]] = []

    def part_of(self, tensor: Any) -> Part | None:
        """Returns what is known about a tensor that is a part; None if it isn't a part."""
        if not isinstance(tensor, tf.Tensor) or tensor.graph is not self._graph:
            return None
        self._read()
        return self._parts.get(tensor.name)

    def _read(self) -> list[tuple[tf.Operation, Verdict, Mapping[int, Part]]]:
        """Follows the parts through the graph; returns what has to be done where."""
        gradients = self._gradients
        version = self._graph.version, len(gradients.of_tables) + len(gradients.of_shards)
        if version == self._version or self._is_changing:
            return self._work
        reading = _Reading(self._graph, self)
        reading.follow(gradients)
        self._parts, self._work, self._version = reading.parts, reading.work, version
        self._mixed, self._same = reading.mixed, reading.same
        # What was refused before may have become clear, as a graph grows.
        reads_of(self._graph).refused_of_tables = reading.refused
        return self._work

    def gather_fetched(self, leaves: Iterable[Any]) -> None:
        """Has a session fetch the rows of all ranks in the place of this rank's."""
        self._read()
        parts = [
            (leaf, part)
            for leaf in leaves
            if isinstance(leaf, tf.Tensor)
            and leaf.graph is self._graph
            and (part := self._parts.get(leaf.name)) is not None
        ]
        if not parts:
            return
        whole = reads_of(self._graph).wholes
        parts = [(leaf, part) for leaf, part in parts if leaf.name not in whole]
        if not parts:
            return
        with self._changing():
            for x, part in parts:
                if part.kind not in (*SIZES, Kind.ROWS, Kind.IDS):
                    raise TableError(_refusal(x.op, part, "it has places among these"))
                of_all = self._count_of_all_ranks if part.kind in SIZES else self._of_all_ranks
                whole[x.name] = of_all(x, part)

    def check_function(self) -> None:
        """Refuses rows that are combined in the graph of a function, where no exchange is possible.

        Raises:
            TableError: it has an operation that would need the rows of all ranks.
        """
        work = self._read()
        if work:
            op, _, parts = work[0]
            raise TableError(_refusal(op, next(iter(parts.values())), "it is inside a function"))
        refused = reads_of(self._graph).refused_of_tables
        for op in sorted(refused, key=lambda op: op._id):
            raise TableError(refused[op])

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Adds to the graph inside, wherever a script is."""
        with (
            graphs.open_for_changes(self._graph),
            self._graph.as_default(),
            graphs.outside(),
            device_scopes.anywhere(),
            library_operations.noted(self._graph),
            tf.name_scope(SCOPE),
        ):
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False

    def settle(self) -> None:
        """Adds the rows of all ranks wherever a script combines rows."""
        while work := self._read():
            with self._changing():
                self._check_changeable(work)
                for op, verdict, parts in work:
                    for i in verdict.gathered:
                        op._update_input(i, self._of_all_ranks(op.inputs[i], parts[i]))
                    for i in verdict.counted:
                        op._update_input(i, self._count_of_all_ranks(op.inputs[i], parts[i]))
                reductions = [(op, parts[0]) for op, verdict, parts in work if verdict.reduces]
                for together in part_exchanges.independent(reductions, self._taken()):
                    part_exchanges.reduce_over_ranks(together)
                self.settled.update(op for op, _, _ in work)
            gate.gates_of(self._graph).changed()
            self._version = (-1, -1)
        self._refuse_rank_local()

    def _refuse_rank_local(self) -> None:
        """Refuses operations that combine parts with values that only this rank knows.

        By now what was reduced over ranks can be told from that.
        """
        mixed, self._mixed = self._mixed, []
        if not mixed or graph_state.of(self._graph, ShownMeans).operations:
            return  # With local steps a gradient goes by sums, of which nobody can tell.
        if graphs.is_traced(self._graph):
            # Nobody can tell a function's arguments from a batch: a rate, other gradients.
            self._mixed_in_function = mixed
            return
        analysis = pending_syncs.analysis_of(self._graph, frozenset(self.settled | self._same))
        for op, part, others in mixed:
            for x in others:
                if not is_fed(x) and analysis.is_rank_local([x]):
                    reads_of(self._graph).refused_of_tables[op] = (
                        f"'{op.name}' ({op.type}) computes with the gradient of table "
                        f"'{part.table}', of which this rank has the rows that it owns, and with "
                        f"'{x.op.name}', which depends on what each rank alone knows (its data, "
                        "its random numbers): a row's gradient would depend on which rank owns "
                        "it. horovod.tensorflow.allreduce(x) is the mean of all ranks' x."
                    )

    def warn_of_rank_local(self) -> None:
        """Warns of a function that combines parts with values that only this rank knows.

        A number that it gets is the same on all ranks, as far as is known.
        """
        captured = {inner.op for _, inner in self._graph.captures}
        for op, part, others in self._mixed_in_function:
            if any(drifts.is_of_rank(x, captured, alike=([],)) for x in others):
                if collectives.rank() == 0:
                    tf.logging.warning(
                        f"The function '{self._graph.name}' computes with the gradient of table "
                        f"'{part.table}' and with what each rank alone knows (its data, its random "
                        f"numbers), by '{op.name}' ({op.type}): a row's gradient depends on which "
                        "rank owns it. horovod.tensorflow.allreduce(x) is the mean of the ranks' x."
                    )
                return

    def _taken(self) -> set[tf.Operation]:
        """Returns the operations that give the gradients, before a script does anything."""
        gradients = gradients_of(self._graph).of_tables.values()
        tensors = (x for known in gradients for x in (known.values, known.rows, known.made_ids))
        return {x.op for x in tensors if x is not None}

    def _check_changeable(self, work: Sequence[Any]) -> None:
        seen = seen_operations.last(self._graph)
        for op, _, parts in work:
            if op._id <= seen:
                part = next(iter(parts.values()))
                raise TableError(
                    f"'{op.name}' ({op.type}) computes with the gradient of table '{part.table}', "
                    "and a session had run it before that was known. Build the whole graph before "
                    "the first run."
                )

    def _of_all_ranks(self, x: tf.Tensor, part: Part) -> tf.Tensor:
        """Returns the rows of all ranks, concatenated."""
        if x.name not in self._gathered:
            self._gathered[x.name] = part_exchanges.allgather(x, [part.table])
        return self._gathered[x.name]

    def _count_of_all_ranks(self, x: tf.Tensor, part: Part) -> tf.Tensor:
        """Returns a number of rows, or a shape that begins with it, for the rows of all ranks."""
        key = f"count of {x.name}"
        if key not in self._gathered:
            sizes = tf.reshape(x, [-1])
            count = tf.reduce_sum(part_exchanges.allgather(sizes[:1], [part.table]), keepdims=True)
            shape = x.shape if x.shape.is_fully_defined() else tf.shape(x)
            whole = tf.reshape(tf.concat([count, sizes[1:]], 0), shape)
            whole.set_shape(x.shape)
            self._gathered[key] = whole
        return self._gathered[key]


@dataclasses.dataclass
class GraphParts:
    """Records what a graph computes from tables' gradients; None before that is asked."""

    parts: GradientParts | None = None


def parts_of(graph: tf.Graph) -> GradientParts:
    """Returns what `graph`, which a session runs, computes from tables' gradients."""
    record = graph_state.of(graph, GraphParts)
    record.parts = record.parts or GradientParts(graph)
    return record.parts


def _has_gradients(graph: tf.Graph) -> bool:
    gradients = gradients_of(graph)
    return bool(gradients.of_tables or gradients.of_shards)


def warn_of_rank_local(graph: tf.Graph) -> None:
    """Warns if a traced function combines a table's gradient with what only this rank knows."""
    if _has_gradients(graph):
        parts_of(graph).warn_of_rank_local()


def settle(graph: tf.Graph) -> None:
    """Extends what a script computes from tables' gradients to all ranks.

    Raises:
        TableError: a session has already run it, or rows are combined inside a function.
    """
    if collectives.size() == 1:
        return
    if graphs.is_function(graph) and _has_gradients(graph):
        parts_of(graph).check_function()
    graph = graphs.outermost(graph)
    if _has_gradients(graph):
        parts_of(graph).settle()


def gather_fetched(graph: tf.Graph, leaves: Iterable[Any]) -> None:
    """Has a session fetch the rows of all ranks in the place of this rank's.

    The ranks' rows are concatenated in order, so the values and the ids of a gradient match.

    Args:
        graph: the session's.
        leaves: the run's fetches.

    Raises:
        TableError: one of them has places among this rank's rows.
    """
    if collectives.size() > 1 and _has_gradients(graph):
        parts_of(graph).gather_fetched(leaves)


def part_of(tensor: Any) -> Part | None:
    """Returns how `tensor` relates to this rank's rows of a table's gradient, if it does."""
    if collectives.size() == 1 or not isinstance(tensor, tf.Tensor):
        return None
    if not tf.is_symbolic_tensor(tensor) or not _has_gradients(tensor.graph):
        return None
    return parts_of(tensor.graph).part_of(tensor)


def is_part(gradient: Any) -> bool:
    """Tells whether `IndexedSlices` are of a table's gradient, also if the script made them."""
    if is_of_table(gradient):
        return True
    return isinstance(gradient, tf.IndexedSlices) and any(
        part_of(x) is not None for x in (gradient.indices, gradient.values)
    )


class _Reading:
    """Follows parts downwards through a graph, once."""

    def __init__(self, graph: tf.Graph, known: GradientParts) -> None:
        self.parts: dict[str, Part] = {}
        self.refused: dict[tf.Operation, str] = {}
        self._verdicts: dict[tf.Operation, tuple[Verdict, Mapping[int, Part]]] = {}
        self._settled = known.settled
        self._graph = graph
        self._noted = library_operations.NotedOperations(graph)
        self._shards = {
            graph_analysis.memory(v): shard_of(v)
            for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if not is_replicated(v) and v.shape.rank != 0
        }
        self._lookups: dict[str, list[Any]] = {}
        for written in lookups_of(graph).written:
            self._lookups.setdefault(written.lookup.ids.name, []).append(written)
        self._waiting: list[tuple[int, tf.Operation]] = []
        self._is_waiting: set[tf.Operation] = set()

    @property
    def mixed(self) -> list[tuple[tf.Operation, Part, list[tf.Tensor]]]:
        """Returns operations on parts and other numbers, one of the parts, and these numbers."""
        return [
            (op, next(iter(parts.values())), others)
            for op, (verdict, parts) in self._verdicts.items()
            # What an optimizer of TensorFlow's multiplies by is its rate.
            if (verdict.outputs or verdict.gathered)
            and not self._noted.is_optimizers(op)
            and (others := [x for x in op.inputs if _is_other_number(x, self.parts)])
        ]

    @property
    def same(self) -> set[tf.Operation]:
        """Returns operations on parts whose results are the same on all ranks.

        A shape is so except for the number of rows, which is known as a part.
        """
        return {
            op
            for op, (verdict, _) in self._verdicts.items()
            if not verdict.refused and SIZES.issuperset(verdict.outputs.values())
        }

    @property
    def work(self) -> list[tuple[tf.Operation, Verdict, Mapping[int, Part]]]:
        """Returns the operations that need the rows of all ranks."""
        return [
            (op, verdict, parts)
            for op, (verdict, parts) in sorted(self._verdicts.items(), key=lambda x: x[0]._id)
            if verdict.reduces or verdict.gathered or verdict.counted
        ]

    def follow(self, gradients: TableGradients) -> None:
        for known in gradients.of_tables.values():
            part = Part(
                Kind.ROWS,
                str(known.table.op.name),
                frozenset({known.call}),
                owners_of(known.table),
            )
            self._note(known.values, part)
            self._note(known.rows, dataclasses.replace(part, kind=Kind.LOCAL))
            if known.made_ids is not None:
                self._note(known.made_ids, dataclasses.replace(part, kind=Kind.IDS))
        for tensor, table, is_rows in gradients.of_shards.values():
            kind, name = Kind.LOCAL if is_rows else Kind.ROWS, str(table.op.name)
            self._note(tensor, Part(kind, name, frozenset({-tensor.op._id}), owners_of(table)))
        self._note_own_optimizers_reads()
        while self._waiting:
            _, op = heapq.heappop(self._waiting)
            self._is_waiting.discard(op)
            self._judge(op)

    def _note(self, tensor: tf.Tensor, part: Part) -> None:
        before = self.parts.get(tensor.name)
        if before is not None:
            # A gradient's own tensors stay what they are; rows with one rank are ids.
            part = dataclasses.replace(before, calls=before.calls | part.calls)
            if part == before:
                return
        self.parts[tensor.name] = part
        for written in self._lookups.get(tensor.name, ()):
            self._note_lookup(written, part)
        for op in tensor.consumers():
            if op not in self._is_waiting:
                self._is_waiting.add(op)
                heapq.heappush(self._waiting, (op._id, op))

    def _note_own_optimizers_reads(self) -> None:
        """Notes what a script's own optimizers read from tables and slots: this rank's rows."""
        for op in self._graph.get_operations() if self._noted.own_optimizers else ():
            if op.type != "ReadVariableOp" or not self._noted.is_own_optimizers(op):
                continue
            table = self._shards.get(graph_analysis.holder(op.inputs[0]))
            if table is None:
                continue
            # A read may wait for an update that waits for another read's reduction.
            part = Part(Kind.ROWS, str(table.op.name), frozenset({-op._id}), owners_of(table))
            if table.rows is None:
                self.refused[op] = _refusal(op, part, "only its keys tell which rows it has")
            else:
                self._note(op.outputs[0], part)

    def _updates_a_shard(self, op: tf.Operation) -> bool:
        """Tells whether `op` updates a table or a slot by rows of this rank."""
        is_update = op.type.startswith(assignments.OPTIMIZER_UPDATES) or op.type in (
            assignments.ASSIGNS
        )
        return is_update and graph_analysis.holder(op.inputs[0]) in self._shards

    def _note_lookup(self, written: Any, part: Part) -> None:
        """Notes the rows that were looked up by ids of a gradient."""
        if written.lookup.sparse_ids is not None or part.kind not in (Kind.IDS, Kind.ROWS):
            self.refused[written.out] = _refusal(written.out, part, "it pools rows")
        else:
            self._note(written.out.outputs[0], dataclasses.replace(part, kind=Kind.ROWS))

    def _judge(self, op: tf.Operation) -> None:
        if op in self._settled or graph_analysis.is_of_carrier(op.type):
            return
        if op.type.startswith("Collective") or self._noted.is_librarys(op):
            return
        parts = {i: self.parts[x.name] for i, x in enumerate(op.inputs) if x.name in self.parts}
        if op.type in part_rules.SUMMARIES:
            _warn_of_summary(op, next(iter(parts.values())))
        verdict = part_rules.verdict(op, {i: part.kind for i, part in parts.items()})
        is_lenient = self._noted.is_optimizers(op)
        if is_lenient:
            verdict = _leniently(op, verdict)
        elif self._noted.is_own_optimizers(op) and self._updates_a_shard(op):
            verdict = NOTHING
        shared = verdict.reduces or verdict.gathered or verdict.counted
        part = next(iter(parts.values()))
        if shared and op._get_control_flow_context() is not None:
            verdict = Verdict(refused="it is inside tf.cond or tf.while_loop")
        self._verdicts[op] = verdict, parts
        self.refused.pop(op, None)
        if verdict.refused and not is_lenient:
            self.refused[op] = _refusal(op, part, verdict.refused)
        calls = frozenset().union(*(each.calls for each in parts.values()))
        owners = {each.owners for each in parts.values()}
        for i, kind in verdict.outputs.items():
            if kind is Kind.IDS and len(owners) > 1:
                kind = Kind.ROWS  # One key may be on two ranks.
            part = Part(kind, part.table, calls, min(owners) if len(owners) == 1 else "")
            self._note(op.outputs[i], part)


def _is_other_number(x: tf.Tensor, parts: Mapping[str, Part]) -> bool:
    return x.name not in parts and x.op.type != "Const" and x.dtype.base_dtype != tf.resource


def _warn_of_summary(op: tf.Operation, part: Part) -> None:
    warned = parts_of(op.graph).warned
    if collectives.rank() == 0 and op not in warned:
        warned.add(op)
        tf.logging.warning(
            "The summary '%s' shows the rows of the gradient of table '%s' that one rank owns. A "
            "summary of tf.convert_to_tensor(gradient) shows those of all ranks, if all run it.",
            op.name,
            part.table,
        )


def _leniently(op: tf.Operation, verdict: Verdict) -> Verdict:
    """Returns the verdict on an operation of an optimizer: it updates this rank's shard."""
    if verdict.reduces:
        return verdict
    return Verdict(verdict.outputs)


def _refusal(op: tf.Operation, part: Part, why: str) -> str:
    return (
        f"'{op.name}' ({op.type}) computes with the gradient of table '{part.table}', of which "
        f"this rank has the rows that it owns, and {why}: what it makes of them would not be that "
        f"of the whole gradient. {ADVICE}"
    )


def check_gradient(gradient: Any, variable: Any) -> Any:
    """Returns the gradient of a replicated variable, which a script may have computed from a
    table's.

    Raises:
        TableError: it is this rank's rows, which can't update a replica.
    """
    if isinstance(gradient, tf.IndexedSlices):
        parts = [part_of(gradient.values), part_of(gradient.indices)]
        if None in parts:
            return gradient
        parts_here = parts_of(gradient.values.graph)
        with library_operations.noted(gradient.values.graph), device_scopes.anywhere():
            values, indices = (
                parts_here._of_all_ranks(x, part)
                for x, part in zip((gradient.values, gradient.indices), parts)
                if part is not None
            )
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    part = part_of(gradient)
    if part is not None and part.kind in BY_ROW:
        raise TableError(
            f"The gradient '{gradient.op.name}' of the replicated variable '{variable.op.name}' is "
            f"made of that of table '{part.table}', of which this rank has the rows that it owns. "
            f"{ADVICE}"
        )
    return gradient
