"""Builds a small model for strategy.estimator, and for plain tf.estimator for comparison."""

import contextlib
import os

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import estimator as tf_estimator
from collective.coordination import barrier
from collective.ops.communication import collectives
from tests.ranks import reference

BATCH = 4
_rng = np.random.default_rng(5)
IDS, WEIGHTS = _rng.integers(0, 10, [200, 3]), _rng.uniform(0.1, 2, 200).astype(np.float32)
LABELS = (_rng.uniform(0, 1, 200) < 0.4).astype(np.float32)


def records(count, batch=BATCH):
    def input_fn():
        data = {"ids": IDS[:count], "weight": WEIGHTS[:count], "number": np.arange(count)}
        # Ending an iterator that tunes itself may take TensorFlow as long as it has lived (a
        # wake-up that gets lost).
        options = tf2.data.Options()
        options.autotune.enabled = False
        return (
            tf2.data.Dataset.from_tensor_slices((data, LABELS[:count]))
            .batch(batch)
            .with_options(options)
        )

    return input_fn


def model(
    embedding_scope, metrics=None, optimizer=lambda: tf.train.AdagradOptimizer(0.2), trouble=None
):
    def model_fn(features, labels, mode, params):
        if trouble:
            trouble(mode)
        with embedding_scope():
            table = reference.table("t", 10, 2)
        w = tf.get_variable("w", [2, 1], initializer=tf.constant_initializer([[1.0], [-1.5]]))
        rows = tf.reduce_mean(tf.nn.embedding_lookup(table, features["ids"]), 1)
        logit = tf.matmul(rows, w)[:, 0] * params.get("scale", 1.0)
        p = tf.sigmoid(logit)
        if mode == tf_estimator.ModeKeys.PREDICT:
            return tf_estimator.EstimatorSpec(
                mode, predictions={"p": p, "number": features["number"]}
            )
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logit))
        step = tf.train.get_or_create_global_step()
        return tf_estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=optimizer().minimize(loss, global_step=step),
            eval_metric_ops=metrics(labels, p, features["weight"])
            if metrics and mode == tf_estimator.ModeKeys.EVAL
            else None,
        )

    return model_fn


def told(**mine):
    """Returns every rank's `mine`."""
    return barrier.exchange(None, "case", mine)


def made(strategy, folder, params=None, config=None, shard=True, **kwargs):
    """Makes an estimator outside of scope(), which its methods enter themselves."""
    return strategy.estimator(
        model(strategy.embedding_scope, **kwargs), folder, config, params or {}, shard_input=shard
    )


def plain(folder, metrics=None, **kwargs):
    """Makes a plain tf.estimator in a folder of this rank's own."""
    where = os.path.join(folder, f"plain{collectives.rank()}")
    return tf_estimator.Estimator(
        model(contextlib.nullcontext, metrics), where, params={}, **kwargs
    )


def few_metrics(labels, p, weights):
    return {
        "auc": tf.metrics.auc(labels, p, num_thresholds=50),
        "mean": tf.metrics.mean(p, weights),
    }


def assert_equal(got, want):
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def everyones(numbers):
    """Returns the values that all ranks have, by rank."""
    return [text["numbers"] for text in told(numbers=[int(x) for x in numbers])]
