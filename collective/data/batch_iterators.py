"""Finds the iterators of a graph that give batches of resumable datasets.

A dataset is recognised by a function that reads its position, wherever the dataset is made: by
operations of the graph, whose result MakeIterator passes to an iterator, or in the function of a
one-shot iterator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis

# Datasets with exactly one element for each input element.
ONE_FOR_ONE = frozenset(
    {
        "AssertCardinalityDataset",
        "Identity",
        "MapDataset",
        "MaxIntraOpParallelismDataset",
        "ModelDataset",
        "OptionsDataset",
        "ParallelMapDataset",
        "ParallelMapDatasetV2",
        "PrefetchDataset",
        "PrivateThreadPoolDataset",
        "TakeDataset",
        "UnwrapDatasetVariant",
        "WrapDatasetVariant",
        "ZipDataset",
    }
)


def positions_read(iterator: tf.Operation, handles: Set[str]) -> frozenset[str]:
    """Returns the positions from which the batches of an iterator are counted.

    Args:
        iterator: the operation that has the iterator.
        handles: the names of all positions' variables, by which functions find them.

    Raises:
        NotImplementedError: batches pass through a dataset that isn't one-to-one, or the iterator
            gets several datasets.
    """
    graph = iterator.graph
    if iterator.type == "OneShotIterator":
        name = iterator.node_def.attr["dataset_factory"].func.name
        definition = graph._functions[name].cached_definition
        nodes = {node.name: node for node in definition.node_def}
        lasts = [_producer(output) for output in definition.ret.values()]
        return frozenset().union(*(_positions(graph, nodes, last, handles) for last in lasts))
    variants = [
        op.inputs[0].op for op in iterator.outputs[0].consumers() if op.type == "MakeIterator"
    ]
    found = set()
    for variant in variants:
        made_of = graph_analysis.walk([variant], control=False)
        nodes = {op.name: op.node_def for op in made_of}
        found.add(_positions(graph, nodes, variant.name, handles))
    if len(found) > 1:
        raise NotImplementedError(
            f"iterator '{iterator.name}' is given several datasets, of which a resumable one can't "
            "be told from the others in a run: make an iterator for each "
            "(tf.data.make_initializable_iterator)."
        )
    return found.pop() if found else frozenset()


def _positions(
    graph: tf.Graph, nodes: Mapping[str, Any], last: str, handles: Set[str]
) -> frozenset[str]:
    """Returns the positions that the dataset of node `last` reads."""
    known: dict[str, frozenset[str]] = {}
    stack = [last]
    while stack:
        name = stack[-1]
        node = nodes.get(name)
        # An argument of the function has no node.
        inputs = [] if node is None else [_producer(x) for x in node.input if x[0] != "^"]
        own = frozenset() if node is None else _read_inside(graph, node, handles)
        waiting = [x for x in inputs if x not in known] if not own else []
        if waiting:
            stack += waiting
            continue
        stack.pop()
        upstream = frozenset().union(*(known[x] for x in inputs)) if not own else frozenset()
        if upstream and node is not None and node.op not in ONE_FOR_ONE:
            names = ", ".join(sorted(upstream))
            raise NotImplementedError(
                f"the batches counted by '{names}' pass through '{name}' ({node.op}), which "
                "doesn't give one for each: put what shuffles, repeats, filters or batches in "
                "front of collective.data.resumable(), and only map(), prefetch(), take() and "
                "zip() after it."
            )
        known[name] = own or upstream
    return known[last]


def _read_inside(graph: tf.Graph, node: Any, handles: Set[str]) -> frozenset[str]:
    """Returns the positions that the functions of a node read."""
    return frozenset(
        shared_name
        for inner in _nodes_inside(graph, node)
        if inner.op == "VarHandleOp"
        for shared_name in [inner.attr["shared_name"].s.decode()]
        if shared_name in handles
    )


def _nodes_inside(graph: tf.Graph, node: Any) -> Iterator[Any]:
    """Yields the nodes of the functions that a node calls itself, not of those that these call."""
    for value in node.attr.values():
        for name in [value.func.name, *(each.name for each in value.list.func)]:
            function = graph._functions.get(name) if name else None
            if function is not None:
                yield from function.cached_definition.node_def


def _producer(reference: str) -> str:
    """Returns the name of the node of 'node', 'node:1' or 'node:output:0'."""
    return reference.partition(":")[0]
