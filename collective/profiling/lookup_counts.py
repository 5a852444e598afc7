"""Counts what a traced run looked up: samples, ids, and the keys requested from this rank."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.ops.communication import collectives
from collective.ops.communication.collective_names import KEYS, short, split_name
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_analysis
from collective.strategies import Lookup
from collective.strategies.grouped_exchange import Group, groups_of
from collective.tables.grouping import lookups_of
from collective.tables.table import is_replicated_table

Shapes = Mapping[str, list[int]]


class LookupCounts(NamedTuple):
    """Keeps what one rank looked up in one run.

    Attributes:
        samples: the samples of the batch: the rows, or rows of rows, that most lookups return; None
            without a lookup.
        ids: the ids that were looked up; ungrouped lookups of the same ids count once.
        asked: the keys requested from this rank, by the names of the tables.
        carried: for each exchange, by the group or by the table of an ungrouped lookup, and then by
            table: [keys, elements of rows]. Over all ranks they add up to what was sent.
        table_ids: the ids that were looked up, by the names of the tables; of replicated ones, too.
        table_distinct: how many of these were distinct, by the names of replicated tables; those
            left out whose lookups don't find out.
    """

    samples: int | None
    ids: int
    asked: dict[str, int]
    carried: dict[str, dict[str, list[float]]]
    table_ids: dict[str, int]
    table_distinct: dict[str, int]


@dataclasses.dataclass
class CarriedTensors:
    """Names the tensors whose sizes tell what an exchange carries for a table.

    Attributes:
        subject: the exchange: the group, or the table of an ungrouped lookup.
        table: the name of the table.
        dim: D.
        keys: has `key_words` elements for each key requested from this rank.
        key_words: 2 if each key is sent with the number of its occurrences.
        bags: have an element for each row that is returned for a lookup that the owner pools.
        pooled_ids: for each of these lookups, names of tensors with an element for each id; those
            of a tensor that the graph optimizer removes and of one that stays.
        pools_all: the owner pools all lookups of the table.
        has_ids: the ids of the lookup are counted, too. Ungrouped lookups of the same ids count
            once.
    """

    subject: str
    table: str
    dim: int
    keys: str
    bags: list[str] = dataclasses.field(default_factory=list)
    pooled_ids: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    pools_all: bool = False
    has_ids: bool = True
    key_words: int = 1

    def counts(self, shapes: Shapes) -> tuple[int, int]:
        """Returns (keys, elements of rows) of a run that computed tensors of these shapes."""
        keys = _elements(shapes, self.keys) // self.key_words
        rows = sum(_elements(shapes, name) for name in self.bags)
        if not self.pools_all:
            rows += keys - sum(_first_known(shapes, names) for names in self.pooled_ids)
        return keys, rows * self.dim


class LookupCounter:
    """Counts from the shapes of a run's tensors. Lookups in functions and loops are not counted.

    Args:
        graph: the graph.
        footprint: that of the run.
    """

    def __init__(self, graph: tf.Graph, footprint: run_analysis.RunFootprint):
        self._graph, self._footprint = graph, footprint
        self._written = [w for w in lookups_of(graph).written if w.out in footprint.operations]
        # For each lookup, its table and the names of tensors with an element for each of its ids.
        self._id_tensors: list[tuple[str, tuple[str, ...]]] = []
        self._replicated = list(_replicated_lookups(graph, footprint))
        self._carried: list[CarriedTensors] = []
        self._unneeded = {x.name for x, _ in footprint.empty_feeds}
        for group in groups_of(graph):
            for member in group.members:
                ids = member.ids
                if ids.op in footprint.operations and ids.name not in self._unneeded:
                    names = (ids.name, member.lookup.ids.name)
                    self._id_tensors.append((member.lookup.table.op.name, names))
            self._count_keys_of(group)
        requests = {request.keys.op for request in gates_of(graph).key_requests.values()}
        for written in lookups_of(graph).written:
            if written.group is None:
                is_run = written.out in footprint.operations
                if is_run:
                    self._count_ids(written.lookup, written.out, requests)
                self._carry_ungrouped(written.lookup, written.out, is_run)

    def _count_keys_of(self, group: Group) -> None:
        tables = group.layout.tables
        for op in graph_analysis.upstream([group.pool]):
            keys_by_table = _keys_by_table(op, len(tables))
            if keys_by_table and op in self._footprint.operations:
                carried = [
                    CarriedTensors(short(group.name), table.op.name, table.dim, keys.name)
                    for table, keys in zip(tables, keys_by_table)
                ]
                _add_pooled(group, carried, self._unneeded)
                self._carried += carried
                return

    def _count_ids(self, lookup: Lookup, out: tf.Operation, requests: Set[tf.Operation]) -> None:
        """Notes the ids of an ungrouped lookup."""
        inputs = {x.name for x in lookup.inputs}
        upstream = graph_analysis.upstream([out], inputs)
        for keys in (op for op in upstream if op in requests):
            for op in graph_analysis.upstream([keys], inputs):
                if op.type == "Unique":
                    names = (op.outputs[1].name, lookup.ids.name)
                    self._id_tensors.append((lookup.table.op.name, names))
                    break

    def _carry_ungrouped(self, lookup: Lookup, out: tf.Operation, is_run: bool) -> None:
        """Notes the keys of the exchange of an ungrouped lookup.

        Args:
            lookup: the lookup.
            out: its result.
            is_run: the run computes the result, so that its ids are counted.
        """
        for op in graph_analysis.upstream([out], {x.name for x in lookup.inputs}):
            collective = collectives.collective_name(op) or ""
            phase, subject = split_name(collective)
            if phase == KEYS and op in self._footprint.operations:
                name, dim = lookup.table.op.name, lookup.table.dim
                self._carried.append(
                    CarriedTensors(
                        subject,
                        name,
                        dim,
                        f"{op.name}:0",
                        has_ids=is_run,
                        key_words=2 if lookup.table.counts_keys else 1,
                    )
                )

    def counts(self, shapes: Shapes) -> LookupCounts:
        """Counts for a run that computed tensors of these shapes."""
        asked: collections.Counter[str] = collections.Counter()
        carried: dict[str, dict[str, list[float]]] = {}
        for of in self._carried:
            keys, elements = of.counts(shapes)
            if of.has_ids:
                asked[of.table] += keys
            # On several hosts the keys for other ranks of this one travel by themselves.
            before = carried.setdefault(of.subject, {}).get(of.table, [0, 0])
            carried[of.subject][of.table] = [before[0] + keys, before[1] + elements]
        table_ids: collections.Counter[str] = collections.Counter()
        for table, names in self._id_tensors:
            table_ids[table] += _first_known(shapes, names)
        ids = sum(table_ids.values())
        table_distinct: collections.Counter[str] = collections.Counter()
        for lookup in self._replicated:
            table_ids[lookup.table] += _elements(shapes, lookup.ids)
            table_distinct[lookup.table] += _elements(shapes, lookup.distinct)
        for lookup in self._replicated:
            if not lookup.distinct:
                table_distinct.pop(lookup.table, None)
        lookups_by_rows: collections.Counter[int] = collections.Counter()
        for written in self._written:
            rows = _rows(written.out.outputs[0], shapes)
            if not rows and written.lookup.sparse_ids is None:
                # The optimizer has merged what gives the result its shape, which the ids have, too.
                rows = _rows(written.lookup.ids, shapes)
            if rows:
                lookups_by_rows[rows] += 1
        samples = None
        if lookups_by_rows:
            samples = max(lookups_by_rows, key=lambda rows: (lookups_by_rows[rows], rows))
        return LookupCounts(
            samples, ids, dict(asked), carried, dict(table_ids), dict(table_distinct)
        )


class ReplicatedLookup(NamedTuple):
    """Names the tensors that tell how many ids are looked up in a replicated table.

    Attributes:
        table: the name of the table.
        ids: has an element for each id.
        distinct: has one for each distinct id; '' if there is none.
    """

    table: str
    ids: str
    distinct: str


def _replicated_lookups(
    graph: tf.Graph, footprint: run_analysis.RunFootprint
) -> Iterator[ReplicatedLookup]:
    """Yields the lookups of a run in replicated tables: TensorFlow's own operations."""
    variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    names = {v.handle.op: v.op.name for v in variables if is_replicated_table(v)}
    if not names:
        return
    for op in footprint.operations:
        if op.type == "ResourceGather" and op.inputs[0].op in names:
            ids, table = op.inputs[1], names[op.inputs[0].op]
            while ids.op.type == "Identity":
                ids = ids.op.inputs[0]
            if ids.op.type == "Unique":
                yield ReplicatedLookup(table, ids.op.outputs[1].name, ids.name)
            else:
                yield ReplicatedLookup(table, ids.name, "")


def _keys_by_table(op: tf.Operation, tables: int) -> list[tf.Tensor]:
    """Returns the keys that the ranks request of each of a group's tables; [] if `op` has none."""
    kind = op.type
    if kind == "CollectiveSharedAlltoallKeys":
        return list(op.outputs[-tables:])
    if kind == "CollectiveHear" and len(op.outputs) > tables:
        return list(op.outputs[:tables])
    return []


def _add_pooled(group: Group, carried: list[CarriedTensors], unneeded: Set[str]) -> None:
    """Adds the tensors of the lookups that owners pool.

    Args:
        group: the group.
        carried: for each of its tables.
        unneeded: the names of ids that the run doesn't look up.
    """
    sections = group.layout.sections
    for i, of_table in enumerate(carried):
        of_table.pools_all = all(section.pooled for section in sections if section.table == i)
    for i, (member, s) in enumerate(zip(group.members, group.layout.members)):
        if sections[s].pooled and member.ids.name not in unneeded:
            of_table = carried[sections[s].table]
            of_table.pooled_ids.append((member.ids.name, member.lookup.ids.name))
            # Positions follow the rows: of a pooled lookup one for each of its bags.
            of_table.bags.append(group.pool.inputs[1 + i].name)


def _first_known(shapes: Shapes, names: Iterable[str]) -> int:
    """Returns the elements of the first of these tensors that the run has computed."""
    return next((_elements(shapes, name) for name in names if name in shapes), 0)


def _elements(shapes: Shapes, tensor: str) -> int:
    return int(np.prod(shapes[tensor])) if tensor in shapes else 0


def _rows(tensor: tf.Tensor, shapes: Shapes) -> int:
    """Returns the first dimension of a tensor; 0 if it isn't known.

    TensorFlow's graph optimizer may have removed the identity that a lookup is.
    """
    while tensor.name not in shapes and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return (shapes.get(tensor.name) or [0])[0]
