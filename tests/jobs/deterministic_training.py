"""Trains a model with all that could make two launches differ, and prints every bit of it: for
tests/jobs/test_deterministic.py.
"""

import hashlib

import numpy as np
import tensorflow.compat.v1 as tf

B, STEPS = 48, 12


def batches(rank, size):
    """Shuffled, mapped by several threads that needn't keep the order, prefetched."""
    rng = np.random.default_rng(3)
    ids, x = rng.integers(0, 500, (600, 4)), rng.normal(size=(600, 8)).astype(np.float32)
    data = (
        tf.data.Dataset.from_tensor_slices((ids, x)).shard(size, rank).shuffle(100, seed=5).repeat()
    )
    data = data.map(lambda ids, x: (ids % 400, x * 2.0), num_parallel_calls=4, deterministic=False)
    return tf.data.make_one_shot_iterator(data.batch(B // size).prefetch(2)).get_next()


def model(strategy):
    """(loss, train, state): tables of both kinds, repeated ids, dropout, clipping by a norm of all,
    a dense layer.
    """
    rank, size = strategy.rank(), strategy.world_size()
    tf.set_random_seed(11)
    ids, x = batches(rank, size)
    with strategy.embedding_scope():
        static, dynamic = (
            tf.get_variable("static", [400, 16]),
            tf.get_variable("dynamic", [None, 16]),
        )
    # replicated: its sparse gradients have rows twice
    own = tf.get_variable("own", [400, 16])
    wide = tf.concat(
        [
            tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 64])
            for table in (static, dynamic, own)
        ]
        + [x],
        1,
    )
    for i in range(2):
        wide = tf.nn.dropout(
            tf.layers.dense(wide, 64, tf.nn.relu, name=f"layer{i}"), rate=0.3, seed=20 + rank
        )
    loss = tf.reduce_mean(tf.square(tf.layers.dense(wide, 1, name="out") - 1.0))
    optimizer = tf.train.AdagradOptimizer(0.1)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
    train = optimizer.apply_gradients(zip(clipped, variables), tf.train.get_or_create_global_step())
    every = tf.range(400, dtype=tf.int64)
    state = [tf.nn.embedding_lookup(table, every) for table in (static, dynamic, own)]
    state += [v for v in tf.trainable_variables() if v.op.name.startswith(("layer", "out"))]
    return [loss, norm, train], state


def bits(strategy, **options):
    """Everything that training gives, as text."""
    told = []
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        step, state = model(strategy)
        config = tf.ConfigProto(intra_op_parallelism_threads=2, inter_op_parallelism_threads=2)
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                loss, norm, _ = session.run(step)
                told.append(f"{float(loss).hex()} {float(norm).hex()}")
            told += [
                hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=8).hexdigest()
                for x in session.run(state)
            ]
    return told


if __name__ == "__main__":
    from collective import CollectiveStrategy

    print("\n".join(bits(CollectiveStrategy(), deterministic=True)))
