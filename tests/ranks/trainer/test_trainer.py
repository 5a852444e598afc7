"""A Trainer's steps, boundaries and numbers are those of plain TensorFlow in one process."""

import functools
import os
import random

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective
from collective import RankError
from collective import estimator as tf_estimator
from collective.checkpoint import read_table
from collective.trainer import Batch, Epoch, Record, Seconds
from tests.ranks.estimators import IDS, LABELS, WEIGHTS, few_metrics, model, plain, told

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3), pytest.mark.backends("hb")]

RECORDS, B = 50, 12
CONFIG = tf_estimator.RunConfig(tf_random_seed=1, save_summary_steps=None)


def some(count, first=0):
    """Returns a function that gives single records, as a Trainer's data do."""

    def records():
        end = first + count
        data = {
            "ids": IDS[first:end],
            "weight": WEIGHTS[first:end],
            "number": np.arange(first, end),
        }
        options = tf2.data.Options()
        options.autotune.enabled = False
        return tf2.data.Dataset.from_tensor_slices((data, LABELS[first:end])).with_options(options)

    return records


def shuffled():
    return some(RECORDS)().shuffle(RECORDS, seed=3)


TEST = some(40, first=60)


def trainer_in(strategy, folder, trouble=None, **kwargs):
    return collective.Trainer(
        model(strategy.embedding_scope, few_metrics, trouble=trouble),
        {},
        **{"model_dir": folder, "global_batch_size": B, "config": CONFIG, **kwargs},
    )


def weights_in(folder):
    """Returns the table and the dense weights of the latest checkpoint in a folder."""
    latest = tf.train.latest_checkpoint(folder)
    rows = np.concatenate([rows for _, rows in read_table(latest, "t")])
    return rows, tf.train.load_variable(latest, "w")


def plain_steps(folder, steps, checkpoints=()):
    """Trains TensorFlow's own Estimator on whole batches; returns metrics by step, and weights."""
    estimator = plain(folder, few_metrics, config=CONFIG)
    metrics, last = {}, 0
    for step in [*checkpoints, steps]:
        # A train() of its own for each validation begins the data again, so they skip what is used.
        rest = functools.partial(lambda used: shuffled().repeat().batch(B).skip(used), last)
        estimator.train(rest, max_steps=step)
        metrics[step], last = estimator.evaluate(lambda: TEST().batch(B)), step
    names = {"t": estimator.get_variable_value("t"), "w": estimator.get_variable_value("w")}
    return metrics, (names["t"], names["w"])


def assert_close(found, expected):
    for values, others in zip(found, expected):
        np.testing.assert_allclose(values, others, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_numbers_and_positions_are_those_of_one_process(strategy, folder):
    """Epochs of 50 records in batches of 12 end after the steps 5, 9 and 13."""
    validated = {}
    training = trainer_in(strategy, folder).fit(
        shuffled,
        TEST,
        max_length=Epoch(3),
        validation_period=Epoch(1),
        checkpoint_period=Record(75),
        reporting_period=Batch(4),
        checkpoint_policy="all",
        on_validation=lambda step, metrics: validated.update({step: metrics}),
    )
    expected, weights = plain_steps(folder, 13, (5, 9))
    assert list(validated) == [5, 9, 13]
    for step, metrics in expected.items():
        for name, value in metrics.items():
            np.testing.assert_allclose(validated[step][name], value, rtol=1e-5, err_msg=name)
    assert_close(weights_in(folder), weights)
    saved = {int(name[11:-6]) for name in os.listdir(folder) if name.endswith(".index")}
    assert saved == {0, 5, 7, 9, 13}  # 75 and 150 records are used after 7 and 13 steps
    assert [report["step"] for report in training.reports] == [4, 8, 12, 13]
    assert (training.step, training.stopped) == (13, False)
    assert training.metrics["auc"] == pytest.approx(float(expected[13]["auc"]), rel=1e-5)


def test_the_loss_that_is_reported_is_that_of_whole_batches(strategy, folder):
    training = trainer_in(strategy, folder).fit(
        shuffled, max_length=Batch(6), reporting_period=Batch(3)
    )
    losses = []

    class Losses(tf.train.SessionRunHook):
        def before_run(self, context):
            return tf.train.SessionRunArgs(tf.get_collection(tf.GraphKeys.LOSSES)[-1])

        def after_run(self, context, values):
            losses.append(values.results)

    estimator = plain(folder, config=CONFIG)
    estimator.train(lambda: shuffled().repeat().batch(B), hooks=[Losses()], max_steps=6)
    found = [report["loss"] for report in training.reports]
    np.testing.assert_allclose(found, [np.mean(losses[:3]), np.mean(losses[3:])], rtol=1e-5)


@pytest.mark.slow
def test_training_goes_on_at_its_position(strategy, folder):
    """In three jobs, with a checkpoint of another folder between; then it has been trained."""
    first, second = os.path.join(folder, "first"), os.path.join(folder, "second")
    fit = {"train": shuffled, "validation": TEST, "continue_id": "a"}
    random.seed(5)
    np.random.seed(5)
    trainer_in(strategy, first).fit(max_length=Batch(3), **fit)
    drawn = told(numbers=[random.random(), np.random.random()])[0]["numbers"]
    trainer_in(strategy, first).fit(max_length=Batch(5), **fit)
    again = told(numbers=[random.random(), np.random.random()])[0]["numbers"]
    assert again == drawn  # the generators continue from the checkpoint of step 3
    training = trainer_in(strategy, second).fit(max_length=Batch(9), latest_checkpoint=first, **fit)
    expected, weights = plain_steps(folder, 9)
    assert_close(weights_in(second), weights)
    assert training.metrics["loss"] == pytest.approx(float(expected[9]["loss"]), rel=1e-5)
    again = trainer_in(strategy, second).fit(max_length=Batch(9), **fit)
    assert (again.step, again.metrics) == (9, training.metrics)
    assert_close(weights_in(second), weights)


@pytest.mark.long
def test_another_id_takes_the_weights_only(strategy, folder, rank):
    first, second = os.path.join(folder, "first"), os.path.join(folder, "second")
    trainer_in(strategy, first).fit(shuffled, max_length=Batch(4), continue_id="a")
    expected_error = ValueError if rank == 0 else RankError
    with pytest.raises(expected_error, match="continue_id='b', but the checkpoints in .* of 'a'"):
        trainer_in(strategy, first).fit(shuffled, max_length=Batch(5), continue_id="b")
    with pytest.raises(expected_error, match="latest_checkpoint=None begins from nothing"):
        trainer_in(strategy, first).fit(shuffled, max_length=Batch(5), latest_checkpoint=None)
    started = {}
    training = trainer_in(strategy, second).fit(
        shuffled,
        TEST,
        max_length=Batch(1),
        latest_checkpoint=first,
        continue_id="b",
        step_zero_validation=True,
        on_validation=lambda step, metrics: started.update({step: metrics}),
    )
    assert training.step == 1 and list(started) == [0, 1]
    expected, _ = plain_steps(folder, 4)
    assert started[0]["loss"] == pytest.approx(float(expected[4]["loss"]), rel=1e-5)
    position = tf.train.load_variable(tf.train.latest_checkpoint(second), "train/position")
    assert int(position) == 1


@pytest.mark.long
@pytest.mark.parametrize("smaller", [True, False])
def test_the_best_checkpoint_is_kept(strategy, folder, smaller):
    """By the metric and its direction, while the latest one alone is kept otherwise."""
    config = CONFIG.replace(keep_checkpoint_max=1)
    values = {}
    trainer = trainer_in(strategy, folder, metric="mean", smaller_is_better=smaller, config=config)
    training = trainer.fit(
        shuffled,
        TEST,
        max_length=Batch(4),
        validation_period=Batch(1),
        on_validation=lambda step, metrics: values.update({step: float(metrics["mean"])}),
    )
    best = min(values, key=values.get) if smaller else max(values, key=values.get)
    assert training.best_checkpoint == os.path.join(folder, "best", f"model.ckpt-{best}")
    found = trainer.evaluate(TEST, checkpoint="best")
    assert found["mean"] == pytest.approx(values[best]) and found["global_step"] == best
    told()
    saved = [name for name in os.listdir(folder) if name.endswith(".index")]
    assert saved == ["model.ckpt-4.index"]


@pytest.mark.slow
def test_a_wish_of_one_rank_stops_all(strategy, folder, rank, size):
    """At the next boundary, with a validation and a checkpoint of that step."""
    trainer = trainer_in(strategy, folder)

    class Wish(tf.train.SessionRunHook):
        runs = 0

        def after_run(self, context, values):
            self.runs += 1
            if rank == size - 1 and self.runs == 4:
                trainer.stop()

    training = trainer.fit(
        shuffled, TEST, max_length=Batch(50), reporting_period=Batch(6), hooks=[Wish()]
    )
    assert (training.step, training.stopped) == (6, True)
    assert training.checkpoint.endswith("model.ckpt-6") and training.metrics["global_step"] == 6


@pytest.mark.long
def test_a_validation_that_fails_on_one_rank_fails_on_all(strategy, folder, rank, size):
    """The checkpoint is there, and the next fit validates it before it trains on."""
    fails = []

    def trouble(mode):
        if mode == tf_estimator.ModeKeys.EVAL and rank == size - 1 and not fails:
            fails.append(mode)
            raise KeyError("boom")

    fit = {"max_length": Batch(4), "validation_period": Batch(2), "train": shuffled}
    with pytest.raises(KeyError if rank == size - 1 else RankError, match="boom"):
        trainer_in(strategy, folder, trouble).fit(validation=TEST, **fit)
    validated = []
    training = trainer_in(strategy, folder).fit(
        validation=TEST, on_validation=lambda step, _: validated.append(step), **fit
    )
    assert validated == [2, 4] and training.step == 4
    assert_close(weights_in(folder), plain_steps(folder, 4)[1])


@pytest.mark.long
def test_an_error_in_on_validation_of_one_rank_is_one_on_all(strategy, folder, rank, size):
    def fail(step, metrics):
        if rank == size - 1:
            raise KeyError("boom")

    with pytest.raises(KeyError if rank == size - 1 else RankError, match="boom"):
        trainer_in(strategy, folder).fit(
            shuffled, TEST, max_length=Batch(4), validation_period=Batch(2), on_validation=fail
        )


@pytest.mark.long
def test_the_test_mode_takes_one_batch_of_each(strategy, folder):
    """In a folder of its own: the checkpoints of training stay, and those of the last test go."""
    trainer_in(strategy, folder).fit(shuffled, TEST, max_length=Batch(3))
    before = sorted(os.listdir(folder))
    told()
    for _ in range(2):
        trainer = trainer_in(strategy, folder)
        training = trainer.fit(
            shuffled, TEST, max_length=Epoch(3), validation_period=Epoch(1), test_mode=True
        )
        assert training.step == 1 and training.metrics["global_step"] == 1
        assert os.path.dirname(training.checkpoint) == os.path.join(folder, "test_mode")
    assert sorted({*os.listdir(folder)} - {"test_mode"}) == before
    with tf.Graph().as_default():
        one_batch = plain(folder, few_metrics, config=CONFIG)
        one_batch.train(lambda: shuffled().repeat().batch(B), max_steps=1)
        expected = one_batch.evaluate(lambda: TEST().take(B).batch(B))
    assert training.metrics["loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_seconds_are_those_of_rank_0(strategy, folder):
    training = trainer_in(strategy, folder).fit(
        shuffled, max_length=Seconds(0.5), reporting_period=Seconds(0.1)
    )
    steps = told(step=training.step)
    assert {each["step"] for each in steps} == {training.step} and training.step > 0
    assert training.reports[-1]["seconds"] >= 0.5
    again = trainer_in(strategy, folder).fit(shuffled, max_length=Seconds(0.5))
    assert again.step == training.step


def receiver():
    ids = tf.placeholder(tf.int64, [None, 3])
    number = tf.placeholder(tf.int64, [None])
    inputs = {"ids": ids, "number": number}
    return tf_estimator.export.ServingInputReceiver(inputs, inputs)


@pytest.mark.slow
def test_predictions_and_exports(strategy, folder, rank):
    trainer = trainer_in(strategy, folder)
    trainer.fit(shuffled, TEST, max_length=Batch(3))
    predictions = [float(each["p"]) for each in trainer.predict(TEST, gather=True)]
    assert len(predictions) == (40 if rank == 0 else 0)
    path = trainer.export(os.path.join(folder, "served"), receiver, checkpoint="best")
    loaded = tf2.saved_model.load(path).signatures["serving_default"]
    with tf.Graph().as_default():
        pass
    if rank == 0:
        assert os.path.isdir(path) and loaded is not None


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda fit: fit(shuffled, max_length=5), "max_length=5 has no unit"),
        (
            lambda fit: fit(some(30), max_length=Epoch(1), checkpoint_policy="x"),
            "checkpoint_policy",
        ),
        (lambda fit: fit(lambda: shuffled().repeat(), max_length=Epoch(1)), "has no end"),
        (lambda fit: fit(lambda: 3, max_length=Batch(1)), "returned int"),
        (lambda fit: fit(lambda input_context: 3, max_length=Batch(1)), "takes input_context"),
    ],
)
def test_refusals(strategy, folder, make, message):
    with pytest.raises((TypeError, ValueError, RankError), match=message):
        make(trainer_in(strategy, folder).fit)


def test_a_batch_is_needed_and_epochs_are_checked(strategy, folder):
    with pytest.raises(ValueError, match="global_batch_size=…"):
        trainer_in(strategy, folder, global_batch_size=None)
    with pytest.raises(ValueError, match="records_per_epoch is 49, .* have 50"):
        trainer_in(strategy, folder, records_per_epoch=49).fit(shuffled, max_length=Epoch(1))


@pytest.mark.long
def test_a_resumable_dataset_of_the_scripts_own(strategy, folder):
    def own():
        return collective.data.resumable(shuffled().repeat(), 12, name="clicks")

    trainer_in(strategy, folder).fit(own, max_length=Batch(4))
    assert_close(weights_in(folder), plain_steps(folder, 4)[1])
    with pytest.raises((ValueError, RankError), match="global_batch_size is 24, .* of 12 records"):
        trainer_in(strategy, folder, global_batch_size=24).fit(own, max_length=Batch(6))


@pytest.mark.slow
def test_a_run_that_counts_other_steps_is_refused(strategy, folder):
    def twice(features, labels, mode, params):
        spec = model(strategy.embedding_scope)(features, labels, mode, params)
        with tf.control_dependencies([spec.train_op]):
            more = tf.assign_add(tf.train.get_global_step(), 1)
        return spec._replace(train_op=more.op)

    trainer = collective.Trainer(
        twice, {"global_batch_size": B}, model_dir=folder, config=CONFIG, strategy=strategy
    )
    with pytest.raises((ValueError, RankError), match="after global batch 2 the global step is 4"):
        trainer.fit(shuffled, max_length=Batch(6), reporting_period=Batch(2))


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_a_profile_of_a_trainer_that_was_made_inside_a_scope(strategy, folder):
    """The scope's own options, which the Trainer keeps, have a profile, too: none."""
    with strategy.scope(plan="quiet", profile_steps=(2, 3)):
        trainer = trainer_in(strategy, folder)
    profile = os.path.join(folder, "profile")
    trainer.fit(shuffled, max_length=Batch(4), profile=profile)
    assert os.listdir(profile)
