"""The optimizers of `collective.train` give the numbers of NumPy on any number of ranks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import train
from tests import numpy_optimizers
from tests.ranks import reference

pytestmark = pytest.mark.double

V, D, B, STEPS = 9, 3, 12, 5
KEYS = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, V)  # Of the dynamic tables.


def step():
    return tf.train.get_or_create_global_step()


# How an optimizer is made, and its rule in NumPy.
CASES = {
    "row_wise_adagrad": (
        lambda: train.RowWiseAdagradOptimizer(0.3),
        numpy_optimizers.row_wise_adagrad(0.3, 0.1, 0.0),
    ),
    "persia_adagrad": (
        lambda: train.PersiaAdagradOptimizer(0.3, 0.2, 0.6),
        numpy_optimizers.persia_adagrad(0.3, 0.2, 0.6, 1e-10),
    ),
    "persia_adagrad_shared_by_rows": (
        lambda: train.PersiaAdagradOptimizer(0.3, 0.2, 0.6, vectorwise_shared=True),
        numpy_optimizers.persia_adagrad(0.3, 0.2, 0.6, 1e-10, shared=True),
    ),
    "adagrad_decay": (
        lambda: train.AdagradDecayOptimizer(
            0.3, step(), accumulator_decay_step=2, accumulator_decay_rate=0.5
        ),
        numpy_optimizers.adagrad_decay(0.3, 0.1, 2, 0.5),
    ),
    "adam_async": (
        lambda: train.AdamAsyncOptimizer(0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
    ),
    "adam_async_with_rmsprop": (
        lambda: train.AdamAsyncOptimizer(0.1, 0.8, 0.9, 1e-3, apply_sparse_rmsprop=True),
        numpy_optimizers.rmsprop_of_adam_async(0.1, 0.8, 0.9, 1e-3),
    ),
    "adam_w": (
        lambda: train.AdamWOptimizer(0.05, 0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=False, decay=0.05),
    ),
    "lazy_adam": (
        lambda: train.LazyAdamOptimizer(0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
    ),
    "group_lasso_ftrl": (
        lambda: train.GroupLassoFtrlOptimizer(0.3, l1_regularization_strength=2.0),
        numpy_optimizers.ftrl(0.3, -0.5, 2.0, 0.0, 0.0, 0.0, group=True),
    ),
}


def batch(number):
    """Draws ids, of which some come several times, and the gradient of each occurrence."""
    rng = np.random.default_rng([2, number])
    return rng.integers(0, V - 1, B), rng.normal(size=(B, D))


@pytest.mark.matrix
@pytest.mark.ranks(1, 3)
@pytest.mark.double("matrix")
def test_rows_and_slots_of_every_kind_of_table(strategy, rank, size):
    """A static table, a dynamic one, and one outside of embedding_scope(), for each optimizer."""
    updates, rows, slots = [], {}, {}
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids, keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        factors = tf.placeholder(tf.float32, [None, D])
        for name, (make, _) in CASES.items():
            with strategy.embedding_scope():
                tables = [
                    reference.table(f"{name}/static", V, D),
                    tf.get_variable(
                        f"{name}/dynamic", [None, D], initializer=tf.ones_initializer()
                    ),
                ]
            tables.append(reference.table(f"{name}/replicated", V, D))
            found = [
                tf.nn.embedding_lookup(table, used) for table, used in zip(tables, (ids, keys, ids))
            ]
            losses = [B * tf.reduce_mean(tf.reduce_sum(each * factors, 1)) for each in found]
            optimizer = make()
            updates.append(optimizer.minimize(tf.add_n(losses), var_list=tables))
            rows[name] = [
                tf.nn.embedding_lookup(table, used)
                for table, used in zip(tables, (np.arange(V), KEYS, np.arange(V)))
            ]
            slots[name] = {
                slot: tf.identity(optimizer.get_slot(tables[0], slot))
                for slot in CASES[name][1].start(D)
            }
        with tf.control_dependencies(updates):
            train_all = tf.assign_add(step(), 1)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for number in range(STEPS):
                batch_ids, gradients = (reference.part(x, rank, size) for x in batch(number))
                session.run(train_all, {ids: batch_ids, keys: KEYS[batch_ids], factors: gradients})
            found_rows, found_slots = session.run([rows, slots])
    came = np.unique(np.concatenate([batch(number)[0] for number in range(STEPS)]))
    assert len(came) < V
    for name, (_, rule) in CASES.items():
        start = reference.table_values(V, D)
        for kind, first, got in zip(
            ("static", "dynamic", "replicated"), (start, np.ones([V, D]), start), found_rows[name]
        ):
            want, states = numpy_optimizers.trained(rule, first, map(batch, range(STEPS)))
            if kind == "dynamic":
                want[np.setdiff1d(np.arange(V), came)] = 0.0
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6, err_msg=f"{name}, {kind}")
            if kind == "static":
                for slot, values in found_slots[name].items():
                    want_slot = np.stack([state[slot] for state in states])
                    np.testing.assert_allclose(
                        values, want_slot, rtol=2e-4, atol=2e-6, err_msg=f"{name}, {slot}"
                    )


def ones(dim=3):
    return collective.get_embedding_variable("var_1", dim, initializer=tf.ones_initializer())


@pytest.mark.either_backend
def test_deeprecs_published_losses_of_adagrad_decay(strategy):
    assert train.AdagradDecayV2Optimizer is train.AdagradDecayOptimizerV2
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows = tf.nn.embedding_lookup(ones(), tf.constant([0, 1, 2, 5, 6, 7], tf.int64))
        loss = tf.reduce_sum(rows * 2.0)
        optimizer = train.AdagradDecayOptimizerV2(0.1, step(), accumulator_decay_step=2)
        update = optimizer.minimize(loss, global_step=step())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([loss, update])[0] for _ in range(5)]
    np.testing.assert_allclose(
        losses, [36, 32.444176, 29.847788, 27.74195, 25.852505], rtol=0, atol=1e-5
    )


@pytest.mark.either_backend
def test_deeprecs_published_rows_of_group_lasso_ftrl(strategy):
    """The third key's is of the formula: DeepRec's case evicts it by its weight before it looks."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows = tf.nn.embedding_lookup(ones(), tf.constant([0, 0, 0, 1, 1, 2], tf.int64))
        optimizer = train.GroupLassoFtrlOptimizer(
            0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.00001
        )
        update = optimizer.minimize(tf.reduce_sum(rows * 2.0))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(update)
            got = session.run(rows)
    want = [0.8282884] * 3 + [0.7927219] * 2 + [0.6880260]
    np.testing.assert_allclose(got, np.repeat(want, 3).reshape(6, 3), rtol=0, atol=5e-7)


@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("shape", [[1, 5], [5], [2, 5]])
def test_a_slot_that_is_neither_by_row_nor_a_number_is_refused(strategy, rank, size, shape):
    """Else a rank with one row would take [1, 5] for a slot by row, and another rank would not."""

    class WholeTableSlot(tf.train.GradientDescentOptimizer):
        def _create_slots(self, variables):
            for variable in variables:
                self._get_or_make_slot(variable, tf.zeros(shape), "whole", "slot")

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [2 * size - 1, D])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [0]))
        rows = 1 if rank == size - 1 else 2
        if shape == [rows, 5]:
            WholeTableSlot(0.1).minimize(loss)
        else:
            message = rf"table 't' has {rows} rows? .*'t/slot' has the shape \[{str(shape)[1:-1]}\]"
            with pytest.raises(collective.TableError, match=message):
                WholeTableSlot(0.1).minimize(loss)
