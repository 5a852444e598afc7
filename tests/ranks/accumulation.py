"""Builds the models of local_steps, and compares them with TensorFlow and the larger batch."""

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, drawn

K, B, V, D = 3, 12, 40, 3  # batches an update, samples a batch, rows, dimension


def batch(update):
    """Draws all samples of an update, a fifth of them without ragged ids.

    Returns: ids [K * B]; ragged ids with their weights; features.
    """
    rng = np.random.default_rng([11, update])
    lengths = rng.integers(0, 4, K * B) * (rng.random(K * B) < 0.8)
    places = np.array([(i, j) for i, length in enumerate(lengths) for j in range(length)], np.int64)
    return {
        "dense": np.minimum(rng.zipf(1.4, K * B) - 1, V - 1),
        "places": places,
        "ids": np.minimum(rng.zipf(1.4, len(places)) - 1, V - 1),
        "weights": rng.uniform(0.5, 2.0, len(places)).astype(np.float32),
        "x": rng.normal(size=(K * B, 3)).astype(np.float32),
    }


def share(update, step, rank, size):
    """Cuts this rank's share out of one batch of the update."""
    whole, part = batch(update), B // size
    first = step * B + rank * part
    mine = (whole["places"][:, 0] >= first) & (whole["places"][:, 0] < first + part)
    return {
        "dense": whole["dense"][first : first + part],
        "x": whole["x"][first : first + part],
        "places": whole["places"][mine] - [first, 0],
        "ids": whole["ids"][mine],
        "weights": whole["weights"][mine],
    }


def shares(updates, rank, size):
    return [share(update, step, rank, size) for update in range(updates) for step in range(K)]


def network(embedding_scope, shape, init, samples):
    """Builds tables t, in three kinds of lookups, and u, in one, and a dense layer.

    Returns (loss, {'t', 'u', 'w': variables}, placeholders).
    """
    with embedding_scope():
        t = tf.get_variable("t", shape, initializer=init)
        u = reference.table("u", 7, 2)
    p = {
        "places": tf.placeholder(tf.int64, [None, 2]),
        "ids": tf.placeholder(tf.int64, [None]),
        "weights": tf.placeholder(tf.float32, [None]),
        "dense": tf.placeholder(tf.int64, [None]),
        "x": tf.placeholder(tf.float32, [None, 3]),
    }
    sparse = tf.SparseTensor(p["places"], p["ids"], [samples, 3])
    weights = tf.SparseTensor(p["places"], p["weights"], [samples, 3])
    wide = tf.concat(
        [
            p["x"],
            tf.nn.embedding_lookup(t, p["dense"]),
            tf.gather(t, (p["dense"] + 1) % V),
            tf.nn.safe_embedding_lookup_sparse(t, sparse, weights, combiner="mean", default_id=3),
            tf.nn.embedding_lookup(u, p["dense"] % 7),
        ],
        1,
    )
    w = tf.get_variable("w", initializer=tf.constant(reference.table_values(3 * D + 5, 1)))
    return tf.reduce_mean(tf.square(tf.matmul(wide, w) - 1.0)), {"t": t, "u": u, "w": w}, p


def model(embedding_scope, train, samples, shape=(V, D), init=None):
    """Builds the network, which `train(loss, variables)` gives an update."""
    init = init or tf.constant_initializer(drawn(np.arange(V)))
    loss, variables, p = network(embedding_scope, list(shape), init, samples)
    op = train(loss, variables)
    return {
        "train": op,
        "w": variables["w"].read_value(),
        "u": tf.nn.embedding_lookup(variables["u"], tf.range(7)),
        "t": tf.nn.embedding_lookup(variables["t"], tf.range(V)),
        "step": tf.train.get_or_create_global_step().read_value(),
    }, p


VALUES = ("t", "u", "w", "step")


def minimize(optimizer):
    made = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer]
    return lambda loss, _: made().minimize(loss, global_step=tf.train.get_or_create_global_step())


def larger(train, updates, init=None):
    """Returns plain TensorFlow's values after each update with all samples of it."""
    return reference.plain(
        lambda s: model(s, train, K * B, init=init),
        [run for update in range(updates) for run in ((["train"], batch(update)), (VALUES, {}))],
    )[1::2]


def smaller(strategy, rank, size, train, updates, **kwargs):
    """Returns the values after each of this rank's runs with `local_steps`."""
    runs = [
        run for feed in shares(updates, rank, size) for run in ((["train"], feed), (VALUES, {}))
    ]
    with strategy.scope(local_steps=K):
        return reference.sharded(strategy, lambda s: model(s, train, B // size, **kwargs), runs)[
            1::2
        ]


def keys_until(update):
    """Returns the keys that the updates before this one look up."""
    batches = [batch(u) for u in range(update)]
    return np.unique(
        np.concatenate(
            [[3], *[np.concatenate([b["dense"], (b["dense"] + 1) % V, b["ids"]]) for b in batches]]
        )
    )


def compare(strategy, rank, size, train, updates=2, want=None, rtol=2e-5, **kwargs):
    want = want or larger(train, updates)
    got = smaller(strategy, rank, size, train, updates, **kwargs)
    for update in range(updates):
        theirs, ours = want[update], got[update * K + K - 1]
        for name in VALUES:
            at = keys_until(update + 1) if name == "t" else ...  # a dynamic table has no other
            np.testing.assert_allclose(
                ours[name][at],
                theirs[name][at],
                rtol=rtol,
                atol=rtol / 10,
                err_msg=f"{name}, update {update}",
            )
    return got


def build_small(strategy, rate=1.0):
    """Builds a step in which each run moves w and the rows of t by the mean of x.

    Returns (placeholder, train_op, fetch).
    """
    with strategy.embedding_scope():
        t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
    w = tf.get_variable("w", initializer=tf.zeros([]))
    x = tf.placeholder_with_default(tf.constant(1.0), [], "x")
    loss = w * x + tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
    train = tf.train.GradientDescentOptimizer(rate).minimize(
        loss, tf.train.get_or_create_global_step()
    )
    return x, train, [w.read_value(), tf.nn.embedding_lookup(t, [1, 2])]
