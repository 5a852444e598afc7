"""Data go on where a job stopped: each record once, at any N, with the weights of one long run."""

import functools
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import RankError, data
from collective import estimator as tf_estimator
from collective.checkpoint import read_table
from collective.coordination import barrier
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

RECORDS, EPOCHS, B = 42, 2, 12  # global batches 3 and 6 have records of two epochs and of the rest
LR = 0.1


@pytest.fixture
def folder(tmp_path):
    """Returns rank 0's folder, which all ranks see."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def of_all_ranks(values):
    """Returns what all ranks have, in their order."""
    return [each["values"] for each in barrier.exchange(None, "values", {"values": values})]


def pipeline():
    return tf2.data.Dataset.range(RECORDS).shuffle(17, seed=3).repeat(EPOCHS)


@functools.cache
def order(graph_seed=None):
    """Returns the records in the order in which plain TensorFlow gives them."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(graph_seed)
        batch = tf.data.make_one_shot_iterator(pipeline().batch(1000)).get_next()
        return session.run(batch).tolist()


def from_parquet(folder, rank):
    path = f"{folder}/records.parquet"
    if rank == 0:
        table = pyarrow.table({"id": np.arange(RECORDS)})
        pyarrow.parquet.write_table(table, path, row_group_size=8)
    barrier.exchange(None, "written", {})
    return lambda: data.parquet(path, shuffle=True, seed=9, epochs=EPOCHS)


def iterator_of(dataset, kind):
    if kind == "one shot":
        return tf.data.make_one_shot_iterator(dataset)
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def build(strategy, ids):
    with strategy.embedding_scope():
        table = reference.table("t", RECORDS, 2)
    rows = tf.nn.embedding_lookup(table, ids)
    weight = tf.get_variable("w", [2], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(rows * weight - 0.5))
    step = tf.train.get_or_create_global_step()
    return tf.train.GradientDescentOptimizer(LR).minimize(loss, global_step=step)


def trained(strategy, folder, steps, make=pipeline, kind="one shot", ahead=False, **options):
    """Trains from the folder's latest checkpoint on; returns this rank's records, step by step."""
    used = []
    scope = strategy.scope(plan="quiet", prefetch_keys=ahead)
    with scope, tf.Graph().as_default():
        dataset = data.resumable(make(), **{"batch_size": B, "name": "clicks", **options})
        if make is not pipeline:
            dataset = dataset.map(lambda batch: batch["id"])
        ids = iterator_of(dataset.prefetch(3), kind).get_next()
        train = build(strategy, ids)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=1000
        ) as session:
            for _ in range(steps):
                if session.should_stop():
                    break
                used.append(session.run([ids, train])[0].tolist())
    return used


def joined(used):
    """Returns the records of each step, of all ranks, sorted."""
    return [sorted(id for part in step for id in part) for step in zip(*of_all_ranks(used))]


def batches(graph_seed=None):
    records = order(graph_seed)
    return [sorted(records[i : i + B]) for i in range(0, len(records), B)]


def weights_of_plain_steps(records):
    """Returns the table and the weight after plain gradient descent on batches, in float64."""
    table, weight = reference.table_values(RECORDS, 2).astype(np.float64), np.ones(2)
    for ids in records:
        rows = table[ids]
        error = 2 * (rows * weight - 0.5) / rows.size
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids, error * weight)
        table, weight = table - LR * gradient, weight - LR * (error * rows).sum(0)
    return table, weight


def position(folder, name="clicks"):
    return int(tf.train.load_variable(folder, f"{name}/position"))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind, ahead",
    [("one shot", False), ("initializable", True), ("one shot", True), ("initializable", False)],
)
def test_a_job_goes_on_with_the_next_batch(strategy, folder, kind, ahead):
    used = []
    for steps, place in ((2, 2), (1, 3), (100, 7), (100, 7)):
        used += joined(trained(strategy, folder, steps, kind=kind, ahead=ahead))
        assert position(folder) == place
    assert used == batches()
    assert sorted(id for step in used for id in step) == sorted([*range(RECORDS)] * EPOCHS)
    table, weight = weights_of_plain_steps(used)
    np.testing.assert_allclose(tf.train.load_variable(folder, "w"), weight, rtol=1e-5)
    rows = np.concatenate([x for _, x in read_table(tf.train.latest_checkpoint(folder), "t")])
    np.testing.assert_allclose(rows, table, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
def test_parquet_goes_to_its_place_at_once(strategy, rank, folder):
    make = from_parquet(folder, rank)
    used = []
    for steps in (2, 1, 100):
        used += joined(trained(strategy, folder, steps, make))
    assert [len(step) for step in used] == [B] * 7
    assert sorted(id for step in used for id in step) == sorted([*range(RECORDS)] * EPOCHS)
    assert len(set(sum(used[:3], []))) == 3 * B  # of one epoch
    with pytest.raises(
        (RankError, tf.errors.InvalidArgumentError),
        match="records 42, seed 9, .*records 42, seed 8",
    ):
        trained(
            strategy,
            folder,
            1,
            lambda: data.parquet(f"{folder}/records.parquet", shuffle=True, seed=8, epochs=EPOCHS),
        )


@pytest.mark.matrix
def test_ranks_have_one_more_where_n_does_not_divide_a_batch(strategy, size, folder):
    used = trained(strategy, folder, 2, batch_size=13)
    used += trained(strategy, folder, 100, batch_size=13)
    records = order()
    parts = of_all_ranks(used)
    for rank, steps in enumerate(parts):
        for k, ids in enumerate(steps):
            assert ids == records[13 * k : 13 * (k + 1)][rank::size]
    # The last batch has 84 - 78 records.
    assert len(used) == 7


@pytest.mark.matrix
def test_other_data_than_the_checkpoints_are_refused(strategy, rank, size, folder, capfd):
    trained(strategy, folder, 2)
    with pytest.raises(
        (RankError, tf.errors.InvalidArgumentError),
        match=r"resumable dataset clicks: .* after global batch 2, is of other data "
        r"\(batch_size 12, .*\) than those of this job \(batch_size 24, .*on_change=restart",
    ):
        trained(strategy, folder, 1, batch_size=24)
    assert position(folder) == 2
    used = joined(trained(strategy, folder, 1, batch_size=24, on_change="restart"))
    used += joined(trained(strategy, folder, 1, batch_size=24, on_change="restart"))
    records = order()
    assert used == [sorted(records[:24]), sorted(records[24:48])]
    assert position(folder) == 2
    warned = capfd.readouterr().err.count("those of this job begin again")
    assert warned == (rank == 0)


@pytest.mark.long
def test_a_checkpoint_without_a_position(strategy, folder):
    """Of a job that hadn't a resumable dataset; the weights are restored, the data begin."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        build(strategy, tf.constant([0, 1], tf.int64))
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder):
            pass
    with pytest.raises((RankError, tf.errors.NotFoundError), match="'clicks/position'"):
        trained(strategy, folder, 1)
    used = joined(trained(strategy, folder, 1, on_change="restart", start=4))
    used += joined(trained(strategy, folder, 1))
    assert used == batches()[4:6]
    assert position(folder) == 6


@pytest.mark.matrix
def test_an_evaluation_does_not_move_the_place(strategy, size, folder):
    """Runs of another iterator, and runs that are fed, take no batch."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        dataset = data.resumable(pipeline(), B, name="clicks")
        held_out = data.resumable(tf2.data.Dataset.range(RECORDS), B, name="held_out")
        ids = tf.data.make_one_shot_iterator(dataset).get_next()
        others = tf.data.make_one_shot_iterator(held_out.prefetch(2)).get_next()
        with tf.variable_scope("model"):
            train = build(strategy, ids)
        with tf.variable_scope("model", reuse=True), strategy.embedding_scope():
            table = tf.get_variable("t", [RECORDS, 2])
        evaluated = tf.reduce_sum(tf.nn.embedding_lookup(table, others))
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run([train, tf.train.get_global_step()])
            for _ in range(3):
                session.run(evaluated)
            session.run(train, {ids: np.arange(4)})
            session.run(tf.train.get_global_step())
            path = saver.save(session, f"{folder}/m")
            places = {name: position(path, name) for name in ("clicks", "held_out")}
            assert places == {"clicks": 2, "held_out": 3}
            # The iterator goes on from where it is, and that isn't where the checkpoint's is.
            session.run(train)
            saver.restore(session, path)
            with pytest.raises(RuntimeError, match="a checkpoint was restored after batches of"):
                session.run(train)
        with tf.Session() as session:
            saver.restore(session, path)
            got = session.run([ids, train])[0]
    records = order()
    assert sorted(sum(of_all_ranks(got.tolist()), [])) == sorted(records[2 * B : 3 * B])


@pytest.mark.slow
def test_a_batch_whose_step_failed_counts(strategy, rank, size, folder):
    """The iterator is beyond it."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        records = tf2.data.Dataset.range(4 * size).map(
            lambda i: tf.where(tf.equal(i // size, 1), i + 1000, i)
        )
        dataset = data.resumable(records, size)
        ids = tf.data.make_one_shot_iterator(dataset).get_next()
        train = build(strategy, ids)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
                session.run(train)
            assert session.run([ids, train])[0].tolist() == [2 * size + rank]
            path = saver.save(session, f"{folder}/m")
    assert position(path, "data") == 3


def functions_of_estimator(strategy, used):
    def input_fn():
        return data.resumable(pipeline(), B, name="clicks").map(lambda ids: ({"ids": ids}, ids))

    def model_fn(features, labels, mode):
        ids = features["ids"]
        if mode == "eval":
            count = tf.metrics.mean(tf.cast(ids, tf.float32))
            with strategy.embedding_scope():
                table = reference.table("t", RECORDS, 2)
            loss = tf.reduce_mean(tf.nn.embedding_lookup(table, ids))
            return tf_estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"mean": count})
        train = build(strategy, ids)

        class Note(tf.train.SessionRunHook):
            def before_run(self, context):
                return tf.train.SessionRunArgs(ids)

            def after_run(self, context, values):
                used.append(values.results.tolist())

        return tf_estimator.EstimatorSpec(
            mode,
            loss=tf.reduce_mean(tf.cast(ids, tf.float32)),
            train_op=train,
            training_hooks=[Note()],
        )

    return model_fn, input_fn


@pytest.mark.matrix
def test_an_estimators_input_goes_on(strategy, folder):
    used = []
    with strategy.scope(plan="quiet"):
        model_fn, input_fn = functions_of_estimator(strategy, used)
        with pytest.raises(ValueError, match=r"RunConfig\(tf_random_seed="):
            strategy.estimator(model_fn, f"{folder}/seedless").train(input_fn, steps=2)
        config = tf_estimator.RunConfig(tf_random_seed=1)
        estimator = strategy.estimator(model_fn, folder, config)
        estimator.train(input_fn, steps=2)
        # An evaluation begins at the start, and moves nothing.
        metrics = estimator.evaluate(input_fn)
        assert metrics["mean"] == pytest.approx(np.mean(order(1)))
        some = estimator.evaluate(input_fn, steps=2)
        assert some["mean"] == pytest.approx(np.mean(order(1)[: 2 * B]))
        estimator.train(input_fn, steps=1)
        estimator.train(input_fn)
    assert joined(used) == batches(1)
    assert position(os.fspath(folder)) == 7
