"""Tries a script once: `collective launch --test-mode` gives each session one batch of each kind.

    first training run     runs                     first evaluation run      runs
    further ones           the data have ended      further ones              the data have ended

So a script takes its usual way to a checkpoint, an evaluation and an export. A loop in a plain
`tf.Session` that doesn't end with the data, `for step in range(…)`, would fail there: it gets the
values of the first run again, for nothing.
"""

from __future__ import annotations

import os
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination import run_analysis
from collective.coordination.session_state import SessionState, state_of_session
from collective.job.info import TEST_MODE
from collective.ops.graph import graph_analysis

# How often a plain session's loop gets the same values: one that never ends should end.
MOST_ANSWERS = 100_000
_REPEATS = ("RepeatDataset", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2")


def is_on() -> bool:
    """Tells whether this process only tries everything once."""
    return os.environ.get(TEST_MODE, "") not in ("", "0")


def run_once(session: Any, leaves: list[Any], feed_dict: Any, carry_out: Callable[[], Any]) -> Any:
    """Carries a run out, unless the session has had one of its kind.

    Args:
        session: the session.
        leaves: what is fetched.
        feed_dict: what is fed.
        carry_out: runs it.

    Raises:
        tf.errors.OutOfRangeError: it would be the session's second batch.
    """
    state = state_of_session(session)
    names = tuple(name for leaf in leaves for name in graph_analysis.tensor_names(leaf))
    kind = "" if state.is_stopping else _kind(session.graph, state, names, leaves, feed_dict)
    if not kind:
        return carry_out()
    values = state.tried.setdefault(kind, {})
    if not values:
        values[names] = carry_out()
        return values[names]
    state.answers += 1
    ends = state.is_monitored or kind.endswith("finite data") or state.answers > MOST_ANSWERS
    if ends:
        raise tf.errors.OutOfRangeError(
            None, None, f"--test-mode: this session has had its batch of {kind}."
        )
    if names not in values:
        values[names] = carry_out()
    return values[names]


def _kind(
    graph: tf.Graph,
    state: SessionState,
    names: tuple[str, ...],
    leaves: list[Any],
    feed_dict: Any,
) -> str:
    """Returns "training" or "evaluation", with a word on the data; "" for any other run."""
    if names not in state.kinds:
        try:
            footprint = run_analysis.footprint_of(graph, leaves, list(feed_dict or {}))
        except Exception:
            return ""  # TensorFlow refuses the fetches or feeds itself
        kind = "evaluation" if footprint.takes_data else ""
        if footprint.is_step and not footprint.restores:
            if run_analysis.updates_weights(graph, footprint):
                kind = "training"
        if kind and footprint.takes_data:
            kind += " with repeated data" if _repeats(graph) else " with finite data"
        state.kinds[names] = kind
    return state.kinds[names]


def _repeats(graph: tf.Graph) -> bool:
    """Tells whether some dataset of the graph may be repeated without end."""
    if any(op.type in _REPEATS for op in graph.get_operations()):
        return True
    functions = graph.as_graph_def().library.function
    return any(node.op in _REPEATS for function in functions for node in function.node_def)
