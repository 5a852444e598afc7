"""Trains, saves and restores a small model, on every rank."""

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from tests.ranks import reference


def wait():
    barrier.exchange(None, "wait", {})


def model(strategy, rows=9, dim=3, optimizer=None, name="t", values=0):
    """A table with slots and a dense weight; `session.run(train, {ids: …})` changes all of them."""
    with strategy.embedding_scope():
        t = reference.table(name, rows, dim, values)
    w = tf.get_variable("w", initializer=reference.table_values(dim, 1, 1))
    ids = tf.placeholder(tf.int64, [None], "ids")
    loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, ids), w)))
    step = tf.train.get_or_create_global_step()
    train = (optimizer or tf.train.AdamOptimizer(0.01)).minimize(loss, global_step=step)
    return {
        "t": t,
        "w": w,
        "ids": ids,
        "loss": loss,
        "train": train,
        "step": step,
        "several": rows,
        "rows": tf.nn.embedding_lookup(t, tf.range(rows)),
    }


def steps(session, m, rank, count, start=0):
    return [
        session.run(
            [m["loss"], m["train"]], {m["ids"]: [(rank + i) % m["several"], i % m["several"]]}
        )[0]
        for i in range(start, start + count)
    ]


def saved(strategy, rank, path, count=3, **options):
    """Trains and saves; the table's rows then."""
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy, **options)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            steps(session, m, rank, count)
            saver.save(session, path)
            return session.run(m["rows"])


def restored(strategy, path, scope=None, initialize=False, **options):
    """Builds a model, restores `path` into it; its table's rows."""
    with strategy.scope(**(scope or {})), tf.Graph().as_default():
        m = model(strategy, **options)
        saver = tf.train.Saver()
        with tf.Session() as session:
            if initialize:
                session.run(tf.global_variables_initializer())
            try:
                saver.restore(session, path)
            finally:
                if initialize:
                    after = session.run([m["rows"], m["w"]])
                    barrier.exchange(session, "looked", {})
                    restored.after = after
            return session.run(m["rows"])
