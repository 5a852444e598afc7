"""Determines which records a batch has: a pure function of its number, for any number of ranks.

The files' row groups are put in a sequence: in the files' order, or in a different order each
epoch. Then `interleave` row groups at a time, a window, are read in parallel: the first
`batch_size` records of each, then the next `batch_size` of each, and so on. Batches are cut from
the records in this order. With interleave=3, row groups a, b, c of two batches each, and d, e, f
after them:

    window        | a b c          | d e f          |
    batches       | a0 b0 c0 a1 b1 c1 | d0 e0 f0 d1 … |
    number        | 0  1  2  3  4  5  | 6  7  8  9  … |

Rank r of N has the batches r, r + N, r + 2N, …: with N = 3 rank 0 reads a and d only. With
interleave=1 a step's batches come from the same row group, which every rank then reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Piece:
    """Describes records that follow each other in a row group's order.

    Attributes:
        group: the number of the row group among those of all files.
        first: the first record, counted in the order of this epoch.
        count: how many.
        epoch: whose order it follows.
    """

    group: int
    first: int
    count: int
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Describes a batch.

    Attributes:
        pieces: its records.
        window: the row groups of its windows, as (epoch, group).
        beyond: the number of the first batch that has no record of these windows.
    """

    pieces: tuple[Piece, ...]
    window: frozenset[tuple[int, int]]
    beyond: int


class RecordOrder:
    """Gives the records of each batch.

    Attributes:
        records, batches: how many an epoch has.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        interleave: int = 1,
        drop_remainder: bool = False,
    ):
        """Takes the number of rows of each row group, and the options of `parquet`."""
        self._rows = np.asarray(rows, np.int64)
        self._batch_size, self._interleave = batch_size, interleave
        self._seed, self.shuffles = seed, shuffle
        self.records = int(self._rows.sum())
        whole, rest = divmod(self.records, batch_size)
        self.batches = whole + (1 if rest and not drop_remainder else 0)
        # Batches of two epochs may be read in turn, at an epoch's end.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    @property
    def mixing(self) -> tuple[bool, int, int]:
        """Returns what the order depends on in addition to row groups and seed.

        Without `interleave` the size of a batch doesn't matter.
        """
        return self.shuffles, self._interleave, self._batch_size if self._interleave > 1 else 0

    @property
    def batches_of_a_group(self) -> int:
        """Returns how many batches the largest row group has records for."""
        return -(-int(self._rows.max(initial=0)) // self._batch_size)

    def batch(self, number: int) -> Batch:
        """Returns a batch, by its number among the batches of all epochs."""
        epoch, of_epoch = divmod(int(number), self.batches)
        first = of_epoch * self._batch_size
        last = min(first + self._batch_size, self.records)
        pieces, window, beyond = self.between(epoch, first, last)
        next_batch = epoch * self.batches + min(-(-beyond // self._batch_size), self.batches)
        return Batch(tuple(pieces), frozenset(window), next_batch)

    def between(
        self, epoch: int, first: int, last: int
    ) -> tuple[list[Piece], set[tuple[int, int]], int]:
        """Returns the records first to last, without it, of an epoch.

        Returns:
            The pieces; the row groups of their windows, as (epoch, group); and the first record
            beyond these windows.
        """
        groups, starts = self._epoch(epoch if self.shuffles else 0)
        pieces: list[Piece] = []
        window = int(np.searchsorted(starts, first, "right")) - 1
        of_windows: set[tuple[int, int]] = set()
        while first < last:
            members = groups[window * self._interleave : (window + 1) * self._interleave]
            start, end = int(starts[window]), int(starts[window + 1])
            for piece in self._pieces(members, first - start, min(last, end) - start):
                _append(pieces, dataclasses.replace(piece, epoch=epoch))
            of_windows.update((epoch, group) for group in members.tolist())
            first, window = end, window + 1
        return pieces, of_windows, first

    def permutation(self, epoch: int, group: int) -> np.ndarray | None:
        """Returns which row each record of a row group is; None: the rows in their order."""
        if not self.shuffles:
            return None
        return self._random(epoch, group + 1).permutation(int(self._rows[group]))

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row groups in this epoch's order, and the first record of each window."""
        groups = np.flatnonzero(self._rows)
        if self.shuffles:
            groups = self._random(epoch, 0).permutation(groups)
        ends = np.cumsum(self._rows[groups])
        last_of_windows = np.arange(self._interleave, len(groups), self._interleave) - 1
        return groups, np.concatenate([[0], ends[last_of_windows], ends[-1:]])

    def _random(self, *key: int) -> np.random.RandomState:
        # Its numbers don't change with NumPy's version, those of a Generator may.
        return np.random.RandomState([self._seed, *key])

    def _pieces(self, members: np.ndarray, first: int, last: int) -> Iterator[Piece]:
        """Yields the records first to last of a window."""
        rows, size = self._rows[members], self._batch_size
        turn = _last_turn(rows, size, first)
        position = int(np.minimum(rows, turn * size).sum())
        while position < last:
            for group, count in zip(members.tolist(), (rows - turn * size).tolist()):
                count = min(count, size)
                begin, end = max(first - position, 0), min(count, last - position)
                if begin < end:
                    yield Piece(group, turn * size + begin, end - begin)
                position += max(count, 0)
            turn += 1


def _last_turn(rows: np.ndarray, size: int, first: int) -> int:
    """Returns the last turn over a window's row groups that begins at record `first` or before."""
    low, high = 0, int(rows.max()) // size + 1
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(rows, middle * size).sum()) <= first:
            low = middle
        else:
            high = middle - 1
    return low


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Appends a piece, to the last one if it follows it in the same row group."""
    if pieces:
        last = pieces[-1]
        if last.group == piece.group and last.first + last.count == piece.first:
            pieces[-1] = dataclasses.replace(last, count=last.count + piece.count)
            return
    pieces.append(piece)
