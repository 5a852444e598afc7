"""The model of train.py, trained and evaluated by an Estimator.

    COLLECTIVE_STRATEGY=hb python -m collective.launch -np 2
    modelzoo/census_income/train_estimator.py

The options are those of train.py, and each rank works on the same rows at each step. The lines
marked with (*) are those that a script for one process doesn't have.
"""

from __future__ import annotations

import os
import sys

import batches
import model
import options
import pipeline
import serving
import source
import tensorflow.compat.v1 as tf
from columns import LABEL
from features import Encoder
from progress import ProgressHook, speaker

from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, all of Estimator is deprecated
EVALUATION_BATCH = 2048  # of one rank


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    say = speaker(rank)
    options.check_batch_size(chosen.batch_size, rank, ranks)

    train_rows, test_rows, reference = source.load(chosen, rank, say)
    options.check_rows(chosen.batch_size, len(train_rows[LABEL]), rank)
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    steps = chosen.total_steps(len(train))
    say(
        f"{len(train)} training rows, {steps} steps of {chosen.batch_size} rows on {ranks} "
        f"rank{'s' * (ranks > 1)}, "
        f"{len(train.ids)} tables of dimension {chosen.dim}, {chosen.optimizer} at "
        f"{chosen.learning_rate:g}, by an Estimator"
    )

    done = pipeline.steps_done(chosen.checkpoint_dir)
    if done:
        say(f"going on after step {done}, from {chosen.checkpoint_dir}")

    def model_fn(features: dict, labels: tf.Tensor | None, mode: str) -> tf.estimator.EstimatorSpec:
        # (*) its tables in strategy.embedding_scope()
        network = model.create(strategy, encoder, chosen.dim)
        logits = network({"ids": features, "numeric": features["numeric"]})
        probability = tf.sigmoid(logits)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"probability": probability})
        loss = model.mean_loss(labels, logits)
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(
                mode,
                loss=loss,
                eval_metric_ops={
                    "auc": tf.metrics.auc(labels, probability, num_thresholds=2000),
                    "accuracy": tf.metrics.accuracy(labels, tf.cast(logits > 0, tf.float32)),
                },
            )
        train_op = model.optimizer(chosen.optimizer, chosen.learning_rate).minimize(
            loss, global_step=tf.train.get_global_step()
        )
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=train_op,
            training_hooks=[ProgressHook(loss, steps, chosen.batch_size, rank, done)],
        )

    def training_input():  # (*) all ranks' batches, which the Estimator deals
        return labelled(
            pipeline.dataset(
                train,
                lambda: batches.dealt(
                    len(train), chosen.batch_size, steps, chosen.seed, ranks, done
                ),
            )
        )

    def test_input():
        return labelled(
            pipeline.dataset(test, lambda: batches.evaluation(len(test), EVALUATION_BATCH, 0, 1))
        )

    def serving_input() -> tf.estimator.export.ServingInputReceiver:
        rows = serving.placeholders()
        return tf.estimator.export.ServingInputReceiver(flat(serving.encoded(encoder, rows)), rows)

    with strategy.scope():  # (*)
        estimator = strategy.estimator(  # (*) instead of tf.estimator.Estimator
            model_fn,
            chosen.checkpoint_dir,
            tf.estimator.RunConfig(
                tf_random_seed=chosen.seed, save_checkpoints_steps=chosen.save_steps
            ),
        )
        estimator.train(training_input, max_steps=steps)
        metrics = estimator.evaluate(test_input)
        say(
            f"test AUC {metrics['auc']:.4f}  accuracy {metrics['accuracy']:.4f}  ({len(test)} rows)"
        )
        say(reference)
        if chosen.export_dir:
            say(
                f"exported to "
                f"{tf.compat.as_str(estimator.export_saved_model(chosen.export_dir, serving_input))}"
            )


def labelled(dataset):
    """(features, label), as an Estimator takes them."""
    return dataset.map(lambda batch: (flat(batch), batch["label"]))


def flat(batch: dict) -> dict:
    return {**batch["ids"], "numeric": batch["numeric"]}


if __name__ == "__main__":
    sys.exit(main())
