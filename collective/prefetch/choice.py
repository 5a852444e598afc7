"""Whether keys of a graph are exchanged ahead, settled once, before a session runs it; the plan
tells.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import communication
from collective.plan.known import known
from collective.prefetch.ahead import is_of_keys  # noqa: F401 (for those who settle)
from collective.prefetch.cut import cut, cut_of

NOTE = "prefetch_keys"


def keep_whole(graph: tf.Graph, why: str) -> None:
    """Keys of `graph` are not to be exchanged ahead, whoever wants it."""
    graph._collective_whole = f"off: {why}"


def stand_ins(graph: tf.Graph, xs: list[Any]) -> list[Any]:
    """`xs`, with what stands for them where `graph` is cut: what is computed behind the cut depends
    on that.
    """
    made = cut_of(graph)
    return (
        xs
        if made is None
        else [made.stand_ins.get(x.name, x) if isinstance(x, tf.Tensor) else x for x in xs]
    )


def settle(graph: tf.Graph, wanted: bool) -> None:
    """Cuts `graph` if that is `wanted`, and hasn't been settled."""
    notes = known(graph).notes
    if not wanted or NOTE in notes or getattr(graph, "_collective_uncut", None) == graph.version:
        return
    said = (
        "off: there is one rank"
        if communication.size() == 1
        else getattr(graph, "_collective_whole", None) or cut(graph)
    )
    if said:
        notes[NOTE] = said
    graph._collective_uncut = graph.version  # no need to look again before something is added
