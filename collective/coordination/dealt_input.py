"""Lets a layer above compare what was dealt to the ranks, once all of them are out of data.

The coordination of runs knows dealt input only by this class (`collective.data.dealt_input` is
one). Ranks compare 63 bits of what they have seen, in headers that they exchange at the end anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable, Protocol

from collective.coordination.agreement import ENDED, IDLE, Header
from collective.ops.graph import graph_state


class DealtInput(Protocol):
    """Compares the datasets of a graph that are dealt to the ranks."""

    def end_digest(self, session: Any) -> int:
        """Returns 63 bits of what this rank has seen of data that have ended."""

    def report(self, session: Any) -> Any:
        """Returns what this rank has seen in a session (None: in eager code), for JSON."""

    def judge(self, reports: Sequence[Any]) -> BaseException | None:
        """Returns the error that every rank raises for all ranks' reports; None: all is well."""


@dataclasses.dataclass
class GraphInput:
    """Records what is dealt of a graph's input.

    Attributes:
        dealt: compares the datasets that are dealt; None if none are.
        has_global_batches: whether an Estimator has dealt the batches of its input to the ranks.
    """

    dealt: DealtInput | None = None
    has_global_batches: bool = False


# What eager code deals.
EAGER_INPUT = GraphInput()


def end_digest(session: Any) -> int:
    """Returns 63 bits of what this rank has seen of data that have ended; 0 if none are dealt."""
    dealt = graph_state.of(session.graph, GraphInput).dealt
    return 0 if dealt is None else dealt.end_digest(session)


def difference(
    session: Any,
    headers: Sequence[Header],
    exchange: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> BaseException | None:
    """Returns the error that every rank whose data have ended raises; None if all is well.

    Args:
        session: the session.
        headers: those of ranks 0, 1, …; the same on every rank.
        exchange: exchanges texts; called on every rank or on none.
    """
    alike = {(h.session, h.signature) for h in headers}
    are_over = all(h.status in (IDLE, ENDED) for h in headers)
    if not are_over or len(alike) > 1 or len({h.id for h in headers}) == 1:
        return None
    dealt = graph_state.of(session.graph, GraphInput).dealt
    reports = exchange({"dealt": None if dealt is None else dealt.report(session)})
    if dealt is None or any(report["dealt"] is None for report in reports):
        return None
    return dealt.judge([report["dealt"] for report in reports])
