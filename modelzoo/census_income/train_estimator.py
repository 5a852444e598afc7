"""Trains and evaluates the model of train.py by an Estimator.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 \\
        modelzoo/census_income/train_estimator.py

The options are those of train.py, and each rank works on the same rows at each step. The lines
marked with (*) are those that a script for one process doesn't have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

from census_income import batches, data_source, input_pipeline, model, options, overview, serving
from census_income.columns import LABEL
from census_income.features import Encoder
from collective import CollectiveStrategy
from collective import estimator as estimators
from common import optimizers, reporting
from common.checkpoints import trained_steps

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, all of Estimator is deprecated
EVALUATION_BATCH = 2048  # of one rank


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line = options.parser(rank)
    command_line.check_batch_size(chosen.batch_size, ranks)

    train_rows, test_rows, reference = data_source.load(chosen, report, command_line.error)
    command_line.check_full_batch(chosen.batch_size, len(train_rows[LABEL]))
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    steps = chosen.total_steps(len(train))
    tables = f"{len(train.ids)} tables of dimension {chosen.dim}"
    summary = reporting.summary(chosen, len(train), "rows", ranks, tables)
    report(f"{summary}, by an Estimator")

    checkpoint = None
    if chosen.checkpoint_dir:
        checkpoint = tf.train.latest_checkpoint(chosen.checkpoint_dir)
    finished = trained_steps(checkpoint)
    if finished:
        report(f"going on after step {finished}, from {chosen.checkpoint_dir}")

    def model_fn(features: dict, labels: tf.Tensor | None, mode: str) -> estimators.EstimatorSpec:
        # (*) its tables in strategy.embedding_scope()
        network = model.create(strategy, encoder, chosen.dim)
        logits = network({"ids": features, "numeric": features["numeric"]})
        probability = tf.sigmoid(logits)
        if mode == estimators.ModeKeys.PREDICT:
            return estimators.EstimatorSpec(mode, predictions={"probability": probability})
        loss = model.mean_loss(labels, logits)
        if mode == estimators.ModeKeys.EVAL:
            metrics = {
                "auc": tf.metrics.auc(labels, probability, num_thresholds=2000),
                "accuracy": tf.metrics.accuracy(labels, tf.cast(logits > 0, tf.float32)),
            }
            return estimators.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        optimizer = optimizers.create(chosen.optimizer, chosen.learning_rate)
        return estimators.EstimatorSpec(
            mode,
            loss=loss,
            train_op=optimizer.minimize(loss, global_step=tf.train.get_global_step()),
            training_hooks=[reporting.ProgressHook(loss, steps, chosen.batch_size, rank), plans],
        )

    def training_batches():  # (*) those of all ranks, which the Estimator deals
        return batches.training_of_all_ranks(
            len(train), chosen.batch_size, steps, chosen.seed, ranks, finished
        )

    def training_input():
        return labelled(input_pipeline.dataset(train, training_batches))

    def test_batches():
        return batches.evaluation(len(test), EVALUATION_BATCH)

    def test_input():
        return labelled(input_pipeline.dataset(test, test_batches))

    def serving_input() -> estimators.export.ServingInputReceiver:
        rows = serving.placeholders()
        features = flat(serving.encode(encoder, rows))
        return estimators.export.ServingInputReceiver(features, rows)

    plans = overview.PlanHook(strategy)
    run_config = estimators.RunConfig(
        tf_random_seed=chosen.seed, save_checkpoints_steps=chosen.save_steps
    )
    with strategy.scope():  # (*)
        # (*) instead of tf.estimator.Estimator
        estimator = strategy.estimator(model_fn, chosen.checkpoint_dir, run_config)
        estimator.train(training_input, max_steps=steps)
        scores = estimator.evaluate(test_input)
        report(
            f"test AUC {scores['auc']:.4f}  accuracy {scores['accuracy']:.4f}  ({len(test)} rows)"
        )
        seen = overview.lines(plans.plan, chosen.batch_size, scores["auc"], reference)
        report("\n".join(seen))
        if chosen.export_dir:
            estimator.export_saved_model(chosen.export_dir, serving_input)


def labelled(dataset):
    """Makes the elements (features, label), as an Estimator takes them."""
    return dataset.map(lambda batch: (flat(batch), batch["label"]))


def flat(batch: dict) -> dict:
    return {**batch["ids"], "numeric": batch["numeric"]}


if __name__ == "__main__":
    sys.exit(main())
