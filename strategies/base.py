"""What a backend must do, for a group of lookups."""
from __future__ import annotations

import abc
import dataclasses
import importlib
import os
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernels

BACKENDS = {'hb': 'collective.strategies.hb.HbBackend'}
COMING = ('sok',)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup in one table. Symbols: K ids, V rows of dimension D.

    Attributes:
        table: a `collective.tables.table.Table`: `name`, `rows` V, `dim` D, `dtype`, `owners` of keys, `fetch` of rows.
        ids: int64. Dense of any shape for plain rows; [K] if the rows are pooled.
        bounds: [2] int64, the smallest and largest of the ids, for the gate to check; None if they are checked already.
        sparse_ids: the `SparseTensor` whose values are the ids, if the rows are pooled per sample; else None.
        sparse_weights: its weights, or None.
        combiner: 'sum', 'mean' or 'sqrtn', if the rows are pooled; else None.
        max_norm: L2 norm to which each row is clipped before pooling, or None.
    """
    table: Any
    ids: tf.Tensor
    bounds: tf.Tensor | None
    sparse_ids: tf.SparseTensor | None = None
    sparse_weights: tf.SparseTensor | None = None
    combiner: str | None = None
    max_norm: float | None = None

    def combined(self, rows: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """What the lookup returns.

        Args:
            rows: [U, D], its distinct rows.
            positions: [K] int32, which of them is each id's.
        """
        if self.combiner is None:
            places = tf.reshape(positions, tf.shape(self.ids))
            places.set_shape(self.ids.shape)
            return tf.nn.embedding_lookup(rows, places, max_norm=self.max_norm)
        return kernels.pool(rows, positions, self.sparse_ids, self.sparse_weights, self.combiner, self.max_norm)


class Backend(abc.ABC):
    """A way to exchange."""

    @abc.abstractmethod
    def exchange(self, group: Sequence[Lookup]) -> list[tf.Tensor]:
        """Builds one complete, differentiable exchange for `group` and returns what each lookup returns.

        For a lookup of plain rows, ids' shape + [D]; for a pooled one [samples, D]. Differentiating with respect to
        `table.handle` must give `IndexedSlices` of the shard: at every owner the sum of all ranks' gradients for its rows.
        Every rank calls this with the same group, in the same order. All of its collectives take the gate that stands
        behind the group's ids, and each lookup's bounds are registered there as a `Check`.
        """


def backend(name: str | None = None) -> Backend:
    """The backend called `name`; by default the one in the environment variable COLLECTIVE_STRATEGY, else hb.

    Raises:
        ValueError: there is no such backend.
    """
    name = (name or os.environ.get('COLLECTIVE_STRATEGY') or 'hb').lower()
    if name in COMING:
        raise ValueError(f"COLLECTIVE_STRATEGY={name}: this backend isn't there yet. Known: {', '.join(BACKENDS)}.")
    if name not in BACKENDS:
        raise ValueError(f"COLLECTIVE_STRATEGY={name}: there is no such backend. Known: {', '.join(BACKENDS)}.")
    module, _, kind = BACKENDS[name].rpartition('.')
    made: Backend = getattr(importlib.import_module(module), kind)()
    return made
