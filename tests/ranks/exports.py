"""Trains and exports small models, and serves them by TensorFlow alone."""

import os

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from tests.ranks import reference

FOREIGN = ("Horovod", "Collective", "PyFunc", "EagerPyFunc")


def trained(strategy, build, folder):
    """Builds the model, starts it and saves a checkpoint, whose prefix it returns."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            build()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return tf.train.Saver().save(session, os.path.join(folder, "model"))


def signature(strategy, build):
    """Returns the signature_def_fn of a model."""

    def serving():
        with strategy.embedding_scope():
            inputs, outputs = build()
        return tf.saved_model.predict_signature_def(inputs, outputs)

    return serving


def served(path, feeds, key="serving_default"):
    """Returns the answers of TensorFlow alone."""
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        model = tf.saved_model.loader.load(session, [tf.saved_model.tag_constants.SERVING], path)
        whole = graph.as_graph_def()
        types = {
            node.op
            for node in [*whole.node, *(n for f in whole.library.function for n in f.node_def)]
        }
        assert not {kind for kind in types if kind.startswith(FOREIGN)}
        told = model.signature_def[key]
        return session.run(
            {name: info.name for name, info in told.outputs.items()},
            {told.inputs[name].name: value for name, value in feeds.items()},
        )


def left_in(base):
    """Lists the folder once rank 0 has cleaned up."""
    barrier.exchange(None, "cleaned", {})
    return os.listdir(base)


def one_table(rows=5):
    p = tf.placeholder(tf.int64, [None], "p")
    return {"p": p}, {"rows": tf.nn.embedding_lookup(reference.table("t", rows, 2), p)}


def an_output(value):
    return {"p": tf.placeholder(tf.int64)}, {"x": tf.identity(value)}
