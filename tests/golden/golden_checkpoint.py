"""Made `version_1` next to it, which tests/ranks/checkpoint/test_checkpoint_golden.py restores; a
new format gets a folder of its own.

    PYTHONPATH=. collective launch -np 2 --device cpu tests/golden/golden_checkpoint.py
    tests/golden/version_1
"""

import sys

import tensorflow.compat.v1 as tf

import collective
from collective import CollectiveStrategy


def build(strategy):
    """Builds a static table, a dynamic one and a dense variable, with Momentum's slots."""
    with strategy.embedding_scope():
        user = tf.get_variable("user", initializer=tf.constant([[i, i + 0.25] for i in range(5)]))
    item = collective.get_embedding_variable("item", 2, initializer=tf.ones_initializer())
    bias = tf.get_variable("bias", initializer=tf.constant([1.0, 2.0]))
    ids, keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(user, ids), tf.nn.embedding_lookup(item, keys)
    loss = tf.reduce_sum(rows[0]) + tf.reduce_sum(rows[1]) + tf.reduce_sum(bias)
    optimizer = tf.train.MomentumOptimizer(0.5, 0.5)
    train = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    slots = [optimizer.get_slot(v, "momentum") for v in (user, item, bias)]
    return ids, keys, rows, train, bias, slots


def main():
    strategy = CollectiveStrategy()
    with strategy.scope(), tf.Graph().as_default():
        ids, keys, _, train, _, _ = build(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(
                    train,
                    {
                        ids: [[0, 1, 4], [4]][strategy.rank()],
                        keys: [[-1, 2**63 - 1], [-1, 7]][strategy.rank()],
                    },
                )
            saver.save(session, f"{sys.argv[1]}/m", write_meta_graph=False, write_state=False)


if __name__ == "__main__":
    main()
