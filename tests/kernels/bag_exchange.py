"""Simulates an exchange of N ranks in one process.

What each rank computes is there, what travels is sliced and put together.

For comparison, the same lookups on whole tables, by plain TensorFlow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import placement
from collective.ops.exchange import embedding_bag

COMBINERS = {
    None: embedding_bag.ROWS,
    "sum": embedding_bag.SUM,
    "mean": embedding_bag.MEAN,
    "sqrtn": embedding_bag.SQRTN,
}


@dataclasses.dataclass
class Table:
    """`keys` [V] is None for a static table; a dynamic one has the row of each of its keys, which
    are sorted.
    """

    rows: np.ndarray
    keys: np.ndarray | None = None

    @property
    def kind(self) -> int:
        return embedding_bag.STATIC if self.keys is None else embedding_bag.DYNAMIC

    def shards(self, ranks: int) -> list[np.ndarray]:
        """Returns the row numbers that each rank owns, in the order of its shard."""
        if self.keys is None:
            return [np.arange(rank, len(self.rows), ranks) for rank in range(ranks)]
        owners = placement.dynamic(ranks).owner(self.keys)
        return [np.flatnonzero(owners == rank) for rank in range(ranks)]


@dataclasses.dataclass
class Lookup:
    """What the ranks look up: `ids`, `samples`, `weights` are an array a rank. Ids are row numbers,
    also of dynamic tables.
    """

    table: int
    ids: list[np.ndarray]
    combiner: str | None = None
    samples: list[np.ndarray] | None = None
    weights: list[np.ndarray] | None = None
    max_norm: float | None = None
    by_owner: bool = False


class Simulation:
    """Holds the graph of an exchange, and of plain lookups.

    `twice`: TensorFlow has no second derivative of means without weights; they get weights of 1,
        which make no difference.

    Attributes:
        outputs: [rank][lookup], what the exchange gives.
        plain: the same by TensorFlow's own lookups.
        shards: [table][rank] variables.
        tables: variables of whole tables.
        weights, plain_weights: placeholders with defaults, [rank][lookup] or None.
        flats: [rank] what came back to it, before it was pooled.
    """

    def __init__(self, tables: list[Table], lookups: list[Lookup], ranks: int, twice: bool = False):
        self.sections, self.members, self.lookups, self.ranks = [], [], lookups, ranks
        self.kinds = [table.kind for table in tables]
        shared: dict[int, int] = {}
        for lookup in lookups:
            dim = tables[lookup.table].rows.shape[1]
            if lookup.by_owner:
                section = len(self.sections)
                self.sections.append(
                    embedding_bag.Section(
                        lookup.table, dim, True, lookup.weights is not None, lookup.max_norm or 0.0
                    )
                )
            else:
                if lookup.table not in shared:
                    shared[lookup.table] = len(self.sections)
                    self.sections.append(embedding_bag.Section(lookup.table, dim))
                section = shared[lookup.table]
            self.members.append(
                embedding_bag.BagMember(
                    section,
                    dim,
                    COMBINERS[lookup.combiner],
                    lookup.weights is not None,
                    0.0 if lookup.by_owner else lookup.max_norm or 0.0,
                )
            )
        self.numbers = [table.shards(ranks) for table in tables]
        self.shards = [
            [variable(table.rows[mine]) for mine in numbers]
            for table, numbers in zip(tables, self.numbers)
        ]
        self.tables = [variable(table.rows) for table in tables]
        self.weights = [
            [lookup.weights and given(lookup.weights[rank], np.float32) for lookup in lookups]
            for rank in range(ranks)
        ]
        self.plain_weights = [
            [lookup.weights and given(lookup.weights[rank], np.float32) for lookup in lookups]
            for rank in range(ranks)
        ]
        self._twice = twice
        self._exchange(tables)
        self.plain = [
            [
                self._plain(lookup, rank, self.plain_weights[rank][i])
                for i, lookup in enumerate(lookups)
            ]
            for rank in range(ranks)
        ]

    def _exchange(self, tables: list[Table]) -> None:
        ranks, layout = self.ranks, (self.sections, self.kinds, self.ranks)
        self.asked = []
        for rank in range(ranks):
            ids = [
                given(
                    lookup.ids[rank]
                    if tables[lookup.table].keys is None
                    else tables[lookup.table].keys[lookup.ids[rank]]
                )
                for lookup in self.lookups
            ]
            self.asked.append(
                embedding_bag.request(
                    ids,
                    [given(lookup.samples[rank]) for lookup in self.lookups if lookup.by_owner],
                    [
                        w
                        for w, lookup in zip(self.weights[rank], self.lookups)
                        if lookup.by_owner and w is not None
                    ],
                    self.members,
                    *layout,
                    own_samples=[
                        None
                        if lookup.by_owner or lookup.combiner is None
                        else given(lookup.samples[rank])
                        for lookup in self.lookups
                    ],
                )
            )
        messages = [tf.split(a.message, a.splits, num=ranks) for a in self.asked]
        answers = []
        for owner in range(ranks):
            message, splits = (
                tf.concat([m[owner] for m in messages], 0),
                tf.stack([a.splits[owner] for a in self.asked]),
            )
            heard = embedding_bag.respond(message, splits, *layout)
            rows = [
                local
                if table.keys is None
                else tf.searchsorted(tf.constant(table.keys[mine[owner]]), local, out_type=tf.int64)
                for table, mine, local in zip(tables, self.numbers, heard.keys)
            ]
            shards = [shard[owner] for shard in self.shards]
            flat = embedding_bag.gather(
                [shard.handle for shard in shards],
                rows,
                message,
                splits,
                *layout,
                [s.shape for s in shards],
                headers=heard.headers,
            )
            answers.append(tf.split(flat, heard.row_splits, num=ranks))
        self.flats, self.outputs = [], []
        for rank in range(ranks):
            asked = self.asked[rank]
            # One after the other has its rows, as an all-to-all gives them.
            flat = tf.ensure_shape(tf.concat([answer[rank] for answer in answers], 0), [None])
            with tf.control_dependencies(
                [tf.assert_equal(tf.stack([tf.size(a[rank]) for a in answers]), asked.row_splits)]
            ):
                flat = tf.identity(flat)
            members, samples, weights, by_owner = [], [], [], 0
            own_samples = iter(asked.own_samples)
            for i, lookup in enumerate(self.lookups):
                member = self.members[i]
                if lookup.by_owner:
                    member = dataclasses.replace(member, combiner=embedding_bag.SUM, weighted=True)
                    samples.append(asked.samples[by_owner])
                    weights.append(asked.scales[by_owner])
                    by_owner += 1
                elif lookup.combiner is not None:
                    samples.append(next(own_samples))
                    if lookup.weights is not None:
                        weights.append(self.weights[rank][i])
                members.append(member)
            self.flats.append(flat)
            self.outputs.append(
                embedding_bag.pool(flat, asked.positions, samples, weights, members, asked.counts)
            )

    def _plain(self, lookup: Lookup, rank: int, weights: Any) -> tf.Tensor:
        table, ids = self.tables[lookup.table], tf.constant(lookup.ids[rank], tf.int64)
        if lookup.combiner is None:
            return tf.nn.embedding_lookup(table, ids, max_norm=lookup.max_norm)
        samples = lookup.samples[rank]
        if weights is None and self._twice:
            weights = tf.ones([len(samples)])
        indices = np.stack([samples, np.arange(len(samples))], 1).astype(np.int64)
        shape = [int(samples[-1]) + 1 if len(samples) else 0, max(len(samples), 1)]
        sparse = tf.SparseTensor(indices, ids, shape)
        sparse_weights = None if weights is None else tf.SparseTensor(indices, weights, shape)
        return tf.nn.embedding_lookup_sparse(
            table, sparse, sparse_weights, combiner=lookup.combiner, max_norm=lookup.max_norm
        )


def variable(value: np.ndarray) -> tf.Variable:
    return tf.Variable(value.astype(np.float32), use_resource=True, dtype=tf.float32)


def given(value: np.ndarray, dtype: Any = np.int64) -> tf.Tensor:
    """No constant: nothing of the graph may be computed beforehand."""
    return tf.placeholder_with_default(tf.constant(np.asarray(value, dtype)), [None])


def started() -> tf.Session:
    """A session that has initialized all variables."""
    session = tf.Session(
        config=tf.ConfigProto(intra_op_parallelism_threads=2, inter_op_parallelism_threads=1)
    )
    session.run(tf.global_variables_initializer())
    return session


def whole(simulation: Simulation, table: int, slices: list[Any]) -> np.ndarray:
    """The gradient of a whole table, from what the ranks have of it (None for none). Their rows
    must be distinct.
    """
    total = np.zeros([sum(map(len, simulation.numbers[table])), simulation.tables[table].shape[1]])
    for numbers, part in zip(simulation.numbers[table], slices):
        if part is not None:
            assert len(np.unique(part.indices)) == len(part.indices)
            total[numbers[part.indices]] = part.values
    return total


def dense(gradient: Any, shape: Any) -> np.ndarray:
    """Returns the sum of an `IndexedSlicesValue`, or zeros for None."""
    total = np.zeros(shape)
    if gradient is not None:
        np.add.at(total, gradient.indices, gradient.values)
    return total
