"""What is known of a graph that stands nowhere in it."""

from __future__ import annotations

import dataclasses

import tensorflow.compat.v1 as tf

from collective.ops import graphs
from collective.ranks import runs


@dataclasses.dataclass
class Known:
    """What is known of a graph that stands nowhere in it.

    Attributes:
        step: what a training step executes, once there was one.
        received: bytes a step by the names of the collectives, as of the last profile, on this
            rank.
        keys_per_owner: keys a step that each rank was asked for, by the names of the tables, as of
            the last profile.
        notes: what parts of the library want to be said of them in the plan, by their names.
    """

    step: runs.Reach | None = None
    received: dict[str, float] = dataclasses.field(default_factory=dict)
    keys_per_owner: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def known(graph: tf.Graph) -> Known:
    """What is known of `graph`, to be added to."""
    return graphs.kept(graph, "known", Known)
