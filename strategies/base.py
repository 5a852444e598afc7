"""What a backend must do, for a group of lookups."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import os
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import tensorflow_lookup
from collective.ops.embedding_bag import Section

BACKENDS = {
    "hb": "collective.strategies.hb.HbBackend",
    "sok": "collective.strategies.sok.SokBackend",
}


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup in one table. Symbols: K ids, V rows of dimension D.

    Attributes:
        table: a `collective.tables.table.Table`: `name`, `rows` V, `dim` D, `dtype`, `owners` of
            keys, `fetch` of rows.
        ids: int64. Dense of any shape for plain rows; [K] if the rows are pooled.
        bounds: [2] int64, the smallest and largest of the ids, for the gate to check; None if they
            are checked already.
        sparse_ids: the `SparseTensor` whose values are the ids, if the rows are pooled per sample;
            else None.
        sparse_weights: its weights, or None.
        combiner: 'sum', 'mean' or 'sqrtn', if the rows are pooled; else None.
        max_norm: L2 norm to which each row is clipped before pooling, or None.
        weights_have_gradients: whether the weights depend on something that can be trained.
    """

    table: Any
    ids: tf.Tensor
    bounds: tf.Tensor | None
    sparse_ids: tf.SparseTensor | None = None
    sparse_weights: tf.SparseTensor | None = None
    combiner: str | None = None
    max_norm: float | None = None
    weights_have_gradients: bool = False

    def __str__(self) -> str:
        """What every rank must have alike."""
        how = f", combined by '{self.combiner}'" if self.combiner else ""
        return (
            f"table '{self.table.op.name}' of "
            f"{'any' if self.table.rows is None else self.table.rows} rows of dimension "
            f"{self.table.dim}{how}"
            + (f", max_norm {self.max_norm}" if self.max_norm is not None else "")
        )

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
        return tensorflow_lookup.pool(
            rows, positions, self.sparse_ids, self.sparse_weights, self.combiner, self.max_norm
        )


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """How a group's lookups share an exchange.

    What travels is ordered by section, and one row comes back for each *bag* of a section. A
    section is of one table. Its bags are the distinct keys of all its lookups, whose rows the asker
    pools; or, if it is pooled, the keys of one sample on one owner, which the owner pools, of a
    single lookup.

    Attributes:
        tables: the group's, each once.
        sections: what travels: of one table each, `table` is its place in `tables`.
        members: for each lookup the section that it is in.
    """

    tables: tuple[Any, ...]
    sections: tuple[Section, ...]
    members: tuple[int, ...]


class Backend(abc.ABC):
    """A way to exchange: what a backend decides is the layout of a group;
    `collective.strategies.grouped_exchange` carries it out.
    """

    @abc.abstractmethod
    def layout(self, group: Sequence[Lookup]) -> GroupLayout:
        """How `group` shares an exchange. A pure function: every rank gets the same for the same
        group.
        """


def tables_of(group: Sequence[Lookup]) -> tuple[Any, ...]:
    """The tables of `group`, each once, in the order of their first lookups."""
    return tuple({id(lookup.table): lookup.table for lookup in group}.values())


def backend(name: str | None = None) -> Backend:
    """The backend called `name`; by default the one in the environment variable
    COLLECTIVE_STRATEGY, else hb.

    Raises:
        ValueError: there is no such backend.
    """
    name = (name or os.environ.get("COLLECTIVE_STRATEGY") or "hb").lower()
    if name not in BACKENDS:
        raise ValueError(
            f"COLLECTIVE_STRATEGY={name}: there is no such backend. Known: {', '.join(BACKENDS)}."
        )
    module, _, kind = BACKENDS[name].rpartition(".")
    made: Backend = getattr(importlib.import_module(module), kind)()
    return made
