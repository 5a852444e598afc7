"""Checks where a step waits on the host for what kernels compute: for sizes alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from tests.gpu_double import driver

ROWS, DIMS, RATE = 20, (4, 3, 16), 0.5


class Model:
    """Looks three tables up: one by plain ids, one by samples, one by both, with weights.

    Args:
        batches: of its steps.

    Attributes:
        start: what to run first.
        train: a step of SGD.
    """

    def __init__(self, batches: Sequence[Batch]):
        inputs = batches[0].inputs()
        iterator = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_generator(
                lambda: (batch.inputs() for batch in batches),
                tuple(x.dtype for x in inputs),
                tuple([None] for _ in inputs),
            )
        )
        *self.ids, by_sample, with_weights, self.weights = iterator.get_next()
        self.tables = [
            tf.get_variable(f"t{t}", initializer=values) for t, values in enumerate(first_values())
        ]
        first, second = self.tables[1:]
        results = [
            tf.nn.embedding_lookup(self.tables[0], self.ids[0]),
            tf.nn.embedding_lookup_sparse(
                first, sparse(by_sample, self.ids[1]), None, combiner="sum"
            ),
            tf.nn.embedding_lookup(second, self.ids[2]),
            tf.nn.embedding_lookup_sparse(
                second,
                sparse(with_weights, self.ids[3]),
                sparse(with_weights, self.weights),
                combiner="mean",
            ),
        ]
        # Each row of a result counts by its number.
        loss = tf.add_n(
            [
                tf.reduce_sum(
                    result * tf.cast(tf.range(1, tf.shape(result)[0] + 1), tf.float32)[:, None]
                )
                for result in results
            ]
        )
        self.train = tf.train.GradientDescentOptimizer(RATE).minimize(loss)
        self.start = [tf.global_variables_initializer(), iterator.initializer]


def sparse(samples: tf.Tensor, values: tf.Tensor) -> tf.SparseTensor:
    return tf.SparseTensor(
        tf.stack([samples, tf.zeros_like(samples)], 1), values, tf.constant([100, 1], tf.int64)
    )


def first_values() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((ROWS, dim)).astype(np.float32) for dim in DIMS]


class Batch:
    """Draws the inputs of a step; samples have gaps, and one lookup may have no ids."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        sizes = [9, 0 if seed == 1 else 12, 5, 30]
        self.ids = [rng.integers(0, ROWS, size) for size in sizes]
        self.samples = [np.sort(rng.integers(0, 9, size)) for size in (sizes[1], sizes[3])]
        self.weights = rng.uniform(0.5, 2, sizes[3]).astype(np.float32)

    def inputs(self) -> tuple[np.ndarray, ...]:
        return (*self.ids, *self.samples, self.weights)

    def train(self, tables: list[np.ndarray]) -> None:
        """Trains tables of NumPy in float64."""
        factors = self.samples[1] + 1.0
        sums = np.bincount(self.samples[1], self.weights)
        of_mean = factors * self.weights / sums[self.samples[1]]
        for t, ids, of_rows in (
            (0, self.ids[0], np.arange(1, len(self.ids[0]) + 1)),
            (1, self.ids[1], self.samples[0] + 1.0),
            (2, self.ids[2], np.arange(1, len(self.ids[2]) + 1)),
            (2, self.ids[3], of_mean),
        ):
            np.subtract.at(tables[t], ids, RATE * np.asarray(of_rows, np.float64)[:, None])


@pytest.mark.parametrize("backend", ["hb", "sok"])
@pytest.mark.usefixtures("bound")
def test_a_step_waits_for_sizes_only(
    backend: str, stand_in: driver.StandIn, monkeypatch: pytest.MonkeyPatch
):
    """For counts of the request, and headers of the message; where the owner pools, for how many
    rows are distinct, too. Nothing is done before somebody waits.
    """
    monkeypatch.setenv("COLLECTIVE_STRATEGY", backend)
    wanted = [values.astype(np.float64) for values in first_values()]
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), strategy.embedding_scope():
        batches = [Batch(seed) for seed in range(3)]
        model = Model(batches)
        with tf.Session() as session:
            session.run(model.start)
            for batch in batches:
                stand_in.reset()
                stand_in.delays = True
                session.run(model.train)
                assert "pool_rows" in stand_in.launches
                assert ("list_bags" in stand_in.launches) == (backend == "sok"), "owners pool"
                assert stand_in.calls.count("wait_for_event") == (3 if backend == "sok" else 2)
                assert not stand_in.queued
                batch.train(wanted)
            stand_in.reset()
            for got, want in zip(session.run(model.tables), wanted):
                np.testing.assert_allclose(got, want, 1e-5, 1e-5)
