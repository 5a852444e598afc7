"""Trains a model of static and dynamic tables, looked up in every way: for tests of exchanges that
are merged on each host.

    merged_training.py STEPS OPTIONS [FOLDER]

OPTIONS are those of scope(), as JSON. Every rank takes its part of the same batches. Rank 0 prints
the plan's words, the losses and what the tables hold at the end. Each rank makes a file in FOLDER
after its third step.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

import collective

tf.logging.set_verbosity(tf.logging.ERROR)
V, BATCH = 30, 48


def batch(step, rank, size):
    """Returns the rank's ids [B/N, 3], weights and targets [B/N, 1] of a step."""
    draw = np.random.default_rng(step)
    ids = draw.zipf(1.3, (BATCH, 3)) % V
    weights = draw.uniform(0.5, 2, (BATCH, 3)).astype(np.float32)
    y = draw.normal(size=(BATCH, 1)).astype(np.float32)
    return tuple(x[rank::size] for x in (ids, weights, y))


def features(ids, weights):
    """Looks up ids in every way; returns [B, …] of each lookup, and the tables."""
    policy = collective.TablePolicy(filter_freq=3)
    static = tf.get_variable("static", [V, 4])
    dynamic = tf.get_variable("dynamic", [None, 3])
    admitted = collective.get_embedding_variable("admitted", 5, ev_option=policy)
    rows = tf.shape(ids)[0]
    samples = tf.repeat(tf.range(tf.cast(rows, tf.int64)), 3)
    indices = tf.stack([samples, tf.tile(tf.range(3, dtype=tf.int64), [rows])], 1)
    shape = tf.cast([rows, 3], tf.int64)
    bags = tf.SparseTensor(indices, tf.reshape(ids, [-1]), shape)
    weighted = tf.SparseTensor(indices, tf.reshape(weights, [-1]), shape)
    pool = tf.nn.embedding_lookup_sparse
    outputs = [
        tf.reshape(tf.nn.embedding_lookup(static, ids), [-1, 12]),
        pool(static, bags, weighted, combiner="sum", max_norm=1.5),
        pool(dynamic, bags, None, combiner="sqrtn"),
        pool(dynamic, bags, weighted, combiner="mean"),
        pool(admitted, bags, None, combiner="mean"),
    ]
    return outputs, (static, dynamic)


def main(steps, options, folder=None):
    strategy = collective.CollectiveStrategy()
    rank, size = strategy.rank(), strategy.world_size()
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default() as graph:
        tf.set_random_seed(5)
        ids, y = tf.placeholder(tf.int64, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        weights = tf.placeholder(tf.float32, [None, 3])
        with strategy.embedding_scope():
            outputs, tables = features(ids, weights)
        joined = tf.concat(outputs, 1)
        start = np.linspace(-0.5, 0.5, joined.shape[1], dtype=np.float32)[:, None]
        dense = tf.get_variable("dense", initializer=start)
        loss = tf.reduce_mean(tf.square(tf.matmul(joined, dense) - y))
        optimizer, step = tf.train.AdagradOptimizer(0.1), tf.train.get_or_create_global_step()
        pairs = optimizer.compute_gradients(loss)
        clipped, norm = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 2.0)
        train = optimizer.apply_gradients(zip(clipped, [v for _, v in pairs]), global_step=step)
        every = tf.range(V, dtype=tf.int64)
        state = [tf.nn.embedding_lookup(table, every) for table in tables]
        state.append(dense)
        norms = []
        with tf.train.MonitoredTrainingSession() as session:
            for i in range(steps):
                parts = batch(i, rank, size)
                _, value = session.run([train, norm], dict(zip((ids, weights, y), parts)))
                norms.append(float(value))
                if folder and i == 2:
                    Path(folder, f"rank{rank}").touch()
            plan = strategy.plan(graph)
            empty = {ids: np.zeros((0, 3)), weights: np.zeros((0, 3)), y: np.zeros((0, 1))}
            values = session.run(state, empty)
    if rank == 0:
        reaches = [f"{x.phase} {x.reach}" for x in plan.exchanges if x.reach]
        print("plan", json.dumps([plan.notes.get("hierarchical"), reaches]))
        print("norms", json.dumps(norms))
        print("values", json.dumps([x.tolist() for x in values]))
        print("bits", b"".join(x.tobytes() for x in values).hex(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
