"""Lays out what ranks with GPUs send each other: messages, the rows that come back, and what an
owner reads.

Everything travels by rank, then section. A *run* is what one rank and one section have of it, so
there are N·S.

    message   for each rank: for each section (bags, keys); keys; how long pooled bags are; weights
        of weighted sections' keys
    flat      for each rank, for each section one row a bag

Words are int64; lengths (int32) and weights (float32) lie two to a word, and begin with a word of
their own. Words of zeros for each section are a message that asks for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.segments import MOST, Segments


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes a group's exchange: see `collective.ops.embedding_bag.Section`.

    Attributes:
        ranks: N.
        tables: for each of S sections its table.
        kinds: for each of T tables STATIC or DYNAMIC.
        dims, pooled, weighted, max_norms: of each section.
    """

    ranks: int
    tables: Sequence[int]
    kinds: Sequence[int]
    dims: Sequence[int]
    pooled: Sequence[bool]
    weighted: Sequence[bool]
    max_norms: Sequence[float] = ()

    @property
    def section_kinds(self) -> list[int]:
        """Returns the kind of each section's table."""
        return [self.kinds[table] for table in self.tables]

    def by_run(self, values: Sequence[Any]) -> np.ndarray:
        """Repeats the S `values` for each run, [N·S]."""
        return np.tile(np.asarray(values), self.ranks)


class Runs:
    """Says how much each run has, and where it is.

    Args:
        layout: of the exchange.
        bags, keys: [N, S], how many.

    Attributes:
        bags, keys: [N·S] int64.
        first_bag, first_key: [N·S] int64, what comes before.
        splits: [N] int64, words of each rank's message.
        row_splits: [N] int64, elements of `flat`.
    """

    def __init__(self, layout: Layout, bags: np.ndarray, keys: np.ndarray):
        ranks, sections = layout.ranks, len(layout.tables)
        self.bags, self.keys = (np.asarray(x, np.int64).reshape(-1) for x in (bags, keys))
        self.first_bag, self.first_key = (np.cumsum(x) - x for x in (self.bags, self.keys))
        self.pooled, self.weighted = (
            layout.by_run(layout.pooled).astype(bool),
            layout.by_run(layout.weighted).astype(bool),
        )
        lengths, weights = (
            np.where(which, x, 0).reshape(ranks, sections)
            for which, x in ((self.pooled, self.bags), (self.weighted, self.keys))
        )
        headers, of_keys = np.full(ranks, 2 * sections), self.keys.reshape(ranks, sections).sum(1)
        sizes = np.stack([headers, of_keys, -(-lengths.sum(1) // 2), -(-weights.sum(1) // 2)])
        self.splits = sizes.sum(0)
        starts = np.cumsum(self.splits) - self.splits + np.cumsum(sizes, 0) - sizes
        self._keys, self._lengths, self._weights = (
            starts[1],
            _halves(starts[2], lengths),
            _halves(starts[3], weights),
        )
        self._of_keys = of_keys
        self.row_splits = (self.bags * layout.by_run(layout.dims)).reshape(ranks, sections).sum(1)
        if max(self.splits.sum(), self.row_splits.sum()) > MOST:
            raise ValueError(
                f"{int(self.splits.sum()):,} words of keys or {int(self.row_splits.sum()):,} "
                f"elements of rows at once, but no more than {MOST:,} can be: use smaller batches"
            )

    def keys_in(self, kernels: Kernels) -> Any:
        """Indexes the keys of all runs in a message."""
        return kernels.spans(self._keys, self._of_keys)

    def lengths_in(self, kernels: Kernels) -> Any:
        """Indexes the lengths of pooled runs' bags in a message of half words."""
        return kernels.spans(self._lengths, np.where(self.pooled, self.bags, 0))

    def weights_in(self, kernels: Kernels) -> Any:
        """Indexes the weights of weighted runs' keys in a message of half words."""
        return kernels.spans(self._weights, np.where(self.weighted, self.keys, 0))

    def bags_of(self, kernels: Kernels, which: np.ndarray) -> Any:
        """Indexes the bags of some runs among all."""
        return kernels.spans(self.first_bag, np.where(which, self.bags, 0))

    def keys_of(self, kernels: Kernels, which: np.ndarray) -> Any:
        """Indexes the keys of some runs among all."""
        return kernels.spans(self.first_key, np.where(which, self.keys, 0))

    def keys_by(self, kernels: Kernels, tables: np.ndarray) -> Any:
        """Indexes the keys of all runs among all, ordered by the tables [N·S] of the runs."""
        order = np.argsort(tables, kind="stable")
        return kernels.spans(self.first_key[order], self.keys[order])

    def counts_by(self, tables: np.ndarray, count: int) -> list[int]:
        """Counts the keys of each of `count` tables."""
        return [int(keys) for keys in np.bincount(tables, self.keys, count)]

    def segments(self, sections: np.ndarray) -> Segments:
        """Describes the keys, by run."""
        return Segments.of(self.keys, sections)


def _halves(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns [N·S], the beginnings of runs of `counts` [N, S] half words that follow one another
    from the word `starts` [N] on.
    """
    return np.asarray(2 * starts[:, None] + np.cumsum(counts, 1) - counts).reshape(-1)


def read_runs(kernels: Kernels, layout: Layout, message: Any, splits: np.ndarray) -> Runs:
    """Reads the runs of a received message of `splits` [N] words.

    Raises:
        ValueError: it is malformed.
    """
    sections, splits = len(layout.tables), np.asarray(splits, np.int64)
    if len(splits) != layout.ranks or np.any(splits < 2 * sections) or splits.sum() != message.size:
        raise ValueError(
            f"a message of {counted(message.size, 'word')} can not be of "
            f"{counted(layout.ranks, 'rank')} whose splits are "
            f"{splits.tolist()}, of at least {2 * sections} words each"
        )
    starts = np.cumsum(splits) - splits
    headers = kernels.download(
        message[kernels.spans(starts, np.full(layout.ranks, 2 * sections))]
    ).reshape(layout.ranks, sections, 2)
    bags, keys = headers[..., 0], headers[..., 1]
    pooled = np.asarray(layout.pooled, bool)
    if np.any(headers < 0) or np.any(bags > keys) or np.any((bags != keys) & ~pooled):
        raise ValueError(
            f"a malformed message: bags and keys of each rank's sections are {headers.tolist()}"
        )
    runs = Runs(layout, bags, keys)
    if np.any(runs.splits != splits):
        raise ValueError(
            f"a malformed message: its parts are of {splits.tolist()} words, but its headers speak "
            f"of {runs.splits.tolist()}"
        )
    return runs
