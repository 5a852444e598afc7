"""Trains a model of movie ratings by an Estimator, with dynamic tables, and exports it.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 \\
        modelzoo/movielens/train.py --export-dir /tmp/ratings

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective import estimator as estimators
from common import reporting
from common.checkpoints import trained_steps
from movielens import input_pipeline, model, options, ratings
from movielens.evaluation_report import ScoreReporter, score_line

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, all of Estimator is deprecated


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line = options.parser(rank)
    command_line.check_batch_size(chosen.batch_size, ranks)

    split = ratings.load(chosen, report, command_line.error)
    train, test = split.train, split.test
    command_line.check_full_batch(chosen.batch_size, len(train))
    steps = chosen.total_steps(len(train))
    tables = f"2 dynamic tables of dimension {1 + chosen.dim}"
    report(reporting.summary(chosen, len(train), "ratings", ranks, tables))

    def progress_hooks(loss: tf.Tensor) -> list:
        return [reporting.ProgressHook(loss, steps, chosen.batch_size, rank)]

    run_config = estimators.RunConfig(
        tf_random_seed=chosen.seed,
        log_step_count_steps=None,
        save_checkpoints_steps=chosen.steps_per_epoch(len(train)),
    )
    params = {
        "dim": chosen.dim,
        "l2": chosen.l2,
        "optimizer": chosen.optimizer,
        "learning_rate": chosen.learning_rate,
    }
    with strategy.scope():  # (*)
        model_fn = model.make_model_fn(strategy, progress_hooks)
        # (*) instead of tf.estimator.Estimator
        estimator = strategy.estimator(model_fn, chosen.model_dir, run_config, params)

        def training_input():
            # A --model-dir that was used before: training goes on where it ended.
            finished = trained_steps(estimator.latest_checkpoint())
            # (*) batches of 1/N
            return input_pipeline.training(train, chosen.batch_size, ranks, chosen.seed, finished)

        def test_input():
            return input_pipeline.evaluation(test)

        scores, _ = estimator.train_and_evaluate(
            estimators.TrainSpec(training_input, max_steps=steps),
            estimators.EvalSpec(
                test_input,
                steps=None,
                throttle_secs=0,  # after every checkpoint, which is after every epoch
                exporters=[ScoreReporter(len(test), report)],
            ),
        )
        if scores is None:  # an earlier call has trained all steps
            report(score_line(estimator.evaluate(test_input), len(test)))
        if split.reference:
            report(split.reference)
        if chosen.export_dir:
            estimator.export_saved_model(chosen.export_dir, model.serving_input)


if __name__ == "__main__":
    sys.exit(main())
