"""Notes which operations of a graph the library has made for itself.

What a script computes is read off its graph. An exchange, or the sums that a norm is made of, must
not be taken for the script's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from collective.ops.graph_state import state_of


@contextlib.contextmanager
def noted(graph: tf.Graph) -> Iterator[None]:
    """Notes the operations that are added to `graph` inside."""
    with _noted_in(graph, state_of(graph).library_operations):
        yield


@contextlib.contextmanager
def noted_as_optimizers(graph: tf.Graph) -> Iterator[None]:
    """Notes the operations that are added inside by an optimizer, which updates tables' shards."""
    with _noted_in(graph, state_of(graph).optimizer_operations):
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
    """Tells which operations of a graph were noted, as of now.

    Attributes:
        librarys: the numbers of those that the library has made.
        optimizers: the numbers of those that optimizers have made.
    """

    def __init__(self, graph: tf.Graph) -> None:
        state = state_of(graph)
        self.librarys, self.optimizers = (
            {number for first, last in ranges for number in range(first, last + 1)}
            for ranges in (state.library_operations, state.optimizer_operations)
        )

    def is_librarys(self, op: tf.Operation) -> bool:
        """Tells whether the library has made `op`."""
        return op._id in self.librarys

    def is_optimizers(self, op: tf.Operation) -> bool:
        """Tells whether an optimizer has made `op`, to update tables' shards."""
        return op._id in self.optimizers
