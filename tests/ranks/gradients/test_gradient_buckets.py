"""Gradients of a large network travel in several allreduces, as plain TensorFlow trains.

Those of its last layers don't wait for those of its first.
"""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.communication import dense_allreduce
from collective.ops.graph import graph_analysis
from tests.ranks import reference

WIDTH, LAYERS = 16, 3
BYTES = 4 * WIDTH * WIDTH


@pytest.fixture
def small_buckets(monkeypatch):
    """Lets each layer's gradients be long enough for an allreduce."""
    monkeypatch.setattr(dense_allreduce, "BUCKET_BYTES", BYTES)


def first_kernel(layer):
    return reference.table_values(WIDTH, WIDTH, layer) / WIDTH**0.5


def build(embedding_scope):
    with embedding_scope():
        table = reference.table("table", 9, WIDTH)
    ids = tf.placeholder(tf.int64, [None])
    x = tf.nn.embedding_lookup(table, ids)
    for layer in range(LAYERS):
        kernel = tf.get_variable(f"layer_{layer}/kernel", initializer=first_kernel(layer))
        bias = tf.get_variable(f"layer_{layer}/bias", [WIDTH], initializer=tf.zeros_initializer())
        x = tf.nn.tanh(tf.matmul(x, kernel) + bias)
    loss = tf.reduce_mean(tf.square(x - 0.3))
    # The ranks' sum of it may travel with gradients.
    largest, update = tf.metrics.mean(x)
    train = tf.train.AdagradOptimizer(0.05).minimize(loss)
    fetches = {f"w{i}": v.read_value() for i, v in enumerate(tf.trainable_variables()) if i}
    fetches["rows"] = tf.nn.embedding_lookup(table, tf.range(9))
    local = tf.variables_initializer(tf.local_variables())
    return {**fetches, "train": train, "local": local, "update": update, "mean": largest}, {
        "ids": ids
    }


@pytest.mark.double
@pytest.mark.parametrize("compression", ["none", pytest.param("bf16", marks=pytest.mark.matrix)])
def test_training_is_that_of_plain_tensorflow(strategy, rank, size, small_buckets, compression):
    ids = np.random.default_rng(0).integers(0, 9, 24)

    def runs(ids):
        steps = [(["train", "update"], {"ids": ids})] * 5
        weights = ["rows", *(f"w{i}" for i in range(1, 2 * LAYERS + 1))]
        return [(["local"], {}), *steps, (weights, {}), (["mean"], {})]

    want = reference.plain(build, runs(ids))
    with strategy.scope(dense_compression=compression):
        got = reference.sharded(strategy, build, runs(reference.part(ids, rank, size)))
    compressed = compression != "none" and size > 1
    for name in want[-2]:
        # Five steps of 0.05 at most, each off by a part of what its gradient was rounded by.
        atol = 5 * 0.05 * 2.0**-5 if compressed else 1e-5
        np.testing.assert_allclose(got[-2][name], want[-2][name], rtol=0, atol=atol)
    if not compressed:
        np.testing.assert_allclose(got[-1]["mean"], want[-1]["mean"], rtol=0, atol=1e-6)


def test_the_last_layer_waits_for_no_other(strategy, size, small_buckets):
    with strategy.scope(), tf.Graph().as_default() as graph:
        build(strategy.embedding_scope)
        allreduces = [
            op
            for op in graph.get_operations()
            if graph_analysis.collective_kind(op.type) == "Allreduce"
            and "dense_gradients" in op.name
        ]
    assert len(allreduces) == (LAYERS if size > 1 else 0)
    waits = [graph_analysis.upstream([op]) for op in allreduces]
    for number, own in enumerate(waits):
        assert [other for other in allreduces if other in own] == [allreduces[number]]
    of_kernels = re.compile(r"MatMul(_\d)?_grad/MatMul_1$")
    gradients = [op for op in graph.get_operations() if of_kernels.search(op.name)]
    if size > 1:
        assert len(gradients) == LAYERS
        assert [sum(op in own for op in gradients) for own in waits] == [3, 2, 1]


@pytest.mark.double
def test_fit_is_that_of_plain_keras(strategy, rank, size, small_buckets):
    keras = tf2.keras
    ids = np.random.default_rng(0).integers(0, 9, 48)
    labels = np.random.default_rng(1).normal(size=(48, WIDTH)).astype(np.float32)

    def trained(rank, size, embedding_scope):
        start = keras.initializers.Constant(reference.table_values(9, WIDTH))
        with embedding_scope():
            table = keras.layers.Embedding(9, WIDTH, start)
        layers = [
            keras.layers.Dense(
                WIDTH, "tanh", kernel_initializer=keras.initializers.Constant(first_kernel(layer))
            )
            for layer in range(LAYERS)
        ]
        model = keras.Sequential([keras.Input([], dtype="int64"), table, *layers])
        model.compile(keras.optimizers.Adagrad(0.05), "mse")
        own = reference.part(ids, rank, size), reference.part(labels, rank, size)
        data = tf2.data.Dataset.from_tensor_slices(own).batch(len(own[0]))
        model.fit(data, epochs=5, verbose=0)
        return [v.numpy() for layer in model.layers[1:] for v in layer.trainable_variables]

    want = trained(0, 1, contextlib.nullcontext)
    with strategy.scope():
        got = trained(rank, size, strategy.embedding_scope)
    for mine, plain in zip(got, want):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-6)
