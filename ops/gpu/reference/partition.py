"""`collective.ops.gpu.partition` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.partition import Partition
from collective.ops.gpu.reference import owners
from collective.ops.gpu.segments import Segments


def by_key(
    keys: np.ndarray, segments: Segments, kinds: Sequence[int], ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the section and the owner of every key, [K] int64 each."""
    section = np.repeat(segments.sections, np.diff(segments.offsets))
    owner = np.zeros(len(keys), np.int64)
    for s, kind in enumerate(kinds):
        owner[section == s] = owners.owners(keys[section == s], kind, ranks)
    return section, owner


def counts(section: np.ndarray, owner: np.ndarray, sections: int, ranks: int) -> np.ndarray:
    """Counts the keys of each owner and section, [N, S] int32."""
    return (
        np.bincount(owner * sections + section, minlength=ranks * sections)
        .astype(np.int32)
        .reshape(ranks, sections)
    )


def partition(
    keys: np.ndarray, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Any = None
) -> Partition:
    """See `collective.ops.gpu.partition.partition`."""
    section, owner = by_key(keys, segments, kinds, ranks)
    order = np.lexsort((np.arange(len(keys)), section, owner))
    positions = np.empty(len(keys), np.int32)
    positions[order] = np.arange(len(keys), dtype=np.int32)
    return Partition(keys[order], counts(section, owner, len(kinds), ranks), positions)


def local_rows(
    keys: np.ndarray, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Any = None
) -> np.ndarray:
    """See `collective.ops.gpu.partition.local_rows`."""
    section = np.repeat(segments.sections, np.diff(segments.offsets))
    return owners.local_rows(keys, np.asarray(kinds)[section], ranks)
