"""Rows of tables are changed by their ids, in runs of their own, as in plain TensorFlow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.double]

V, D = 9, 3
IDS = np.array([7, 1, 4, 2])
ROWS = reference.table_values(4, D, 5)


def scattered(table, how, method):
    """Returns the operation that changes rows IDS to, or by, ROWS."""
    if method == "function":
        return getattr(tf, f"scatter_{how}")(table, IDS, ROWS)
    if method == "nd":
        return getattr(tf, f"scatter_nd_{how}")(table, IDS[:, None], ROWS)
    if method == "nd_method":
        return getattr(table, f"scatter_nd_{how}")(IDS[:, None], ROWS)
    return getattr(table, f"scatter_{how}")(tf.IndexedSlices(ROWS, IDS))


CASES = [
    *((how, "function") for how in ("update", "add", "sub", "mul", "div", "min", "max")),
    *((how, "method") for how in ("update", "add", "sub", "mul", "div", "min", "max")),
    *((how, kind) for how in ("update", "add", "sub") for kind in ("nd", "nd_method")),
]


@pytest.mark.parametrize("how,method", CASES)
def test_rows_change_as_in_plain_tensorflow(strategy, how, method):
    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        changed = tf.convert_to_tensor(scattered(table, how, method))
        rows = tf.nn.embedding_lookup(table, tf.range(V))
        return {"changed": changed, "rows": rows}, {}

    runs = [(["changed"], {}), (["rows"], {})]
    want = reference.plain(build, runs)
    got = reference.sharded(strategy, build, runs)
    for i, name in enumerate(("changed", "rows")):
        np.testing.assert_allclose(got[i][name], want[i][name], rtol=1e-6)


def test_the_row_of_unknown_ids_is_the_mean_of_the_others(strategy):
    """As recommenders write it when training is over."""

    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        mean = tf.reduce_mean(tf.gather(table, tf.range(V - 1)), 0, keepdims=True)
        set_unknown = table.scatter_nd_update([[V - 1]], mean)
        rows = tf.nn.embedding_lookup(table, tf.range(V))
        return {"set": tf.convert_to_tensor(set_unknown), "rows": rows}, {}

    runs = [(["set"], {}), (["rows"], {})]
    want = reference.plain(build, runs)
    got = reference.sharded(strategy, build, runs)
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=1e-6)


def test_a_slot_is_reset_by_ids(strategy):
    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        optimizer = tf.train.AdagradOptimizer(0.1)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 3, 4]) ** 2) / 4
        train = optimizer.minimize(loss)
        slot = optimizer.get_slot(table, "accumulator")
        reset = tf.scatter_update(slot, [1, 4], tf.fill([2, D], 0.25))
        rows = tf.nn.embedding_lookup(slot, tf.range(V))
        return {"train": train, "reset": tf.convert_to_tensor(reset), "rows": rows}, {}

    runs = [(["train"], {}), (["reset"], {}), (["rows"], {})]
    want = reference.plain(build, runs)
    got = reference.sharded(strategy, build, runs)
    np.testing.assert_allclose(got[2]["rows"], want[2]["rows"], rtol=1e-6)


def changing(strategy, ids, rows):
    with strategy.embedding_scope():
        table = reference.table("t", V, D)
    return table, tf.scatter_update(table, ids, rows), tf.nn.embedding_lookup(table, tf.range(V))


def test_rows_that_differ_between_ranks_are_refused_on_all(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        given = tf.placeholder(tf.float32, [1, D])
        table, change, rows = changing(strategy, [2], given)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(rows)
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="table 't': ranks 0 and 1 give different ids"
            ):
                session.run(change, {given: np.full([1, D], rank)})
            np.testing.assert_array_equal(session.run(rows), before)
            session.run(change, {given: np.full([1, D], 3)})
            np.testing.assert_array_equal(session.run(rows)[2], [3] * D)


def test_an_id_outside_of_the_table_is_refused_on_all(strategy, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        _, change, rows = changing(strategy, [2, V], tf.ones([2, D]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(rows)
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"id 9 is not in \[0, 9\)"):
                session.run(change)
            np.testing.assert_array_equal(session.run(rows), before)


def test_touched_rows_by_the_ids_of_a_gradient(strategy, rank, size):
    """Each rank has ids of its own then: it resets the rows that the gradient is of."""
    ids = np.array([1, 2, 2, 5, 7, 7])

    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        fed = tf.placeholder(tf.int64, [None])
        gradient = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(table, fed)), table)[0]
        touched = tf.unique(gradient.indices)[0]
        ones = tf.ones_like(tf.gather(table, touched))
        reset = tf.convert_to_tensor(tf.scatter_update(table, touched, ones))
        return {"reset": reset, "rows": tf.nn.embedding_lookup(table, tf.range(V))}, {"ids": fed}

    def runs(ids):
        return [(["reset"], {"ids": ids}), (["rows"], {})]

    want = reference.plain(build, runs(ids))
    got = reference.sharded(strategy, build, runs(reference.part(ids, rank, size)))
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=1e-6)


def test_elements_and_dynamic_tables_are_refused(strategy, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D)
            dynamic = tf.get_variable("d", [None, D])
        with pytest.raises(TableError, match="rows, indices .*, not elements"):
            table.scatter_nd_update([[1, 2]], [0.5])
        with pytest.raises(TableError, match="table 'd'.*import_"):
            tf.scatter_update(dynamic, [1], tf.ones([1, D]))
