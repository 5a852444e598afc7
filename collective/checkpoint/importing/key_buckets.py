"""Sorts rows by their keys in bounded memory, in files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

# All rows of a bucket are in memory at the same time, twice.
BUCKET_BYTES = 128 << 20


def bucket_count(rows: int, row_bytes: int) -> int:
    """Returns how many buckets a table gets: 1, or a multiple of 12.

    Many numbers of ranks have a common divisor with 12: then a rank reads only some buckets.
    """
    least = -(-rows * row_bytes // BUCKET_BYTES)
    return 1 if least <= 1 else -(-least // 12) * 12


class KeyBuckets:
    """Puts keys and their rows into buckets, and returns each bucket by ascending keys.

    Args:
        stem: the beginning of the files' names.
        dim: D.
        dtype: the type of a value.
        buckets: how many there are.
        bucket_of: returns the bucket numbers [b] of keys [b].

    Attributes:
        counts: the rows in each bucket so far.
    """

    def __init__(
        self,
        stem: str,
        dim: int,
        dtype: Any,
        buckets: int,
        bucket_of: Callable[[np.ndarray], np.ndarray],
    ):
        self._stem, self._dim, self._dtype, self._bucket_of = stem, dim, np.dtype(dtype), bucket_of
        # Values are stored as bytes: NumPy's records don't support bfloat16.
        row_bytes = dim * self._dtype.itemsize
        self._record = np.dtype([("key", np.int64), ("row", np.uint8, (row_bytes,))])
        self.counts = [0] * buckets

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Adds keys [b] int64 and rows [b, D]."""
        records = np.empty(len(keys), self._record)
        records["key"] = keys
        rows = np.ascontiguousarray(rows, self._dtype)
        records["row"] = rows.view(np.uint8).reshape(records["row"].shape)
        buckets = self._bucket_of(keys)
        order = np.argsort(buckets, kind="stable")
        numbers, starts = np.unique(buckets[order], return_index=True)
        for number, part in zip(numbers, np.split(order, starts[1:])):
            with open(self._path(number), "ab") as file:
                records[part].tofile(file)
            self.counts[number] += len(part)

    def take(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a bucket's keys, ascending, and their rows, and deletes the bucket."""
        if not self.counts[bucket]:
            return np.zeros(0, np.int64), np.zeros((0, self._dim), self._dtype)
        records = np.fromfile(self._path(bucket), self._record)
        os.remove(self._path(bucket))
        records = records[np.argsort(records["key"], kind="stable")]
        rows = np.ascontiguousarray(records["row"]).view(self._dtype)
        return records["key"].copy(), rows.reshape(len(records), self._dim)

    def _path(self, bucket: int) -> str:
        return f"{self._stem}-{bucket}"


def first_repeated(keys: Sequence[int] | np.ndarray) -> int | None:
    """Returns a key that the ascending `keys` have twice; None if there is none."""
    keys = np.asarray(keys)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    return int(keys[repeated[0]]) if len(repeated) else None
