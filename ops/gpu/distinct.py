"""De-duplicates the keys of a group's sections and groups them by owner: one pass of hashing, no
sort.

Five kernels, of which only the first accesses the hash table more than once per key:

    insert   every key finds or takes a word of a scratch table; the word then holds the key's
    first position
    count    how many first positions each tile has for each owner
    scan     the sums of these, by owner, then section
    number   first positions are numbered and their keys written
    inverse  every key takes the number of its first position

Numbers follow positions, not the order in which threads ran: the result is always the same.
`reference/distinct.py` has the same function in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.partition import scan, tiled
from collective.ops.gpu.segments import THREADS, TILE, Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "distinct.cu",
    (
        "distinct_insert",
        "distinct_count",
        "distinct_number",
        "distinct_inverse",
        "copy_keys",
        "copy_numbers",
    ),
)
_WARPS = THREADS // 32


class Distinct(NamedTuple):
    """Holds distinct keys in the order in which they are sent.

    Attributes:
        keys: [K] int64, of which the first U are defined, U the sum of `counts`: rank 0's keys
            first, then rank 1's, …; each owner's keys by section, each section's by first
            appearance. That is the order of ops/exchange/embedding_bag.py.
        counts: [N, S] int32, how many keys of each section each rank owns.
        inverse: [K] int32, the position of each of the K keys among the U.
    """

    keys: Any
    counts: Any
    inverse: Any


class ScratchTable:
    """Holds the scratch table into which keys are hashed; words below `base` are free.

    Args:
        workspace: has its words.

    Attributes:
        base: the base of the next call.
    """

    def __init__(self, workspace: Workspace):
        self.base = 0
        self._workspace, self._size = workspace, 0

    def opened(self, keys: int) -> tuple[Any, int]:
        """Returns [2 K] uint32 words for `keys` keys, all free, and the base of this call."""
        words = self._workspace.take("distinct.words", 2 * keys, np.uint32)
        # New memory is not zero, and the base must not overflow. All of it is cleared, even if the
        # next call needs less.
        if 2 * keys > self._size or self.base + keys > 2**32:
            words.fill(0)
            self._size, self.base = 2 * keys, 1
        base = self.base
        self.base += keys
        return words, base


def distinct(
    keys: Any, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Workspace
) -> Distinct:
    """De-duplicates keys by section and orders them by owner. Launches 5 kernels; the host waits
    for nothing.

    The host needs `counts` before it can exchange keys: one `Device.download`.

    Bytes moved: per key about 8 + 4 for insert, 8 for count, 4 + 20 per distinct key for number, 8
    for inverse; and at random one word in insert (atomically if the key is new, else with one key),
    count and inverse. The part of the scratch table that a section uses is 8 bytes per key, and
    mostly stays in the L2.

    Args:
        keys: [K] int64, any values, including the extreme ones. `placement.cuh` has their owners.
        segments: M of them with K keys. Keys are equal only within a section.
        kinds: S of them, of the sections' tables.
        ranks: N, up to `MOST_RANKS`; 1 to de-duplicate the keys that an owner received.
        workspace: holds the results until the next call with it.

    Raises:
        ValueError: too many ranks or keys, or a segment without a section.
    """
    tiles = tiled(segments, kinds, ranks, workspace, "distinct")
    count, device, size = tiles.plan.tiles, workspace.device, segments.keys
    inverse = workspace.take("distinct.inverse", size, np.int32)
    numbers = workspace.take("distinct.numbers", size, np.uint32)
    found = workspace.take("distinct.keys", size, np.int64)
    words, base = workspace.keep("distinct", lambda: ScratchTable(workspace)).opened(size)
    by_tile = (keys, tiles.segments, np.int32(len(tiles.plan.segments)))
    counts = (np.uint32(ranks), tiles.counts, np.uint32(count))
    device.kernel(SOURCE, "distinct_insert")(
        count, THREADS, (*by_tile, words, np.uint32(base), inverse)
    )
    device.kernel(SOURCE, "distinct_count")(
        count, THREADS, (*by_tile, *counts, words, np.uint32(base), inverse), shared=4 * ranks
    )
    scan(tiles, ranks, workspace, "distinct")
    device.kernel(SOURCE, "distinct_number")(
        count,
        THREADS,
        (*by_tile, *counts, tiles.starts, inverse, numbers, found),
        shared=4 * _WARPS * ranks,
    )
    device.kernel(SOURCE, "distinct_inverse")(
        -(-size // TILE), THREADS, (numbers, np.int64(size), inverse)
    )
    return Distinct(found, tiles.section_counts, inverse)
