"""Orders occurrences by row, so that gradients are summed without atomics and always in the same
order.

    numbers      2 0 2 1 2          the row of each occurrence
    offsets      0 1 2 5            row r has the places offsets[r] to before offsets[r + 1] of
    order        1 3 0 2 4          the occurrences by row, ascending

It is a counting sort by some bits of the row numbers at a time (`digits`).
`reference/occurrences.py` has the same function in NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.partition import scan_counts
from collective.ops.gpu.segments import MOST, THREADS, TILE
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "occurrences.cu",
    ("occurrences_count", "occurrences_place", "occurrences_offsets", "occurrences_split"),
)
LONG, PIECE = 64, 512  # as in occurrences.cuh
SORT_TILE = 16 * THREADS  # as in occurrences.cu
_MOST_BITS = 9  # of a digit: shared memory has room for their counters
# Bytes that a pass moves: per key; per digit of a tile, including its keys' incomplete sectors.
_KEY_BYTES, _DIGIT_BYTES = 20, 64
_WARPS = THREADS // 32
_NULL = np.uint64(0)


class Occurrences(NamedTuple):
    """Holds K occurrences of R rows.

    Attributes:
        offsets: [R + 1] int32, where the occurrences of each row begin in `order`.
        order: [K] int32, the occurrences by row; those of one row ascend. A null pointer if there
            are `terms`.
        counters: [2] uint32, how many rows have more than `LONG` occurrences, and how many pieces
            these rows have.
        longs: [K // LONG, 3] uint32, for each such row (row, its first piece, its number of
            pieces), in any order.
        pieces: [., 3] uint32, for each piece of at most `PIECE` occurrences (row, its first place
            in `order`, its end).
        terms: [K, 2] uint32, the terms of the occurrences by row, if they were given; or None.
    """

    offsets: Any
    order: Any
    counters: Any
    longs: Any
    pieces: Any
    terms: Any = None


def most_pieces(occurrences: int) -> int:
    """Bounds the number of pieces that so many occurrences can have."""
    return occurrences // PIECE + occurrences // LONG


def digits(rows: int) -> tuple[int, int]:
    """Returns (the number of passes, bits per pass) that sort the numbers of `rows` rows and move
    the fewest bytes. Larger digits need fewer passes, but more counters, and write shorter runs
    for each value.
    """
    bits = max((rows - 1).bit_length(), 1)
    ways = [(passes, -(-bits // passes)) for passes in range(1, bits + 1)]

    def moved(way: tuple[int, int]) -> float:  # for each key
        passes, width = way
        return passes * (_KEY_BYTES + _DIGIT_BYTES * 2**width / SORT_TILE)

    return min((way for way in ways if way[1] <= _MOST_BITS), key=moved)


def occurrences(
    numbers: Any, rows: int, workspace: Workspace, name: str = "occurrences", terms: Any = None
) -> Occurrences:
    """Orders occurrences by row, stably. Launches 3 kernels for each pass of `digits`, and 2; the
    host waits for nothing.

    Bytes moved: in each pass 4 K for the counts, 16 K for the order (12 K in the first), and per
        4,096 keys 16 for each value of a digit; then 4 K + 8 R. With terms 12 K more.

    Args:
        numbers: [K] int32, the row of each occurrence, at least 0 and smaller than `rows`; that
            isn't checked. For example the inverse index of `distinct`, or the samples of ids if
            their offsets are needed.
        rows: R.
        workspace: holds the result until the next call with it and the same name.
        name: the name of its arrays.
        terms: [K, 2] uint32 of each occurrence, see `sums.sum_rows`, which are put in the order of
            the rows in place of the occurrences' numbers: so sums read what lies side by side.

    Raises:
        ValueError: there are too many occurrences or rows.
    """
    size, device = int(numbers.size), workspace.device
    if max(size, rows) > MOST:
        raise ValueError(
            f"{size:,} occurrences of {rows:,} rows, but no more than {MOST:,} can be: use smaller "
            "batches"
        )
    passes, bits = digits(rows)
    values = 2**bits
    tiles = -(-size // SORT_TILE)
    counts = workspace.take(f"{name}.tile_counts", values * (tiles + 1), np.uint32)
    starts = workspace.take(f"{name}.starts", values + 1, np.uint32)
    nobody_asks = workspace.take(f"{name}.counts", values, np.int32)
    order: Any = _NULL
    for number in range(passes):
        digit = (np.int64(size), np.uint32(number * bits), np.uint32(values))
        device.kernel(SOURCE, "occurrences_count")(
            tiles, THREADS, (numbers, *digit, counts, np.uint32(tiles)), shared=4 * values
        )
        all_tiles = np.array([0, tiles], np.uint32)
        scan_counts(counts, all_tiles, nobody_asks, starts, workspace, name)
        placed = workspace.take(f"{name}.rows{number % 2}", size, np.int32)
        of_each = _NULL if terms is None or number + 1 < passes else terms
        if of_each is _NULL:
            placed_order = workspace.take(f"{name}.order{number % 2}", size, np.int32)
        else:
            placed_order = workspace.take(f"{name}.terms", 2 * size, np.uint32).reshape(size, 2)
        device.kernel(SOURCE, "occurrences_place")(
            tiles,
            THREADS,
            (
                numbers,
                order,
                *digit,
                counts,
                np.uint32(tiles),
                starts,
                of_each,
                placed,
                placed_order,
            ),
            shared=4 * (2 * SORT_TILE + values) + 2 * _WARPS * values,
        )
        numbers, order = placed, placed_order
    offsets = workspace.take(f"{name}.offsets", rows + 1, np.int32)
    counters = workspace.take(f"{name}.counters", 2, np.uint32)
    marks = workspace.take(f"{name}.marks", rows // THREADS + 1, np.uint8)
    longs = workspace.take(f"{name}.longs", 3 * (size // LONG), np.uint32).reshape(-1, 3)
    pieces = workspace.take(f"{name}.pieces", 3 * most_pieces(size), np.uint32).reshape(-1, 3)
    device.kernel(SOURCE, "occurrences_offsets")(
        size // TILE + 1,
        THREADS,
        (numbers, np.int64(size), np.uint32(rows), offsets, counters, marks),
    )
    device.kernel(SOURCE, "occurrences_split")(
        -(-rows // THREADS), THREADS, (offsets, np.int64(rows), counters, longs, pieces, marks)
    )
    by_row = (order, None) if terms is None else (_NULL, order)
    return Occurrences(offsets, by_row[0], counters, longs, pieces, by_row[1])
