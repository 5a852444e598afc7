"""Lets ranks do something together outside of a run: saving, restoring, exporting.

Each step is a meeting: the ranks check that they do the same, then exchange payloads. If a rank
does something else (runs, leaves, has failed), all ranks find out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, TypeVar

from collective.coordination import coordinator, hash_seed
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.startup import STARTUP

T = TypeVar("T")


def exchange(session: Any, name: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's `payload`, in the order of the ranks.

    Args:
        session: the `tf.Session` whose ranks meet, or None outside of any.
        name: says what the ranks do; the same on every rank. It identifies this meeting, and
            appears in the error if ranks differ.
        payload: a value that JSON can hold.

    Raises:
        RankError: a rank does something else, has failed, or has left the session; on every rank.
    """
    if collectives.size() == 1:
        return [payload]
    with STARTUP.doing(getattr(session, "graph", None), f"waiting for the other ranks: {name}"):
        said = hash_seed.CHECK.added_to(payload)
        payloads = coordinator.instance().exchange(session, name, name, said)
    hash_seed.CHECK.compare(payloads)
    return payloads


def run_on_all_ranks(session: Any, name: str, step: Callable[[], T]) -> list[T]:
    """Calls `step` on every rank; an error on one rank is an error on all.

    Args:
        session: see `exchange`.
        name: see `exchange`.
        step: returns a value that JSON can hold.

    Returns:
        The results of `step` on the ranks, in their order.

    Raises:
        Exception: whatever `step` raised here, once the other ranks know.
        RankError: it raised elsewhere: the message has the rank and the error.
    """
    if collectives.size() == 1:
        return [step()]
    try:
        coordinator.instance().progress.works(name)
        payload: dict[str, Any] = {"result": step()}
    except Exception as error:
        failure = _described(error)
        try:
            coordinator.instance().exchange(
                session, name, f"{name}: failed with {failure}", {"error": failure}
            )
        except Exception as elsewhere:
            # A peer does something else, and now knows why.
            raise error from elsewhere
        raise
    payloads = exchange(session, name, payload)
    _raise_if_failed(name, payloads)
    return [each["result"] for each in payloads]


class Steps:
    """Runs steps with a meeting of the ranks after each.

    An error between two meetings, on any rank, is an error on all at the next.

        with Steps('the export of a SavedModel') as steps:
            ...                                         # may fail on some ranks
            payloads = steps.meet({'files': files})     # then this raises on the others

    A meeting within `run_on_all_ranks` would leave out a rank that failed before it. Here every
    rank comes to the same meetings until a rank brings an error; that meeting is the last for all.

    Args:
        name: says what the ranks do; the same on every rank; for messages.
    """

    def __init__(self, name: str):
        self._name, self._over = name, False

    def meet(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's `payload`, which JSON can hold, in the order of the ranks.

        Raises:
            RankError: a rank failed since the last meeting, or does something else.
        """
        try:
            payloads = exchange(None, self._name, payload)
            self._post_progress()
            _raise_if_failed(self._name, payloads)
        except BaseException:
            self._over = True
            raise
        return payloads

    def _post_progress(self) -> None:
        # Peers may wait meanwhile, and the launcher should know why.
        if collectives.size() > 1:
            coordinator.instance().progress.works(self._name)

    def __enter__(self) -> Steps:
        self._post_progress()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not self._over:
            self._over = True
            try:
                exchange(None, self._name, {"error": _described(error)})
            except Exception:
                # A peer is elsewhere, and now knows where this rank was.
                pass
        if collectives.size() > 1:
            coordinator.instance().progress.leaves()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_if_failed(name: str, payloads: Sequence[dict[str, Any]]) -> None:
    failures = [
        f"rank {r}: {payload['error']}" for r, payload in enumerate(payloads) if "error" in payload
    ]
    if failures:
        raise RankError(f"{name} failed on " + "; ".join(failures))
