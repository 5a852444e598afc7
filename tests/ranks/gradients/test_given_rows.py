"""Rows that a script names by ids of its own reach the ranks that have them, as one process's do.

A gradient that a script makes by itself counts as one that TensorFlow takes: as the mean over
ranks.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference
from tests.ranks.gradients.test_gradient_parts import summed, with_values
from tests.ranks.training import compare

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped]

V, D = 9, 3


def slices(values, ids):
    return summed(tf.IndexedSlices(values, ids, tf.constant([V, D])))


def constant(loss, emb, g):
    return slices(tf.ones([4, D]), tf.constant([1, 4, 4, 8]))


def of_the_batch(loss, emb, g):
    """As scripts do that take gradients of the looked-up rows, and change these by sample."""
    ids = next(op for op in tf.get_default_graph().get_operations() if op.type == "Placeholder")
    return slices(1.5 * tf.gradients(loss, emb)[0], ids.outputs[0])


def parents(loss, emb, g):
    return tf.IndexedSlices(g.values, g.indices // 2, g.dense_shape)


def neighbours(loss, emb, g):
    return tf.IndexedSlices(g.values, (g.indices + 1) % V)


def remapped(loss, emb, g):
    return tf.IndexedSlices(
        g.values, tf.gather(tf.constant([3, 0, 1, 8, 7, 2, 5, 4, 6]), g.indices)
    )


def masked_to_a_bucket(loss, emb, g):
    return tf.IndexedSlices(g.values, tf.where(g.indices > 4, g.indices, tf.zeros_like(g.indices)))


def a_matrix_of_the_batch(loss, emb, g):
    return tf.convert_to_tensor(of_the_batch(loss, emb, g))


GRADIENTS = [
    constant,
    of_the_batch,
    parents,
    neighbours,
    remapped,
    masked_to_a_bucket,
    a_matrix_of_the_batch,
]
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.3),
    "adam": lambda: tf.train.AdamOptimizer(0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", GRADIENTS, ids=lambda make: make.__name__)
def test_a_gradient_by_ids_of_the_scripts_own(strategy, rank, size, make, optimizer):
    def train(loss, variables):
        table, w = variables
        emb = tf.get_default_graph().get_tensor_by_name(loss_rows(loss))
        g, dense = tf.gradients(loss, variables)
        # Some of these wait for nothing: the table is to change after its rows were used.
        with tf.control_dependencies([dense]):
            g = with_values(summed(g), tf.identity(summed(g).values))
            made = make(loss, emb, g)
        return {"train": OPTIMIZERS[optimizer]().apply_gradients([(made, table), (dense, w)])}

    compare(strategy, rank, size, train, rtol=1e-4)


def loss_rows(loss):
    """Returns the name of the looked-up rows: the first factor of what is multiplied by x."""
    product = next(op for op in loss.graph.get_operations() if op.type == "MatMul").inputs[0].op
    return product.inputs[0].name


def test_another_tables_gradient(strategy, rank, size):
    """Two tables of different V, of which one moves by the other's gradient."""

    def build(embedding_scope):
        with embedding_scope():
            a, b = reference.table("a", V, D), reference.table("b", 20, D, 1)
        ids = tf.placeholder(tf.int64, [None])
        g = summed(tf.gradients(tf.reduce_mean(tf.nn.embedding_lookup(a, ids) ** 2), a)[0])
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients([(g, b)])
        return {"train": train, "rows": tf.nn.embedding_lookup(b, tf.range(20))}, {"ids": ids}

    ids = np.array([1, 2, 2, 5, 7, 7])
    after = [(["rows"], {})]
    want = reference.plain(build, [(["train"], {"ids": ids}), *after])
    own = reference.part(ids, rank, size)
    got = reference.sharded(strategy, build, [(["train"], {"ids": own}), *after])
    np.testing.assert_allclose(got[-1]["rows"], want[-1]["rows"], rtol=1e-5)


SCATTERED = {"parents": lambda ids: ids // 2, "neighbours": lambda ids: (ids + 1) % V}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_scatter_by_ids_computed_of_a_gradients(strategy, rank, size, name):
    def train(loss, variables):
        g = summed(tf.gradients(loss, variables[0])[0])
        return {"train": tf.scatter_sub(variables[0], SCATTERED[name](g.indices), g.values).op}

    compare(strategy, rank, size, train, rtol=1e-4)


def test_an_id_outside_of_the_table_is_refused_on_all(strategy, size, rank):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D)
        ids = tf.constant([1, V + rank])
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(
            [(tf.IndexedSlices(tf.ones([2, D]), ids), table)]
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(table)
            with pytest.raises(tf.errors.InvalidArgumentError, match="table 't'"):
                session.run(train)
            np.testing.assert_array_equal(session.run(table), before)


def test_a_dynamic_table_has_only_rows_that_were_looked_up(strategy, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            dynamic = tf.get_variable("d", [None, D])
            static = reference.table("t", V, D)
        own = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(dynamic, [1, 2])), dynamic)[0]
        g = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(static, [1, 2])), static)[0]
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        optimizer.apply_gradients([(with_values(own, own.values * 2), dynamic)])
        for ids in (tf.constant([1, 2], tf.int64), g.indices, own.indices + 1):
            made = tf.IndexedSlices(tf.identity(g.values), ids)
            with pytest.raises(TableError, match="dynamic table 'd'.*tf.gradients"):
                optimizer.apply_gradients([(made, dynamic)])
