"""What stands in for Horovod in TensorFlow 2 trains as one process does with the whole batch."""

import numpy as np
import pytest
import tensorflow as tf2

from collective.compat.horovod_stand_in import modules
from collective.errors import RankError
from tests.ranks.keras.models import (
    BATCH,
    batches,
    compare,
    data,
    dataset,
    keras,
    loss_of,
    make_model,
    part,
    train_step,
)

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
STEPS = 8


@pytest.fixture
def hvd():
    stand_in = modules.Module("horovod.tensorflow")
    stand_in.init()
    yield stand_in
    stand_in.shutdown()


@pytest.fixture
def hvd_keras(hvd):
    stand_in = modules.Module("horovod.tensorflow.keras")
    stand_in.callbacks = modules.Module("horovod.tensorflow.keras.callbacks")
    return stand_in


def shift(model, by):
    """Makes the weights of layers those of no other rank."""
    kernel = model.layers[-1].kernel
    kernel.assign_add(tf2.fill(kernel.shape, float(by)))


@pytest.mark.parametrize(
    "is_eager", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["function", "eager"]
)
def test_a_tape(strategy, rank, size, hvd, is_eager):
    arrays = data(BATCH * STEPS)
    plain, optimizer = make_model(), keras.optimizers.Adam(0.01)
    shift(plain, size - 1)
    step = train_step(plain, optimizer)
    want = [float(step(*batch)) for batch in batches(arrays)]
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model(batches(part(arrays, rank, size), size)[0][:2])
        shift(model, rank)
        hvd.broadcast_variables(model.variables, root_rank=size - 1)  # and no tables

        def train(users, words, labels, is_first):
            with tf2.GradientTape() as tape:
                loss = loss_of(model, users, words, labels)
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            if is_first:
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
            return loss, loss if is_eager else hvd.allreduce(loss)

        if not is_eager:
            train = tf2.function(train)
        losses = []
        for number, batch in enumerate(batches(part(arrays, rank, size), size)):
            loss, reduced = train(*batch, number == 0)
            losses.append(float(hvd.allreduce(loss)))
            if not is_eager:
                assert float(reduced) == pytest.approx(losses[-1], rel=1e-6)
        compare(model, plain, rank, size)
    np.testing.assert_allclose(losses, want, rtol=1e-5)


@pytest.mark.slow
def test_fit(strategy, rank, size, hvd_keras):
    """The learning rate rises by the formula of Horovod; momentum follows it."""
    arrays, epochs, steps, rate = data(BATCH * STEPS), 3, STEPS, 0.3
    plain = make_model()

    class Rising(keras.callbacks.Callback):
        made = 0

        def on_train_batch_begin(self, batch, logs=None):
            optimizer = self.model.optimizer
            old = float(optimizer.learning_rate.numpy())
            done = min((self.made + 1) / (2 * steps), 1)
            new = rate * (1 + done * (size - 1)) / size
            optimizer.learning_rate.assign(new)
            # The rate that the last step has left.
            optimizer.momentum.assign(0.5 * new / old if self.made < 2 * steps else 0.5)
            self.made += 1

    def compiled(model, optimizer):
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    def sgd():
        optimizer = keras.optimizers.legacy.SGD(rate, momentum=0.5)
        optimizer._create_hypers()
        return optimizer

    history = compiled(plain, sgd()).fit(
        dataset(arrays, BATCH), epochs=epochs, verbose=0, callbacks=[Rising()]
    )
    named = hvd_keras.callbacks
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        shift(model, rank)
        optimizer = hvd_keras.DistributedOptimizer(sgd(), average_aggregated_gradients=True)
        callbacks = [
            named.BroadcastGlobalVariablesCallback(0),
            named.MetricAverageCallback(),
            named.LearningRateWarmupCallback(rate, warmup_epochs=2, steps_per_epoch=steps),
            named.LearningRateScheduleCallback(rate, 1.0, start_epoch=2),
        ]
        own = dataset(part(arrays, rank, size), BATCH // size)
        got = compiled(model, optimizer).fit(own, epochs=epochs, verbose=0, callbacks=callbacks)
        compare(model, plain, rank, size)
    for name in ("loss", "mae"):
        np.testing.assert_allclose(got.history[name], history.history[name], rtol=1e-5)
    rates = [rate * (1 + min((epoch + 1) / 2, 1) * (size - 1)) / size for epoch in range(epochs)]
    np.testing.assert_allclose(got.history["lr"], rates, rtol=1e-5)


def test_collectives_of_eager_code(strategy, rank, size, hvd, hvd_keras):
    def of(each):
        return np.random.default_rng([each, 3]).normal(size=(3, 2)).astype(np.float32) + 2

    all_ranks = np.stack([of(each) for each in range(size)])
    x = tf2.constant(of(rank))
    with strategy.scope():
        for op, want in (
            (hvd.Average, all_ranks.mean(0)),
            (hvd.Sum, all_ranks.sum(0)),
            (hvd.Min, all_ranks.min(0)),
            (hvd.Max, all_ranks.max(0)),
            (hvd.Product, all_ranks.prod(0)),
        ):
            np.testing.assert_allclose(hvd.allreduce(x, op=op), want, rtol=1e-6)
        scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        np.testing.assert_allclose(scaled, all_ranks.sum(0) / 2, rtol=1e-6)
        halved = hvd.allreduce(x, compression=hvd.Compression.fp16)
        assert halved.dtype == tf2.float32
        np.testing.assert_allclose(halved, all_ranks.mean(0), rtol=2e-3)
        whole = hvd.grouped_allreduce([tf2.constant([rank, 1]), x], op=hvd.Average)
        np.testing.assert_array_equal(whole[0], [(size - 1) // 2, 1])
        np.testing.assert_allclose(whole[1], all_ranks.mean(0), rtol=1e-6)
        slices = hvd.allreduce(tf2.IndexedSlices(x[: rank + 1], tf2.range(rank + 1)), op=hvd.Sum)
        lengths = [min(each + 1, 3) for each in range(size)]
        want = np.concatenate([of(each)[:length] for each, length in enumerate(lengths)])
        np.testing.assert_array_equal(slices.values, want)
        gathered = hvd_keras.allgather(np.full([rank], rank > 0))
        np.testing.assert_array_equal(gathered, np.ones(size * (size - 1) // 2, bool))
        last = size - 1
        np.testing.assert_array_equal(hvd_keras.broadcast(x, last), all_ranks[last])
        assert hvd.broadcast_object({"epoch": rank}, last) == {"epoch": last}
        assert hvd.allgather_object([rank, "x"]) == [[each, "x"] for each in range(size)]
        with tf2.GradientTape() as tape, pytest.raises(NotImplementedError, match="would be lost"):
            tape.watch(x)
            hvd.allreduce(x)


def test_ranks_that_differ_are_told(strategy, rank, size, hvd):
    if size == 1:
        return
    with strategy.scope():
        with pytest.raises(ValueError, match=r"rank 0 has \['float32 \[1\]'\], rank 1 .*\[2\]"):
            hvd.allreduce(tf2.ones([min(rank, 1) + 1]))
        with pytest.raises(RankError, match="do not run the same"):
            hvd.allreduce(1.0) if rank == 0 else hvd.broadcast(1.0, 0)
    with pytest.raises(RuntimeError, match=r"eager code outside of scope\(\) needs Horovod itself"):
        hvd.allreduce(1.0)


def test_what_would_change_results_is_refused(strategy, size, hvd, hvd_keras):
    sgd = keras.optimizers.SGD(0.1)
    with strategy.scope():
        with pytest.raises(NotImplementedError, match="backward_passes_per_step"):
            hvd_keras.DistributedOptimizer(sgd, backward_passes_per_step=2)
        for wrap in (
            lambda: hvd_keras.DistributedOptimizer(sgd, sparse_as_dense=True),
            lambda: hvd.DistributedGradientTape(tf2.GradientTape(), sparse_as_dense=True),
        ):
            with pytest.raises(NotImplementedError, match="as TensorFlow has them. Leave it out"):
                wrap()
        if size > 1:
            for wrap in (
                lambda: hvd_keras.DistributedOptimizer(sgd, op=hvd.Sum),
                lambda: hvd.DistributedGradientTape(tf2.GradientTape(), op=hvd.Sum),
            ):
                with pytest.raises(NotImplementedError, match="leave op out"):
                    wrap()
    for wrap in (hvd_keras.DistributedOptimizer, hvd.DistributedGradientTape):
        with pytest.raises(RuntimeError, match=r"outside of scope\(\) needs Horovod itself"):
            wrap(sgd)
