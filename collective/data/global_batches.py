"""Determines which records of a global batch a rank gets; batches may span the ends of epochs."""

from __future__ import annotations

import dataclasses

import numpy as np

from collective.data.record_order import Batch, Piece, RecordOrder


@dataclasses.dataclass(frozen=True)
class GlobalBatches:
    """Divides the records of all epochs into global batches, and these into parts for the ranks.

        epochs      |     0     |     1     |     2     |
        batches     | 0   | 1   | 2   | 3   | 4   | 5   |    of B records; the last may have fewer
        parts       |0 1 2|0 1 2|                            of ranks 0, 1 and 2

    Attributes:
        records: how many records an epoch has.
        epochs: how many there are; None: no end.
        batch_size: B.
        drop_remainder: whether the last batch is left out if it has fewer records.
        rank, ranks: whose parts these are.
    """

    records: int
    epochs: int | None
    batch_size: int
    drop_remainder: bool
    rank: int
    ranks: int

    @property
    def end(self) -> int | None:
        """Returns the number after the last batch of which this rank has records; None: no end."""
        if self.epochs is None:
            return None
        whole, rest = divmod(self.records * self.epochs, self.batch_size)
        if self.drop_remainder or not _part(rest, self.rank, self.ranks)[1]:
            return whole
        return whole + 1

    def part(self, number: int) -> list[tuple[int, int, int]]:
        """Returns this rank's records of a global batch, as (epoch, first, last) without the last.

        They follow each other, in an epoch or over its end.
        """
        first = int(number) * self.batch_size
        size = self.batch_size
        if self.epochs is not None:
            size = min(size, self.records * self.epochs - first)
        offset, count = _part(size, self.rank, self.ranks)
        first += offset
        ranges = []
        while count > 0:
            epoch, in_epoch = divmod(first, self.records)
            length = min(count, self.records - in_epoch)
            ranges.append((epoch, in_epoch, in_epoch + length))
            first, count = first + length, count - length
        return ranges


@dataclasses.dataclass(frozen=True)
class PartOrder:
    """Gives the pieces of row groups of a rank's part of each global batch (a `BatchOrder`).

    Attributes:
        order: of the records of an epoch.
        batches: the global batches.
    """

    order: RecordOrder
    batches: GlobalBatches

    @property
    def shuffles(self) -> bool:
        return self.order.shuffles

    def batch(self, number: int) -> Batch:
        """Returns this rank's part of a global batch."""
        pieces: list[Piece] = []
        window: set[tuple[int, int]] = set()
        beyond = 0
        for epoch, first, last in self.batches.part(number):
            more, of_windows, beyond_windows = self.order.between(epoch, first, last)
            pieces += more
            window |= of_windows
            beyond = epoch * self.batches.records + beyond_windows
        return Batch(tuple(pieces), frozenset(window), -(-beyond // self.batches.batch_size))

    def permutation(self, epoch: int, group: int) -> np.ndarray | None:
        return self.order.permutation(epoch, group)


def _part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns where a rank's part of `size` records begins, and how many it has."""
    first = size * rank // ranks
    return first, size * (rank + 1) // ranks - first
