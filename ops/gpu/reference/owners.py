"""Finds the rank that owns a key, and where it keeps it: `collective.ops.placement` once more."""

from __future__ import annotations

import numpy as np

from collective.ops.gpu.segments import DYNAMIC


def mix(keys: np.ndarray) -> np.ndarray:
    """Mixes int64 keys to uint64 by SplitMix64, as `collective.ops.exchange.key_hashing.mix_np`."""
    x = np.ascontiguousarray(keys, np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def owners(keys: np.ndarray, kind: int, ranks: int) -> np.ndarray:
    """Returns the rank that owns each of the int64 `keys` of a table of `kind`, int64."""
    return (mix(keys) % np.uint64(ranks)).astype(np.int64) if kind == DYNAMIC else keys % ranks


def local_rows(keys: np.ndarray, is_dynamic: np.ndarray, ranks: int) -> np.ndarray:
    """Returns where the owners keep the int64 `keys` [K]: rows of static tables, else the keys."""
    return np.where(is_dynamic, keys, keys // ranks)
