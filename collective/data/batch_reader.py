"""Reads batches of records by number, and reads the next row groups ahead."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from collective.data.parquet_files import ParquetFiles, one_chunk, reading_threads
from collective.data.record_order import Batch


class BatchOrder(Protocol):
    """Determines which records a batch has, and the order of a row group's records."""

    @property
    def shuffles(self) -> bool: ...

    def batch(self, number: int) -> Batch: ...

    def permutation(self, epoch: int, group: int) -> np.ndarray | None: ...


Order = TypeVar("Order", bound=BatchOrder)


class BatchReader(Generic[Order]):
    """Reads batches by number in any order; it is fast if numbers ascend.

    It keeps in memory the row groups of the batch's window that this reader has reached, and the
    next ones.
    """

    def __init__(self, files: ParquetFiles, order: Order, last: int | None, step: int = 1):
        """Makes a reader.

        Args:
            files: the files.
            order: of their records.
            last: the number after the last batch; None: no end.
            step: the difference between the numbers of consecutive batches.
        """
        self.files, self.order = files, order
        self._last, self._step = last, step
        self._groups: dict[tuple[int, int], Future[Any]] = {}
        # The window whose next row groups are being read.
        self._prepared: frozenset[tuple[int, int]] | None = None
        self._lock = threading.Lock()

    @property
    def part_types(self) -> list[Any]:
        """Returns the types of the arrays that `read` returns."""
        return [dtype for column in self.files.columns for dtype in column.part_types]

    def read(self, number: int) -> list[np.ndarray]:
        """Returns the parts of all columns of a batch, one column after the other.

        Raises:
            ValueError: see `ParquetFiles.read`.
        """
        batch = self.order.batch(number)
        with self._lock:
            is_known = all(self._key(p.epoch, p.group) in self._groups for p in batch.pieces)
            wanted = [self._group(piece.epoch, piece.group) for piece in batch.pieces]
            is_last = self._last is not None and number + self._step >= self._last
            if not is_known or is_last or self._prepared != batch.window:
                self._prepare(number, batch, is_last)
        groups = [(group.result(), piece) for group, piece in zip(wanted, batch.pieces)]
        parts = []
        for index, column in enumerate(self.files.columns):
            parts += column.joined(
                [records[index][p.first : p.first + p.count] for records, p in groups]
            )
        return parts

    def _prepare(self, number: int, batch: Batch, is_last: bool) -> None:
        """Drops the row groups that are finished, and begins to read the next ones."""
        self._prepared = batch.window
        kept = {self._key(epoch, group) for epoch, group in batch.window}
        for upcoming in (number + self._step, self._next_beyond(number, batch)):
            if self._last is None or upcoming < self._last:
                ahead = self.order.batch(upcoming)
                for piece in ahead.pieces[:1]:
                    self._group(piece.epoch, piece.group)
                    kept.add(self._key(piece.epoch, piece.group))
        for key in list(self._groups):
            if key not in kept or is_last:
                del self._groups[key]

    def _next_beyond(self, number: int, batch: Batch) -> int:
        """Returns the next number of this reader whose batch is beyond the window."""
        steps = -(-(batch.beyond - int(number)) // self._step)
        return int(number) + max(steps, 1) * self._step

    def _key(self, epoch: int, group: int) -> tuple[int, int]:
        return (epoch if self.order.shuffles else 0, group)

    def _group(self, epoch: int, group: int) -> Future[Any]:
        key = self._key(epoch, group)
        known = self._groups.get(key)
        if known is None or (known.done() and known.exception() is not None):
            known = self._groups[key] = reading_threads().submit(self._load, key)
        return known

    def _load(self, key: tuple[int, int]) -> list[Any]:
        """Returns the records of a row group in this epoch's order, column by column."""
        table, permutation = self.files.read(key[1]), self.order.permutation(*key)
        if permutation is not None:
            table = table.take(permutation)
        return [
            column.prepared(one_chunk(table.column(column.name))) for column in self.files.columns
        ]
