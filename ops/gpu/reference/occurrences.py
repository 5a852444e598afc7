"""`collective.ops.gpu.occurrences` in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.ops.gpu.occurrences import LONG, PIECE, Occurrences


def occurrences(
    numbers: np.ndarray, rows: int, workspace: Any = None, name: str = ""
) -> Occurrences:
    """See `collective.ops.gpu.occurrences.occurrences`; rows with many occurrences ascend."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=rows))]).astype(
        np.int32
    )
    longs: list[tuple[int, int, int]] = []
    pieces: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(np.diff(offsets) > LONG).tolist():
        firsts = np.arange(offsets[row], offsets[row + 1], PIECE)
        longs.append((row, len(pieces), len(firsts)))
        pieces += [(row, first, min(first + PIECE, offsets[row + 1])) for first in firsts]
    return Occurrences(
        offsets,
        np.argsort(numbers, kind="stable").astype(np.int32),
        np.array([len(longs), len(pieces)], np.uint32),
        np.array(longs, np.uint32).reshape(-1, 3),
        np.array(pieces, np.uint32).reshape(-1, 3),
    )
