"""Brings rows into the order of their keys in bounded memory, by files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

# The rows of a bucket are in memory together, twice.
BUCKET_BYTES = 128 << 20


def bucket_count(rows: int, row_bytes: int) -> int:
    """Returns how many buckets a table is given: 1, or a multiple of 12.

    Many numbers of ranks have a common divisor with such: a rank then reads only some buckets.
    """
    least = -(-rows * row_bytes // BUCKET_BYTES)
    return 1 if least <= 1 else -(-least // 12) * 12


class KeyBuckets:
    """Puts keys and their rows into buckets, and gives each bucket by ascending keys.

    Args:
        stem: what the files' names begin with.
        dim: D.
        dtype: a value's.
        buckets: how many there are.
        bucket_of: gives the numbers of the buckets [b] of keys [b].

    Attributes:
        counts: rows in each bucket so far.
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
        # Values are bytes: NumPy's records take no bfloat16.
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
        """Returns the keys of a bucket, ascending, and their rows; the bucket is gone then."""
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
    """Returns a key that ascending `keys` have twice; None if there is none."""
    keys = np.asarray(keys)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    return int(keys[repeated[0]]) if len(repeated) else None
