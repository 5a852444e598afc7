"""Trains by a Trainer whose arguments a job file gives, or, with the word "itself", the script."""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from collective.trainer import Batch, Epoch

ARGUMENTS = sys.argv[1:]
strategy = collective.CollectiveStrategy()
estimators = collective.estimator


def model_fn(features, labels, mode, params):
    with strategy.embedding_scope():
        table = tf.get_variable("t", [50, 4])
    bias = tf.get_variable("b", [3])
    rows = tf.reduce_sum(tf.nn.embedding_lookup(table, features["id"]), axis=1)
    logit = rows + tf.reduce_sum(bias)
    loss = tf.reduce_mean(tf.square(logit - labels))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(params["lr"]).minimize(loss, step)
    metrics = {"auc": tf.metrics.auc(labels, tf.sigmoid(logit))}
    return estimators.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


def records(first, last):
    ids = np.arange(first, last) * 31 % 50
    return tf.data.Dataset.from_tensor_slices(({"id": ids}, (ids % 3 == 0).astype(np.float32)))


def main():
    train, test = (lambda: records(0, 100)), (lambda: records(100, 140))
    validated = []
    told = {"on_validation": lambda step, metrics: validated.append(step)}
    if ARGUMENTS[:1] == ["itself"]:
        trainer = collective.Trainer(
            model_fn,
            {"global_batch_size": 12, "lr": 0.5},
            model_dir=ARGUMENTS[1],
            metric="auc",
            smaller_is_better=False,
            config=collective.RunConfig(tf_random_seed=5, keep_checkpoint_max=2),
        )
        training = trainer.fit(
            train,
            test,
            max_length=Epoch(2),
            checkpoint_period=Batch([2, 5]),
            validation_period=Epoch(1),
            reporting_period=Batch(4),
            step_zero_validation=True,
            **told,
        )
    else:
        extra = {"max_length": Batch(3)} if "otherwise" in ARGUMENTS else {}
        training = collective.Trainer(model_fn).fit(train, test, **told, **extra)
    reader = tf.train.load_checkpoint(training.checkpoint)
    digest = hashlib.md5(reader.get_tensor("b").tobytes())
    for name in sorted(reader.get_variable_to_shape_map()):
        if name.startswith("t/"):
            digest.update(reader.get_tensor(name).tobytes())
    steps = [report["step"] for report in training.reports]
    best = training.best_checkpoint.rpartition("-")[2]
    auc = training.metrics["auc"]
    print(f"trained {training.step} {validated} {steps} best {best} {auc:.6f} {digest.hexdigest()}")
    print("drawn", random.random() if "draw" in ARGUMENTS else "")


if __name__ == "__main__":
    main()
