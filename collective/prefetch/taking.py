"""How a run of a script takes the batch whose keys were exchanged ahead, and what ranks do of what
they learned there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from collective.errors import RankError
from collective.launch.progress_board import Phase
from collective.prefetch.ahead import Ahead, Outcome
from collective.prefetch.cut import run_of_keys
from collective.ranks import runs
from collective.ranks.agreement import RUNNING, Header
from collective.ranks.shared import Membership, Run

if TYPE_CHECKING:
    from collective.ranks.protocol import Protocol


def take(
    protocol: Protocol,
    session: Any,
    member: Membership,
    run: Run,
    feeds: dict[Any, Any],
    doing: str,
) -> dict[str, Any]:
    """What `run` is fed with to take a batch whose keys are there. The next batch's are exchanged
    beside it.

    Args:
        feeds: the script's. If they are a batch, its keys are exchanged here and now, and what was
            taken ahead stays for later.

    Raises:
        Exception: what the ranks have learned about the batch: the data's end, an id outside its
            table.
    """
    cut = run.cut
    ahead = member.ahead = member.ahead or Ahead(session, member.number, protocol.channel, cut)
    protocol.progress.enters(Phase.AGREEING)
    ahead.join()
    given = {
        leaf: value
        for leaf, value in feeds.items()
        if not cut.feedable.isdisjoint(runs.tensor_names(leaf))
    }
    if not given:
        _learn(protocol, member, ahead.outcome())
    batch = ahead.staged
    if given or batch is None:
        keys = run_of_keys(cut, sorted(name for leaf in given for name in runs.tensor_names(leaf)))
        # A rank that has keys already, or exchanges none ahead, runs something else.
        protocol.settle(
            Header(RUNNING, member.number, keys.reach.signature),
            member,
            keys,
            f"{doing} (whose keys it exchanges first, with prefetch_keys)",
        )
        batch, outcome = ahead.exchange(keys, given, run.reach.trains)
        _learn(protocol, member, outcome)
    else:
        ahead.staged = None
    starts = not given and run.gate is not None
    if starts:
        ahead.start(run.reach.trains)
    return {cut.batch.name: batch, cut.releases.name: starts}


def restart(protocol: Protocol, member: Membership) -> None:
    """Forgets what was taken ahead of an iterator that is about to start anew."""
    if member.ahead is not None:
        protocol.progress.enters(Phase.AGREEING)
        with contextlib.suppress(tf.errors.OpError):
            _learn(protocol, member, member.ahead.drop())


def alone(members: Iterable[Membership], member: Membership) -> None:
    """Waits for the runs of keys of other sessions: those of two graphs may have collectives of the
    same names.
    """
    for other in members:
        if other is not member and other.ahead is not None:
            other.ahead.join()


def leave(protocol: Protocol, member: Membership) -> bool:
    """Takes part in the last run of keys to its end. Whether the session is over with it: there is
    no more to say there.
    """
    if member.ahead is not None:
        protocol.progress.enters(Phase.AGREEING)
        with contextlib.suppress(tf.errors.OpError, RankError):
            member.ahead.join()
            _learn(protocol, member, member.ahead.outcome())
    return member.over is not None or protocol.broken is not None


def _learn(protocol: Protocol, member: Membership, outcome: Outcome | None) -> None:
    """Raises what all ranks have learned in a run of keys, if it didn't end well."""
    if outcome is None:
        return
    error, judged = outcome.error, outcome.judged
    if outcome.headers is None:
        protocol.broken = f"{type(error).__name__}: {error}"
        raise error or RankError(protocol.broken)
    protocol.conclude(outcome.headers, judged, member)
    failed = error is not None and not isinstance(error, tf.errors.OutOfRangeError)
    if error is not None and (failed or isinstance(judged, tf.errors.OutOfRangeError)):
        raise error
    if judged is not None:
        raise judged
