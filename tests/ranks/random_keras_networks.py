"""Builds a drawn Keras model, of plain Keras or with tables, and the data to fit it with."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from collective import keras as collective_keras
from collective.ops import key_hashing
from tests.ranks import reference
from tests.ranks.random_keras_models import STEPS, Feature, Model, Optimizer, Table

keras = tf.keras
new, legacy = keras.optimizers, keras.optimizers.legacy
ADAM = {"epsilon": 1e-3}
OPTIMIZERS: dict[str, Any] = {
    "Adagrad": lambda rate, **o: new.Adagrad(rate, **o),
    "Adam": lambda rate, **o: new.Adam(rate, **ADAM, **o),
    "AMSGrad": lambda rate, **o: new.Adam(rate, amsgrad=True, **ADAM, **o),
    "AdamW": lambda rate, **o: new.AdamW(rate, **{"weight_decay": 0.02, **ADAM, **o}),
    "Adamax": lambda rate, **o: new.Adamax(rate, **ADAM, **o),
    "Adadelta": lambda rate, **o: new.Adadelta(rate, epsilon=1e-3, **o),
    "RMSprop": lambda rate, **o: new.RMSprop(rate, momentum=0.5, epsilon=1e-3, **o),
    "SGD": lambda rate, **o: new.SGD(rate, **o),
    "momentum": lambda rate, **o: new.SGD(rate, 0.9, **o),
    "nesterov": lambda rate, **o: new.SGD(rate, 0.8, nesterov=True, **o),
    "Ftrl": lambda rate, **o: new.Ftrl(rate, l1_regularization_strength=0.001, **o),
    "legacy Adagrad": lambda rate, **o: legacy.Adagrad(rate, **o),
    "legacy Adam": lambda rate, **o: legacy.Adam(rate, **ADAM, **o),
    "legacy AMSGrad": lambda rate, **o: legacy.Adam(rate, amsgrad=True, **ADAM, **o),
    "legacy Adamax": lambda rate, **o: legacy.Adamax(rate, **ADAM, **o),
    "legacy Adadelta": lambda rate, **o: legacy.Adadelta(rate, epsilon=1e-3, **o),
    "legacy RMSprop": lambda rate, **o: legacy.RMSprop(rate, epsilon=1e-3, **o),
    "legacy Nadam": lambda rate, **o: legacy.Nadam(rate, **ADAM, **o),
    "legacy SGD": lambda rate, **o: legacy.SGD(rate, **o),
    "legacy momentum": lambda rate, **o: legacy.SGD(rate, 0.9, **o),
    "legacy nesterov": lambda rate, **o: legacy.SGD(rate, 0.8, nesterov=True, **o),
    "legacy Ftrl": lambda rate, **o: legacy.Ftrl(rate, l1_regularization_strength=0.001, **o),
}
LOSSES: dict[str, Any] = {
    "binary_crossentropy": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "mse": keras.losses.MeanSquaredError,
    "huber": keras.losses.Huber,
    "focal": lambda: keras.losses.BinaryFocalCrossentropy(from_logits=True),
    "log_cosh": keras.losses.LogCosh,
}
METRICS: dict[str, Any] = {
    "auc": lambda: keras.metrics.AUC(50, from_logits=True, name="auc"),
    "mae": lambda: keras.metrics.MeanAbsoluteError(name="mae"),
    "accuracy": lambda: keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.1),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    "precision": lambda: keras.metrics.Precision(0.1, name="precision"),
    "mean": lambda: keras.metrics.MeanMetricWrapper(lambda y, p: p, name="mean"),
}
SCHEDULES: dict[str, Any] = {
    "exponential": lambda rate: new.schedules.ExponentialDecay(rate, 5, 0.7),
    "piecewise": lambda rate: new.schedules.PiecewiseConstantDecay([3, 11], [rate, rate / 2, rate]),
    "polynomial": lambda rate: new.schedules.PolynomialDecay(rate, 15, rate / 10, 2.0),
    "cosine": lambda rate: new.schedules.CosineDecay(rate, 15),
}


def initial_rows(table: Table) -> np.ndarray:
    rows = reference.table_values(table.rows, table.dim, len(table.name)) / 2
    return np.repeat(rows[:1], table.rows, 0) if table.kind == "dynamic" else rows


def keys_of(table: Table, ids: np.ndarray) -> np.ndarray:
    """Returns the keys of a dynamic table that take the place of ids."""
    if table.keys == "strings":
        return np.char.add("key ", ids.astype(str)).astype(object)
    return ids.astype(np.int64) * (2**59 + 1) - 2**61 if table.keys == "huge" else ids


def stored_keys(table: Table) -> list[int]:
    """Returns the keys under which a dynamic table has the rows of ids from 0."""
    keys = keys_of(table, np.arange(table.rows))
    if table.keys == "strings":
        keys = key_hashing.of_strings(tf.constant(keys)).numpy()
    return keys.tolist()


class PlainEmbedding(keras.layers.Layer):
    """Is this library's layer in plain Keras, written with `tf.gather` and sums of segments."""

    def __init__(self, table: Table):
        super().__init__(trainable=table.trainable)
        self.combiner = table.combiner
        values = keras.initializers.Constant(initial_rows(table))
        self.embeddings = self.add_weight(
            "embeddings", [table.rows, table.dim], initializer=values, trainable=table.trainable
        )

    def call(self, ids: Any, weights: Any = None) -> Any:
        if self.combiner is None:
            if isinstance(ids, tf.RaggedTensor):
                return ids.with_flat_values(tf.gather(self.embeddings, ids.flat_values))
            return tf.gather(self.embeddings, ids)
        if isinstance(ids, tf.SparseTensor):
            count, sample, values = ids.dense_shape[0], ids.indices[:, 0], ids.values
            weights = None if weights is None else weights.values
        else:
            if not isinstance(ids, tf.RaggedTensor):
                ids, weights = (
                    x if x is None else tf.RaggedTensor.from_tensor(x) for x in (ids, weights)
                )
            count, sample, values = ids.nrows(), ids.value_rowids(), ids.flat_values
            weights = None if weights is None else weights.flat_values
        weights = tf.ones(tf.shape(values)) if weights is None else weights
        rows = tf.gather(self.embeddings, values) * weights[:, None]
        total = tf.math.unsorted_segment_sum(rows, sample, count)
        if self.combiner == "sum":
            return total
        power = weights if self.combiner == "mean" else weights**2
        divisor = tf.math.unsorted_segment_sum(power, sample, count)[:, None]
        divisor = divisor if self.combiner == "mean" else tf.sqrt(divisor)
        return tf.math.divide_no_nan(total, divisor)


class Sum(keras.layers.Layer):
    """Makes one row of the rows of a sample, which may be ragged."""

    def __init__(self, mean: bool):
        super().__init__()
        self.mean, self._supports_ragged_inputs = mean, True

    def call(self, rows: Any) -> Any:
        total = tf.reduce_sum(rows, 1)
        return total / tf.cast(tf.shape(rows)[1], tf.float32) if self.mean else total


def _dense(units: int, seed: int, activation: str | None = None, name: str | None = None) -> Any:
    start = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(units, activation, kernel_initializer=start, name=name)


class Built:
    """Makes the layers of a drawn model, and the model.

    Args:
        drawn: the model.
        embedding_scope: makes the scope in which tables are made; None: plain Keras.

    Attributes:
        model: Keras's model.
        layers: by the names of the tables.
    """

    def __init__(self, drawn: Model, embedding_scope: Any = None):
        self.drawn, self._scope = drawn, embedding_scope
        tables = {feature.table.name: feature.table for feature in drawn.features}
        self.layers = {name: self._layer(table) for name, table in tables.items()}
        self._pools = {
            f.name: keras.layers.GlobalAveragePooling1D()
            if f.pooled == "masked mean"
            # Of ragged rows the number differs from sample to sample.
            else Sum(f.pooled == "mean" and f.form == "several")
            for f in drawn.features
        }
        self._shared = {f.table.dim: _dense(3, f.table.dim) for f in drawn.features}
        towers = 2 if drawn.network == "towers" else 1
        self._towers = [
            [_dense(units, i + 7 * t, drawn.activation) for i, units in enumerate(drawn.hidden)]
            + [_dense(4, 50 + t)]
            for t in range(towers)
        ]
        self._heads = [_dense(1, 70 + i, name=f"head{i}") for i in range(len(drawn.losses))]
        self.model = self._make()

    # Tables and features

    def _placed(self, table: Table) -> Any:
        if self._scope is None or table.kind == "replicated":
            return contextlib.nullcontext()
        return self._scope(placement=table.placement)

    def _type_of(self, feature: Feature) -> Any:
        return tf.string if self._scope and feature.table.keys == "strings" else tf.int64

    def _layer(self, table: Table) -> Any:
        with self._placed(table):
            layer = self._made(table)
            if self.drawn.kind == "subclassed" and not layer.built:
                layer.build([None])
        return layer

    def _made(self, table: Table) -> Any:
        rows = initial_rows(table)
        if table.kind in ("keras", "replicated"):
            return keras.layers.Embedding(
                table.rows,
                table.dim,
                keras.initializers.Constant(rows),
                "l2" if table.regularized else None,
                None,
                keras.constraints.MaxNorm(0.4, axis=1) if table.constrained else None,
                table.masked,
                trainable=table.trainable,
            )
        if self._scope is None:
            return PlainEmbedding(table)
        static = table.kind == "static"
        return collective_keras.layers.Embedding(
            table.dim,
            table.rows if static else None,
            table.combiner,
            keras.initializers.Constant(rows if static else rows[0]),
            trainable=table.trainable,
        )

    def _vector(self, feature: Feature, inputs: dict[str, Any]) -> Any:
        """Looks a feature up: [B, dim]."""
        ids, weights = inputs[feature.name], inputs.get(f"{feature.name}/weights")
        layer = self.layers[feature.table.name]
        if feature.way == "gather":
            rows = tf.gather(layer.embeddings, ids)
        elif feature.way == "lookup":
            rows = tf.nn.embedding_lookup(layer.embeddings, ids)
        elif feature.way in ("lookup_sparse", "safe"):
            name = {
                "safe": "safe_embedding_lookup_sparse",
                "lookup_sparse": "embedding_lookup_sparse",
            }
            return getattr(tf.nn, name[feature.way])(
                layer.embeddings, ids, weights, combiner=feature.combiner
            )
        else:
            with self._placed(feature.table):
                rows = layer(ids) if weights is None else layer(ids, weights)
        if feature.form == "one" or feature.combiner:
            return rows
        return self._pools[feature.name](rows)

    # The network

    def _outputs(self, inputs: dict[str, Any]) -> Any:
        """Returns the logits [B, 1] of each loss, and the features' vectors."""
        vectors = [self._vector(feature, inputs) for feature in self.drawn.features]
        parts = [*vectors, inputs["x"]]
        if self.drawn.network == "crossed":
            low = [self._shared[v.shape[-1]](v) for v in vectors]
            low.append(self._shared[self.drawn.features[0].table.dim](vectors[0] * 2.0))
            total, squares = tf.add_n(low), tf.add_n([v * v for v in low])
            parts.append(total * total - squares)
        towers = [self._tower(t, parts[t :: len(self._towers)]) for t in range(len(self._towers))]
        joined = towers[0] * towers[1] if len(towers) == 2 else towers[0]
        return [head(joined) for head in self._heads], vectors

    def _tower(self, number: int, parts: list[Any]) -> Any:
        layers = self._towers[number]
        value = tf.concat(parts, 1) if len(parts) > 1 else parts[0]
        if self.drawn.kind == "nested":
            inner = keras.Input(value.shape[1:])
            out = inner
            for layer in layers:
                out = layer(out)
            return keras.Model(inner, out)(value)
        for layer in layers:
            value = layer(value)
        return value

    # The model

    def _make(self) -> Any:
        drawn = self.drawn
        if drawn.kind == "sequential":
            (feature,) = drawn.features
            layer = self.layers[feature.table.name]
            pools = [] if feature.form == "one" or feature.combiner else [self._pools[feature.name]]
            with self._placed(feature.table):
                first = [_input(feature, self._type_of(feature)), layer, *pools]
                return keras.Sequential([*first, *self._towers[0], *self._heads])
        if drawn.kind == "subclassed":
            return _Subclassed(self)
        inputs = {"x": keras.Input([2])}
        for feature in drawn.features:
            inputs[feature.name] = _input(feature, self._type_of(feature))
            if feature.weighted:
                inputs[f"{feature.name}/weights"] = _input(feature, tf.float32)
        outputs, _ = self._outputs(inputs)
        cls = _Functional if drawn.own_step else keras.Model
        return cls(inputs, outputs if len(outputs) > 1 else outputs[0])


def _input(feature: Feature, dtype: Any) -> Any:
    shape = {"one": [], "ragged": [None]}.get(feature.form, [feature.width])
    return keras.Input(
        shape,
        dtype=dtype,
        ragged=feature.form == "ragged",
        sparse=feature.form == "sparse",
    )


class _OwnStep:
    """Has a step of its own, which changes the loss and the gradients."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(y, self(x, training=True), None, self.losses)
            loss = loss + 0.1 * tf.reduce_mean(x["x"] ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [_scaled(g) for g in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.compiled_metrics.update_state(y, self(x, training=True))
        return {**{m.name: m.result() for m in self.metrics}, "own": loss}


class _Functional(_OwnStep, keras.Model):
    pass


class _Subclassed(_OwnStep, keras.Model):
    def __init__(self, built: Built):
        super().__init__()
        # Keras finds layers in attributes, and in lists of them.
        self.built_layers = [list(built.layers.values()), built._towers, built._heads]
        self.pools = list(built._pools.values())
        self.others = list(built._shared.values())
        self._built_of = [lambda: built]

    def call(self, inputs: Any, training: Any = None) -> Any:
        built = self._built_of[0]()
        outputs, vectors = built._outputs(inputs)
        if built.drawn.added_loss:
            self.add_loss(0.01 * tf.reduce_mean(vectors[0] ** 2))
        return outputs if len(outputs) > 1 else outputs[0]

    def train_step(self, data: Any) -> Any:
        own = _OwnStep if self._built_of[0]().drawn.own_step else keras.Model
        return own.train_step(self, data)


# Training


def optimizer_of(drawn: Optimizer, summed: list[Any]) -> Any:
    """Makes an optimizer.

    Args:
        drawn: which.
        summed: the variables of which a row's gradients are summed up before they are clipped:
            plain TensorFlow clips each occurrence by itself.
    """
    options: dict[str, Any] = dict([drawn.clip] if drawn.clip else [])
    if drawn.decay is not None:
        options["weight_decay"] = drawn.decay
    if drawn.averaged:
        options.update(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7)
    rate: Any = drawn.rate
    if drawn.schedule in SCHEDULES:
        rate = SCHEDULES[drawn.schedule](rate)
    made = OPTIMIZERS[drawn.name](rate, **options)
    if drawn.clip and summed:
        keys = {id(v) for v in summed}
        apply = made.apply_gradients

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            return apply(
                [(_summed(g) if id(v) in keys else g, v) for g, v in grads_and_vars],
                *args,
                **kwargs,
            )

        made.apply_gradients = apply_gradients
    return made


def _scaled(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = gradient.values, gradient.indices
        return tf.IndexedSlices(0.9 * values, indices, gradient.dense_shape)
    return None if gradient is None else 0.9 * gradient


def _summed(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def compiled(built: Built, summing: bool) -> Any:
    """Compiles a model; with `summing` the gradients of tables have no row twice."""
    drawn = built.drawn
    summed = [layer.embeddings for layer in built.layers.values()] if summing else []
    several = len(drawn.losses) > 1
    losses = [LOSSES[name]() for name in drawn.losses]
    metrics = [METRICS[name]() for name in drawn.metrics]
    built.model.compile(
        optimizer_of(drawn.optimizer, summed),
        losses if several else losses[0],
        [metrics, []] if several else metrics,
        loss_weights=[1.0, 0.5] if several else None,
        steps_per_execution=drawn.executions,
    )
    return built.model


def dataset_of(drawn: Model, arrays: dict[str, np.ndarray], batch: int, with_keys: bool) -> Any:
    """Makes batches (features, labels[, weights of samples])."""
    features = {"x": arrays["x"]}
    for feature in drawn.features:
        ids, weights, lengths = (
            arrays[f"{feature.name}/{x}"] for x in ("ids", "weights", "lengths")
        )
        ids = keys_of(feature.table, ids) if with_keys else ids.astype(np.int64)
        features[feature.name] = _in_form(feature, ids, lengths)
        if feature.weighted:
            features[f"{feature.name}/weights"] = _in_form(feature, weights, lengths)
    x: Any = features
    if drawn.kind == "sequential":
        x = features[drawn.features[0].name]
    y = tuple(arrays["y"][:, i : i + 1] for i in range(len(drawn.losses)))
    parts = (x, y if len(y) > 1 else y[0])
    if drawn.weighted:
        parts = (*parts, arrays["sample_weight"])
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


def _in_form(feature: Feature, values: np.ndarray, lengths: np.ndarray) -> Any:
    if feature.form == "one":
        return values[:, 0]
    if feature.form == "several":
        return values
    rows = np.repeat(np.arange(len(values)), lengths)
    columns = np.concatenate([np.arange(n) for n in lengths]).astype(np.int64)
    flat = tf.constant(values[rows, columns])
    if feature.form == "ragged":
        return tf.RaggedTensor.from_row_lengths(flat, lengths)
    indices = np.stack([rows, columns], 1).astype(np.int64)
    return tf.SparseTensor(indices, flat, values.shape)


def fit_arguments(drawn: Model, dataset: Any, with_keys: bool) -> dict[str, Any]:
    """Returns the dataset of training in the form that was drawn.

    Plain Keras always knows its length: otherwise its last call, which finds no data, still writes
    what doesn't depend on them, such as decayed momentum.
    """
    if drawn.data == "endless":
        return {"x": dataset.repeat(), "steps_per_epoch": STEPS}
    if with_keys and drawn.data == "unknown" and drawn.executions is None:
        dataset = dataset.filter(lambda *_: True)
    return {"x": dataset}


def callbacks_of(drawn: Model) -> list[Any]:
    if drawn.optimizer.schedule != "by callback":
        return []
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (1 - 0.5 * epoch))]
