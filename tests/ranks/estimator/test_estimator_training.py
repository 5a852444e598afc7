"""strategy.estimator trains, with evaluations and exports between its steps."""

import contextlib
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import estimator as tf_estimator
from tests.ranks.estimators import (
    BATCH,
    IDS,
    assert_equal,
    few_metrics,
    made,
    model,
    plain,
    records,
    told,
)
from tests.ranks.exports import served

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]


@pytest.mark.slow
def test_training_is_that_of_one_process(strategy, folder, size):
    """N ranks with batches of 4 take the steps of one process with batches of 4 N; then evaluation
    of the checkpoint.
    """
    for ours, batch in ((True, BATCH), (False, BATCH * size)):
        estimator = (
            made(strategy, folder, metrics=few_metrics) if ours else plain(folder, few_metrics)
        )
        estimator.train(records(8 * BATCH * size, batch), steps=3)
        estimator.train(records(8 * BATCH * size, batch), max_steps=5)
        assert estimator.train(records(30), max_steps=5) is estimator
        results = estimator.evaluate(records(33))
        assert results["global_step"] == 5
        if ours:
            got = results, [p["p"] for p in estimator.predict(records(33), gather=True)]
    assert_equal(got[0], results)
    if got[1]:
        np.testing.assert_allclose(
            got[1], [p["p"] for p in estimator.predict(records(33))], rtol=1e-5
        )


def test_training_ends_with_the_first_rank_that_is_out_of_data(strategy, folder, size):
    estimator = made(strategy, folder).train(records(7 * BATCH))
    assert estimator.get_variable_value("global_step") == 7 // size


class _Counting(tf.train.SessionRunHook):
    def __init__(self):
        self.runs = 0

    def after_run(self, context, values):
        self.runs += 1


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "train_and_evaluate",
    [
        lambda estimator, *specs: estimator.train_and_evaluate(*specs),
        tf_estimator.train_and_evaluate,
    ],
)
def test_train_and_evaluate(strategy, folder, rank, size, train_and_evaluate):
    """Evaluations don't train, nor use up training data; the module's function and the method do
    the same.
    """
    trained, evaluated = _Counting(), _Counting()
    config = tf_estimator.RunConfig(
        save_checkpoints_steps=4, save_summary_steps=2, log_step_count_steps=3
    )
    estimator = made(strategy, folder, config=config)
    evaluation = tf_estimator.EvalSpec(records(13), steps=None, throttle_secs=0, hooks=[evaluated])
    train = tf_estimator.TrainSpec(records(6 * BATCH * size), max_steps=6, hooks=[trained])
    metrics, exports = train_and_evaluate(estimator, train, evaluation)
    assert metrics["global_step"] == 6 and exports == [] and trained.runs == 6
    assert evaluated.runs == 2 * len(range(rank, 4, size))  # at steps 4 and 6
    assert_equal(metrics, estimator.evaluate(records(13)))
    told()
    assert len([f for f in os.listdir(os.path.join(folder, "eval")) if "tfevents" in f]) == 1
    again = tf_estimator.TrainSpec(records(9), max_steps=6)
    assert train_and_evaluate(estimator, again, evaluation) == (None, None)


def receiver():
    inputs = {
        "ids": tf.placeholder(tf.int64, [None, 3]),
        "number": tf.placeholder(tf.int64, [None]),
    }
    return tf_estimator.export.ServingInputReceiver(inputs, inputs)


@pytest.mark.matrix
def test_exporters(strategy, folder, rank):
    """All ranks get the same paths; rank 0 alone deletes old exports."""
    exporters = [
        tf_estimator.FinalExporter("final", receiver),
        tf_estimator.LatestExporter("latest", receiver, exports_to_keep=1),
        tf_estimator.BestExporter("best", receiver, exports_to_keep=1),
    ]
    estimator = made(strategy, folder, config=tf_estimator.RunConfig(save_checkpoints_steps=2))
    _, exports = estimator.train_and_evaluate(
        tf_estimator.TrainSpec(lambda: records(40)().repeat(), max_steps=4),
        tf_estimator.EvalSpec(records(9), throttle_secs=0, exporters=exporters),
    )
    texts = [
        text["exports"] for text in told(exports=[tf.compat.as_str(path or "") for path in exports])
    ]
    assert all(text == texts[0] for text in texts) and texts[0][0] and texts[0][1]
    for exporter in exporters:
        found = os.listdir(os.path.join(folder, "export", exporter.name))
        assert len(found) == 1 and found[0].isdigit()
    assert "_garbage_collect_exports" not in vars(exporters[1])
    told()
    served = tf2.saved_model.load(texts[0][0]).signatures["serving_default"]
    with tf.Session() if not tf.executing_eagerly() else contextlib.nullcontext():
        got = served(ids=tf.constant(IDS[:9]), number=tf.range(9, dtype=tf.int64))["p"]
    want = [p["p"] for p in estimator.predict(records(9), gather=True)]
    if rank == 0:
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.matrix
def test_early_stopping(strategy, folder):
    estimator = made(strategy, folder, config=tf_estimator.RunConfig(save_checkpoints_steps=2))
    hook = tf_estimator.experimental.stop_if_no_decrease_hook(
        estimator, "loss", max_steps_without_decrease=0, run_every_secs=None, run_every_steps=3
    )
    metrics, _ = estimator.train_and_evaluate(
        tf_estimator.TrainSpec(lambda: records(200)().repeat(), max_steps=30, hooks=[hook]),
        tf_estimator.EvalSpec(records(9), throttle_secs=0),
    )
    assert 3 <= metrics["global_step"] < 8


class _Listener(tf.train.CheckpointSaverListener):
    def __init__(self):
        self.steps = []

    def after_save(self, session, global_step_value):
        self.steps.append(int(global_step_value))


@pytest.mark.matrix
def test_listeners_and_a_warm_start(strategy, folder):
    listener, first = _Listener(), os.path.join(folder, "first")
    config = tf_estimator.RunConfig(save_checkpoints_steps=2, keep_checkpoint_max=2)
    estimator = made(strategy, first, config=config)
    estimator.train(lambda: records(40)().repeat(), steps=5, saving_listeners=[listener])
    assert listener.steps == [0, 2, 4, 5]
    assert len([f for f in os.listdir(first) if f.endswith(".index")]) == 2
    want = estimator.evaluate(records(9))
    told()
    for start in (estimator.latest_checkpoint(), tf_estimator.WarmStartSettings(first)):
        warm = strategy.estimator(
            model(strategy.embedding_scope),
            os.path.join(folder, "warm"),
            params={},
            warm_start_from=start,
        )
        assert_equal(warm.evaluate(records(9)) | {"global_step": 5}, want)
    assert warm.evaluate(records(9))["global_step"] == 0
    warm.train(lambda: records(40)().repeat(), steps=1)
    assert (
        warm.evaluate(records(9), checkpoint_path=estimator.latest_checkpoint())["global_step"] == 5
    )
    assert warm.evaluate(records(9))["global_step"] == 1


def features_of(rank, step):
    """Draws [BATCH, 2] of a rank's batch."""
    return np.random.default_rng([rank, step]).normal(rank, 1 + rank, (BATCH, 2)).astype(np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("fused", [False, True])
def test_batch_normalization(strategy, folder, rank, size, fused):
    """Training keeps one average of all ranks' batches; evaluation and prediction use it."""

    def input_fn(steps):
        x = np.concatenate([features_of(rank, step) for step in range(steps)])
        return lambda: tf2.data.Dataset.from_tensor_slices({"x": x}).batch(BATCH)

    def model_fn(features, mode):
        images = tf.reshape(features["x"], [-1, 1, 1, 2])
        out = tf.layers.batch_normalization(
            images, momentum=0.5, fused=fused, training=mode == tf_estimator.ModeKeys.TRAIN
        )
        out = tf.reshape(out, [-1, 2])
        if mode == tf_estimator.ModeKeys.PREDICT:
            return tf_estimator.EstimatorSpec(mode, predictions={"out": out})
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(out)) + tf.reduce_mean(tf.nn.embedding_lookup(t, [1]))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.0).minimize(
                loss, tf.train.get_or_create_global_step()
            )
        return tf_estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=train,
            eval_metric_ops={"mean": tf.metrics.mean(tf.square(out))},
        )

    estimator = strategy.estimator(model_fn, folder, shard_input=False).train(input_fn(3))
    mean, variance = np.zeros(2), np.ones(2)
    for step in range(3):
        batches = [features_of(r, step) for r in range(size)]
        mean = (mean + np.mean([b.mean(0) for b in batches], 0)) / 2
        # The fused kernel takes its average of the unbiased variance.
        variance = (variance + np.mean([b.var(0, ddof=1 if fused else 0) for b in batches], 0)) / 2
    for name, want in (("mean", mean), ("variance", variance)):
        np.testing.assert_allclose(
            estimator.get_variable_value(f"batch_normalization/moving_{name}"), want, rtol=1e-5
        )
    want = [(features_of(r, 0) - mean) / np.sqrt(variance + 1e-3) for r in range(size)]
    np.testing.assert_allclose(
        [p["out"] for p in estimator.predict(input_fn(1))], want[rank], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        estimator.evaluate(input_fn(1))["mean"], np.mean(np.square(want)), rtol=1e-4
    )


@pytest.mark.matrix
def test_evaluation_and_export_of_averages(strategy, folder, size):
    """Restored for the variables by a Scaffold's saver."""

    def averaged(embedding_scope):
        inner = model(embedding_scope)

        def model_fn(features, labels, mode, params):
            made = inner(features, labels, mode, params)
            average = tf.train.ExponentialMovingAverage(0.5)
            if mode == tf_estimator.ModeKeys.TRAIN:
                with tf.control_dependencies([made.train_op]):
                    return made._replace(train_op=average.apply(tf.trainable_variables()))
            return made._replace(
                scaffold=tf.train.Scaffold(saver=tf.train.Saver(average.variables_to_restore()))
            )

        return model_fn

    ours = strategy.estimator(
        averaged(strategy.embedding_scope), os.path.join(folder, "ours"), params={}
    )
    alone = tf_estimator.Estimator(
        averaged(contextlib.nullcontext), os.path.join(folder, f"plain{strategy.rank()}"), params={}
    )
    ours.train(records(8 * BATCH * size), steps=4)
    alone.train(records(8 * BATCH * size, BATCH * size), steps=4)
    want, last = (
        alone.evaluate(records(33)),
        tf_estimator.Estimator(model(contextlib.nullcontext), alone.model_dir, params={}).evaluate(
            records(33)
        ),
    )
    assert abs(want["loss"] - last["loss"]) > 1e-5
    assert_equal(ours.evaluate(records(33)), want)
    path = tf.compat.as_str(ours.export_saved_model(os.path.join(folder, "export"), receiver))
    answer = served(path, {"ids": IDS[:33], "number": np.arange(33)})["p"]
    np.testing.assert_allclose(answer, [p["p"] for p in alone.predict(records(33))], rtol=1e-5)


@pytest.mark.slow
def test_the_model_of_a_canned_estimator(strategy, folder, size):
    """Of TensorFlow's own: its model_fn, on all ranks. Nothing but the model's variables is told of
    a model without tables.
    """

    def canned():
        columns = [
            tf.feature_column.numeric_column("weight"),
            tf.feature_column.numeric_column("number"),
        ]
        return tf_estimator.LinearRegressor(
            columns,
            optimizer=lambda: tf.train.GradientDescentOptimizer(1e-4),
            loss_reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE,
        )

    ours = strategy.estimator(canned().model_fn, os.path.join(folder, "ours"))
    alone = tf_estimator.Estimator(
        canned().model_fn, os.path.join(folder, f"plain{strategy.rank()}")
    )
    ours.train(records(8 * BATCH * size), steps=3)
    alone.train(records(8 * BATCH * size, BATCH * size), steps=3)
    assert ours.get_variable_names() == alone.get_variable_names()
    for name in alone.get_variable_names():
        np.testing.assert_allclose(
            ours.get_variable_value(name), alone.get_variable_value(name), rtol=1e-5
        )
    if size > 1:
        with (
            pytest.raises(TypeError, match=r"strategy.estimator\(estimator.model_fn"),
            strategy.scope(),
        ):
            canned().train(records(8), steps=1)


@pytest.mark.matrix
def test_the_best_checkpoints_are_kept(strategy, folder):
    estimator = strategy.estimator(
        model(strategy.embedding_scope),
        folder,
        tf_estimator.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=1),
        {},
        keep_best=("loss", "max", 2),
    )
    losses = {}
    for step in range(1, 4):
        estimator.train(lambda: records(40)().repeat(), steps=1)
        losses[step] = estimator.evaluate(records(9))["loss"]
        estimator.evaluate(records(9), name="other")
    want = sorted(losses, key=lambda step: losses[step])[-2:]
    best = tf.train.get_checkpoint_state(os.path.join(folder, "best"))
    found = [int(path.rpartition("-")[2]) for path in best.all_model_checkpoint_paths]
    assert found == want
    again = estimator.evaluate(records(9), checkpoint_path=best.model_checkpoint_path)
    assert again["loss"] == pytest.approx(losses[want[-1]], rel=1e-6)
