"""Builds messages of bags and what their owner makes of them, compared with NumPy in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.exchange import dispatch, embedding_bag
from tests.gpu_double import driver

DIMS, ROWS, SCALE = (4, 3, 16), 9, 0.3


class Section(NamedTuple):
    """Describes a section; with a `max_norm` of 0 nothing is clipped."""

    table: int
    pooled: bool = True
    weighted: bool = False
    max_norm: float = 0.0


PLAIN = (Section(2), Section(0), Section(2))
MIXED = (Section(0, weighted=True), Section(1, False), Section(2), Section(0, False), Section(1))
CLIPPED = (Section(0, True, True, 1.5), Section(2), Section(0, True, False, 0.7), Section(1, False))


class Sent(NamedTuple):
    """Holds what a rank sent of a section."""

    lengths: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    @property
    def bags(self) -> np.ndarray:
        """Returns the bag of each key."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


class Bagged:
    """Builds operations of an owner, by messages of several ranks.

    Args:
        most: bags that a rank asks for in a section.
        keys: the most keys of a bag; of an unpooled section it is one, and each key comes once.
    """

    def __init__(
        self,
        sections: tuple[Section, ...] = MIXED,
        ranks: int = 2,
        most: int = 11,
        keys: int = 4,
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.sections, self.ranks = sections, ranks
        self.values = [rng.standard_normal((ROWS, dim)).astype(np.float32) for dim in DIMS]
        self.sent = [[self._sent(one, most, keys, rng) for one in sections] for _ in range(ranks)]
        self.tables = [
            tf.get_variable(f"table{t}", initializer=one, use_resource=True)
            for t, one in enumerate(self.values)
        ]
        words = [self._words(of_rank) for of_rank in self.sent]
        self.message = tf.placeholder_with_default(np.concatenate(words), [None])
        self.splits = tf.constant([len(one) for one in words], tf.int32)
        self.rows = [
            tf.placeholder_with_default(
                np.concatenate([one.rows for one in self.of_table(t)] or [np.zeros(0, np.int64)]),
                [None],
            )
            for t in range(len(DIMS))
        ]
        headers = [[len(one.lengths), len(one.rows)] for of in self.sent for one in of]
        self.headers = tf.constant(np.reshape(headers, -1), tf.int64)
        self.gradients = [
            [
                rng.standard_normal((len(one.lengths), DIMS[section.table])).astype(np.float32)
                for section, one in zip(sections, of_rank)
            ]
            for of_rank in self.sent
        ]
        flat = np.concatenate([one.reshape(-1) for of in self.gradients for one in of])
        self.gradient = tf.placeholder_with_default(flat, [None])
        self.attributes: dict[str, Any] = {
            "ranks": ranks,
            "section_tables": [one.table for one in sections],
            "kinds": [embedding_bag.STATIC] * len(DIMS),
            "dims": [DIMS[one.table] for one in sections],
            "pooled": [one.pooled for one in sections],
            "weighted": [one.weighted for one in sections],
        }
        self.more = {
            "max_norms": [one.max_norm for one in sections],
            "shapes": [table.shape for table in self.tables],
        }

    @staticmethod
    def _sent(section: Section, most: int, keys: int, rng: np.random.Generator) -> Sent:
        bags = int(rng.integers(min(most, 3), most + 1))
        if not section.pooled:
            rows = rng.permutation(ROWS)[:bags]
            return Sent(np.ones(len(rows), int), rows, np.ones(len(rows), np.float32))
        lengths = rng.integers(0, keys + 1, bags)
        size = int(lengths.sum())
        weights = rng.uniform(0.5, 2, size) if section.weighted else np.ones(size)
        return Sent(lengths, rng.integers(0, ROWS, size), weights.astype(np.float32))

    def _words(self, of_rank: list[Sent]) -> np.ndarray:
        parts = [np.array([[len(one.lengths), len(one.rows)] for one in of_rank]).reshape(-1)]
        for section, one in zip(self.sections, of_rank):
            parts.append(one.rows)
            if section.pooled:
                parts.append(_halves(one.lengths.astype(np.int32)))
            if section.weighted:
                parts.append(_halves(one.weights))
        return np.concatenate(parts).astype(np.int64)

    def pieces(self, t: int) -> list[tuple[int, int]]:
        """Returns rank and section of all pieces of a table."""
        return [
            (rank, s)
            for rank in range(self.ranks)
            for s, section in enumerate(self.sections)
            if section.table == t
        ]

    def of_table(self, t: int) -> list[Sent]:
        return [self.sent[rank][s] for rank, s in self.pieces(t)]

    def gathered(self, operations: Any = None) -> tf.Tensor:
        return (operations or dispatch.operations()).collective_gather_rows(
            [table.handle for table in self.tables],
            self.rows,
            self.message,
            self.splits,
            [self.headers] if operations is None else [],
            **self.attributes,
            **self.more,
        )

    def reduced(self, operations: Any = None) -> list[tf.Tensor]:
        made = (operations or dispatch.operations()).collective_reduce_rows(
            self.gradient,
            [table.handle for table in self.tables],
            self.rows,
            self.message,
            self.splits,
            [self.headers] if operations is None else [],
            scale=SCALE,
            **self.attributes,
            **self.more,
        )
        return [one for of_kind in made for one in of_kind]

    def clips(self, section: Section, rows: np.ndarray) -> np.ndarray:
        """Returns by what each row is multiplied, [K, 1]."""
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        most = section.max_norm or np.inf
        return np.where(norms > most, most / norms, 1)

    def wanted_rows(self) -> np.ndarray:
        """Computes the rows of bags in float64."""
        made = []
        for of_rank in self.sent:
            for section, one in zip(self.sections, of_rank):
                rows = self.values[section.table][one.rows].astype(np.float64)
                pooled = np.zeros((len(one.lengths), DIMS[section.table]))
                factors = one.weights[:, None] * self.clips(section, rows)
                np.add.at(pooled, one.bags, factors * rows)
                made.append(pooled.reshape(-1))
        return np.concatenate(made)

    def wanted_sums(self) -> list[np.ndarray]:
        """Computes values, indices and inverse of each table in float64."""
        values, indices, inverses = [], [], []
        for t, dim in enumerate(DIMS):
            dim = dim if self.pieces(t) else 1  # as on a CPU: nobody says what it is
            rows = np.concatenate([one.rows for one in self.of_table(t)] or [[]]).astype(int)
            terms = [np.zeros((0, dim))]
            for rank, s in self.pieces(t):
                section, one = self.sections[s], self.sent[rank][s]
                of_key = self.gradients[rank][s].astype(np.float64)[one.bags]
                own = self.values[t][one.rows].astype(np.float64)
                clip = self.clips(section, own)
                along = (own * of_key).sum(1, keepdims=True) / np.square(own).sum(1, keepdims=True)
                of_key = np.where(clip < 1, clip * (of_key - along * own), of_key)
                terms.append(one.weights[:, None] * of_key)
            distinct = list(dict.fromkeys(rows.tolist()))
            inverse = np.array([distinct.index(row) for row in rows], np.int32)
            summed = np.zeros((len(distinct), dim))
            np.add.at(summed, inverse, SCALE * np.concatenate(terms))
            values.append(summed)
            indices.append(np.array(distinct, np.int64))
            inverses.append(inverse)
        return [*values, *indices, *inverses]


def _halves(values: np.ndarray) -> np.ndarray:
    """Packs numbers of 32 bits, two to a word."""
    return np.pad(values, (0, len(values) % 2)).view(np.int64)


def initialized(session: tf.Session, stand_in: driver.StandIn, delays: bool = False) -> None:
    session.run(tf.global_variables_initializer())
    stand_in.reset()
    stand_in.delays = delays


def near(got: Any, wanted: Any) -> None:
    assert len(got) == len(wanted)
    for number, (one, other) in enumerate(zip(got, wanted)):
        assert one.shape == other.shape, number
        np.testing.assert_allclose(one, other, 1e-4, 1e-5, err_msg=str(number))
