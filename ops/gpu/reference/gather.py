"""`collective.ops.gpu.gather` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.segments import Segments


def gather(
    tables: Sequence[np.ndarray],
    rows: np.ndarray,
    segments: Segments,
    workspace: Any = None,
) -> np.ndarray:
    """See `collective.ops.gpu.gather.gather`."""
    pieces = []
    for m, t in enumerate(segments.sections):
        wanted = rows[segments.offsets[m] : segments.offsets[m + 1]]
        inside = (wanted >= 0) & (wanted < len(tables[t]))
        found = np.zeros((len(wanted), tables[t].shape[1]), np.float32)
        found[inside] = tables[t][wanted[inside]]
        pieces.append(found.reshape(-1))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
