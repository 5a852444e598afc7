"""Notes which operations of a graph the library has made itself.

The library reads from the graph what a script computes. It must not take an exchange, or the sums
of a norm, for the script's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state


@dataclasses.dataclass
class NotedRanges:
    """Records operations of a graph, each list by the numbers of the first and last of some.

    Attributes:
        librarys: those that the library has made itself.
        optimizers: those that TensorFlow's and the library's optimizers made to update tables.
        own_optimizers: those that a script's own optimizers made.
    """

    librarys: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    optimizers: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    own_optimizers: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def noted(graph: tf.Graph) -> Iterator[None]:
    """Notes the operations that are added to `graph` inside."""
    with _noted_in(graph, graph_state.of(graph, NotedRanges).librarys):
        yield


# Packages whose optimizers are known to update each row by itself.
_KNOWN = frozenset({"tensorflow", "keras", "tf_keras", "collective", "horovod"})


@contextlib.contextmanager
def noted_as_optimizers(graph: tf.Graph, optimizer: Any) -> Iterator[None]:
    """Notes the operations that an optimizer adds inside to update tables' shards.

    Those of a script's own optimizer are noted separately: it may compute anything.
    """
    ranges = graph_state.of(graph, NotedRanges)
    is_known = type(optimizer).__module__.partition(".")[0] in _KNOWN
    with _noted_in(graph, ranges.optimizers if is_known else ranges.own_optimizers):
        yield


@contextlib.contextmanager
def _noted_in(graph: tf.Graph, ranges: list[tuple[int, int]]) -> Iterator[None]:
    # TensorFlow numbers operations from 2.
    first = graph.version + 2
    try:
        yield
    finally:
        if graph.version + 1 >= first:
            ranges.append((first, graph.version + 1))


class NotedOperations:
    """Tells which operations of a graph have been noted so far.

    Attributes:
        librarys: the numbers of operations that the library has made.
        optimizers: the numbers of operations that TensorFlow's and the library's optimizers made.
        own_optimizers: the numbers of operations that a script's own optimizers have made.
    """

    def __init__(self, graph: tf.Graph) -> None:
        noted = graph_state.of(graph, NotedRanges)
        self.librarys, self.optimizers, self.own_optimizers = (
            {number for first, last in ranges for number in range(first, last + 1)}
            for ranges in (noted.librarys, noted.optimizers, noted.own_optimizers)
        )

    def is_librarys(self, op: tf.Operation) -> bool:
        """Tells whether the library has made `op`."""
        return op._id in self.librarys

    def is_own_optimizers(self, op: tf.Operation) -> bool:
        """Tells whether a script's own optimizer has made `op`."""
        return op._id in self.own_optimizers and op._id not in self.librarys

    def is_optimizers(self, op: tf.Operation) -> bool:
        """Tells whether an optimizer has made `op`, to update tables' shards."""
        return op._id in self.optimizers
