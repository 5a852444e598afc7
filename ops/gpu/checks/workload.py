"""Draws the inputs of the sparse half of the DLRM workload's step, T tables of V rows of dimension
D, and computes what it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.device import Device
from collective.ops.gpu.rules import Adagrad
from collective.ops.gpu.segments import Segments

TABLES, SAMPLES, DIM, RANKS = 26, 65536, 128, 8
RULE = Adagrad(0.05)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Batch(NamedTuple):
    """Holds one rank's look-ups for B samples, and the gradients of the results. Arrays are in
    NumPy or on a device.

    Attributes:
        lengths: T of them, how many ids each table has.
        ids: [K] int64, by table, then sample.
        offsets: [T B + 1] int32, the first id of each sample of each table.
        gradients: [T B, D] float32.
    """

    lengths: Sequence[int]
    ids: Any
    offsets: Any
    gradients: Any

    @property
    def segments(self) -> Segments:
        """Describes the ids, by table."""
        return Segments.of(self.lengths, range(len(self.lengths)))

    def there(self, device: Device) -> Batch:
        """Copies the arrays to a device."""
        return self._replace(
            ids=on(device, self.ids),
            offsets=on(device, self.offsets),
            gradients=on(device, self.gradients),
        )


class Received(NamedTuple):
    """Holds the requests that the first of N ranks gets, and the gradients that it receives. Arrays
    are in NumPy or on a device.

    Attributes:
        lengths: N T of them, how many keys come from each rank and, within one rank, for each
          table.
        keys: [K] int64, in this order; those of one rank and table are distinct.
        gradients: [K, D] float32.
    """

    lengths: Sequence[int]
    keys: Any
    gradients: Any

    @property
    def segments(self) -> Segments:
        """Describes the keys, by rank and table."""
        return Segments.of(self.lengths, [*range(TABLES)] * (len(self.lengths) // TABLES))

    def there(self, device: Device) -> Received:
        """Copies the arrays to a device."""
        return self._replace(keys=on(device, self.keys), gradients=on(device, self.gradients))


def drawn(size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draws [`size`] int64 below `rows`: Zipf's distribution with exponent 1.2, hashed, so that
    frequent ones are spread everywhere.
    """
    return (
        (rng.zipf(1.2, size).astype(np.uint64) * _GOLDEN >> np.uint64(20)) % np.uint64(rows)
    ).astype(np.int64)


def batch(samples: int, rows: int, most: int, gradients: Any, rng: np.random.Generator) -> Batch:
    """Draws 1 to `most` ids a sample and table, of tables with so many rows."""
    lengths = rng.integers(1, most + 1, (TABLES, samples))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Batch(lengths.sum(1).tolist(), drawn(int(lengths.sum()), rows, rng), offsets, gradients)


def received(samples: int, rows: int, rng: np.random.Generator) -> Received:
    """Draws the requests of 8 ranks with one id a sample, for tables of which each rank has so many
    rows. Without gradients.
    """
    keys = [np.unique(drawn(samples, RANKS * rows, rng)) for _ in range(RANKS * TABLES)]
    keys = [some[some % RANKS == 0] for some in keys]
    return Received([len(some) for some in keys], np.concatenate(keys), None)


def stepped(
    weights: np.ndarray, slot: np.ndarray, rows: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (weights, slot) of a table, float64, after a step of Adagrad with [n, D] gradients of
    its [n] rows, some of them equal.
    """
    order = np.argsort(rows, kind="stable")
    touched, firsts = np.unique(rows[order], return_index=True)
    summed = np.add.reduceat(gradients[order].astype(np.float64), firsts)
    weights, slot = weights.astype(np.float64), slot.astype(np.float64)
    slot[touched] += summed**2
    weights[touched] -= RULE.rate * summed / np.sqrt(slot[touched])
    return weights, slot


def pooled(weights: np.ndarray, one: Batch) -> Iterator[np.ndarray]:
    """Yields [B, D] float64 for each table of [T, V, D] weights: the sums of the rows that its
    samples look up.
    """
    samples = (len(one.offsets) - 1) // len(one.lengths)
    for table, part in enumerate(np.split(one.ids, np.cumsum(one.lengths)[:-1])):
        firsts = one.offsets[table * samples : (table + 1) * samples] - one.offsets[table * samples]
        yield np.add.reduceat(weights[table][part].astype(np.float64), firsts)


def updated(weights: np.ndarray, slots: np.ndarray, one: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns [T, V, D] weights and slots, float64, after the step."""
    each = np.repeat(one.gradients, np.diff(one.offsets), 0)
    cuts = np.cumsum(one.lengths)[:-1]
    made = [
        stepped(*given)
        for given in zip(weights, slots, np.split(one.ids, cuts), np.split(each, cuts))
    ]
    return np.stack([weight for weight, _ in made]), np.stack([slot for _, slot in made])
