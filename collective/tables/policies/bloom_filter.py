"""Sizes counting Bloom filters, and defines which part of a filter a rank has, and a checkpoint.

A filter consists of `PARTITIONS` small filters. Keys are placed on partitions as on ranks: key k is
counted in partition mix(k) mod `PARTITIONS`, and lives on rank mix(k) mod N. If N divides
`PARTITIONS`, all keys of a partition live on one rank, and only this rank has the partition: what
the filter knows of a key doesn't depend on N. Otherwise several ranks have a partition, each for
its own keys, and the memory is divided by the greatest common divisor. The rank of a whole table
has all partitions, as if N were 1.

A checkpoint has partitions by numbers u, which are those of a key on a rank: u mod `PARTITIONS` is
the partition, u mod N the rank. It keeps them under the key whose mix is u, which that rank owns.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from collective.ops import placement
from collective.ops.rows.compiled_row_store import FilterShape

PARTITIONS = 6720  # 2**6 · 3 · 5 · 7: all numbers of ranks up to 8, most of those up to 64.
_FEWEST_CELLS, _MOST_HASHES = 8, 60
# The filter is a little better than asked for: what is measured scatters about the expectation.
_MARGIN = 0.8
_WORD = 1 << 64


@functools.lru_cache(maxsize=64)
def size(elements: int, probability: float) -> tuple[int, int]:
    """Returns (counters of a key, counters in a partition) of the smallest filter.

    After this many different keys, the probability that it mistakes a key that never came for one
    that did is below the given one.
    """
    loads, weights = _loads(elements / PARTITIONS)
    best: tuple[int, int] | None = None
    for hashes in range(1, min(_MOST_HASHES, math.ceil(-math.log2(probability)) + 4) + 1):

        def is_enough(cells: int, hashes: int = hashes) -> bool:
            return _false_positives(loads, weights, hashes, cells) <= _MARGIN * probability

        most = _FEWEST_CELLS
        while not is_enough(most):
            most *= 2
            if best is not None and most >= 2 * best[1]:
                break
        least = _FEWEST_CELLS
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if is_enough(middle) else (middle + 1, most)
        if is_enough(least) and (best is None or least < best[1]):
            best = hashes, least
    assert best is not None
    return best


def _loads(mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of keys that a partition may have, and their probabilities."""
    spread = 12 * math.sqrt(mean) + 24
    first, last = max(0, math.floor(mean - spread)), math.ceil(mean + spread)
    loads = np.arange(first, last + 1, max(1, (last - first) // 4000), dtype=np.float64)
    logarithms = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in loads]
    weights = np.exp(np.array(logarithms) - max(logarithms))
    return loads, weights / weights.sum()


def _false_positives(loads: np.ndarray, weights: np.ndarray, hashes: int, cells: int) -> float:
    """Returns the share of keys that never came, but whose counters are all in use.

    Counters in use are throws into cells: E[(X / c)**k] of their number X, to second order.
    """
    throws, empty = loads * hashes, 1.0 - 1.0 / cells
    in_use = 1.0 - empty**throws
    two_empty = (1.0 - 2.0 / cells) ** throws
    variance = (1.0 - in_use) / cells + (1.0 - 1.0 / cells) * two_empty - (1.0 - in_use) ** 2
    curvature = hashes * (hashes - 1) / 2 * in_use ** max(hashes - 2, 0)
    return float((weights * (in_use**hashes + curvature * np.maximum(variance, 0.0))).sum())


def shape(elements: int, probability: float, counter_type: str, ranks: int) -> FilterShape:
    """Returns the filter of one of `ranks` ranks that share the keys."""
    hashes, cells = size(elements, probability)
    return FilterShape(
        hashes, cells, np.dtype(counter_type), PARTITIONS, math.gcd(PARTITIONS, ranks)
    )


def numbers(step: int, rank: int, ranks: int) -> np.ndarray:
    """Returns the numbers u of a rank's partitions, in their order, int64.

    Args:
        step: `FilterShape.step`.
        rank, ranks: the rank, of so many that share the keys.
    """
    parts = placement.dynamic(PARTITIONS).parts_of(placement.dynamic(ranks), rank)
    partitions = np.array(parts, np.int64)
    others = ranks // step
    if others == 1:
        return partitions
    inverse = pow(PARTITIONS // step, -1, others)
    return partitions + PARTITIONS * (((rank - partitions) // step * inverse) % others)


def keys(numbers_: np.ndarray) -> np.ndarray:
    """Returns the keys whose mix (`collective.ops.key_hashing`) is `numbers_`, int64."""
    x = np.asarray(numbers_, np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
            x = _unshifted(x, shift) * np.uint64(pow(factor, -1, _WORD))
        return _unshifted(x, 30).view(np.int64)


def _unshifted(x: np.ndarray, shift: int) -> np.ndarray:
    """Returns y with y ^ (y >> shift) = x."""
    y = x
    for _ in range(64 // shift):
        y = x ^ (y >> np.uint64(shift))
    return y
