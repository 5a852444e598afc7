"""Own loops with a tape in a tf.function: ranks with other numbers of records are one process."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from tests.ranks import reference
from tests.ranks.gradients.test_batch_means import (
    CLASSES,
    DATA,
    DIM,
    KERNEL,
    LOSSES,
    ROWS,
    STEPS,
    UNWEIGHED,
    own,
    said_of,
)
from tests.ranks.keras.models import keras

pytestmark = [pytest.mark.either_backend, pytest.mark.double, pytest.mark.matrix]

OF_KERAS = {
    "a loss of Keras": lambda m: keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
        m["classes"], m["logits"]
    ),
    "a loss of Keras, and a function of it": lambda m: (
        keras.losses.BinaryCrossentropy(from_logits=True)(
            tf.cast(m["labels"] > 0, tf.float32)[:, None], m["out"][:, None]
        )
        + tf.reduce_mean(keras.losses.mean_squared_error(m["labels"][:, None], m["out"][:, None]))
    ),
}
# tf.losses keep their sums in a collection of a graph.
ALL = {**{name: each for name, each in LOSSES.items() if "tf.losses" not in name}, **OF_KERAS}


class Model(tf2.Module):
    def __init__(self, embedding_scope):
        super().__init__()
        with embedding_scope():
            self.rows = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="zeros")
            self.rows.build([None])
        self.rows.set_weights([reference.table_values(ROWS, DIM)])
        self.kernel = tf2.Variable(KERNEL)

    def variables_of(self):
        return [self.kernel, *self.rows.trainable_variables]

    def outputs(self, batch):
        rows = tf.reduce_sum(self.rows(batch["ids"]), 1)
        logits = tf.matmul(tf.concat([rows, batch["dense"]], 1), self.kernel)
        return {**batch, "kernel": self.kernel, "logits": logits, "out": logits[:, 0]}


def trained(embedding_scope, steps, loss_of, is_static):
    """Returns the kernel and the table after `steps`, one batch each.

    Args:
        is_static: whether the function is traced for each batch's shapes.
    """
    model, optimizer = Model(embedding_scope), keras.optimizers.Adagrad(0.3)

    def step(batch):
        with tf2.GradientTape() as tape:
            loss = loss_of(model.outputs(batch))
        variables = model.variables_of()
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))

    specs = {name: tf.TensorSpec([None, *x.shape[1:]], x.dtype) for name, x in steps[0].items()}
    function = tf2.function(step, input_signature=None if is_static else [specs])
    for batch in steps:
        function({name: tf2.constant(x) for name, x in batch.items()})
    return model.kernel.numpy(), model.rows(np.arange(ROWS)).numpy()


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("loss", ALL)
def test_a_mean_over_the_batch_is_that_of_all_records(strategy, rank, size, loss, is_static):
    whole = [{name: x[step] for name, x in DATA.items()} for step in range(STEPS)]
    want = trained(contextlib.nullcontext, whole, ALL[loss], is_static)
    steps = [own(step, rank, size) for step in range(STEPS)]
    with strategy.scope(plan="quiet"):
        got = trained(strategy.embedding_scope, steps, ALL[loss], is_static)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loss", [name for name in UNWEIGHED if "loop" not in name])
def test_what_counts_alike_is_warned_of(strategy, rank, loss):
    make_loss, name = UNWEIGHED[loss]

    def run(records):
        with strategy.scope(plan="quiet"):
            steps = [{name: x[0, :records] for name, x in DATA.items()}] * 2
            trained(strategy.embedding_scope, steps, make_loss, False)

    first, second, third = said_of([5, 3 + rank, 3 + rank], run)
    assert not first and not third and len(second) == 1 and name in second[0]


@pytest.mark.parametrize("records", [lambda size: 8, lambda size: max(size - 1, 1)])
def test_a_rank_that_divides_by_another_number_weighs_for_nobody(strategy, rank, size, records):
    """Rank 0 divides by the size of its batch, the others by a number of their own."""
    with strategy.scope(plan="quiet"):
        kernel = tf2.Variable(np.ones([1, CLASSES], np.float32))

        @tf2.function
        def gradient(x):
            number = tf.shape(x)[0] if rank == 0 else tf.constant(8)
            with tf2.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x, kernel)) / tf.cast(number, tf.float32)
            return tape.gradient(loss, kernel)

        got = gradient(tf2.ones([8 - rank if rank else records(size), 1]))
    want = np.mean([(8 - each) / 8 for each in range(size)])
    np.testing.assert_allclose(got, np.full([1, CLASSES], want), rtol=1e-6)


def test_what_is_no_loss_stays_as_it_is(strategy, rank, size):
    """A part of a loss that has no gradient, and targets that are several tensors in one."""
    with strategy.scope(plan="quiet"):
        kernel = tf2.Variable(np.ones([1, 2], np.float32))

        @tf2.function
        def gradients(x):
            with tf2.GradientTape(persistent=True) as tape:
                y = tf.matmul(x, kernel)
                counted = tf.cast(tf.cast(tf.reduce_mean(y), tf.int32), tf.float32)
                loss = tf.reduce_mean(y) + counted
                ragged = tf.RaggedTensor.from_row_lengths(y, [1, tf.shape(y)[0] - 1])
            return tape.gradient(loss, kernel), tape.gradient(ragged, kernel)

        of_mean, of_ragged = gradients(tf2.ones([2 + rank, 1]))
    np.testing.assert_allclose(of_mean, np.full([1, 2], 0.5), rtol=1e-6)
    np.testing.assert_allclose(of_ragged, np.full([1, 2], 2 + (size - 1) / 2), rtol=1e-6)
