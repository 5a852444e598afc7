"""How ranks agree on a run before any of its collectives starts.

Every rank contributes one header. In the normal case the exchange of headers is an operation of the
run itself, and opens the gate. A rank that can't run (its data has ended, it leaves, it has failed)
contributes its header from outside. Headers are a few integers; only where they disagree do ranks
exchange texts too, to say what each of them did.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import RankError
from collective.ops import collectives
from collective.ops.gate import Check, Gate

RUNNING, INVALID, ENDED, LEFT, FAILED, IDLE, CLOSING = range(7)
# the check of a rank that is ENDED, and should have been IDLE
EVALUATING = 1
NAME = collectives.PREFIX + "agreement"
# the channel on which ranks agree on keys that are exchanged a batch ahead
AHEAD = ".ahead"
LOOKUPS = 1 << 24  # more than a check has
# status, session, signature, number of the check, id, clock
WIDTH = 6


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


@dataclasses.dataclass(frozen=True)
class Header:
    """What a rank says before a run.

    Attributes:
        status: RUNNING, INVALID (an id outside its table), ENDED (out of data), CLOSING (at the end
            of the session, whose hooks may still run), LEFT (closed the session), FAILED or IDLE
            (out of data in an evaluation, in which it answers whoever goes on).
        session: the number of the session, counted alike on every rank.
        signature: of the collectives that the run will use; 0 for CLOSING, LEFT and FAILED.
        check: which lookup's id failed: the number of its check in the graph times LOOKUPS plus its
            place in the check; of an ENDED rank EVALUATING if it only evaluates.
        id: that id, or what else is wrong of it.
        clock: microseconds since 1970.
    """

    status: int
    session: int
    signature: int = 0
    check: int = 0
    id: int = 0
    clock: int = dataclasses.field(default_factory=now)


class SideChannel:
    """Exchanges between the ranks' Python programs, outside any user's graph or session."""

    def __init__(self) -> None:
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            self._header = tf.placeholder(tf.int64, [1, WIDTH])
            self._headers = {
                channel: collectives.allgather(self._header, NAME + channel, 0)
                for channel in ("", AHEAD)
            }
            self._text = tf.placeholder(tf.uint8, [None])
            self._size = tf.placeholder(tf.int32, [1])
            self._texts = {
                channel: [
                    collectives.allgather(self._text, f"{collectives.PREFIX}texts{channel}", 0),
                    collectives.allgather(
                        self._size, f"{collectives.PREFIX}text_sizes{channel}", 0
                    ),
                ]
                for channel in ("", AHEAD)
            }
            self._session = tf.Session(config=tf.ConfigProto(device_count={"GPU": 0}))

    def headers(self, header: Header, channel: str = "") -> list[Header]:
        """Every rank's header; this one's is `header`. Meets both its like and the operation that a
        run carries.
        """
        row = np.array([dataclasses.astuple(header)], np.int64)
        return as_headers(self._session.run(self._headers[channel], {self._header: row}))

    def texts(self, mine: dict[str, Any], channel: str = "") -> list[dict[str, Any]]:
        """Every rank's description of itself."""
        data = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        joined, sizes = self._session.run(
            self._texts[channel], {self._text: data, self._size: [len(data)]}
        )
        parts = np.split(joined, np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes().decode()) for part in parts]


def as_headers(rows: np.ndarray) -> list[Header]:
    return [Header(*(int(x) for x in row)) for row in rows]


def agree(
    gate: Gate,
    checks: Mapping[int, Check],
    after: Sequence[tf.Operation],
    disagreed: Callable[[list[Header]], None],
    first: bool,
    opened: Callable[[], tf.Operation] = tf.no_op,
) -> tf.Tensor:
    """Exchanges headers within a run and opens `gate` if all ranks are well and run the same. A
    rank may be idle, if not all.

    Args:
        gate: whose `ticket` is fed (1, session, signature, clock).
        checks: the lookups whose ids must be valid, by their number in the graph.
        after: operations that must have succeeded first: the sources of the run's data.
        disagreed: called with the headers if the gate stays closed; the run then fails.
        first: whether the run passes no other gate before.
        opened: makes an operation that is to be executed when the gate is open.

    Returns:
        int64 scalar, rank 0's clock.
    """
    with (
        gate.zero.graph.as_default(),
        tf.init_scope(),
        tf.device("/cpu:0"),
        tf.name_scope("collective/agreement"),
    ):
        status, check, worst = _first_invalid(checks)
        header = tf.stack([status, gate.ticket[1], gate.ticket[2], check, worst, gate.ticket[3]])
        # Not tf.control_dependencies, which marks what is waited for, and TensorFlow warns of a
        # mark on what has run already.
        header.op._add_control_inputs(list(after))
        if first:
            header = gate.counted(header)
        headers = collectives.allgather(header[None], NAME + gate.channel, 0)
        running = tf.equal(headers[:, 0], RUNNING)
        well = tf.reduce_all(tf.logical_or(running, tf.equal(headers[:, 0], IDLE)))
        well = tf.logical_and(well, tf.reduce_all(tf.equal(headers[:, 1:3], headers[:1, 1:3])))

        def refuse(rows: np.ndarray) -> np.ndarray:
            disagreed(as_headers(rows))
            raise RuntimeError("the ranks do not agree on this run")

        def open_gate() -> tf.Tensor:
            with tf.control_dependencies([gate.open(), opened()]):
                return tf.identity(headers[0, 5])

        def keep_closed() -> tf.Tensor:
            return tf.reshape(tf.numpy_function(refuse, [headers], tf.int64), [])

        return tf.cond(well, open_gate, keep_closed)


def _first_invalid(checks: Mapping[int, Check]) -> list[tf.Tensor]:
    """(status, which lookup, id), each an int64 scalar."""
    if not checks:
        return [tf.constant(x, tf.int64) for x in (RUNNING, 0, 0)]
    bounds = tf.concat([check.bounds for check in checks.values()], 0)
    rows = tf.constant([rows for check in checks.values() for rows in check.rows], tf.int64)
    which = tf.constant(
        [number * LOOKUPS + i for number, check in checks.items() for i in range(len(check.rows))],
        tf.int64,
    )
    low, high = bounds[:, 0], bounds[:, 1]
    below, beyond = low < 0, tf.logical_and(high >= rows, high >= low)
    first = tf.argmax(tf.cast(tf.logical_or(below, beyond), tf.int32), output_type=tf.int64)
    worst = tf.where(below[first], low[first], high[first])
    invalid = tf.logical_or(below[first], beyond[first])
    return [
        tf.where(invalid, tf.constant(INVALID, tf.int64), tf.constant(RUNNING, tf.int64)),
        which[first],
        worst,
    ]


def verdict(
    headers: Sequence[Header], checks: Sequence[Check], texts: Callable[[], list[dict[str, Any]]]
) -> BaseException | None:
    """What every rank raises for these headers, alike; None if all are well.

    Args:
        headers: of ranks 0, 1, ….
        checks: the graph's, to name a table.
        texts: exchanges what the ranks did, {'doing': …, 'shared': […]}; called on every rank or on
            none.
    """
    if any(h.status == FAILED for h in headers):
        return RankError("A rank failed. " + _each(texts(), lambda text: text["doing"]))
    sessions = {h.session for h in headers}
    signatures = {h.signature for h in headers if h.status in (RUNNING, INVALID, ENDED, IDLE)}
    if len(sessions) > 1 or len(signatures) > 1:
        return RankError("The ranks do not run the same. " + _difference(texts()))
    running = any(h.status == RUNNING for h in headers)
    for r, h in enumerate(headers):
        if h.status == ENDED and h.check == EVALUATING and running:
            return RankError(
                f"Rank {r} is out of data in an evaluation, others are not, and it can not answer "
                f"them: the run has a lookup "
                "in tf.cond or tf.while_loop, or a gradient, or a collective of your own "
                "(hvd.allreduce), or its keys are "
                "exchanged ahead (prefetch_keys). Look up outside of control flow, in a graph of "
                "its own, or give every rank "
                "the same number of batches."
            )
        if h.status == INVALID:
            check, place = checks[h.check // LOOKUPS], h.check % LOOKUPS
            return tf.errors.InvalidArgumentError(
                None, None, f"{check.says(place, h.id)} (on rank {r})"
            )
    for status, what in (
        (ENDED, "is out of data"),
        (IDLE, "is out of data"),
        (CLOSING, "is at the end of the session"),
        (LEFT, "has left the session"),
    ):
        ranks = [str(r) for r, h in enumerate(headers) if h.status == status]
        if ranks:
            return tf.errors.OutOfRangeError(
                None, None, f"rank {', '.join(ranks)} {what}: the step ends on all ranks"
            )
    return None


def _each(texts: Sequence[dict[str, Any]], say: Callable[[dict[str, Any]], str]) -> str:
    return " ".join(f"Rank {r}: {say(text)}." for r, text in enumerate(texts))


def _difference(texts: Sequence[dict[str, Any]]) -> str:
    """What each rank runs, and the first collective that not all of them use."""
    used = [text["shared"] for text in texts]
    everywhere = set(used[0]).intersection(*used[1:]) if used else set()
    # what a user knows by its name comes first
    odd = sorted(
        {name for names in used for name in names} - everywhere,
        key=lambda name: (name.startswith(collectives.PREFIX), name),
    )
    first = ""
    if odd:
        who = [str(r) for r, names in enumerate(used) if odd[0] in names]
        first = f" First difference: '{odd[0]}' is used by rank {', '.join(who)} only."
    return (
        _each(texts, lambda text: text["doing"])
        + first
        + " Every rank must run the same fetches, save and restore, in the same order, on the "
        "same graph."
    )


def takes_all(doing: str, error: tf.errors.OutOfRangeError) -> RankError:
    """What is raised, in the place of an end of data, where nothing is about data: a session would
    swallow that.
    """
    return RankError(
        f"{doing[:1].upper()}{doing[1:]} takes all ranks, but {error.message}. Every "
        f"rank must do it before "
        "any of them leaves the session."
    )
