"""All reductions of a run share exchanges, however many variables and metrics there are."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.exchange import slice_means
from tests.ranks import grouped

pytestmark = pytest.mark.double

V, D, B = 13, 3, 6


def small_tables(strategy, count, dtypes=(tf.float32,)):
    """Makes embeddings that are replicated: they have less rows than a table must have."""
    with strategy.embedding_scope(min_rows=1000):
        return plain_tables(count, dtypes)


def plain_tables(count, dtypes):
    return [
        tf.get_variable(
            f"e{i:02}",
            [V, D + i % 3],
            dtypes[i % len(dtypes)],
            initializer=tf.random_uniform_initializer(seed=i),
            use_resource=True,
        )
        for i in range(count)
    ]


def loss_of(tables, ids):
    rows = [tf.nn.embedding_lookup(table, (ids + i) % V) for i, table in enumerate(tables)]
    return tf.add_n([tf.reduce_mean(tf.cast(tf.square(x - 0.5), tf.float32)) for x in rows])


def ids_of(rank, size):
    every = np.random.default_rng(3).integers(0, V, [size, B])
    return every[rank]


def exchanges(strategy, count):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tables = small_tables(strategy, count)
        kernel = tf.get_variable("kernel", [2], initializer=tf.ones_initializer())
        ids = tf.placeholder(tf.int64, [None])
        loss = loss_of(tables, ids) + tf.reduce_sum(tf.square(kernel))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: ids_of(0, 1)})
            _, counts = grouped.counted(session, train, {ids: ids_of(0, 1)})
    return sum(counts[kind] for kind in ("Alltoall", "Allreduce", "Allgather"))


@pytest.mark.slow
def test_fifty_replicated_embeddings_take_as_many_exchanges_as_one(strategy):
    assert exchanges(strategy, 50) == exchanges(strategy, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [tf.train.AdagradOptimizer, tf.train.GradientDescentOptimizer]
)
def test_slices_of_all_ranks_are_those_of_one_process(strategy, rank, size, optimizer):
    """Types and widths differ, and so do the numbers of slices of ranks."""
    dtypes = (tf.float32, tf.float64)

    def trained(tables, parts):
        # The truth is the mean of the ranks' losses, in one graph.
        losses = [loss_of(tables, part) for part in parts]
        loss = tf.add_n(losses) / len(losses)
        gradients = tf.gradients(loss, tables)
        norm = tf.global_norm([tf.cast(g.values, tf.float32) for g in gradients])
        train = optimizer(0.1).apply_gradients(zip(gradients, tables))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            norms = [session.run([norm, train])[0] for _ in range(3)]
            return norms, session.run(tables)

    every = [ids_of(r, size)[: B - r] for r in range(size)]
    with strategy.scope(), tf.Graph().as_default():
        tables = small_tables(strategy, 5, dtypes)
        norms, got = trained(tables, [tf.constant(every[rank])])
    with tf.Graph().as_default():
        tables = plain_tables(5, dtypes)
        expected_norms, expected = trained(tables, [tf.constant(part) for part in every])
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)


@pytest.mark.parametrize("reads", [False, True])
def test_a_rank_sends_each_row_of_large_embeddings_once(strategy, rank, size, reads, monkeypatch):
    """What a script reads are all slices; of the other gradients ranks send sums of rows."""
    monkeypatch.setattr(slice_means, "MOST_ELEMENTS", 0)
    dtypes = (tf.float32, tf.float16)

    def trained(tables, parts):
        losses = [loss_of(tables, part) for part in parts]
        optimizer = tf.train.AdagradOptimizer(0.1)
        gradients = optimizer.compute_gradients(tf.add_n(losses) / len(losses), tables)
        if reads:
            clipped = tf.clip_by_norm(gradients[0][0].values, 100.0)
            changed = tf.IndexedSlices(
                clipped, gradients[0][0].indices, gradients[0][0].dense_shape
            )
            gradients[0] = (changed, gradients[0][1])
        train = optimizer.apply_gradients(gradients)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run(train)
            values = session.run(tables)
            _, operations = grouped._traced(session, train, None)
            names = {name for name, kind in operations if kind == "Allgather"}
            sent = [
                session.run(tf.size(op.inputs[0]))
                for op in tf.get_default_graph().get_operations()
                if op.name in names and "sparse_gradients" in op.name
            ]
        return values, sent

    every = [np.concatenate([ids_of(r, size)[: B - r]] * 50) for r in range(size)]
    with strategy.scope(), tf.Graph().as_default():
        got, sent = trained(small_tables(strategy, 4, dtypes), [tf.constant(every[rank])])
    with tf.Graph().as_default():
        tables = plain_tables(4, dtypes)
        expected, _ = trained(tables, [tf.constant(part) for part in every])
    for i, (a, b) in enumerate(zip(got, expected)):
        np.testing.assert_allclose(a, b, rtol=[1e-5, 5e-3][i % 2], atol=[1e-7, 5e-3][i % 2])
    if size == 1:
        return
    assert len(sent) == 1 + reads  # all types travel as float32
    distinct = np.unique(every[rank]).size
    heads = 2 * 4 + 2 * 4 * distinct  # how many rows each gradient has, and which
    once = heads + distinct * sum(D + i % 3 for i in range(4))
    if reads:
        once -= 2 + distinct * (2 + D)  # the first one travels as slices, with all others
    assert once in sent and (max(sent) > 10 * once) == reads


def test_a_penalty_on_slices_is_that_of_all_ranks(strategy, rank, size):
    """The mean over ranks of slices is differentiable."""

    def penalty(table, parts):
        losses = [tf.reduce_sum(tf.nn.embedding_lookup(table, part) ** 3) for part in parts]
        slices = tf.gradients(tf.add_n(losses) / len(losses), table)[0]
        return tf.reduce_sum(tf.square(slices.values))

    every = [ids_of(r, size)[: B - r] for r in range(size)]
    with strategy.scope(), tf.Graph().as_default():
        table = small_tables(strategy, 1)[0]
        gradient = tf.convert_to_tensor(
            tf.gradients(penalty(table, [tf.constant(every[rank])]), table)[0]
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            got, value = session.run([gradient, table])
    # d/dv of the sum over slices of (3 v² / N)² is 36 v³ / N² for each slice's row.
    occurrences = np.bincount(np.concatenate(every), minlength=V)[:, None]
    np.testing.assert_allclose(got, 36 * value**3 / size**2 * occurrences, rtol=1e-5)
