"""`fit` and `evaluate` of Keras in a graph go the same way on all ranks, over unequal data, too."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import RankError
from tests.ranks import grouped, reference

pytestmark = pytest.mark.ranks(1, 3)

BATCH, WIDTH = 4, 2
# Batches of each rank.
COUNTS = (5, 4, 7)


def batches(rank):
    rng = np.random.default_rng([2, rank])
    ids = rng.integers(0, 9, (COUNTS[rank], BATCH, WIDTH))
    return ids, rng.normal(size=(COUNTS[rank], BATCH, 1)).astype(np.float32)


def of_all(size, fewest=False):
    """Returns the batches of one process: the n-th one is that of all ranks."""
    mine = [batches(rank) for rank in range(size)]
    numbers = range((min if fewest else max)(COUNTS[:size]))
    return [
        tuple(
            np.concatenate([parts[which][n] for parts in mine if n < len(parts[which])])
            for which in (0, 1)
        )
        for n in numbers
    ]


def dataset(whole):
    types = (tf.TensorSpec([None, WIDTH], tf.int64), tf.TensorSpec([None, 1], tf.float32))
    made = tf2.data.Dataset.from_generator(lambda: iter(whole), output_signature=types)
    return made.apply(tf2.data.experimental.assert_cardinality(len(whole)))


@contextlib.contextmanager
def model_in(scope, embedding_scope, loss="mse"):
    with scope, tf.Graph().as_default(), tf.Session().as_default() as session:
        tf.keras.backend.set_session(session)
        with embedding_scope():
            table = tf2.keras.layers.Embedding(
                9, 3, tf.constant_initializer(reference.table_values(9, 3)), input_length=WIDTH
            )
        dense = tf2.keras.layers.Dense(1, kernel_initializer=tf.constant_initializer(0.3))
        model = tf.keras.Sequential([table, tf2.keras.layers.Flatten(), dense])
        optimizer = tf2.keras.optimizers.legacy.Adagrad(0.1)
        model.compile(optimizer, loss, metrics=["mae", tf2.keras.metrics.RootMeanSquaredError()])
        yield model
        tf.keras.backend.set_session(None)


def in_scope(strategy, loss="mse"):
    return model_in(strategy.scope(plan="quiet"), strategy.embedding_scope, loss)


@pytest.mark.slow
def test_unequal_data_give_the_numbers_of_one_process(strategy, rank, size):
    """An epoch has as many batches as the rank with the fewest; an evaluation has every record."""

    def run(model, train, validation):
        history = model.fit(
            dataset(train), epochs=2, verbose=0, validation_data=dataset(validation)
        )
        return {
            **{name: np.array(values) for name, values in history.history.items()},
            "evaluated": np.array(model.evaluate(dataset(validation), verbose=0)),
            **dict(zip("tab", model.get_weights())),
        }

    with model_in(contextlib.nullcontext(), contextlib.nullcontext) as model:
        want = run(model, of_all(size, fewest=True), of_all(size))
    with in_scope(strategy) as model:
        mine = list(zip(*batches(rank)))
        got = run(model, mine, mine)
    assert set(got) == set(want) and "val_loss" in got
    grouped.same(got, want, 2e-5, 1e-6)


@pytest.mark.slow
def test_a_loss_that_adds_up_samples(strategy, rank, size):
    def run(model, train):
        history = model.fit(dataset(train), epochs=2, verbose=0).history
        return {"loss": np.array(history["loss"]), **dict(zip("tab", model.get_weights()))}

    loss = tf2.keras.losses.MeanSquaredError(reduction="sum")
    with model_in(contextlib.nullcontext(), contextlib.nullcontext, loss) as model:
        want = run(model, of_all(size, fewest=True))
    with in_scope(strategy, loss) as model:
        got = run(model, list(zip(*batches(rank))))
    grouped.same(got, want, 2e-5, 1e-6)


def test_arrays_of_unequal_length(strategy, rank, size):
    x, y = (part.reshape(-1, part.shape[-1]) for part in batches(rank))
    records = min(BATCH * count - other for other, count in enumerate(COUNTS[:size]))
    x, y = x[: len(x) - rank], y[: len(y) - rank]
    with in_scope(strategy) as model:
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        if size > 1:
            with pytest.raises(ValueError, match=r"records is 20 on rank 0, and 15 on rank 1\. "):
                model.evaluate(x, y, batch_size=BATCH, verbose=0)
    assert len({str(each) for each in grouped.everyone(history)}) == 1

    def whole(number):
        at = slice(number * BATCH, min(records, (number + 1) * BATCH))
        flat = [[part.reshape(-1, part.shape[-1]) for part in batches(r)] for r in range(size)]
        return tuple(np.concatenate([parts[which][at] for parts in flat]) for which in (0, 1))

    with model_in(contextlib.nullcontext(), contextlib.nullcontext) as model:
        losses = []
        for _ in range(2):
            of_steps = [whole(number) for number in range(-(-records // BATCH))]
            mean = [float(model.train_on_batch(*each)[0]) for each in of_steps]
            losses.append(np.average(mean, weights=[len(each[0]) for each in of_steps]))
    np.testing.assert_allclose(history["loss"], losses, rtol=2e-5)


@pytest.mark.slow
def test_callbacks_see_the_loss_of_all_ranks_and_stop_together(strategy, rank, size):
    class Stop(tf2.keras.callbacks.Callback):
        """Stops the last rank after its second epoch."""

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = rank == size - 1 and epoch == 1

    seen = []
    note = tf2.keras.callbacks.LambdaCallback(
        on_batch_end=lambda _, logs: seen.append(logs["loss"])
    )
    with in_scope(strategy) as model:
        data = dataset(list(zip(*batches(rank))))
        history = model.fit(data, epochs=9, verbose=0, callbacks=[Stop(), note]).history
        loss = model.train_on_batch(*(part[0] for part in batches(rank)))[0]
    assert len(history["loss"]) == 2
    everyones = grouped.everyone({"seen": seen, "loss": loss, **history})
    assert all(str(mine) == str(everyones[0]) for mine in everyones)


class Failing(tf2.keras.utils.Sequence):
    """Is data that don't even know their length."""

    def __len__(self):
        return 1 // 0

    def __getitem__(self, number):
        raise AssertionError(number)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_what_ranks_could_not_do_alike_is_refused(strategy, rank, size):
    if size == 1:
        pytest.skip("one rank")
    with in_scope(strategy) as model:
        data = dataset(list(zip(*batches(rank))))
        with pytest.raises(ValueError, match="rank 0 doesn't know how many batches it has"):
            model.fit(data.filter(lambda *_: True), verbose=0)
        with pytest.raises(ValueError, match=r"epochs is \[0, 1\] on rank 0, and \[0, 2\] on rank"):
            model.fit(data, epochs=1 + rank, verbose=0)
        model.fit(data, steps_per_epoch=2 + rank, verbose=0)
        assert model.evaluate(data.repeat(), steps=2, verbose=0)
        with pytest.raises(ValueError, match="batches is 2 on rank 0, and 3 on rank 1"):
            model.evaluate(data.repeat(), steps=2 + rank, verbose=0)
        with pytest.raises(ZeroDivisionError if rank == 1 else RankError, match="division|Zero"):
            model.fit(Failing() if rank == 1 else data, verbose=0)
        model.fit(data, steps_per_epoch=2, verbose=0)  # Training goes on.


def test_only_rank_0_has_a_progress_bar(strategy, rank, size, capsys):
    with in_scope(strategy) as model:
        model.fit(dataset(list(zip(*batches(rank)))), verbose=2)
    assert ("loss:" in capsys.readouterr().out) == (rank == 0)
