"""Defines lookups and groups of them, and the task of a backend."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import os
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.counting import counted
from collective.ops.exchange import tensorflow_lookup
from collective.ops.exchange.embedding_bag import Section

BACKENDS = {
    "hb": "collective.strategies.hb.HbBackend",
    "sok": "collective.strategies.sok.SokBackend",
}


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Describes one lookup in one table. Symbols: K ids, V rows of dimension D.

    Attributes:
        table: a `collective.tables.table.Table`: `name`, `rows` V, `dim` D, `dtype`, `owners` of
            keys, `fetch` of rows.
        ids: int64. Dense of any shape for plain rows; [K] if the rows are pooled.
        unchecked: whether the ids must still be checked to be in [0, V).
        sparse_ids: the `SparseTensor` whose values are the ids, if the rows are pooled per sample;
            else None.
        sparse_weights: the weights of `sparse_ids`, or None.
        combiner: 'sum', 'mean' or 'sqrtn', if the rows are pooled; else None.
        max_norm: L2 norm to which each row is clipped before pooling, or None.
        weights_have_gradients: True if the weights depend on something that can be trained.
    """

    table: Any
    ids: tf.Tensor
    unchecked: bool
    sparse_ids: tf.SparseTensor | None = None
    sparse_weights: tf.SparseTensor | None = None
    combiner: str | None = None
    max_norm: float | None = None
    weights_have_gradients: bool = False

    def __str__(self) -> str:
        """Describes everything about the lookup that must be the same on all ranks."""
        rows = "any rows" if self.table.rows is None else counted(self.table.rows, "row")
        text = f"table '{self.table.op.name}' of {rows} of dimension {self.table.dim}"
        if self.table.placement.holder is not None:
            text += f", whole on rank {self.table.placement.holder}"
        if self.combiner:
            text += f", combined by '{self.combiner}'"
        if self.max_norm is not None:
            text += f", max_norm {self.max_norm}"
        return text

    @property
    def inputs(self) -> list[tf.Tensor]:
        """Returns the tensors that the lookup depends on."""
        sparse = [x for x in (self.sparse_ids, self.sparse_weights) if x is not None]
        return [self.ids, *(x.indices for x in sparse), *(x.values for x in sparse)]

    def combined(self, rows: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Returns the lookup's result from its distinct rows.

        Args:
            rows: [U, D], its distinct rows.
            positions: [K] int32, the place of each id's row among them.
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
    """Describes how a group's lookups share an exchange.

    Messages are ordered by section, and one row comes back for each *bag* of a section. A section
    is of one table. Its bags are the distinct keys of all its lookups, whose rows the requester
    pools. In a pooled section, of a single lookup, a bag has the keys of one sample on one owner,
    which the owner pools.

    Attributes:
        tables: the group's, each once.
        sections: the parts of a message, of one table each: its place in `tables`.
        members: for each lookup the section that it is in.
    """

    tables: tuple[Any, ...]
    sections: tuple[Section, ...]
    members: tuple[int, ...]


class Backend(abc.ABC):
    """Decides the layout of a group, and thereby how it is exchanged.

    `collective.strategies.grouped_exchange` carries the layout out.
    """

    @abc.abstractmethod
    def layout(self, group: Sequence[Lookup]) -> GroupLayout:
        """Returns the layout with which `group` shares an exchange.

        It is a pure function: every rank gets the same layout for the same group.
        """


def tables_of(group: Sequence[Lookup]) -> tuple[Any, ...]:
    """Returns the tables of `group`, each once, in the order of their first lookups."""
    return tuple({id(lookup.table): lookup.table for lookup in group}.values())


def backend(name: str | None = None) -> Backend:
    """Returns the backend called `name`.

    By default it is the one in the environment variable COLLECTIVE_STRATEGY, else hb.

    Raises:
        ValueError: there is no such backend.
    """
    name = (name or os.environ.get("COLLECTIVE_STRATEGY") or "hb").lower()
    if name not in BACKENDS:
        raise ValueError(
            f"COLLECTIVE_STRATEGY={name}: there is no such backend. Known: {', '.join(BACKENDS)}."
        )
    module, _, kind = BACKENDS[name].rpartition(".")
    chosen: Backend = getattr(importlib.import_module(module), kind)()
    return chosen
