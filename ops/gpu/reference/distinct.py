"""`collective.ops.gpu.distinct` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.distinct import Distinct
from collective.ops.gpu.reference.partition import by_key, counts
from collective.ops.gpu.segments import Segments


def distinct(
    keys: np.ndarray, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Any = None
) -> Distinct:
    """See `collective.ops.gpu.distinct.distinct`. `keys` has U elements."""
    section, owner = by_key(keys, segments, kinds, ranks)
    first = np.empty(len(keys), np.int64)  # position of each key's first appearance
    for s in range(len(kinds)):
        of_section = np.flatnonzero(section == s)
        _, firsts, inverse = np.unique(keys[of_section], return_index=True, return_inverse=True)
        first[of_section] = of_section[firsts][inverse.reshape(-1)]
    kept = np.flatnonzero(first == np.arange(len(keys)))
    order = kept[np.lexsort((kept, section[kept], owner[kept]))]
    number = np.empty(len(keys), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return Distinct(
        keys[order], counts(section[order], owner[order], len(kinds), ranks), number[first]
    )
