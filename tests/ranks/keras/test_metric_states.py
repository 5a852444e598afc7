"""Metrics of `fit`, `evaluate` and functions are those of one process, whatever their states."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError
from tests.ranks.keras.models import BATCH, dataset, keras, part

RECORDS = 4 * BATCH
metrics = keras.metrics
BINARY = {
    metrics.AUC: dict(num_thresholds=20),
    metrics.Accuracy: {},
    metrics.BinaryAccuracy: {},
    metrics.BinaryCrossentropy: {},
    metrics.BinaryIoU: {},
    metrics.CosineSimilarity: {},
    metrics.F1Score: dict(threshold=0.5),
    metrics.FBetaScore: dict(threshold=0.5, beta=2.0),
    metrics.FalseNegatives: {},
    metrics.FalsePositives: {},
    metrics.Hinge: {},
    metrics.KLDivergence: {},
    metrics.LogCoshError: {},
    metrics.MeanAbsoluteError: {},
    metrics.MeanAbsolutePercentageError: {},
    metrics.MeanRelativeError: dict(normalizer=[[2.0]]),
    metrics.MeanSquaredError: {},
    metrics.MeanSquaredLogarithmicError: {},
    metrics.Poisson: {},
    metrics.Precision: {},
    metrics.PrecisionAtRecall: dict(recall=0.5, num_thresholds=20),
    metrics.R2Score: {},
    metrics.Recall: {},
    metrics.RecallAtPrecision: dict(precision=0.5, num_thresholds=20),
    metrics.RootMeanSquaredError: {},
    metrics.SensitivityAtSpecificity: dict(specificity=0.5, num_thresholds=20),
    metrics.SpecificityAtSensitivity: dict(sensitivity=0.5, num_thresholds=20),
    metrics.SquaredHinge: {},
    metrics.TrueNegatives: {},
    metrics.TruePositives: {},
}
OF_CLASSES = {
    metrics.CategoricalAccuracy: {},
    metrics.CategoricalCrossentropy: {},
    metrics.CategoricalHinge: {},
    metrics.OneHotIoU: dict(num_classes=3, target_class_ids=[0, 2]),
    metrics.OneHotMeanIoU: dict(num_classes=3),
    metrics.TopKCategoricalAccuracy: dict(k=2),
}
OF_NUMBERS_OF_CLASSES = {
    metrics.IoU: dict(num_classes=3, target_class_ids=[1], sparse_y_pred=False),
    metrics.MeanIoU: dict(num_classes=3, sparse_y_pred=False),
    metrics.SparseCategoricalAccuracy: {},
    metrics.SparseCategoricalCrossentropy: {},
    metrics.SparseTopKCategoricalAccuracy: dict(k=2),
}
# Those that take values, no labels and predictions.
OF_VALUES = {metrics.Mean: {}, metrics.MeanTensor: {}, metrics.Sum: {}}


class Span(metrics.Metric):
    """Has states of each kind: the largest and the smallest label, and their number."""

    def __init__(self, name="span"):
        super().__init__(name=name)
        self.most = self.add_weight("most", [2], initializer=keras.initializers.Constant(-99.0))
        self.least = self.add_weight("least", initializer=keras.initializers.Constant(99.0))
        self.number = self.add_weight("number", initializer="zeros")

    def update_state(self, label, score=None, sample_weight=None):
        label = tf2.cast(label, tf2.float32)
        self.most.assign(tf2.maximum(self.most, tf2.reduce_max(label)))
        if tf2.reduce_min(label) < 50.0:
            self.least.assign(tf2.minimum(self.least, tf2.reduce_min(label)))
        self.number.assign(self.number + tf2.cast(tf2.size(label), tf2.float32))

    def result(self):
        return {"most": self.most[1], "least": self.least, "number": self.number}

    def reset_state(self):
        self.most.assign([-99.0, -99.0])
        self.least.assign(99.0)
        self.number.assign(0.0)


class Kept(metrics.Metric):
    """Keeps a number in some way."""

    def __init__(self, how, start=0.0, again=0.0):
        super().__init__(name="kept")
        self.how, self.again = how, again
        self.value = self.add_weight("value", initializer=keras.initializers.Constant(start))

    def update_state(self, label, score=None, sample_weight=None):
        self.how(self.value, tf2.cast(tf2.reduce_max(label), tf2.float32))

    def result(self):
        return self.value

    def reset_state(self):
        self.value.assign(self.again)


def largest_by_branch(value, x):
    if x > value:
        value.assign(x)


def largest_and_sum(value, x):
    value.assign(tf2.maximum(value, x))
    value.assign_add(x)


REFUSED = {
    "a branch": (largest_by_branch, "decides by"),
    "last": (lambda value, x: value.assign(x), "is assigned"),
    "average": (lambda value, x: value.assign(0.9 * value + 0.1 * x), "is assigned"),
    "weighted": (lambda value, x: value.assign_add(0.1 * (x - value)), "depends on the state"),
    "several": (largest_and_sum, "in several ways"),
}


def labelled(rank=0, size=1):
    """Returns a rank's records: numbers, and labels from 1."""
    random = np.random.default_rng(5)
    x = random.normal(0, 1, (RECORDS, 3)).astype(np.float32)
    y = random.integers(1, 1000, RECORDS).astype(np.float32)
    return part((x, y), rank, size)


def model_of(units, activation, loss, wanted, **options):
    x = keras.Input([3])
    start = keras.initializers.GlorotUniform(seed=1)
    y = keras.layers.Dense(units, activation, kernel_initializer=start)(x)
    model = keras.Model(x, y)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=wanted, **options)
    return model


def fit_and_evaluated(make, arrays, batch):
    model = make()
    history = model.fit(dataset(arrays, batch), epochs=2, verbose=0).history
    evaluated = model.evaluate(dataset(arrays, batch), verbose=0, return_dict=True)
    return {**history, **{f"evaluated {name}": x for name, x in evaluated.items()}}


def equals(strategy, rank, size, make, arrays):
    """Holds that a model has the logs of plain Keras in one process."""
    want = fit_and_evaluated(make, arrays, BATCH)
    with strategy.scope():
        got = fit_and_evaluated(make, part(arrays, rank, size), BATCH // size)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_every_metric_of_keras(strategy, rank, size):
    known = {*BINARY, *OF_CLASSES, *OF_NUMBERS_OF_CLASSES, *OF_VALUES}
    known |= {metrics.Metric, metrics.MeanMetricWrapper}
    for each in vars(metrics).values():
        assert not (inspect.isclass(each) and issubclass(each, metrics.Metric)) or each in known
    x, y = labelled()
    classes = (y % 3).astype(np.int32)
    for table, units, activation, loss, labels in (
        (BINARY, 1, "sigmoid", "mse", (y % 2)[:, None]),
        (OF_CLASSES, 3, "softmax", "mse", np.eye(3, dtype=np.float32)[classes]),
        (OF_NUMBERS_OF_CLASSES, 3, "softmax", "sparse_categorical_crossentropy", classes),
    ):

        def make(table=table, units=units, activation=activation, loss=loss):
            made = [kind(name=kind.__name__, **options) for kind, options in table.items()]
            return model_of(units, activation, loss, made)

        equals(strategy, rank, size, make, (x, labels))


@pytest.mark.ranks(1, 3)
@pytest.mark.either_backend
def test_largest_and_smallest_values(strategy, rank, size):
    equals(strategy, rank, size, lambda: model_of(1, None, "mse", [Span()]), labelled())


@pytest.mark.parametrize("how", REFUSED)
def test_a_state_that_is_none_of_these_is_refused(strategy, rank, size, how):
    keep, words = REFUSED[how]
    own = dataset(labelled(rank, size), BATCH // size)
    with strategy.scope():
        model = model_of(1, None, "mse", [Kept(keep)])
        if size == 1:
            model.fit(own, verbose=0)
            return
        with pytest.raises(NotImplementedError, match=f"'kept' has the state 'value:0'.*{words}"):
            model.fit(own, verbose=0)


@pytest.mark.parametrize("start, again", [(0.0, 0.0), (5.0, 0.0), (0.0, 5.0)])
def test_a_sum_starts_from_0(strategy, rank, size, start, again):
    """Keras resets a metric that has been called: `fit` does it from its second epoch on."""
    own = dataset(labelled(rank, size), BATCH // size)
    refused = size > 1 and (start or again)
    expected = pytest.raises(NotImplementedError, match="which is a sum that doesn't start from 0")
    with strategy.scope(), expected if refused else contextlib.nullcontext():
        kept = Kept(lambda value, x: value.assign_add(x), start, again)
        history = model_of(1, None, "mse", [kept]).fit(own, epochs=2, verbose=0).history
    if not refused:
        largest = labelled()[1].reshape(4, size, -1).max(2).sum()
        np.testing.assert_allclose(history["kept"], np.array([start, again]) + largest, rtol=1e-6)


@pytest.mark.parametrize("keras_own", [True, False])
def test_without_a_function_a_metric_that_assigns_is_keras_own(strategy, rank, size, keras_own):
    """With run_eagerly=True nothing shows what an assigned value keeps."""
    metric = metrics.R2Score if keras_own else Span

    def make():
        return model_of(1, None, "mse", [metric()], run_eagerly=True)

    x, y = labelled()
    arrays = x, y[:, None]
    if size == 1 or keras_own:
        equals(strategy, rank, size, make, arrays)
        return
    with strategy.scope(), pytest.raises(NotImplementedError, match="assigned without a function"):
        make().fit(dataset(part(arrays, rank, size), BATCH // size), verbose=0)


def loop(make, arrays, batch):
    """Trains a layer by a function that updates metrics, and returns it with these."""
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5))
    optimizer, updated = keras.optimizers.SGD(1e-6), make()
    layer.build([None, 3])

    @tf2.function
    def train(x, y):
        with tf2.GradientTape() as tape:
            errors = (layer(x)[:, 0] - y) ** 2
            loss = tf2.reduce_mean(errors)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
        updated["loss"].update_state(loss)
        updated["errors"].update_state(errors)
        updated["tensor"].update_state(tf2.reduce_mean(x, 0))
        updated["mae"].update_state(y, layer(x)[:, 0])
        updated["span"].update_state(y)

    for each in dataset(arrays, batch):
        train(*each)
    return train, updated


def loop_metrics():
    return {
        "loss": metrics.Mean(),
        "errors": metrics.Sum(),
        "tensor": metrics.MeanTensor(),
        "mae": metrics.MeanAbsoluteError(),
        "span": Span(),
    }


@pytest.mark.ranks(1, 3)
@pytest.mark.either_backend
def test_a_loop_has_results_of_all_ranks(strategy, rank, size):
    """Every rank keeps states of its own records; a metric that no function updates is its own."""
    _, plain = loop(loop_metrics, labelled(), BATCH)
    with strategy.scope():
        train, updated = loop(loop_metrics, labelled(rank, size), BATCH // size)
        for _ in range(2):
            for name, metric in updated.items():
                got, want = metric.result(), plain[name].result()
                tf2.nest.map_structure(
                    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want
                )
        assert updated["span"].number.numpy() == RECORDS / size
        updated["mae"].reset_state()
        assert updated["mae"].result().numpy() == 0
        own = metrics.Mean()
        own.update_state([rank + 1.0])
        assert own.result().numpy() == rank + 1
        if size == 1:
            return
        with pytest.raises(RankError, match=r"calls result\(\) of the Keras metric 'sum'"):
            if rank == 0:
                updated["errors"].result()
            else:
                train(*labelled(rank, size))


def test_results_after_fit_are_of_all_ranks(strategy, rank, size):
    """Neither `fit` nor a callback combines what is combined already."""
    seen = []

    def fitted(arrays, batch):
        model = model_of(1, None, "mse", [metrics.MeanAbsoluteError(name="mae"), Span()])
        results = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: seen.append(model.metrics[1].result().numpy())
        )
        logs = model.fit(dataset(arrays, batch), verbose=0, callbacks=[results]).history
        of_model = model.get_metrics_result()
        return logs["mae"][0], seen.pop(), model.metrics[1].result(), of_model["mae"]

    want = fitted(labelled(), BATCH)
    with strategy.scope():
        got = fitted(labelled(rank, size), BATCH // size)
    np.testing.assert_allclose(got, want, rtol=1e-5)
