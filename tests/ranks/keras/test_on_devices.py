"""Keras trains tables in a GPU's memory as it does those in the host's."""

import numpy as np
import pytest
import tensorflow as tf2

from tests.ranks.keras.models import batches, compare, data, keras, loss_of, make_model, part
from tests.ranks.keras.test_functions import OPTIMIZERS, equals

pytestmark = [pytest.mark.either_backend, pytest.mark.double("test")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["Adagrad", "legacy Adam"])
def test_a_loop_equals_one_process(strategy, rank, size, optimizer):
    equals(strategy, rank, size, OPTIMIZERS[optimizer])


def test_training_without_a_function(strategy, rank, size):
    def train(model, given):
        optimizer = keras.optimizers.legacy.Adagrad(0.05)
        for batch in given:
            with tf2.GradientTape() as tape:
                loss = loss_of(model, *batch)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    arrays, plain = data(), make_model()
    train(plain, batches(arrays)[:4])
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        train(model, batches(part(arrays, rank, size), size)[:4])
    compare(model, plain, rank, size)


def test_rows_are_changed_by_their_ids(strategy):
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    with strategy.scope():
        with strategy.embedding_scope():
            table = tf2.compat.v1.get_variable("changed", initializer=rows)
        table.scatter_add(tf2.IndexedSlices(np.ones((3, 2), np.float32), [4, 1, 4]))
        changed = tf2.nn.embedding_lookup(table, tf2.range(6, dtype=tf2.int64))
    np.add.at(rows, [4, 1, 4], 1)
    np.testing.assert_array_equal(changed, rows)
