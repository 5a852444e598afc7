"""`tf.train.Checkpoint` and what is built on it: plain TensorFlow's files, on any ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError
from tests.ranks.keras.models import (
    BATCH,
    USER_ROWS,
    USERS,
    batches,
    compare,
    data,
    dataset,
    keras,
    make_model,
    part,
    train_step,
)

pytestmark = pytest.mark.double

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.003),
    "legacy Adam": lambda: keras.optimizers.legacy.Adam(0.003),
}


class Later(keras.Model):
    """Makes its table and weights when it is called, which is after a checkpoint was restored."""

    def __init__(self, embedding_scope=None):
        super().__init__()
        self.embedding_scope = embedding_scope
        self.users = keras.layers.Embedding(USERS, 8, keras.initializers.Constant(USER_ROWS))
        self.top = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(3))

    def call(self, inputs, training=None):
        users, _ = inputs
        if self.embedding_scope is None or self.users.built:
            return self.top(self.users(users))
        with self.embedding_scope():
            rows = self.users(users)
        return self.top(rows)


def trained(model, optimizer, own):
    step = train_step(model, optimizer)
    for batch in own:
        step(*batch)


def tracked(model, optimizer):
    return tf2.train.Checkpoint(model=model, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", ["Adam", pytest.param("legacy Adam", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("make", [make_model, Later], ids=["slots later", "all later"])
def test_training_goes_on_from_a_manager(strategy, rank, size, folder, name, make):
    """Also in plain TensorFlow, and from its files. Slots, or all, are made after a restore."""
    make_optimizer, all_data = OPTIMIZERS[name], data()
    own = batches(part(all_data, rank, size), size)
    plain, plain_optimizer = make(), make_optimizer()
    trained(plain, plain_optimizer, batches(all_data)[:12])

    with strategy.scope():
        model, optimizer = make(strategy.embedding_scope), make_optimizer()
        manager = tf2.train.CheckpointManager(tracked(model, optimizer), folder, max_to_keep=2)
        assert manager.restore_or_initialize() is None
        for number in range(4):
            trained(model, optimizer, own[number : number + 1])
            assert manager.save() == os.path.join(folder, f"ckpt-{number + 1}")
        assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-3", "ckpt-4"]
        assert tf2.train.latest_checkpoint(folder) == manager.latest_checkpoint
        files = sorted(os.listdir(folder))
        assert [f for f in files if f.endswith(".index")] == ["ckpt-3.index", "ckpt-4.index"]

        again, optimizer = make(strategy.embedding_scope), make_optimizer()
        manager = tf2.train.CheckpointManager(tracked(again, optimizer), folder, max_to_keep=2)
        assert manager.restore_or_initialize() == os.path.join(folder, "ckpt-4")
        trained(again, optimizer, own[4:8])
        assert int(optimizer.iterations.numpy()) == 8
        path = tracked(again, optimizer).write(os.path.join(folder, "written"))

    alone, optimizer = make(), make_optimizer()
    tracked(alone, optimizer).read(path)
    trained(alone, optimizer, batches(all_data)[8:12])
    for variable, want in zip(alone.trainable_variables, plain.trainable_variables):
        np.testing.assert_allclose(variable, want, rtol=0, atol=1e-6)
    saved = tracked(alone, optimizer).save(os.path.join(folder, f"of_rank{rank}", "alone"))

    with strategy.scope():
        model, optimizer = make(strategy.embedding_scope), make_optimizer()
        trained(model, optimizer, own[:1])
        path = saved.replace(f"of_rank{rank}", "of_rank0")

        tracked(model, optimizer).restore(path).assert_existing_objects_matched()
        compare(model, plain, rank, size)


@pytest.mark.slow
def test_metrics_count_every_record_once(strategy, rank, size, folder):
    """Each rank has its own records; the file has all; what is restored counts once."""
    with strategy.scope():
        model, metric = make_model(strategy.embedding_scope), keras.metrics.Mean()
        metric.update_state([rank + 1.0] * (rank + 1))
        path = tf2.train.Checkpoint(model=model, metric=metric).save(os.path.join(folder, "c"))
        holder = tf2.Module()
        holder.metric = metric
        tf2.train.Checkpoint(model=model, later=holder).save(os.path.join(folder, "d"))
        np.testing.assert_allclose(metric.result(), rank + 1)
        restored, later = keras.metrics.Mean(), tf2.Module()
        tf2.train.Checkpoint(model=model, metric=restored).restore(path)
        tf2.train.Checkpoint(model=model, later=later).read(path.replace("c-1", "d-1"))
        later.metric = keras.metrics.Mean()
        # Of a model that has no table yet.
        built, unbuilt, early = (
            *(Later(strategy.embedding_scope) for _ in range(2)),
            keras.metrics.Mean(),
        )
        batch = (tf2.constant([1, 2]), None)
        built(batch)
        third = tf2.train.Checkpoint(model=built, metric=metric).save(os.path.join(folder, "e"))
        tf2.train.Checkpoint(model=unbuilt, metric=early).restore(third)
        unbuilt(batch)
        states = (restored, later.metric, early)
        totals = [[v.numpy() for v in each.variables] for each in states]
    plain = keras.metrics.Mean()
    tf2.train.Checkpoint(metric=plain).restore(path).expect_partial()
    want = [sum((r + 1) ** 2 for r in range(size)), sum(r + 1 for r in range(size))]
    np.testing.assert_allclose([v.numpy() for v in plain.variables], want)
    for total in totals:
        np.testing.assert_allclose(total, want if rank == 0 else [0, 0])


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_what_ranks_do_not_do_together_is_refused(strategy, rank, size, folder):
    options, own = tf2.train.CheckpointOptions, batches(part(data(), rank, size), size)[:1]
    by_name = os.path.join(folder, "by_name")
    if rank == 0:  # Its peers read it together with it.
        tf2.raw_ops.SaveV2(
            prefix=by_name, tensor_names=["w"], shape_and_slices=[""], tensors=[tf2.ones([2])]
        )
    with strategy.scope():
        model, optimizer = Later(strategy.embedding_scope), OPTIMIZERS["Adam"]()
        trained(model, optimizer, own)
        checkpoint = tracked(model, optimizer)
        path = checkpoint.write(os.path.join(folder, "a"))
        with pytest.raises(RankError, match=f"saving the tf.train.Checkpoint '.*own{size - 1}'"):
            checkpoint.write(os.path.join(folder, f"own{rank}"))
        with pytest.raises(RankError, match="it is '.*a' on rank 0, and None on rank 1"):
            checkpoint.read(path if rank == 0 else None)
        with pytest.raises((tf2.errors.NotFoundError, RankError), match="gone"):
            checkpoint.restore(os.path.join(folder, "gone"))
        with pytest.raises(NotImplementedError, match="enable_async_checkpoint=True"):
            checkpoint.save(path, options(experimental_enable_async_checkpoint=True))
        with pytest.raises(Exception, match="TableError: .*outside of a tf.function, model.save_w"):
            tf2.function(lambda: checkpoint.write(path))()
        with pytest.raises(Exception, match="by_name' has variables by their names, as sessions"):
            checkpoint.read(by_name)
        # One rank alone has a checkpoint for a table that is made later.
        later = Later(strategy.embedding_scope)
        if rank == 0:
            tf2.train.Checkpoint(model=later).read(path).expect_partial()
        with pytest.raises(Exception, match="restoring '.*embeddings' of a tf.train.Check"):
            trained(later, OPTIMIZERS["Adam"](), own)


class Ends(keras.callbacks.Callback):
    """Ends training at a batch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyError("boom")


@pytest.mark.long
@pytest.mark.parametrize("save_freq", ["epoch", pytest.param(3, marks=pytest.mark.matrix)])
def test_a_backup_goes_on_as_in_plain_keras(strategy, rank, size, folder, save_freq):
    def run(model, own, batch, where, *ends):
        # Two runs of a script: one is killed in its second epoch, one goes on.
        model.compile(OPTIMIZERS["Adam"](), "mse", metrics=["mae"])
        backup = keras.callbacks.BackupAndRestore(os.path.join(folder, where), save_freq)
        callbacks = [backup, *ends]
        return model.fit(dataset(own, batch), epochs=3, verbose=0, callbacks=callbacks).history

    few = tf2.nest.map_structure(lambda x: x[: 5 * BATCH], data())
    with pytest.raises(KeyError):
        run(make_model(), few, BATCH, f"plain{rank}", Ends(1, 4))
    plain = make_model()
    want = run(plain, few, BATCH, f"plain{rank}")
    own = part(few, rank, size)
    with strategy.scope():
        with pytest.raises(KeyError, match="boom"):
            run(make_model(strategy.embedding_scope), own, BATCH // size, "b", Ends(1, 4))
        assert os.path.exists(os.path.join(folder, "b"))
        model = make_model(strategy.embedding_scope)
        got = run(model, own, BATCH // size, "b")
        compare(model, plain, rank, size)
        assert not os.path.exists(os.path.join(folder, "b", "chief"))
    assert int(model.optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy())
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=0, atol=1e-6, err_msg=name)
