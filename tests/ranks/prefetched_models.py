"""Builds a model over datasets, whose keys scope(prefetch_keys=True) exchanges ahead."""

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from tests.ranks import reference

V, D, B = 40, 3, 8


def batches(rank, count, bad=None):
    """Draws batches of this rank, some samples without ragged ids.

    Each has plain ids; ragged ids with weights; a feature, a text and a label.
    """
    for i in range(count):
        rng = np.random.default_rng([5, rank, i])
        length = rng.integers(0, 4, B)
        places = np.array([(s, j) for s in range(B) for j in range(length[s])], np.int64).reshape(
            -1, 2
        )
        ids = rng.integers(0, V, B)
        if i == bad:
            ids[3] = V + 7
        yield {
            "ids": ids,
            "places": places,
            "values": rng.integers(0, V, len(places)),
            "weights": rng.uniform(0.5, 2, len(places)).astype(np.float32),
            "x": rng.normal(size=(B, 2)).astype(np.float32),
            "text": np.array([b"label %d" % rng.integers(9) for _ in range(B)]),
            "y": rng.integers(0, 2, (B, 1)).astype(np.float32),
        }


def dataset(rank, count, bad=None, taken=None):
    def generate():
        for batch in batches(rank, count, bad):
            if taken is not None:
                taken.append(1)
            yield batch

    some = next(batches(0, 1))
    return tf.data.Dataset.from_generator(
        generate,
        {
            name: tf.as_dtype(value.dtype if value.dtype.kind != "S" else tf.string)
            for name, value in some.items()
        },
        {
            name: [None, 2]
            if name == "places"
            else [None]
            if name in ("values", "weights")
            else value.shape
            for name, value in some.items()
        },
    )


def model(strategy, batch, dynamic=False, optimizer=None, random=False):
    """Builds four lookups and a dense layer; if it is `random`, a shift of ids and dropout, too.

    (Whether these draw numbers in a run that is refused is a matter of chance, with keys ahead or
    without.)
    """
    tf.set_random_seed(7)
    with strategy.embedding_scope():
        if dynamic:
            t = collective.get_embedding_variable("t", D, initializer=tf.constant_initializer(0.5))
        else:
            t = reference.table("t", V, D)
        u = reference.table("u", V, 2)
    shift = tf.random.uniform([], 0, V, tf.int64, seed=3) if random else tf.constant(5, tf.int64)
    sparse, weights = (
        tf.SparseTensor(batch["places"], batch[name], [B, 4]) for name in ("values", "weights")
    )
    wide = tf.concat(
        [
            batch["x"],
            tf.nn.embedding_lookup(t, batch["ids"]),
            tf.nn.embedding_lookup(u, (batch["ids"] + shift) % V),
            tf.nn.safe_embedding_lookup_sparse(t, sparse, weights, combiner="mean"),
            tf.nn.safe_embedding_lookup_sparse(u, sparse, combiner="sum"),
        ],
        1,
    )
    wide = tf.nn.dropout(wide, rate=0.2, seed=5) if random else wide
    logits = tf.layers.dense(wide, 1, kernel_initializer=tf.ones_initializer())
    loss = tf.losses.sigmoid_cross_entropy(batch["y"], logits) + tf.cast(shift, tf.float32)
    step = tf.train.get_or_create_global_step()
    train = (optimizer or tf.train.AdagradOptimizer(0.1)).minimize(loss, step)
    rows = [
        tf.nn.embedding_lookup(t, tf.range(V, dtype=tf.int64)),
        tf.nn.embedding_lookup(u, tf.range(V)),
    ]
    return {"train": train, "loss": loss, "rows": rows, "logits": logits, "step": step}


def note():
    return collective.CollectiveStrategy().plan().notes["prefetch_keys"]


def expects(start):
    assert note().startswith(start), note()
