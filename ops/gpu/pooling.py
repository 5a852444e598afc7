"""What a rank makes of the rows that come back, and the gradients of that.

    flat ──pool──► one matrix a lookup
    flat's gradient ◄──pool_gradient── their gradients

`collective.ops.embedding_bag.pool` and its gradients are these. Each is one or two of the kernels; `flat` is
laid out as `message_layout.py` says, and positions number its rows through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.pool import SUM, Ids, Lookup
from collective.ops.gpu.segments import Segments

ROWS = 0  # no combiner, as in ops/embedding_bag.py


class Members(NamedTuple):
    """M lookups: see `collective.ops.embedding_bag.BagMember`."""

    sections: Sequence[int]
    dims: Sequence[int]
    combiners: Sequence[int]
    weighted: Sequence[bool]
    max_norms: Sequence[float]


class Pooling:
    """What some of the lookups make of the rows that came back.

    Args:
        members: all M lookups.
        flat: [E] float32.
        counts: [N, S], how many bags of each section came from each rank.
        positions: for each member int32.
        samples: for each member with a combiner int64, ascending.
        weights: for each weighted member float32.
        of: the members that are wanted.
    """

    def __init__(
        self,
        kernels: Kernels,
        members: Members,
        flat: Any,
        counts: np.ndarray,
        positions: Sequence[Any],
        samples: Sequence[Any],
        weights: Sequence[Any],
        of: Sequence[int],
    ):
        self._kernels, self._of, self._weighted = kernels, of, members.weighted
        self._weights, self._positions = list(weights), positions
        dims = np.ones(counts.shape[1], np.int64)
        dims[list(members.sections)] = members.dims
        self._counts, self._dims = counts.astype(np.int64), dims
        self._rows = kernels.flat(flat, self._counts.reshape(-1), np.tile(dims, len(counts)))
        of_samples, of_weights = iter(samples), iter(weights)
        by_sample = [
            next(of_samples) if combiner != ROWS else None for combiner in members.combiners
        ]
        by_weight = [next(of_weights) if weighted else None for weighted in members.weighted]
        sizes = [int(positions[m].size) for m in of]
        self._ends = np.cumsum(sizes)
        batches = self._batches([by_sample[m] for m in of], sizes)
        self.lookups = [
            Lookup(
                batch,
                members.dims[m],
                max(members.combiners[m], SUM),
                members.weighted[m],
                max(members.max_norms[m], 0.0),
            )
            for m, batch in zip(of, batches)
        ]
        joined = None
        if any(members.weighted[m] for m in of):
            joined = kernels.xp.concatenate(
                [
                    kernels.xp.ones(size, np.float32) if by_weight[m] is None else by_weight[m]
                    for m, size in zip(of, sizes)
                ]
            )
        self._ids = Ids(
            kernels.xp.concatenate([positions[m] for m in of]),
            self._offsets([by_sample[m] for m in of], sizes, batches),
            joined,
        )

    def _batches(self, samples: Sequence[Any], sizes: Sequence[int]) -> list[int]:
        """How many samples each member has."""
        known = [i for i, one in enumerate(samples) if one is not None and sizes[i]]
        batches = [size if one is None else 0 for one, size in zip(samples, sizes)]
        if known:
            lasts = self._kernels.download(
                self._kernels.xp.concatenate([samples[i][-1:] for i in known])
            )
            for i, last in zip(known, lasts):
                batches[i] = int(last) + 1
        return batches

    def _offsets(self, samples: Sequence[Any], sizes: Sequence[int], batches: Sequence[int]) -> Any:
        """[B + 1] int32, where the samples of all members begin."""
        kernels, total = self._kernels, int(sum(batches))
        if all(one is None for one in samples):
            return kernels.xp.arange(total + 1, dtype=np.int32)
        joined = kernels.xp.concatenate(
            [
                kernels.xp.arange(size, dtype=np.int64) if one is None else one
                for one, size in zip(samples, sizes)
            ]
        )
        at = kernels.xp.searchsorted(
            kernels.upload(self._ends),
            kernels.xp.arange(int(self._ends[-1]), dtype=np.int64),
            side="right",
        )
        joined = joined + kernels.upload(np.cumsum(batches) - np.asarray(batches, np.int64))[at]
        return kernels.offsets(joined, total)

    def pool(self) -> Joined:
        """[samples or ids, D] float32 for each member."""
        return Joined(
            self._kernels.pool(self.lookups, [self._rows], self._ids),
            [lookup.samples * lookup.dim for lookup in self.lookups],
            [lookup.dim for lookup in self.lookups],
        )

    def gradient(self, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """([E] of `flat`, for each weighted member that of its weights), by what the wanted
        members' results have.
        """
        kernels, total = self._kernels, int(self._counts.sum())
        lookup_gradients = kernels.rows(
            [
                one.reshape(lookup.samples, lookup.dim)
                for one, lookup in zip(gradients, self.lookups)
            ]
        )
        of_weights = any(self._weighted[m] for m in self._of)
        made = kernels.pool_terms(
            self.lookups, [self._rows], self._ids, lookup_gradients, of_weights
        )
        segments = Segments.of(
            self._counts.reshape(-1), np.tile(np.arange(len(self._dims)), len(self._counts))
        )
        flat = kernels.sum_rows(
            lookup_gradients,
            kernels.occurrences(self._ids.positions, total),
            segments,
            self._dims.tolist(),
            made.terms,
            1.0,
            made.along,
            self._rows,
        )
        by_member = {
            m: made.weights[int(end - self._positions[m].size) : int(end)]
            for m, end in zip(self._of, self._ends)
            if self._weighted[m]
        }
        weighted = [m for m, has in enumerate(self._weighted) if has]
        return flat, [
            by_member[m] if m in by_member else kernels.xp.zeros_like(given)
            for m, given in zip(weighted, self._weights)
        ]
