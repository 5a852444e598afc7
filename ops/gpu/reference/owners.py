"""Finds the rank that owns a key, and where it keeps it: `collective.ops.placement` once more."""

from __future__ import annotations

import numpy as np

from collective.ops.gpu.segments import DYNAMIC, ON_ONE_RANK, STATIC


def mix(keys: np.ndarray) -> np.ndarray:
    """Mixes int64 keys to uint64 by SplitMix64, as `collective.ops.key_hashing.mix_np`."""
    x = np.ascontiguousarray(keys, np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def owners(keys: np.ndarray, kind: int, ranks: int) -> np.ndarray:
    """Returns the rank that owns each of the int64 `keys` of a table of `kind`, int64."""
    if kind >= ON_ONE_RANK:
        return np.full(keys.shape, kind // ON_ONE_RANK - 1, np.int64)
    return (mix(keys) % np.uint64(ranks)).astype(np.int64) if kind == DYNAMIC else keys % ranks


def local_rows(keys: np.ndarray, kinds: np.ndarray, ranks: int) -> np.ndarray:
    """Returns where the owners keep the int64 `keys` [K], each of a table of its kind."""
    return np.where(kinds == STATIC, keys // ranks, keys)
