"""Holds pooled look-ups, their gradients and the optimizers' rules against TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.exchange import embedding_bag
from collective.ops.gpu import pool
from collective.ops.gpu.occurrences import occurrences
from collective.ops.gpu.pool import MEAN, SQRTN, SUM, Ids, Lookup
from collective.ops.gpu.rules import (
    SGD,
    Adagrad,
    Adam,
    CenteredRMSProp,
    Ftrl,
    Momentum,
    RMSProp,
    Rule,
)
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.sums import Rows, sum_rows
from collective.ops.gpu.update import Table, update
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice

V, D, STEPS = 40, 6, 3
OPTIMIZERS: dict[str, tuple[Any, list[str], list[float]]] = {
    "sgd": (lambda: tf.train.GradientDescentOptimizer(0.1), [], []),
    "momentum": (lambda: tf.train.MomentumOptimizer(0.1, 0.9), ["momentum"], [0.0]),
    "nesterov": (
        lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        ["momentum"],
        [0.0],
    ),
    "adagrad": (lambda: tf.train.AdagradOptimizer(0.1, 0.5), ["accumulator"], [0.5]),
    "adam": (lambda: tf.train.AdamOptimizer(0.1), ["m", "v"], [0.0, 0.0]),
    "ftrl": (lambda: tf.train.FtrlOptimizer(0.1), ["accum", "linear"], [0.1, 0.0]),
    "ftrl with penalties": (
        lambda: tf.train.FtrlOptimizer(
            0.1,
            l1_regularization_strength=0.02,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.05,
        ),
        ["accum", "linear"],
        [0.1, 0.0],
    ),
    "ftrl of another power": (
        lambda: tf.train.FtrlOptimizer(0.1, learning_rate_power=-0.7),
        ["accum", "linear"],
        [0.1, 0.0],
    ),
    "rmsprop": (
        lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5),
        ["rms", "momentum"],
        [1.0, 0.0],
    ),
    "centered rmsprop": (
        lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
        ["rms", "momentum", "mg"],
        [1.0, 0.0, 0.0],
    ),
}
RULES: dict[str, Rule] = {
    "sgd": SGD(0.1),
    "momentum": Momentum(0.1, 0.9),
    "nesterov": Momentum(0.1, 0.9, True),
    "adagrad": Adagrad(0.1),
    "adam": Adam(0.1),
    "ftrl": Ftrl(0.1),
    "ftrl with penalties": Ftrl(0.1, 0.02, 0.1, 0.05),
    "ftrl of another power": Ftrl(0.1, power=-0.7),
    "rmsprop": RMSProp(0.1, momentum=0.5),
    "centered rmsprop": CenteredRMSProp(0.1, momentum=0.5),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_the_optimizers(name: str):
    """Three steps, each with rows that occur several times, whose gradients TensorFlow is given
    summed.
    """
    rng, (make, names, initial) = np.random.default_rng(3), OPTIMIZERS[name]
    start = rng.standard_normal((V, D)).astype(np.float32)
    batches = [
        (rng.integers(0, V, 30), rng.standard_normal((30, D)).astype(np.float32))
        for _ in range(STEPS)
    ]
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", initializer=start, use_resource=True)
        optimizer = make()
        values, indices = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.int64, [None])
        train = optimizer.apply_gradients([(tf.IndexedSlices(values, indices, [V, D]), table)])
        session.run(tf.global_variables_initializer())
        for rows, gradients in batches:
            distinct, inverse = np.unique(rows, return_inverse=True)
            summed = np.zeros((len(distinct), D), np.float32)
            np.add.at(summed, inverse, gradients)
            session.run(train, {values: summed, indices: distinct})
        wanted = session.run([table, *(optimizer.get_slot(table, slot) for slot in names)])

    device = EmulatedDevice(3)
    workspace = Workspace(device)
    mine = Table(start.copy(), [np.full((V, D), value, np.float32) for value in initial])
    for step, (rows, gradients) in enumerate(batches, 1):
        distinct, inverse = np.unique(rows, return_inverse=True)
        rule: Rule = Adam(0.1, step=step) if name == "adam" else RULES[name]
        update(
            rule,
            [mine],
            distinct,
            Segments.of([len(distinct)], [0]),
            Rows.of([gradients], device),
            occurrences(inverse.astype(np.int32), len(distinct), workspace),
            workspace,
        )
    for what, got, theirs in zip(["weights", *names], [mine.weights, *mine.slots], wanted):
        np.testing.assert_allclose(got, theirs, 2e-5, 2e-6, err_msg=what)


def test_combiners_are_those_of_the_cpu():
    assert (SUM, MEAN, SQRTN) == (embedding_bag.SUM, embedding_bag.MEAN, embedding_bag.SQRTN)


@pytest.mark.parametrize("max_norm", [None, 0.8])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", [SUM, MEAN, SQRTN])
def test_pooling_is_that_of_embedding_lookup_sparse(
    combiner: int, weighted: bool, max_norm: float | None
):
    """Samples of 0 to 3 ids; gradients of the table and of weights; the update with Adagrad without
    the table's gradient.
    """
    rng, samples = np.random.default_rng(4), 25
    start = (rng.standard_normal((V, D)) / 2).astype(np.float32)
    lengths = np.append(rng.integers(0, 4, samples - 1), 2)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids, weights = (
        rng.integers(0, V, offsets[-1]),
        rng.uniform(0.2, 2, offsets[-1]).astype(np.float32),
    )
    ids[:12], weights[offsets[9] : offsets[10]] = 5, 0
    gradient = rng.standard_normal((samples, D)).astype(np.float32)
    places = np.stack(
        [np.repeat(np.arange(samples), lengths), np.concatenate([np.arange(n) for n in lengths])], 1
    )
    with tf.Graph().as_default(), tf.Session() as session:
        table, factors = (
            tf.get_variable("table", initializer=start, use_resource=True),
            tf.constant(weights),
        )
        sparse_ids, sparse_weights = (
            tf.SparseTensor(places, of_each, [samples, 4]) for of_each in (ids, factors)
        )
        pooled = tf.nn.embedding_lookup_sparse(
            table,
            sparse_ids,
            sparse_weights if weighted else None,
            combiner={SUM: "sum", MEAN: "mean", SQRTN: "sqrtn"}[combiner],
            max_norm=max_norm,
        )
        loss = tf.reduce_sum(pooled * gradient)
        of_table = tf.convert_to_tensor(tf.gradients(loss, table)[0])
        of_weights = tf.gradients(loss, factors)[0] if weighted else tf.zeros_like(factors)
        train = tf.train.AdagradOptimizer(0.1, 0.5).apply_gradients(
            [(tf.gradients(loss, table)[0], table)]
        )
        session.run(tf.global_variables_initializer())
        wanted = session.run([pooled, of_table, of_weights])
        session.run(train)
        after = session.run(table)

    device = EmulatedDevice(2)
    workspace, lookup = Workspace(device), Lookup(samples, D, combiner, weighted, max_norm or 0)
    distinct, inverse = np.unique(ids, return_inverse=True)
    received, numbers = start[distinct], inverse.astype(np.int32)
    own, given = Rows.of([received], device), Rows.of([gradient], device)
    asked, segments = Ids(numbers, offsets, weights), Segments.of([len(distinct)], [0])
    np.testing.assert_allclose(
        pool.pool([lookup], [own], asked, workspace)[0], wanted[0], 1e-5, 1e-6
    )
    terms = pool.pool_terms([lookup], [own], asked, given, workspace, of_weights=True)
    found = occurrences(numbers, len(distinct), workspace)
    dense = np.zeros((V, D), np.float32)
    of_rows = sum_rows(given, found, segments, [D], workspace, terms.terms, 1.0, terms.along, own)
    dense[distinct] = of_rows.reshape(-1, D)
    np.testing.assert_allclose(dense, wanted[1], 1e-5, 2e-6)
    np.testing.assert_allclose(terms.weights, wanted[2], 1e-4, 2e-5)
    # the update by the sums of the gradients, and by their terms where these are all of it
    ones = occurrences(np.arange(len(distinct), dtype=np.int32), len(distinct), Workspace(device))
    summed = Rows.of([of_rows.reshape(-1, D)], device)
    ways: list[tuple[Any, ...]] = [(summed, ones, Workspace(device))]
    if max_norm is None:
        ways.append((given, found, workspace, terms.terms))
    for way in ways:
        updated = Table(start.copy(), [np.full((V, D), 0.5, np.float32)])
        update(Adagrad(0.1), [updated], distinct, segments, *way)
        np.testing.assert_allclose(updated.weights, after, 1e-5, 2e-6)
