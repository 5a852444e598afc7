"""Counts what a traced run looked up: samples, ids, and the keys that this rank was asked for."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.ops import graph_analysis, op_attributes
from collective.ops.gate import gates_of
from collective.strategies.grouped_exchange import Group, groups_of
from collective.tables.grouping import lookups_of

Shapes = Mapping[str, list[int]]


class LookupCounts(NamedTuple):
    """Keeps what one rank looked up in one run.

    Attributes:
        samples: of the batch: the rows, or rows of rows, that most lookups return; None without a
            lookup.
        ids: that were looked up; ungrouped lookups of the same ids count once.
        asked: the keys that this rank was asked for, by the names of the tables.
    """

    samples: int | None
    ids: int
    asked: dict[str, int]


class LookupCounter:
    """Counts by the shapes of a run's tensors. Lookups in functions and loops are not counted.

    Args:
        graph: the graph.
        footprint: the run's.
    """

    def __init__(self, graph: tf.Graph, footprint: run_analysis.RunFootprint):
        self._graph, self._footprint = graph, footprint
        self._written = [w for w in lookups_of(graph).written if w.out in footprint.operations]
        # For each lookup, the names of tensors with an element for each of its ids.
        self._id_tensors: list[tuple[str, ...]] = []
        # The names of tensors with an element for each key that this rank was asked for, by table.
        self._key_tensors: list[tuple[str, str]] = []
        unneeded = {x.name for x, _ in footprint.empty_feeds}
        for group in groups_of(graph):
            for member in group.members:
                ids = member.ids
                if ids.op in footprint.operations and ids.name not in unneeded:
                    self._id_tensors.append((ids.name, member.lookup.ids.name))
            self._count_keys_of(group)
        request_names = {request.keys.op: n for n, request in gates_of(graph).key_requests.items()}
        for written in self._written:
            if written.group is None:
                self._count_ungrouped(written.lookup, written.out, request_names)

    def _count_keys_of(self, group: Group) -> None:
        tables = group.layout.tables
        for op in graph_analysis.upstream([group.pool]):
            is_response = op_attributes.kind(op) == "CollectiveHear"
            has_keys_by_table = is_response and len(op.outputs) > len(tables)
            if has_keys_by_table and op in self._footprint.operations:
                for i, table in enumerate(tables):
                    self._key_tensors.append((table.op.name, op.outputs[i].name))
                return

    def _count_ungrouped(
        self, lookup: Any, out: tf.Operation, request_names: Mapping[tf.Operation, str]
    ) -> None:
        inputs = {x.name for x in lookup.inputs}
        upstream = graph_analysis.upstream([out], inputs)
        for keys in (op for op in upstream if op in request_names):
            for op in graph_analysis.upstream([keys], inputs):
                if op.type == "Unique":
                    self._id_tensors.append((op.outputs[1].name, lookup.ids.name))
                    break
            for op in upstream:
                is_alltoall = op.type == "HorovodAlltoall"
                if is_alltoall and str(op.name).endswith(f"/{request_names[keys]}"):
                    self._key_tensors.append((lookup.table.op.name, f"{op.name}:0"))

    def counts(self, shapes: Shapes) -> LookupCounts:
        """Counts for a run that computed tensors of these shapes."""
        asked: collections.Counter[str] = collections.Counter()
        for table, tensor in self._key_tensors:
            asked[table] += _elements(shapes, tensor)
        ids = 0
        for names in self._id_tensors:
            ids += next((_elements(shapes, name) for name in names if name in shapes), 0)
        lookups_by_rows: collections.Counter[int] = collections.Counter()
        for written in self._written:
            rows = _rows(written.out.outputs[0], shapes)
            if rows:
                lookups_by_rows[rows] += 1
        samples = None
        if lookups_by_rows:
            samples = max(lookups_by_rows, key=lambda rows: (lookups_by_rows[rows], rows))
        return LookupCounts(samples, ids, dict(asked))


def _elements(shapes: Shapes, tensor: str) -> int:
    return int(np.prod(shapes[tensor])) if tensor in shapes else 0


def _rows(tensor: tf.Tensor, shapes: Shapes) -> int:
    """Returns the first dimension of a tensor; 0 if it isn't known.

    TensorFlow's graph optimizer may have removed the identity that a lookup is.
    """
    while tensor.name not in shapes and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return (shapes.get(tensor.name) or [0])[0]
