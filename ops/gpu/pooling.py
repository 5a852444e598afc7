"""Pools the rows that come back to a rank, and makes the gradients of that.

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
    """Pools some of the lookups from the rows that came back.

    Args:
        members: all M lookups.
        flat: [E] float32.
        counts: [N, S], how many bags of each section came from each rank.
        positions: for each member int32.
        samples: for each member with a combiner int64, ascending.
        weights: for each weighted member float32.
        wanted: the members that are pooled.
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
        wanted: Sequence[int],
    ):
        self._kernels, self._wanted, self._weighted = kernels, wanted, members.weighted
        self._weights, self._positions = list(weights), positions
        dims = np.ones(counts.shape[1], np.int64)
        dims[list(members.sections)] = members.dims
        self._counts, self._dims = counts.astype(np.int64), dims
        self._rows = kernels.flat(flat, self._counts.reshape(-1), np.tile(dims, len(counts)))
        combined = [combiner != ROWS for combiner in members.combiners]
        samples_by_member = _by_member(samples, combined)
        weights_by_member = _by_member(weights, members.weighted)
        wanted_samples = [samples_by_member[m] for m in wanted]
        sizes = [int(positions[m].size) for m in wanted]
        self._ends = np.cumsum(sizes)
        batches = self._batches(wanted_samples, sizes)
        self.lookups = [
            Lookup(
                batch,
                members.dims[m],
                max(members.combiners[m], SUM),
                members.weighted[m],
                max(members.max_norms[m], 0.0),
            )
            for m, batch in zip(wanted, batches)
        ]
        all_weights = None
        if any(members.weighted[m] for m in wanted):
            by_member = [
                kernels.xp.ones(size, np.float32)
                if weights_by_member[m] is None
                else weights_by_member[m]
                for m, size in zip(wanted, sizes)
            ]
            all_weights = kernels.xp.concatenate(by_member)
        self._ids = Ids(
            kernels.xp.concatenate([positions[m] for m in wanted]),
            self._offsets(wanted_samples, sizes, batches),
            all_weights,
        )

    def _batches(self, samples: Sequence[Any], sizes: Sequence[int]) -> list[int]:
        """Counts the samples of each member."""
        known = [i for i, one in enumerate(samples) if one is not None and sizes[i]]
        batches = [size if one is None else 0 for one, size in zip(samples, sizes)]
        if known:
            lasts = self._kernels.xp.concatenate([samples[i][-1:] for i in known])
            for i, last in zip(known, self._kernels.download(lasts)):
                batches[i] = int(last) + 1
        return batches

    def _offsets(self, samples: Sequence[Any], sizes: Sequence[int], batches: Sequence[int]) -> Any:
        """Returns [B + 1] int32, where the samples of all members begin."""
        kernels, total = self._kernels, int(sum(batches))
        if all(one is None for one in samples):
            return kernels.xp.arange(total + 1, dtype=np.int32)
        by_member = [
            kernels.xp.arange(size, dtype=np.int64) if one is None else one
            for one, size in zip(samples, sizes)
        ]
        at = kernels.xp.arange(int(self._ends[-1]), dtype=np.int64)
        member = kernels.xp.searchsorted(kernels.upload(self._ends), at, side="right")
        firsts = kernels.upload(np.cumsum(batches) - np.asarray(batches, np.int64))
        return kernels.offsets(kernels.xp.concatenate(by_member) + firsts[member], total)

    def pool(self) -> Joined:
        """Pools: [samples or ids, D] float32 for each member."""
        return Joined(
            self._kernels.pool(self.lookups, [self._rows], self._ids),
            [lookup.samples * lookup.dim for lookup in self.lookups],
            [lookup.dim for lookup in self.lookups],
        )

    def gradient(self, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns ([E], the gradient of `flat`, for each weighted member that of its weights), by
        the gradients of the wanted members' results.
        """
        kernels, total = self._kernels, int(self._counts.sum())
        matrices = [
            gradient.reshape(lookup.samples, lookup.dim)
            for gradient, lookup in zip(gradients, self.lookups)
        ]
        lookup_gradients = kernels.rows(matrices)
        of_weights = any(self._weighted[m] for m in self._wanted)
        made = kernels.pool_terms(
            self.lookups, [self._rows], self._ids, lookup_gradients, of_weights
        )
        sections = np.tile(np.arange(len(self._dims)), len(self._counts))
        segments = Segments.of(self._counts.reshape(-1), sections)
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
        if not of_weights:
            return flat, [kernels.xp.zeros_like(one) for one in self._weights]
        by_member = {
            m: made.weights[int(end - self._positions[m].size) : int(end)]
            for m, end in zip(self._wanted, self._ends)
        }
        weighted = [m for m, has_weights in enumerate(self._weighted) if has_weights]
        return flat, [
            by_member[m] if m in by_member else kernels.xp.zeros_like(one)
            for m, one in zip(weighted, self._weights)
        ]


def _by_member(arrays: Sequence[Any], has: Sequence[bool]) -> list[Any]:
    """Deals arrays out to the members that have one; the others get None."""
    remaining = iter(arrays)
    return [next(remaining) if one else None for one in has]
