"""Decides once, before a session runs a graph, whether its keys are exchanged ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.run_extension import extend, extension_of
from collective.ops.communication import collectives
from collective.ops.graph import graph_state, seen_operations
from collective.prefetch.batch_source import PrefetchedKeys
from collective.prefetch.graph_split import (
    NO_GROUP,
    GraphSplit,
    NotPossible,
    TakenOutside,
    split_graph,
)


@dataclasses.dataclass
class Prefetching:
    """Records whether the keys of a graph are exchanged ahead.

    Attributes:
        refused: why they are not to be; '' if they may be.
        note: says whether they are, and if not, why; '' before that is decided.
        settled_version: the graph's version when that was last considered.
    """

    refused: str = ""
    note: str = ""
    settled_version: int | None = None


def note_of(graph: tf.Graph) -> str:
    """Says whether the keys of `graph` are exchanged ahead; '' if that wasn't asked for."""
    record = graph_state.of(graph, Prefetching)
    if not record.note and record.settled_version is not None and seen_operations.last(graph):
        return f"off: {NO_GROUP}"  # One rank runs a graph without groups as it is.
    return record.note


def keep_whole(graph: tf.Graph, why: str) -> None:
    """Forbids that keys of `graph` are exchanged ahead."""
    graph_state.of(graph, Prefetching).refused = why


def split_of(graph: tf.Graph) -> GraphSplit | None:
    """Returns how `graph` was split; None if it is whole."""
    extension = extension_of(graph)
    return extension.split if isinstance(extension, PrefetchedKeys) else None


def staged(graph: tf.Graph, xs: list[Any]) -> list[Any]:
    """Returns `xs` as they are staged in a graph that was split: losses depend on these tensors."""
    split = split_of(graph)
    if split is None:
        return xs
    tensors = split.stage.tensors
    return [tensors.get(x.name, x) if isinstance(x, tf.Tensor) else x for x in xs]


def split_if_wanted(graph: tf.Graph, wanted: bool) -> None:
    """Splits `graph` if that is `wanted`, and hasn't been decided yet."""
    record = graph_state.of(graph, Prefetching)
    if not wanted or record.note or record.settled_version == graph.version:
        return
    try:
        if record.refused:
            raise NotPossible(record.refused)
        split = split_graph(graph)
    except NotPossible as why:
        record.note = f"off: {why}"
        if isinstance(why, TakenOutside):
            tf.logging.warning(
                "scope(prefetch_keys=True) exchanges no keys ahead in this graph: gradients of "
                "lookups in %s were taken outside of that scope. Call tf.gradients, "
                "compute_gradients or minimize inside `with scope(prefetch_keys=True):`, too, or "
                "leave prefetch_keys out.",
                ", ".join(map(repr, why.tables)),
            )
    else:
        if split is not None:
            extend(graph, PrefetchedKeys(split))
            groups = f"{split.groups} group{'s' * (split.groups > 1)}"
            done = "exchanged" if collectives.size() > 1 else "prepared"
            record.note = f"on: keys of {groups} are {done} while the batch before computes"
    # No need to look again before something is added.
    record.settled_version = graph.version
