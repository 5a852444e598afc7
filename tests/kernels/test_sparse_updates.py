"""The compiled updates beside NumPy in float64 and TensorFlow's own; and what they refuse."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops import sparse_updates

ROWS = 50


def matrix(name, values):
    return tf.get_variable(name, initializer=np.asarray(values, np.float32), use_resource=True)


@pytest.mark.parametrize("dim", [1, 3, 16, 100, 128, 300])
@pytest.mark.parametrize("count", [0, 1, 7, 50])
def test_adagrad(dim, count):
    rng = np.random.default_rng([dim, count])
    start, sums = rng.normal(size=(ROWS, dim)), rng.uniform(0.1, 1, (ROWS, dim))
    gradients, rows = (
        rng.normal(size=(3, count, dim)).astype(np.float32),
        [rng.permutation(ROWS)[:count] for _ in range(3)],
    )
    with tf.Graph().as_default(), tf.Session() as session:
        table, accumulator = matrix("table", start), matrix("accumulator", sums)
        other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, dim], shared_name="other")
        before = table.read_value()  # shares the variable's memory until it is updated
        gradient, at = tf.placeholder(tf.float32, [None, dim]), tf.placeholder(tf.int64, [None])
        update = sparse_updates.adagrad(table, accumulator, tf.constant(0.3), gradient, at)
        session.run([table.initializer, accumulator.initializer])
        session.run(tf.raw_ops.AssignVariableOp(resource=other, value=before))
        for g, r in zip(gradients, rows):
            session.run(update, {gradient: g, at: r})
        got = session.run(
            [
                table.read_value(),
                accumulator.read_value(),
                tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32),
            ]
        )
    want, want_sums = (
        start.astype(np.float32).astype(np.float64),
        sums.astype(np.float32).astype(np.float64),
    )
    for g, r in zip(gradients.astype(np.float64), rows):
        want_sums[r] += g**2
        want[r] -= np.float32(0.3) * g / np.sqrt(want_sums[r])
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want_sums, rtol=1e-6)
    # who read it before has what he read
    np.testing.assert_array_equal(got[2], start.astype(np.float32))


def test_special_values_are_those_of_tensorflow():
    """A zero accumulator, infinities and NaN."""
    accumulators = [0, 0, 1, 1, np.inf, np.nan, 1e-38, 1e38]
    gradients = [0, 1, np.inf, np.nan, 1, 1, 1e-30, 1e38]
    with tf.Graph().as_default(), tf.Session() as session:
        made = [
            [
                matrix(f"{i}{name}", [values])
                for name, values in (("t", np.ones(8)), ("a", accumulators))
            ]
            for i in range(2)
        ]
        gradient, rows = tf.constant([gradients], tf.float32), tf.constant([0], tf.int64)
        session.run([v.initializer for pair in made for v in pair])
        session.run(
            [
                sparse_updates.adagrad(*made[0], tf.constant(0.1), gradient, rows),
                tf.raw_ops.ResourceSparseApplyAdagrad(
                    var=made[1][0].handle,
                    accum=made[1][1].handle,
                    lr=0.1,
                    grad=gradient,
                    indices=rows,
                ),
            ]
        )
        ours, theirs = session.run([[v.read_value() for v in pair] for pair in made])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    "rows, shape, words",
    [
        ([0, ROWS], (2, 4), f"not in \\[0, {ROWS}\\)"),
        ([-1], (1, 4), "not in"),
        ([1], (2, 4), "gradient of 1 rows of dimension 4"),
        ([1], (1, 3), "gradient of 1 rows of dimension 4"),
    ],
)
def test_what_does_not_fit_is_refused(rows, shape, words):
    with tf.Graph().as_default(), tf.Session() as session:
        table, accumulator = (
            matrix("table", np.ones((ROWS, 4))),
            matrix("accumulator", np.ones((ROWS, 4))),
        )
        update = sparse_updates.adagrad(
            table, accumulator, tf.constant(0.1), tf.ones(shape), tf.constant(rows, tf.int64)
        )
        with pytest.raises(tf.errors.FailedPreconditionError, match="initialized"):
            session.run(update)
        session.run([table.initializer, accumulator.initializer])
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(update)
        assert (session.run(table.read_value()) == 1).all()
