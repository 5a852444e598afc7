"""Shuffles any number of records without a list of them: a function from place to record."""

from __future__ import annotations

import numpy as np

_ROUNDS = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def shuffled(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns which record comes at each place of a shuffled epoch.

    A Feistel network permutes the numbers below a power of four; what falls outside of the records
    goes through it again, which leaves a permutation of the records (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).

    Args:
        places: int64, from 0, below `size`.
        size: how many records there are.
        seed, epoch: another pair gives another order.

    Returns:
        int64, from 0, below `size`; each once.
    """
    # Its numbers don't change with NumPy's version.
    keys = np.random.RandomState([seed, epoch]).randint(0, 2**32, 2 * _ROUNDS, dtype=np.uint64)
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    numbers = _network(places.astype(np.uint64), half, keys)
    outside = numbers >= size
    while outside.any():
        numbers[outside] = _network(numbers[outside], half, keys)
        outside = numbers >= size
    return numbers.astype(np.int64)


def _network(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Permutes the numbers of 2 * half bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for first, second in zip(keys[::2], keys[1::2]):
        mixed = (right + first) * _FACTOR
        mixed = ((mixed ^ (mixed >> np.uint64(31))) + second) * _FACTOR
        left, right = right, left ^ ((mixed >> np.uint64(29)) & mask)
    joined: np.ndarray = (left << bits) | right
    return joined
