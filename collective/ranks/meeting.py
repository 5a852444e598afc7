"""What ranks do together outside of a run: saving, restoring, exporting.

Every step of it is one meeting: the ranks see that they do the same, then tell each other what they
must. A rank that does something else instead (runs, leaves, has failed) is found out there, on all
of them.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from collective.errors import RankError
from collective.ops import communication
from collective.ranks import protocol

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
    if communication.size() == 1:
        return [mine]
    return protocol.of_process().meet(session, what, what, mine)


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
    if communication.size() == 1:
        return [step()]
    try:
        protocol.of_process().progress.works(what)
        mine: dict[str, Any] = {"result": step()}
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        try:
            protocol.of_process().meet(
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
