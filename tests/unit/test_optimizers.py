"""The optimizers of `collective.train` follow their rules in plain TensorFlow.

The rules are written once more in NumPy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import train
from tests.unit import numpy_optimizers

V, D, STEPS = 6, 3, 7
START = np.random.default_rng(1).normal(size=(V, D))

# How an optimizer is made, and its rule in NumPy.
CASES: dict[str, tuple[Callable[[], Any], numpy_optimizers.Reference]] = {
    "row_wise_adagrad": (
        lambda: train.RowWiseAdagradOptimizer(0.3),
        numpy_optimizers.row_wise_adagrad(0.3, 0.1, 0.0),
    ),
    "row_wise_adagrad_as_torchrecs": (
        lambda: train.RowWiseAdagradOptimizer(lambda: 0.3, 0.0, epsilon=1e-2),
        numpy_optimizers.row_wise_adagrad(0.3, 0.0, 1e-2),
    ),
}


def batches(sparse: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws gradients: of some rows, of which some come several times; or of all rows once."""
    drawn = []
    for step in range(STEPS):
        rng = np.random.default_rng([2, step])
        ids = rng.integers(0, V - 1, 5) if sparse else np.arange(V)
        drawn.append((ids, rng.normal(size=(len(ids), D))))
    return drawn


@contextlib.contextmanager
def resource_variables(on: bool) -> Iterator[None]:
    if not on:
        tf.disable_resource_variables()
    try:
        yield
    finally:
        tf.enable_resource_variables()


@pytest.mark.parametrize(
    "sparse, resource, dtype",
    [(True, True, "float32"), (False, True, "float64"), (True, False, "float64")],
    ids=["sparse", "dense", "reference"],
)
@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, sparse: bool, resource: bool, dtype: str):
    make, reference = CASES[name]
    rows, states = numpy_optimizers.trained(reference, START, batches(sparse))
    with resource_variables(resource), tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("w", initializer=tf.constant(START, dtype))
        ids = tf.placeholder(tf.int64, [None])
        gradients = tf.placeholder(dtype, [None, D] if sparse else [V, D])
        step = tf.train.get_or_create_global_step()
        optimizer = make()
        gradient = tf.IndexedSlices(gradients, ids, [V, D]) if sparse else gradients
        update = optimizer.apply_gradients([(gradient, variable)], step)
        session.run(tf.global_variables_initializer())
        for batch_ids, values in batches(sparse):
            session.run(update, {ids: batch_ids, gradients: values})
        tolerances = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(session.run(variable), rows, **tolerances)
        for slot in states[0]:
            np.testing.assert_allclose(
                session.run(optimizer.get_slot(variable, slot)),
                np.stack([state[slot] for state in states]),
                **tolerances,
                err_msg=slot,
            )


@pytest.mark.parametrize(
    "shape", [[], [4], [2, 3, 2]], ids=["scalar", "vector", "of_three_dimensions"]
)
@pytest.mark.parametrize("name", CASES)
def test_variables_of_any_shape(name: str, shape: list[int]):
    """A row is what lies behind the first dimension; of a vector it is one element."""
    make, reference = CASES[name]
    start = np.random.default_rng(3).normal(size=shape)
    gradients = [np.random.default_rng([4, step]).normal(size=shape) for step in range(3)]
    matrix = (1, 1) if not shape else (shape[0], start.size // shape[0])
    ids = np.arange(matrix[0])
    rows, _ = numpy_optimizers.trained(
        reference, start.reshape(matrix), [(ids, g.reshape(matrix)) for g in gradients]
    )
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("w", initializer=tf.constant(start, tf.float64))
        fed = tf.placeholder(tf.float64, shape)
        step = tf.train.get_or_create_global_step()
        update = make().apply_gradients([(fed, variable)], step)
        session.run(tf.global_variables_initializer())
        for gradient in gradients:
            session.run(update, {fed: gradient})
        np.testing.assert_allclose(session.run(variable), rows.reshape(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: train.RowWiseAdagradOptimizer(0.1, -0.1), "initial_accumulator_value must be"),
        (lambda: train.RowWiseAdagradOptimizer(0.1, 0.0), "epsilon must be"),
        (lambda: train.RowWiseAdagradOptimizer(0.1, use_locking=True), "use_locking=True is not"),
    ],
)
def test_arguments_that_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()
