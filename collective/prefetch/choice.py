"""Whether keys of a graph are exchanged ahead, settled once, before a session runs it; the plan tells."""
from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops import communication
from collective.plan.known import known
from collective.prefetch.ahead import is_of_keys  # noqa: F401 (for those who settle)
from collective.prefetch.cut import cut

NOTE = 'prefetch_keys'


def keep_whole(graph: tf.Graph, why: str) -> None:
    """Keys of `graph` are not to be exchanged ahead, whoever wants it."""
    graph._collective_whole = f'off: {why}'


def settle(graph: tf.Graph, wanted: bool) -> None:
    """Cuts `graph` if that is `wanted`, and hasn't been settled."""
    notes = known(graph).notes
    if not wanted or NOTE in notes or getattr(graph, '_collective_uncut', None) == graph.version:
        return
    said = 'off: there is one rank' if communication.size() == 1 else getattr(graph, '_collective_whole', None) or cut(graph)
    if said:
        notes[NOTE] = said
    graph._collective_uncut = graph.version      # no need to look again before something is added
