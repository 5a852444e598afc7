"""What ranks do together outside of a run: saving, restoring, exporting.

Every step of it is one meeting: the ranks see that they do the same, then tell each other what they
must. A rank that does something else instead (runs, leaves, has failed) is found out there, on all
of them.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from collective.coordination import coordinator
from collective.errors import RankError
from collective.ops import collectives

T = TypeVar("T")


def exchange(session: Any, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's `mine`, in the order of the ranks.

    Args:
        session: the `tf.Session` whose ranks meet, or None outside of any.
        what: the same on every rank: it tells this meeting from others, and stands in the error
            where it differs.
        mine: what JSON can hold.

    Raises:
        RankError: a rank does something else, has failed, or has left the session; on every rank.
    """
    if collectives.size() == 1:
        return [mine]
    return coordinator.of_process().meet(session, what, what, mine)


def together(session: Any, what: str, step: Callable[[], T]) -> list[T]:
    """What `step` returns on every rank, in the order of the ranks; an error on one is an error on
    all.

    Args:
        session: see `exchange`.
        what: see `exchange`.
        step: carried out on this rank; returns what JSON can hold.

    Raises:
        Exception: whatever `step` raised here, once the other ranks know.
        RankError: it raised elsewhere: the message has the rank and the error.
    """
    if collectives.size() == 1:
        return [step()]
    try:
        coordinator.of_process().progress.works(what)
        mine: dict[str, Any] = {"result": step()}
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        try:
            coordinator.of_process().meet(
                session, what, f"{what}: failed with {failed}", {"error": failed}
            )
        except Exception as elsewhere:  # a peer does something else, and now knows why
            raise error from elsewhere
        raise
    told = exchange(session, what, mine)
    failures = [f"rank {r}: {text['error']}" for r, text in enumerate(told) if "error" in text]
    if failures:
        raise RankError(f"{what} failed on " + "; ".join(failures))
    return [text["result"] for text in told]


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
            told = exchange(None, self._what, mine)
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
        if collectives.size() > 1:
            coordinator.of_process().progress.works(self._what)

    def __enter__(self) -> Steps:
        self._works()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not self._over:
            self._over = True
            try:
                exchange(None, self._what, {"error": f"{type(error).__name__}: {error}"})
            except Exception:  # a peer is elsewhere, and now knows where this one was
                pass
        if collectives.size() > 1:
            coordinator.of_process().progress.leaves()
