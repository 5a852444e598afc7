"""Losses that use a table as one value train its rows as in plain TensorFlow."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import grouped, reference

V, D = 11, 3  # rows that no number of ranks divides
VALUES = reference.table_values(V, D)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.train.GradientDescentOptimizer(0.1),
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9),
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: tf.train.FtrlOptimizer(0.1),
    ],
)
@pytest.mark.parametrize("lookups", [True, False])
def test_penalties_on_all_weights(strategy, rank, size, make, lookups):
    """`l2_loss` over `trainable_variables()` makes a table's gradient dense in plain TensorFlow."""

    def build(embedding_scope):
        with embedding_scope():
            tables = {
                name: reference.table(
                    name, V, dim, regularizer=lambda v: 0.01 * tf.reduce_sum(tf.abs(v))
                )
                for name, dim in (("t", D), ("u", 2))
            }
        ids, labels = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None])
        rows = (
            [tf.nn.embedding_lookup(t, ids) for t in tables.values()]
            if lookups
            else [tf.ones([1, 2])]
        )
        loss = tf.reduce_mean(
            tf.square(
                tf.layers.dense(tf.concat(rows, 1), 1, kernel_initializer=tf.ones_initializer())
                - labels[:, None]
            )
        )
        total = (
            loss
            + tf.losses.get_regularization_loss()
            + 0.1 * tf.add_n(list(map(tf.nn.l2_loss, tf.trainable_variables())))
        )
        return {"train": make().minimize(total), **grouped.rows_of(tables)}, {
            "ids": ids,
            "labels": labels,
        }

    rng = np.random.default_rng(1)
    batches = [
        {"ids": rng.integers(0, V, grouped.B), "labels": rng.normal(size=grouped.B)}
        for _ in range(3)
    ]
    want, got = grouped.both(
        strategy, rank, size, build, [(["train"], b) for b in batches] + [(["t", "u"], {})]
    )
    grouped.same(got[-1], want[-1])


def test_an_l2_loss_moves_no_rows(strategy, size):
    """Each rank adds up its own: an allreduce of one number, and one of its gradient."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        loss = tf.nn.l2_loss(t)
        train = tf.train.GradientDescentOptimizer(0.25).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_allclose(
                session.run(loss), 0.5 * np.sum(np.square(VALUES, dtype=np.float64)), rtol=1e-6
            )
            assert grouped.exchanged(session, [loss, train])[:2] == ((0, 2) if size > 1 else (0, 0))
            np.testing.assert_allclose(session.run(t), 0.75 * VALUES, rtol=1e-6)


def test_gradients_through_a_read(strategy, rank, size):
    """All of a table against each sample: the gradient is every rank's, and the clipped norm the
    whole table's.
    """

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        x, labels = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=tf.matmul(x, t, transpose_b=True)
            )
        )
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        clipped, norm = tf.clip_by_global_norm(tf.gradients(loss, [t]), 0.1)
        return {"train": optimizer.apply_gradients(zip(clipped, [t])), "norm": norm, "t": t}, {
            "x": x,
            "labels": labels,
        }

    rng = np.random.default_rng(2)
    batches = [
        {"x": rng.normal(size=(grouped.B, D)), "labels": rng.integers(0, V, grouped.B)}
        for _ in range(3)
    ]
    want, got = grouped.both(
        strategy, rank, size, build, [(["train", "norm"], b) for b in batches] + [(["t"], {})]
    )
    for a, b in zip(got, want):
        grouped.same(
            {k: v for k, v in a.items() if v is not None},
            {k: v for k, v in b.items() if v is not None},
        )


@pytest.mark.slow
def test_losses_over_sampled_rows(strategy, rank, size):
    """`sampled_softmax_loss` and `nce_loss` with the same negatives on every rank."""

    def build(embedding_scope):
        with embedding_scope():
            t, u = reference.table("t", V, D), reference.table("u", V, D, seed=1)
        biases = tf.get_variable("biases", [V], initializer=tf.zeros_initializer())
        ids, labels = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None, 1])
        negatives = (
            tf.constant([1, 4, 7], tf.int64),
            tf.fill([tf.shape(labels)[0], 1], 0.3),
            tf.fill([3], 0.3),
        )
        x = tf.nn.embedding_lookup(t, ids)
        loss = tf.reduce_mean(
            tf.nn.sampled_softmax_loss(u, biases, labels, x, 3, V, sampled_values=negatives)
        )
        loss += tf.reduce_mean(
            tf.nn.nce_loss([u], biases, labels, x, 3, V, sampled_values=negatives)
        )
        return {
            "train": tf.train.AdagradOptimizer(0.2).minimize(loss),
            "biases": biases,
            "t": t,
            "u": u,
        }, {"ids": ids, "labels": labels}

    rng = np.random.default_rng(3)
    batches = [
        {"ids": rng.integers(0, V, grouped.B), "labels": rng.integers(0, V, (grouped.B, 1))}
        for _ in range(3)
    ]
    want, got = grouped.both(
        strategy,
        rank,
        size,
        build,
        [(["train"], b) for b in batches] + [(["t", "u", "biases"], {})],
    )
    grouped.same(got[-1], want[-1])


@pytest.mark.slow
def test_losses_that_draw_their_negatives(strategy, rank, size):
    """From a seed all ranks draw the same: compared with the ranks' parts in one graph, each with
    such a sampler, and their mean.
    """
    rng = np.random.default_rng(4)
    batches = [
        {"ids": rng.integers(0, V, grouped.B), "labels": rng.integers(0, V, (grouped.B, 1))}
        for _ in range(3)
    ]

    def run(scope, embedding_scope, parts):
        with scope, tf.Graph().as_default():
            with embedding_scope():
                t, u = reference.table("t", V, D), reference.table("u", V, D, seed=1)
            biases, feeds, losses = (
                tf.get_variable("biases", [V], initializer=tf.zeros_initializer()),
                [],
                [],
            )
            for _ in parts:
                ids, labels = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None, 1])
                x = tf.nn.embedding_lookup(t, ids)
                loss = tf.reduce_mean(
                    tf.nn.sampled_softmax_loss(u, biases, labels, x, 3, V, seed=5)
                )
                losses.append(
                    loss
                    + tf.reduce_mean(
                        tf.nn.nce_loss(
                            u,
                            biases,
                            labels,
                            x,
                            4,
                            V,
                            sampled_values=(
                                tf.random.uniform_candidate_sampler(labels, 1, 4, True, V, seed=6)
                            ),
                        )
                    )
                )
                feeds.append((ids, labels))
            train = tf.train.AdagradOptimizer(0.2).minimize(tf.add_n(losses) / len(parts))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for batch in batches:
                    session.run(
                        train,
                        {
                            place: reference.part(batch[name], part, size)
                            for part, places in zip(parts, feeds)
                            for name, place in zip(("ids", "labels"), places)
                        },
                    )
                return session.run({"t": t, "u": u, "biases": biases})

    got = run(strategy.scope(), strategy.embedding_scope, [rank])
    grouped.same(got, run(contextlib.nullcontext(), contextlib.nullcontext, range(size)))


@pytest.mark.parametrize("first", [True, False])
def test_a_callable_loss_with_an_l2_loss(strategy, rank, size, first):
    """Before the lookup and after it: the tape knows the table either way."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        ids = tf.placeholder(tf.int64, [None])

        def loss():
            parts = [
                lambda: 0.1 * tf.nn.l2_loss(t),
                lambda: tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids))),
            ]
            return tf.add_n([part() for part in (parts if first else parts[::-1])])

        return {"train": tf.train.GradientDescentOptimizer(0.5).minimize(loss), "t": t}, {
            "ids": ids
        }

    batch = {"ids": np.random.default_rng(7).integers(0, V, grouped.B)}
    want, got = grouped.both(strategy, rank, size, build, [(["train"], batch), (["t"], {})])
    grouped.same(got[1], want[1])


def test_gradients_with_respect_to_slots_and_averages(strategy, rank, size):
    """Which are sharded, too: each row's gradient is that of all ranks."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        ids = tf.placeholder(tf.int64, [None])
        average = tf.train.ExponentialMovingAverage(0.5)
        update = average.apply([t])
        rows = tf.nn.embedding_lookup(average.average(t), ids)
        gradient = tf.gradients(
            tf.reduce_mean(tf.reduce_sum(tf.square(rows), 1)), [average.average(t)]
        )[0]
        moved = tf.train.GradientDescentOptimizer(0.5).apply_gradients(
            [(gradient, average.average(t))]
        )
        return {"update": update, "moved": moved, "average": average.average(t)}, {"ids": ids}

    batch = {"ids": np.random.default_rng(7).integers(0, V, grouped.B)}
    want, got = grouped.both(strategy, rank, size, build, [(["moved"], batch), (["average"], {})])
    grouped.same(got[1], want[1])
