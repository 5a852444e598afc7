"""Checks whether ranks deal from the same elements in the same order, and reports what differs.

Each rank follows a dataset that is dealt (`order_digest`). Ranks compare at the highest number of
elements that all of them have seen, because after a difference everything stays different.

Not every difference is one of order: random numbers that each rank draws, or the last bits of
floats, can differ in the same records. If one tensor has the same records in the same order on all
ranks, the other tensors of its element only cause a warning. The probability that it is the same by
chance is below exp(-n) after n changes of its value from one record to the next.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.dealt_input import EAGER_INPUT, GraphInput
from collective.data import source_digest
from collective.data.order_digest import (
    Mark,
    OrderDigest,
    Reading,
    with_digest,
    with_digest_of_arrays,
)
from collective.data.source_digest import SourceDigest
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.ops.graph import graph_state, graphs

ENOUGH_CHANGES = 16
ENOUGH_AT_END = 6  # of data so small that there are no more to come
FEWEST_CHANGES = 2  # less is a constant, which has any order


@dataclasses.dataclass(frozen=True)
class Dealer:
    """Names what deals a dataset, for messages.

    Attributes:
        dataset: the dataset, for one.
        element: what is dealt.
        way_out: what else the user can do.
    """

    dataset: str
    element: str
    way_out: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """Describes how a dataset differs between ranks.

    Attributes:
        text: says what differs.
        tensors: the tensors that differ in the same records; none if records differ.
    """

    text: str
    tensors: tuple[str, ...] = ()


@dataclasses.dataclass
class DealtInput:
    """Records the datasets of a graph, or of eager code, that are dealt.

    It is a `coordination.dealt_input.DealtInput`.

    Attributes:
        digests: the digest and the dealer of each dataset, in the script's order.
        numbers: of what is dealt, for names.
        warned: the digests of datasets with a warning that tensors differ.
        forgets: whether a dataset that differs is compared no more, once all ranks know.
    """

    digests: list[tuple[Dealer, OrderDigest | SourceDigest]] = dataclasses.field(
        default_factory=list
    )
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    warned: list[OrderDigest | SourceDigest] = dataclasses.field(default_factory=list)
    forgets: bool = False

    def report(self, session: Any) -> list[Reading]:
        """Returns what this rank has seen in `session`, for `judge`; it is for JSON, too.

        Args:
            session: None: in eager code.
        """
        return [digest.read(session) for _, digest in self.digests]

    def end_digest(self, session: Any) -> int:
        """Returns 63 bits of what this rank has seen of passes that have ended."""
        ends = [reading.end for reading in self.report(session)]
        digest = hashlib.blake2b(repr(ends).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def judge(self, reports: Sequence[Any]) -> BaseException | None:
        """Returns the error that every rank raises for the ranks' reports; None if they agree.

        Rank 0 warns of tensors that differ in the same records.

        Args:
            reports: of `report`, by rank, maybe by way of JSON.
        """
        if len({len(readings) for readings in reports}) > 1:
            return None  # other datasets: the runs themselves are compared elsewhere
        for i, (dealer, digest) in enumerate(self.digests):
            readings = [Reading.of_json(report[i]) for report in reports]
            found = difference(digest.tensors, dealer.element, readings)
            if found is None:
                continue
            if not found.tensors:
                if self.forgets:
                    del self.digests[i]
                return RankError(_error_text(dealer, found.text))
            if not any(digest is other for other in self.warned):
                self.warned.append(digest)
                if collectives.rank() == 0:
                    warnings.warn(f"{dealer.dataset}: {found.text}", stacklevel=2)
        return None


def input_of(graph: tf.Graph) -> DealtInput | None:
    """Returns what is known of the datasets that are dealt in `graph`; None if there are none."""
    known = graph_state.of(graph, DealtInput)
    return known if known.digests else None


def followed(dataset: Any, dealer: Dealer, by_record: bool) -> Any:
    """Returns `dataset`, followed in each session of the graph, or in eager code.

    Args:
        dataset: the dataset that is about to be dealt.
        dealer: says what deals it.
        by_record: see `order_digest.with_digest`.
    """
    graph = tf.get_default_graph()
    if graphs.is_function(graph):
        return dataset
    is_eager = tf.executing_eagerly()
    known = _EAGER if is_eager else graph_state.of(graph, DealtInput)
    table = f"collective/order_digest/{next(known.numbers)}"
    digests: list[Any] = []
    if by_record or not source_digest.has_cheap_elements(dataset):
        dataset, digest = with_digest(dataset, table, by_record)
        digests = [digest] if digest is not None else []
    else:
        sources, unknown = source_digest.of_sources(dataset)
        digests += sources
        if unknown:
            dataset, digest = with_digest_of_arrays(dataset, table, unknown)
            digests.append(digest)
    if digests:
        known.digests += [(dealer, digest) for digest in digests]
        (EAGER_INPUT if is_eager else graph_state.of(graph, GraphInput)).dealt = known
    return dataset


# A script may go on with another dataset.
_EAGER = DealtInput(forgets=True)


def note_source(dealer: Dealer, digest: int, elements: int) -> None:
    """Notes a dataset whose order follows from what it is made of, for the graph being built.

    Args:
        dealer: says what deals it.
        digest: 63 bits of what it is made of, its order included.
        elements: how many it has.
    """
    graph = tf.get_default_graph()
    if collectives.size() == 1 or graphs.is_eager() or graphs.is_function(graph):
        return
    known = graph_state.of(graph, DealtInput)
    mark = Mark(1, elements, elements, [digest], [digest], [elements])
    known.digests.append((dealer, SourceDigest(("files",), Reading([mark], mark))))
    graph_state.of(graph, GraphInput).dealt = known


def difference(
    tensors: Sequence[str], element: str, readings: Sequence[Reading]
) -> Difference | None:
    """Returns how a dataset differs between ranks; None if no difference is known yet.

    Args:
        tensors: the names of its tensors.
        element: names what is dealt.
        readings: by rank.
    """
    counts = _other_counts(element, readings)
    if counts is not None:
        return Difference(counts)
    at_places = [_by_place(reading) for reading in readings]
    common = sorted(set(at_places[0]).intersection(*at_places[1:]))
    different = [place for place in common if len({repr(marks[place]) for marks in at_places}) > 1]
    if not different:
        return None
    latest = [marks[common[-1]] for marks in at_places]
    equal = [len({mark.order[t] for mark in latest}) == 1 for t in range(len(tensors))]
    changes = [latest[0].changes[t] if equal[t] else 0 for t in range(len(tensors))]
    is_end = all(reading.end and reading.end.place == common[-1] for reading in readings)
    if max(changes) >= (ENOUGH_AT_END if is_end else ENOUGH_CHANGES):
        kept = tensors[changes.index(max(changes))]
        return _other_tensors([name for name, same in zip(tensors, equal) if not same], kept)
    if max(changes) >= FEWEST_CHANGES and not is_end:
        return None  # more records will tell
    first = [marks[different[0]] for marks in at_places]
    return Difference(_other_records(element, first, latest))


def _by_place(reading: Reading) -> dict[tuple[int, int], Mark]:
    marks = [*reading.marks, *([reading.end] if reading.end else [])]
    return {mark.place: mark for mark in marks}


def _other_counts(element: str, readings: Sequence[Reading]) -> str | None:
    """Says so if a pass has ended that is longer on another rank."""
    for number in sorted({reading.end.number for reading in readings if reading.end}):
        ends = [
            reading.end if reading.end and reading.end.number == number else None
            for reading in readings
        ]
        shortest = min(end.elements for end in ends if end)
        seen = [
            max((mark.elements for mark in reading.marks if mark.number == number), default=0)
            for reading in readings
        ]
        if any(end.elements > shortest for end in ends if end) or max(seen) > shortest:
            counts = [
                f"{end.elements} ({end.records} records)" if end else f"more than {shortest}"
                for end, elements in zip(ends, seen)
                if end or elements > shortest
            ]
            ranks = [r for r, (end, n) in enumerate(zip(ends, seen)) if end or n > shortest]
            return f"it has another number of {element} on each: {_by_value(counts, ranks)}"
    return None


def _other_records(element: str, first: Sequence[Mark], latest: Sequence[Mark]) -> str:
    """Says how ranks differ in elements of the same number.

    Args:
        element: names what is dealt.
        first: by rank, where they were seen to differ first.
        latest: by rank, what all of them have seen last.
    """
    ranks = list(range(len(first)))
    groups = _by_value([repr(mark) for mark in first], ranks, shown=False)
    what = "other records"
    if len({repr(mark.content) for mark in latest}) == 1:
        what = "the same records in another order"
    elif len({mark.records for mark in first}) > 1:
        what = "other numbers of records"
    return f"it has {what} on {groups}, among the first {first[0].elements} {element}"


def _other_tensors(names: Sequence[str], kept: str) -> Difference:
    listed = ", ".join(f"'{name}'" for name in names)
    return Difference(
        f"the values of {listed} differ between ranks, while '{kept}' has the same ones in the "
        "same order. So each record is used once, but with the values of the rank that takes it. "
        "That is well for random numbers, and for the last bits of computed ones. But if the "
        f"records are shuffled by each rank for itself, and '{kept}' is not a part of them (a "
        "number that counts them), some are used twice and others never. "
        "warnings.filterwarnings('ignore', '.*differ between ranks, while') silences this.",
        tuple(names),
    )


def _by_value(values: Sequence[str], ranks: Sequence[int], shown: bool = True) -> str:
    """Lists the ranks that have the same value: '12 on rank 0, 2 | 10 on rank 1'."""
    groups = []
    for value in dict.fromkeys(values):
        of_value = ", ".join(str(rank) for rank, v in zip(ranks, values) if v == value)
        groups.append(f"{value} on rank {of_value}" if shown else f"rank {of_value}")
    return " | ".join(groups)


def _error_text(dealer: Dealer, found: str) -> str:
    return (
        f"{dealer.dataset} is not the same on all ranks: {found}. Each rank takes 1 of "
        f"{collectives.size()} {dealer.element}, so some records are used twice and others never. "
        "Sort what os.listdir, glob or a set gives; seed the script's own generators "
        "(np.random.default_rng(7)); have the same files on all hosts. "
        f"{dealer.way_out}"
    )
