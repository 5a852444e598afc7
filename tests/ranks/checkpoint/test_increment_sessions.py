"""Sessions and Estimators save increments by steps, and start from the newest; consumers follow."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import checkpoint
from collective import estimator as tf_estimator
from collective.checkpoint.files import chain_names
from tests.ranks import reference
from tests.ranks.dynamic_tables import D, normal
from tests.ranks.increments import V, build, increments_in

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]


@pytest.mark.slow
def test_a_monitored_session_saves_increments_and_starts_from_the_newest(strategy, folder):
    class Stopped(Exception):
        pass

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, ids, train, step = build(strategy)
        with (
            pytest.raises(Stopped),
            tf.train.MonitoredTrainingSession(
                checkpoint_dir=folder, save_checkpoint_steps=5, save_incremental_checkpoint_steps=2
            ) as session,
        ):
            for _ in range(9):
                session.run(train, {ids: [3]})
            raise Stopped  # Without a last save.
    # Whole ones at steps 0 and 5; increments at 2 and 4 after the one, 6 and 8 after the other.
    assert increments_in(folder) == [
        f"model.ckpt-{base}.increment-{number}" for base in (0, 5) for number in (1, 2)
    ]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, ids, train, step = build(strategy)
        row = tf.nn.embedding_lookup(table, [3])
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
            done, found = session.run([step, row])
    assert done == 8
    with tf.Graph().as_default(), strategy.scope(plan="quiet"):
        table, ids, train, step = build(strategy)
        row = tf.nn.embedding_lookup(table, [3])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(8):
                session.run(train, {ids: [3]})
            np.testing.assert_array_equal(session.run(row), found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_incremental_checkpoint_secs": 1, "save_incremental_checkpoint_steps": 1}, "one of"),
        ({"save_incremental_checkpoint_steps": 0}, "positive"),
        (
            {"save_incremental_checkpoint_steps": 5, "save_checkpoint_secs": None},
            "don't turn checkpoints off",
        ),
        ({"save_incremental_checkpoint_steps": 5, "checkpoint_dir": None}, "checkpoint_dir"),
    ],
)
def test_options_that_can_not_be(strategy, folder, options, words):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        build(strategy)
        with pytest.raises(ValueError, match=words):
            tf.train.MonitoredTrainingSession(**{"checkpoint_dir": folder, **options})


@pytest.mark.slow
def test_an_estimator_saves_increments(strategy, size, folder):
    def model_fn(features, labels, mode):
        with strategy.embedding_scope():
            table = reference.table("s", V, D)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, features) ** 2)
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        metrics = {"row": tf.metrics.mean(tf.reduce_sum(tf.nn.embedding_lookup(table, [3])))}
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)

    def input_fn():
        return tf.data.Dataset.from_tensors(np.array([3, 4], np.int64)).repeat(50 * size)

    class Abort(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.run(tf.train.get_global_step()) == 5:
                raise ValueError("enough")

    config = collective.RunConfig(
        save_checkpoints_steps=3, save_incremental_checkpoint_steps=1, keep_checkpoint_max=2
    )
    estimator = strategy.estimator(model_fn, folder, config)
    with pytest.raises(ValueError, match="enough"):
        estimator.train(input_fn, hooks=[Abort()], max_steps=9)
    found = increments_in(folder)
    assert "model.ckpt-3.increment-1" in found
    last = max(chain_names.split(name)[1] for name in found if "ckpt-3." in name)
    assert estimator.evaluate(input_fn, steps=1)["global_step"] == 3 + last


def test_consumers_follow_the_same_tables(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, ids, train, _ = build(strategy)
        dynamic = collective.get_embedding_variable("d", D, initializer=normal())
        keys = tf.placeholder_with_default(tf.constant([0], tf.int64), [None])
        rows = tf.nn.embedding_lookup(dynamic, keys)
        more = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows**2))
        serving, backup = checkpoint.changes("serving"), checkpoint.changes("backup", slots=True)
        all_keys = np.arange(30) * 7

        def local(some):
            return [key for key in some if key % size == rank]

        with tf.train.MonitoredTrainingSession("") as session:
            session.run(more, {keys: all_keys})
            with serving.take(session) as updates:
                assert updates.keys() == {"s", "d"}
                assert updates["s"].whole and updates["d"].whole
                assert len(updates["s"]) == len(local(range(V)))
            session.run([train, more], {ids: [5, 6], keys: all_keys[:4]})
            dynamic.remove(session, all_keys[20:])
            with pytest.raises(KeyError), serving.take(session) as updates:
                raise KeyError
            with serving.take(session) as updates:
                found = dict(zip(("keys", "rows"), map(list, zip(*updates["s"].blocks()))))
                assert np.concatenate([*found.get("keys", []), []]).tolist() == local([5, 6])
                mine = np.concatenate([[], *(k for k, _ in updates["d"].blocks())])
                values = [r for _, r in updates["d"].blocks(2)]
                own, wanted = dynamic.lookup_keys(session, np.sort(all_keys[:4]))
                assert sorted(mine) == sorted(own)
                np.testing.assert_array_equal(np.concatenate([wanted[:0], *values]), wanted)
                owned = dynamic._is_owned(all_keys[20:])
                assert updates["d"].removed.tolist() == all_keys[20:][owned].tolist()
            with serving.take(session) as updates:
                assert not len(updates["s"]) and not len(updates["d"])
            with backup.take(session) as updates:
                assert updates.keys() == {"s", "s/Adagrad", "d", "d/Adagrad_1"} or len(updates) == 4
                assert all(update.whole for update in updates.values())
