"""HybridBackend's names, used as its scripts do, evaluate and end as they do there."""

import contextlib
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import estimator as tf_estimator
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.errors import RankError

pytestmark = pytest.mark.either_backend
# A script of HybridBackend has DeepRec's, too.
NAMES = {name.theirs: name for name in (*DEEPREC.names, *HYBRIDBACKEND.names)}

DEEPRECS = next(theirs for theirs in NAMES if theirs.endswith(".CollectiveStrategy"))


def named(theirs):
    """Returns what a script finds under a name."""
    return NAMES[theirs].resolve()


@pytest.fixture
def opens_scope(strategy):
    """Lets `hb.scope()` and so on use the strategy of the tests."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        yield


def evaluated(layers, history, every=2, steps=4):
    """Trains a model of layers without names by 1, evaluates it by 2; returns its last weights."""
    evaluate = named("hb.train.EvaluationHook")

    def loss(x):
        return tf.reduce_mean(tf.square(layers(x) - 1.0))

    def evaluation():
        data = tf.data.Dataset.from_tensors(2 * tf.ones([8, 3]))
        x = named("tf.data.make_one_shot_iterator")(data).get_next()
        return {"loss": (loss(x), tf.no_op())}

    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss(tf.ones([8, 3])), global_step=step)
    variables = tf.trainable_variables()
    hooks = [evaluate(evaluation, every_n_iter=every, history=history)] if every else []
    with tf.train.MonitoredTrainingSession("", hooks=hooks) as session:
        for _ in range(steps):
            session.run(train)
        return session.run(variables)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`tf.layers")
def test_an_evaluation_takes_layers_without_names(opens_scope):
    """Also layers in scopes without a name: counts of default names start again."""

    def layers(x):
        with tf.variable_scope(None, "block"):
            hidden = tf.layers.dense(x, 2, kernel_initializer=tf.constant_initializer(0.1))
        return tf.layers.dense(hidden, 1, kernel_initializer=tf.constant_initializer(0.2))

    history = []
    first, first_bias, last, last_bias = evaluated(layers, history)
    assert len(history) == 2 and history[1]["loss"] != history[0]["loss"]
    outputs = (2 * np.ones([8, 3]) @ first + first_bias) @ last + last_bias
    assert history[1]["loss"] == pytest.approx(np.mean((outputs - 1) ** 2), rel=1e-5)
    name = tf.layers.Dense(1).name
    with tf.Graph().as_default():
        evaluated(layers, [], every=None)
        assert tf.layers.Dense(1).name == name  # The script's counts go on.


@pytest.mark.slow
def test_an_evaluation_that_makes_variables_is_an_error(opens_scope):
    """Nobody would train them. Keras's layers have variables of their own each time."""
    with pytest.raises(
        ValueError, match=r"makes eval/dense/kernel, eval/dense/bias, which the train"
    ):
        evaluated(lambda x: tf.keras.layers.Dense(1)(x), [])
    with tf.Graph().as_default():
        layer = tf.keras.layers.Dense(1, kernel_initializer="ones")
        history = []
        weights, bias = evaluated(layer, history)
    assert history[1]["loss"] == pytest.approx(np.mean((2 * weights.sum() + bias - 1) ** 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("uneven", [False, True])
def test_all_data_are_trained_on_or_an_error(strategy, rank, size, uneven):
    """`hb.scope(data_sync_drop_remainder=False)` asks for a longer training than there is here."""
    batches, done = 3 if uneven and rank == size - 1 else 4, 0
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with named("hb.scope")(data_sync_drop_remainder=False):
            data = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(batches)
            x = named("tf.data.make_one_shot_iterator")(data).get_next()
            w = tf.get_variable("w", [3, 1])
            step = tf.train.get_or_create_global_step()
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            train = optimizer.minimize(tf.reduce_mean(tf.matmul(x, w)), global_step=step)
            with contextlib.ExitStack() as stack:
                if uneven:
                    stack.enter_context(
                        pytest.raises(
                            RankError,
                            match=f"Rank {size - 1} is out of data, others are not: hb.scope.data",
                        )
                    )
                with tf.train.MonitoredTrainingSession("") as session:
                    while not session.should_stop():
                        session.run(train)
                        done += 1
    assert done == batches if not uneven else done <= 3


@pytest.mark.matrix
@pytest.mark.parametrize(
    "theirs, every",
    [("hb.estimator.Estimator", None), ("hb.estimator.Estimator", 2), (DEEPRECS, None)],
)
def test_an_estimator_evaluates_where_it_is_asked_to(strategy, folder, theirs, every):
    """As there: in the training's session after every so many steps, or not at all."""
    x = np.arange(1.0, 5.0, dtype=np.float32)[:, np.newaxis]

    def data(passes):
        return tf.data.Dataset.from_tensor_slices(({"x": x}, 3 * x)).batch(2).repeat(passes)

    def model_fn(features, labels, mode):
        y = tf.layers.dense(features["x"], 1, kernel_initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(y - labels))
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
        metrics = {"error": tf.metrics.mean_squared_error(labels, y)}
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)

    history = []
    specs = (
        tf_estimator.TrainSpec(lambda: data(8), max_steps=4),
        tf_estimator.EvalSpec(lambda: data(1)),
    )
    make = named(theirs)().estimator if theirs == DEEPRECS else named(theirs)
    estimator = make(model_fn, model_dir=f"{folder}/model")
    named("hb.estimator.train_and_evaluate")(
        estimator, *specs, eval_every_n_iter=every, eval_history=history
    )
    assert len(history) == (2 if every else 0)
    assert every or not os.path.exists(estimator.eval_dir())
    if every:
        want = estimator.evaluate(lambda: data(1))
        for name in ("loss", "error"):
            assert history[1][name] == pytest.approx(want[name], rel=1e-5)
            assert history[1][name] < history[0][name]


@pytest.mark.matrix
def test_a_keras_model_trains_in_an_estimator(strategy, rank, size, folder):
    """A `tf.keras.Model`, called in the function of an Estimator."""
    ids, labels = np.arange(48) * 7 % 10, np.arange(48, dtype=np.float32)[:, None] % 2
    column = tf.feature_column.embedding_column(
        tf.feature_column.categorical_column_with_identity("id", 10),
        3,
        initializer=tf.constant_initializer(0.1),
    )

    class Ranking(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = tf.keras.layers.DenseFeatures([column])
            self.score = tf.keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, features):
            return self.score(self.rows(features))

    def model_of(sharding):
        def model_fn(features, labels, mode):
            with sharding():
                scores = Ranking()(features)
            loss = tf.reduce_mean(tf.square(scores - labels))
            train = tf.train.GradientDescentOptimizer(0.5).minimize(
                loss, global_step=tf.train.get_global_step()
            )
            metrics = {"error": tf.metrics.mean_squared_error(labels, scores)}
            return tf_estimator.EstimatorSpec(
                mode, loss=loss, train_op=train, eval_metric_ops=metrics
            )

        return model_fn

    def trained(estimator, samples):
        def input_fn():
            return tf.data.Dataset.from_tensor_slices(({"id": ids}, labels)).batch(samples)

        estimator.train(input_fn)
        return estimator.evaluate(input_fn)

    plain = tf_estimator.Estimator(model_of(contextlib.nullcontext), f"{folder}/plain{rank}")
    want = trained(plain, 4 * size)
    found = trained(
        named("hb.estimator.Estimator")(model_of(named("hb.embedding_scope")), f"{folder}/hb"), 4
    )
    assert found["global_step"] == want["global_step"] == 12 // size
    assert found["error"] == pytest.approx(want["error"], rel=1e-5)
    names = [name for name, _ in tf.train.list_variables(f"{folder}/hb")]
    assert len([name for name in names if "id_embedding" in name and "/part_" in name]) == size
