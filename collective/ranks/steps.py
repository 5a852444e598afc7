"""Several things that ranks do one after another, with code in between that isn't ours."""

from __future__ import annotations

from typing import Any

from collective.errors import RankError
from collective.ops import communication
from collective.ranks import meeting, protocol


class Steps:
    """The ranks meet after each step; an error between two meetings, on any rank, is an error on
    all at the next.

        with Steps('the export of a SavedModel') as steps:
            ...                                         # may fail on some ranks
            told = steps.meet({'files': files})         # then this raises on the others

    A meeting within `meeting.together` would leave a rank behind that failed before it. Here every
    rank comes to the same meetings until one brings an error, which is the last for all.

    Args:
        what: they do: the same on every rank; for messages.
    """

    def __init__(self, what: str):
        self._what, self._over = what, False

    def meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `mine`, which JSON can hold, in the order of the ranks.

        Raises:
            RankError: a rank failed since the last meeting, or does something else.
        """
        try:
            told = meeting.exchange(None, self._what, mine)
            self._works()
            failures = [
                f"rank {r}: {text['error']}" for r, text in enumerate(told) if "error" in text
            ]
            if failures:
                raise RankError(f"{self._what} failed on " + "; ".join(failures))
        except BaseException:
            self._over = True
            raise
        return told

    def _works(self) -> None:
        """Peers may wait meanwhile, and the launcher shall know why."""
        if communication.size() > 1:
            protocol.of_process().progress.works(self._what)

    def __enter__(self) -> Steps:
        self._works()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not self._over:
            self._over = True
            try:
                meeting.exchange(None, self._what, {"error": f"{type(error).__name__}: {error}"})
            except Exception:  # a peer is elsewhere, and now knows where this one was
                pass
        if communication.size() > 1:
            protocol.of_process().progress.leaves()
