"""Gradients are clipped as in plain TensorFlow, by norms that count every shard once."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference
from tests.ranks.training import IDS, X, compare, model, overflowing_in_step_1

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped, pytest.mark.double("matrix")]


def test_gradients_taken_directly_and_clipped(strategy, rank, size):
    def train(loss, variables):
        gradients = tf.gradients(loss, variables)
        clipped = [gradients[0], tf.clip_by_norm(gradients[1], 0.1)]
        return {"train": tf.train.AdagradOptimizer(0.3).apply_gradients(zip(clipped, variables))}

    compare(strategy, rank, size, train)


def test_global_norm_counts_every_shard_once(strategy, rank, size):
    """Plain TensorFlow takes repeated ids apart: the reference's gradient is made dense, that is,
    summed, first.
    """

    def train(loss, variables, dense):
        gradients = tf.gradients(loss, variables)
        summed = [tf.convert_to_tensor(gradients[0]) if dense else gradients[0], gradients[1]]
        clipped, norm = tf.clip_by_global_norm(summed, 0.05)
        return {
            "train": tf.train.GradientDescentOptimizer(0.3).apply_gradients(
                zip(clipped, variables)
            ),
            "norm": norm,
            "norm2": tf.linalg.global_norm(summed),
        }

    names = ("norm", "norm2", "train")
    feeds = {"ids": IDS, "x": X}
    mine = {"ids": reference.part(IDS, rank, size), "x": reference.part(X, rank, size)}
    want = reference.plain(
        lambda scope: model(scope, lambda *a: train(*a, dense=True)),
        [(names, feeds), (["rows"], {})],
    )
    got = reference.sharded(
        strategy,
        lambda scope: model(scope, lambda *a: train(*a, dense=False)),
        [(names, mine), (["rows"], {})],
    )
    for name in ("norm", "norm2"):
        np.testing.assert_allclose(got[0][name], want[0]["norm"], rtol=1e-5)
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=1e-5)


def test_clipping_a_tables_gradient(strategy, rank, size):
    """Compared with plain TensorFlow on the summed gradient, also where a script has scaled the
    gradient first.
    """

    def train(loss, variables, dense, clip):
        gradients = tf.gradients(loss, variables)
        table = (
            tf.convert_to_tensor(gradients[0])
            if dense
            else tf.IndexedSlices(
                gradients[0].values * 1.0, gradients[0].indices, gradients[0].dense_shape
            )
        )
        clipped = [clip(table), gradients[1]]
        return {
            "train": tf.train.GradientDescentOptimizer(0.3).apply_gradients(zip(clipped, variables))
        }

    feeds = {"ids": IDS, "x": X}
    mine = {"ids": reference.part(IDS, rank, size), "x": reference.part(X, rank, size)}
    for clip in (
        lambda g: tf.clip_by_norm(g, 0.05),
        lambda g: tf.clip_by_value(g, -0.03, 0.02),
        lambda g: tf.clip_by_global_norm([tf.clip_by_global_norm([g], 0.2)[0][0]], 0.05)[0][0],
    ):
        want = reference.plain(
            lambda s, clip=clip: model(s, lambda *a: train(*a, dense=True, clip=clip)),
            [(["train"], feeds), (["rows"], {})],
        )
        got = reference.sharded(
            strategy,
            lambda s, clip=clip: model(s, lambda *a: train(*a, dense=False, clip=clip)),
            [(["train"], mine), (["rows"], {})],
        )
        np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=1e-5, atol=1e-7)


def test_an_average_norm_of_a_tables_gradient_is_refused(strategy, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", 9, 3)
        gradient = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(t, [1])), t)[0]
        with pytest.raises(TableError, match="is not supported: use tf.clip_by_norm"):
            tf.clip_by_average_norm(gradient, 1.0)


def test_a_loss_scale_where_one_rows_gradient_overflows(strategy, rank, size):
    """The row's owner alone sees it, and yet no rank takes that step."""

    def train(loss, variables):
        nothing, step = overflowing_in_step_1(variables[0])
        optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
            tf.train.AdagradOptimizer(0.3), tf.train.experimental.DynamicLossScale(128.0)
        )
        gradients = optimizer.compute_gradients(loss + nothing, variables)
        with tf.control_dependencies([optimizer.apply_gradients(gradients)]):
            return {"train": tf.assign_add(step, 1).op}

    compare(strategy, rank, size, train)


def test_a_step_that_a_script_skips_where_one_rows_gradient_overflows(strategy, rank, size):
    """Its norm is the same on all ranks, which `is_finite` of a gradient's values isn't."""

    def train(loss, variables):
        nothing, step = overflowing_in_step_1(variables[0])
        optimizer = tf.train.AdagradOptimizer(0.3)
        gradients = optimizer.compute_gradients(loss + nothing, variables)
        finite = tf.is_finite(tf.linalg.global_norm([gradient for gradient, _ in gradients]))
        trained = tf.cond(finite, lambda: optimizer.apply_gradients(gradients), tf.no_op)
        with tf.control_dependencies([trained]):
            return {"train": tf.assign_add(step, 1).op}

    compare(strategy, rank, size, train)
