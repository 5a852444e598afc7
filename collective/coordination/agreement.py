"""Lets ranks agree on a run before any of its collectives starts.

Every rank contributes one header. In the normal case the exchange of headers is an operation of the
run itself, and opens the gate. A rank that can't run (its data have ended, it leaves, it has
failed) contributes its header from outside. Headers are a few integers. Only if they disagree do
ranks also exchange reports, in which each describes what it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import branch_choices
from collective.coordination.branch_choices import Choice
from collective.coordination.preemption import PREEMPTION
from collective.errors import RankError
from collective.ops.communication import carrier_choice, collectives
from collective.ops.communication.gate import TICKET, Check, Gate
from collective.ops.graph import device_scopes
from collective.ops.graph.update_settings import UPDATE

RUNNING, INVALID, ENDED, LEFT, FAILED, IDLE, CLOSING = range(7)
# The value of `Header.check` for a rank that is RUNNING and weighs nothing by records.
UNWEIGHED = -1
# The value of `Header.check` for a rank that is ENDED but should have been IDLE.
EVALUATING = 1
NAME = collectives.PREFIX + "agreement"
# The channel on which ranks agree on keys that are exchanged a batch ahead.
AHEAD = ".ahead"
# Numbers the values of all checks: no check has as many.
CHECK_STRIDE = 1 << 24
# The fields of a header: status, session, signature, check, id, clock, wish.
WIDTH = 7
_CHECK, _ID, _CLOCK, _WISH = 3, 4, 5, 6
# The names of parts of losses of which a rank has warned.
_warned: set[str] = set()
# Begins the name of an initialized variable in what ranks compare.
INITIALIZE = "initialize "


def now() -> int:
    """Returns microseconds since 1970."""
    return time.time_ns() // 1000


@dataclasses.dataclass(frozen=True)
class Header:
    """Describes the state of one rank before a run.

    Attributes:
        status: RUNNING, INVALID (an id outside its table), ENDED (out of data), CLOSING (at the end
            of the session, whose hooks may still run), LEFT (closed the session), FAILED or IDLE
            (out of data in an evaluation, in which it answers the ranks that continue).
        session: the number of the session, the same on every rank.
        signature: the signature of the collectives that the run will use; 0 for CLOSING, LEFT and
            FAILED.
        check: for INVALID the lookup with the failed id: the number of its check in the graph times
            CHECK_STRIDE, plus its position in the check; for ENDED EVALUATING if the rank only
            evaluates; for RUNNING how many records this rank's batch has, or UNWEIGHED.
        id: the invalid id, or another number for the check's message; for IDLE and ENDED a digest
            of the data that have ended (`collective.coordination.dealt_input`); for RUNNING in a
            session which branches it takes (`collective.coordination.branch_choices`).
        clock: microseconds since 1970.
        wish: the signal by which the rank was told to stop; 0 if it wasn't
            (`collective.coordination.preemption`).
    """

    status: int
    session: int
    signature: int = 0
    check: int = 0
    id: int = 0
    clock: int = dataclasses.field(default_factory=now)
    wish: int = dataclasses.field(default_factory=lambda: PREEMPTION.wish)


class SideChannel:
    """Lets the ranks' Python programs exchange data, outside of the user's graphs and sessions."""

    def __init__(self) -> None:
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            self._header = tf.placeholder(tf.int64, [1, WIDTH])
            self._headers = {
                channel: gathered(self._header, NAME + channel) for channel in ("", AHEAD)
            }
            self._text = tf.placeholder(tf.uint8, [None])
            self._size = tf.placeholder(tf.int32, [1])
            self._texts = {
                channel: [
                    gathered(self._text, f"{collectives.PREFIX}texts{channel}"),
                    gathered(self._size, f"{collectives.PREFIX}text_sizes{channel}"),
                ]
                for channel in ("", AHEAD)
            }
            self._session = tf.Session(config=tf.ConfigProto(device_count={"GPU": 0}))

    def headers(self, header: Header, channel: str = "") -> list[Header]:
        """Returns the headers of all ranks; this rank's is `header`.

        The peers may call this, too, or execute the exchange that a run carries: the collective's
        name is the same.
        """
        row = {self._header: as_rows(header)}
        return as_headers(self._session.run(self._headers[channel], row))

    def texts(self, text: dict[str, Any], channel: str = "") -> list[dict[str, Any]]:
        """Returns the `text` of all ranks; JSON can hold it."""
        data = np.frombuffer(json.dumps(text).encode(), np.uint8)
        joined, sizes = self._session.run(
            self._texts[channel], {self._text: data, self._size: [len(data)]}
        )
        parts = np.split(joined, np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes().decode()) for part in parts]


def gathered(x: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the ranks' `x`, stacked.

    Some ranks may send their headers from outside of the run or of any scope, so all headers use
    the same carrier.
    """
    return collectives.allgather(x, name, 0, carrier_choice.of_agreement())


def as_rows(header: Header) -> np.ndarray:
    """Returns a header as an exchange's row [1, WIDTH]."""
    return np.array([dataclasses.astuple(header)], np.int64)


def as_headers(rows: np.ndarray) -> list[Header]:
    """Returns the headers from an exchange's rows."""
    return [Header(*(int(x) for x in row)) for row in rows]


def ticket(session: int, signature: int) -> list[int]:
    """Returns the feed of a run's gates: the part of its header that is known before.

    Args:
        session: the number of the session.
        signature: the run's.
    """
    return [1, session, signature, now(), PREEMPTION.wish]


def clock_of(rows: np.ndarray) -> int:
    """Returns rank 0's clock, in microseconds since 1970, from the rows of an exchange."""
    return int(rows[0, _CLOCK])


def wishes_of(rows: np.ndarray) -> list[int]:
    """Returns each rank's wish, from the rows of an exchange."""
    wishes: list[int] = rows[:, _WISH].tolist()
    return wishes


def records_of(rows: np.ndarray) -> list[int]:
    """Returns how many records each rank's batch has, or UNWEIGHED, from the rows of an exchange.

    Only where all ranks are RUNNING.
    """
    records: list[int] = rows[:, _CHECK].tolist()
    return records


def warn_of_unweighed(parts: Sequence[str], records: Sequence[int]) -> None:
    """Warns, once, of parts of a step's loss that count alike though ranks' batches differ in size.

    Args:
        parts: their names.
        records: how many records each rank's batch has, or UNWEIGHED.
    """
    differ = len(set(records)) > 1 and UNWEIGHED not in records
    new = [part for part in parts if differ and part not in _warned]
    if new and not collectives.rank():
        tf.logging.warning(
            f"In this step the ranks have {', '.join(map(str, records))} records, but in the loss "
            f"{', '.join(new)} counts alike on all ranks: it isn't seen to be a mean over the "
            "batch. The gradient isn't that of the whole batch. Make the loss of tf.reduce_mean "
            "over the records and factors of it, or let all ranks' batches have one size."
        )
    _warned.update(new)


def agree(
    gate: Gate,
    checks: Mapping[int, Check],
    prerequisites: Sequence[tf.Operation],
    on_disagreement: Callable[[list[Header]], None],
    first: bool,
    when_agreed: Callable[[], tf.Operation] = tf.no_op,
    choices: Sequence[Choice] = (),
    records: tf.Tensor | None = None,
) -> tf.Tensor:
    """Exchanges headers within a run, and opens `gate` if all ranks run the same fetches.

    Some ranks may be idle while others run.

    Args:
        gate: its `ticket` is fed with `ticket(session, signature)`.
        checks: the lookups whose ids must be valid, by their numbers in the graph.
        prerequisites: operations that must have succeeded first: the sources of the run's data.
        on_disagreement: called with the headers if the gate stays closed; the run then fails.
        first: whether the run passes no other gate before.
        when_agreed: makes an operation that is executed before the gate opens: if a run fails after
            its gate, TensorFlow cancels operations that wait for a queue.
        choices: branches that all ranks must take alike.
        records: `gate.records`, if the run needs `gate.weight`.

    Returns:
        [N, WIDTH] int64, the headers of all ranks.
    """
    with (
        gate.zero.graph.as_default(),
        tf.init_scope(),
        device_scopes.on_host(),
        tf.name_scope("collective/agreement"),
    ):
        chosen = branch_choices.chosen(choices)
        header = _header(checks, gate.ticket, records, chosen)
        # Not tf.control_dependencies, which marks the operations waited for: TensorFlow warns of a
        # mark on one that has already run.
        header.op._add_control_inputs(list(prerequisites))
        if first:
            header = gate.counted(header)
        headers = gathered(header, NAME + gate.channel)
        status, session, signature, of_ranks, *_ = tf.unstack(headers, WIDTH, axis=1)
        _, own_session, own_signature, *_ = tf.unstack(gate.ticket, TICKET)
        agreed = tf.logical_or(tf.equal(status, RUNNING), tf.equal(status, IDLE))
        agreed = tf.logical_and(agreed, tf.equal(session, own_session))
        agreed = tf.logical_and(agreed, tf.equal(signature, own_signature))
        if chosen is not None:
            agreed = tf.logical_and(agreed, tf.equal(headers[:, _ID], chosen))
        agreed = tf.reduce_all(agreed)

        def refuse(rows: np.ndarray) -> np.ndarray:
            on_disagreement(as_headers(rows))
            raise RuntimeError("the ranks do not agree on this run")

        # tf.cond would build a function for each side.
        closed_headers, open_headers = _switch(headers, agreed)
        refused = tf.numpy_function(refuse, [closed_headers], tf.int64)
        with tf.control_dependencies([open_headers]):
            agreed_on = when_agreed()
        with tf.control_dependencies([open_headers, agreed_on]):
            opening = gate.open(None if records is None else _weight(records, of_ranks))
        with tf.control_dependencies([opening]):
            opened = tf.identity(open_headers)
        return tf.raw_ops.Merge(inputs=[refused, opened])[0]


def _switch(x: tf.Tensor, side: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (x if not `side`, x if `side`): operations that need the other aren't executed."""
    out = tf.raw_ops.Switch(data=x, pred=side)
    return tf.identity(out.output_false), tf.identity(out.output_true)


def _weight(own: tf.Tensor, of_ranks: tf.Tensor) -> tf.Tensor:
    """Returns N times the share of this rank's records, float64; 0 if nobody has any.

    It is 1 if a rank says of none how many it has: all weigh, or none does.
    """
    all_records = tf.cast(tf.reduce_sum(of_ranks), tf.float64)
    times = tf.size(of_ranks, out_type=tf.int64) * own
    share = tf.div_no_nan(tf.cast(times, tf.float64), all_records)
    return tf.where(tf.reduce_min(of_ranks) < 0, tf.ones_like(share), share)


def _header(
    checks: Mapping[int, Check],
    ticket: tf.Tensor,
    records: tf.Tensor | None,
    chosen: tf.Tensor | None,
) -> tf.Tensor:
    """Returns this rank's header as a row [1, WIDTH], with the first invalid value of `checks`."""
    said = tf.constant(UNWEIGHED, tf.int64) if records is None else records
    choice = tf.constant(0, tf.int64) if chosen is None else chosen
    state = tf.stack([tf.constant(RUNNING, tf.int64), said, choice])
    if checks:
        bounds = tf.concat([check.bounds for check in checks.values()], 0)
        rows = [rows for check in checks.values() for rows in check.rows]
        places = [
            number * CHECK_STRIDE + i
            for number, check in checks.items()
            for i in range(len(check.rows))
        ]
        low, high = tf.unstack(bounds, 2, axis=1)
        below = low < 0
        beyond = tf.logical_and(high >= tf.constant(rows, tf.int64), high >= low)
        wrong = tf.cast(tf.logical_or(below, beyond), tf.int64)
        # The status of a wrong value is INVALID, which is 1; the last state is right.
        values = tf.stack([wrong, tf.constant(places, tf.int64), tf.where(below, low, high)], 1)
        first = tf.argmax(tf.concat([wrong, [1]], 0), output_type=tf.int64)
        state = tf.gather(tf.concat([values, state[None]], 0), first)
    # status, check, id; 1, session, signature, clock, wish
    return tf.gather(tf.concat([state, ticket], 0), [[0, 4, 5, 1, 2, 6, 7]])


def verdict(
    headers: Sequence[Header],
    checks: Sequence[Check],
    exchange_reports: Callable[[], list[dict[str, Any]]],
    needs_all_data: str = "",
    shared: Iterable[str] = (),
) -> BaseException | None:
    """Returns the error that every rank raises for these headers; None if all are well.

    The error is the same on every rank. launch/output/stderr_lines.py knows the words by which it
    tells of a rank that has failed, or left.

    Args:
        headers: those of ranks 0, 1, ….
        checks: the graph's, to name a table.
        exchange_reports: returns each rank's `report`; called on every rank or on none.
        needs_all_data: why training must not end before all ranks are out of data; '' if it may.
        shared: the names of what all ranks must run.
    """
    if any(h.status == FAILED for h in headers):
        return RankError("A rank failed. " + _descriptions(exchange_reports()))
    sessions = {h.session for h in headers}
    signatures = {h.signature for h in headers if h.status in (RUNNING, INVALID, ENDED, IDLE)}
    if len(sessions) > 1 or len(signatures) > 1:
        return RankError("The ranks do not run the same. " + _difference(exchange_reports()))
    running = any(h.status == RUNNING for h in headers)
    for r, h in enumerate(headers):
        if h.status == ENDED and h.check == EVALUATING and running:
            return RankError(
                f"Rank {r} is out of data in an evaluation, others are not, and it can not answer "
                "them: the run has a lookup in tf.cond or tf.while_loop, or a gradient, or a "
                "collective of your own (hvd.allreduce, all_gather), or its keys are exchanged "
                "ahead (prefetch_keys), or Keras evaluates a table's embeddings_regularizer. Look "
                "up outside of control flow, in a graph of its own, or give every rank the same "
                "number of batches."
            )
        if h.status == INVALID:
            check, place = checks[h.check // CHECK_STRIDE], h.check % CHECK_STRIDE
            return tf.errors.InvalidArgumentError(
                None, None, f"{check.says(place, h.id)} (on rank {r})"
            )
    for status, state in (
        (ENDED, "is out of data"),
        (IDLE, "is out of data"),
        (CLOSING, "is at the end of the session"),
        (LEFT, "has left the session"),
    ):
        ranks = [str(r) for r, h in enumerate(headers) if h.status == status]
        if ranks and status == ENDED and running and needs_all_data:
            return RankError(f"Rank {', '.join(ranks)} {state}, others are not: {needs_all_data}.")
        if ranks:
            return tf.errors.OutOfRangeError(
                None, None, f"rank {', '.join(ranks)} {state}: the step ends on all ranks"
            )
    taken = [h.id for h in headers if h.status == RUNNING]
    if any(each != taken[0] for each in taken) and branch_choices.are_among(shared):
        return _branches_differ(taken, exchange_reports())
    return None


# Why this rank does what it does, outermost first.
_reasons: list[str] = []


@contextlib.contextmanager
def because(reason: str) -> Iterator[None]:
    """Inside, reports give a reason for what this rank does, for messages."""
    _reasons.append(reason)
    try:
        yield
    finally:
        _reasons.remove(reason)


LOST_EARLY = (
    "Where that rank ended without an error, it made fewer calls than this one. All ranks make the "
    "same: as many steps of a loop (give each as many batches), and each evaluation and each save, "
    "of which rank 0 writes the files"
)


def explained(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error that also says why a peer may have ended before this rank, if one has."""
    if f"which has ended, while '{NAME}" not in error.message or LOST_EARLY in error.message:
        return error
    message = f"{error.message}\n{LOST_EARLY}."
    return type(error)(error.node_def, error.op, message)


def report(description: str, shared: Iterable[str]) -> dict[str, Any]:
    """Returns what a rank tells its peers if headers disagree.

    Args:
        description: says what the rank does, for messages.
        shared: the names of what all ranks must run (`RunFootprint.shared`).
    """
    said = description
    for reason in _reasons:
        said = reason if reason.startswith(description) else f"{said} ({reason})"
    return {"description": said, "shared": list(shared)}


def _branches_differ(taken: Sequence[int], reports: Sequence[dict[str, Any]]) -> RankError:
    """Returns the error of ranks of which some would wait in a branch for ever.

    Args:
        taken: what each rank has chosen.
        reports: theirs.
    """
    names = branch_choices.differing(taken, reports[0]["shared"])
    return RankError(
        "The ranks do not take the same branches of tf.cond or tf.case: they differ at "
        f"{', '.join(map(repr, names))}, in which they exchange something, such as the rows of a "
        "lookup. " + _descriptions(reports) + " Let it depend on what is the same on all ranks, or "
        "look up outside of the branch."
    )


def _descriptions(reports: Sequence[dict[str, Any]]) -> str:
    return " ".join(f"Rank {r}: {report['description']}." for r, report in enumerate(reports))


def _difference(reports: Sequence[dict[str, Any]]) -> str:
    """Describes what each rank runs, and names the first collective that not all of them use."""
    used = [report["shared"] for report in reports]
    used_by_all = set(used[0]).intersection(*used[1:]) if used else set()
    # Names that the user knows come first, and 'variable:0' before its slots, 'variable/slot:0'.
    different = sorted(
        {name for names in used for name in names} - used_by_all,
        key=lambda name: (name.startswith(collectives.PREFIX), name.replace(":", " ")),
    )
    first = ""
    advice = (
        " Every rank must run the same fetches, save and restore, in the same order, on the same "
        "graph. What one rank alone writes or prints (a summary, for one), all ranks must fetch: "
        "put `if strategy.rank() == 0` around the writing only."
    )
    if any(report["description"].startswith("calls the function") for report in reports):
        advice = (
            " Every rank must call the same functions in the same order. A rank that has caught an "
            "error of its own (of its data, of a callback) has made a call less than the others: "
            "let all ranks leave the loop then."
        )
    if different:
        ranks = [str(r) for r, names in enumerate(used) if different[0] in names]
        first = f" First difference: '{different[0]}' is used by rank {', '.join(ranks)} only."
        if different[0].startswith(INITIALIZE):
            advice = (
                " Every rank must make and initialize the same variables: remove conditions such "
                f"as `if rank == {ranks[0]}:` around this one."
            )
        if different[0].startswith(UPDATE):
            by_rank = (
                f"rank {r}: {', '.join(sorted(n for n in names if n.startswith(UPDATE)))}"
                for r, names in enumerate(used)
            )
            advice = (
                f" By rank, they are {'; '.join(by_rank)}. Give the optimizers of all ranks "
                "the same settings."
            )
    return _descriptions(reports) + first + _other_order(used) + advice


def _other_order(used: Sequence[Sequence[str]]) -> str:
    """Explains that ranks have the same lookups in a different order; '' if that isn't the case.

    Args:
        used: by rank, names of what it runs; that of a lookup is its place, ': ', and what it is.
    """
    by_place = [dict(name.split(": ", 1) for name in names if ": " in name) for names in used]
    places = sorted(by_place[0]) if by_place else []
    listed = [[lookups.get(place) for place in places] for lookups in by_place]
    is_alike = all(
        lookups.keys() == by_place[0].keys()
        and sorted(lookups.values()) == sorted(by_place[0].values())
        for lookups in by_place
    )
    first = next((at_place for at_place in zip(*listed) if len(set(at_place)) > 1), None)
    if first is None or not is_alike:
        return ""
    ranks: dict[str | None, list[str]] = {}
    for r, lookup in enumerate(first):
        ranks.setdefault(lookup, []).append(str(r))
    first_on = ", ".join(f'"{lookup}" on rank {", ".join(r)}' for lookup, r in ranks.items())
    return (
        f" All ranks have the same lookups, in a different order: first comes {first_on}. "
        "Probably the code iterates over a set, or a dict or list made of one, whose order differs "
        "between processes: iterate in an order that all ranks share, as in "
        "`for name in sorted(names)`."
    )


def needs_all_ranks(description: str, error: tf.errors.OutOfRangeError) -> RankError:
    """Returns the error to raise instead of an end of data if the operation takes no data.

    A monitored session would treat an end of data as its own end, silently.
    """
    return RankError(
        f"{description[:1].upper()}{description[1:]} takes all ranks, but {error.message}. Every "
        "rank must do it before any of them leaves the session."
    )
