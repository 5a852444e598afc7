"""What a traced run looked up: samples, ids, and how many keys this rank was asked for."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.ops import graph_analysis, op_attributes
from collective.ops.gate import gates_of
from collective.strategies.grouped_exchange import groups_of
from collective.tables.grouping import lookups_of

Shapes = Mapping[str, list[int]]


class Counts(NamedTuple):
    """Of one rank in one run.

    Attributes:
        samples: of the batch: what most lookups return one row, or one row of rows, for; None
            without a lookup.
        ids: that were looked up; lookups with exchanges of their own by the same ids count once.
        asked: the keys that this rank was asked for, by the names of the tables.
    """

    samples: int | None
    ids: int
    asked: dict[str, int]


class Counting:
    """Which tensors of a run tell what its lookups do. Of lookups in functions and loops none does.

    Args:
        graph: the graph.
        reach: what the run executes.
    """

    def __init__(self, graph: tf.Graph, footprint: run_analysis.RunFootprint):
        self._written = [w for w in lookups_of(graph).written if w.out in footprint.operations]
        absent = {x.name for x, _ in footprint.empty_feeds}
        # of each lookup, tensors of as many elements as it has ids
        self._ids: list[tuple[str, ...]] = []
        self._asked: list[tuple[str, str]] = []
        for group in groups_of(graph):
            self._ids += [
                (m.ids.name, m.lookup.ids.name)
                for m in group.members
                if m.ids.op in footprint.operations and m.ids.name not in absent
            ]
            heard = next(
                (
                    op
                    for op in graph_analysis.upstream([group.pool])
                    if op_attributes.kind(op) == "CollectiveHear"
                    and op in footprint.operations
                    and len(op.outputs) > len(group.layout.tables)
                ),
                None,
            )
            if heard is not None:
                self._asked += [
                    (table.op.name, heard.outputs[i].name)
                    for i, table in enumerate(group.layout.tables)
                ]
        asked = {x.keys.op: name for name, x in gates_of(graph).key_requests.items()}
        for written in self._written:
            if written.group is None:
                self._count_alone(written.lookup, written.out, asked)

    def _count_alone(
        self, lookup: Any, out: tf.Operation, asked: Mapping[tf.Operation, str]
    ) -> None:
        inputs = {x.name for x in lookup.inputs}
        inside = graph_analysis.upstream([out], inputs)
        for keys in (op for op in inside if op in asked):
            distinct = next(
                (op for op in graph_analysis.upstream([keys], inputs) if op.type == "Unique"), None
            )
            self._ids += (
                [(distinct.outputs[1].name, lookup.ids.name)] if distinct is not None else []
            )
            self._asked += [
                (lookup.table.op.name, f"{op.name}:0")
                for op in inside
                if op.type == "HorovodAlltoall" and str(op.name).endswith(f"/{asked[keys]}")
            ]

    def of(self, shapes: Shapes) -> Counts:
        """Counts of a run that computed tensors of these shapes."""
        received: collections.Counter[str] = collections.Counter()
        for table, tensor in self._asked:
            received[table] += _elements(shapes, tensor)
        batches = collections.Counter(
            rows for w in self._written if (rows := _rows(w.out.outputs[0], shapes))
        )
        most = max(batches.items(), key=lambda item: (item[1], item[0]), default=(None, 0))[0]
        ids = sum(
            next((_elements(shapes, name) for name in names if name in shapes), 0)
            for names in self._ids
        )
        return Counts(most, ids, dict(received))


def _elements(shapes: Shapes, tensor: str) -> int:
    return int(np.prod(shapes[tensor])) if tensor in shapes else 0


def _rows(tensor: tf.Tensor, shapes: Shapes) -> int:
    """Its first dimension, also where the optimizer of graphs has taken the identity away; 0 if
    there is no knowing.
    """
    while tensor.name not in shapes and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return (shapes.get(tensor.name) or [0])[0]
