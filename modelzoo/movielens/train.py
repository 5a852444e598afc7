"""Trains a model of movie ratings with an Estimator, its dynamic tables spread over the ranks, and
exports it.

    COLLECTIVE_STRATEGY=hb python -m collective.launch -np 2 modelzoo/movielens/train.py
    --export-dir /tmp/ratings

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys

import arguments
import inputs
import rating_model
import ratings
import reports
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, all of Estimator is deprecated


def main() -> None:
    chosen = arguments.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    say = print_now if rank == 0 else ignore
    arguments.check_batch_size(chosen.batch_size, rank, ranks)

    split = ratings.load(chosen, say, arguments.parser(rank).error)
    train, test = split.train, split.test
    arguments.check_ratings(chosen.batch_size, len(train), rank)
    steps = chosen.total_steps(len(train))
    say(
        f"{len(train)} training ratings, {steps} steps of {chosen.batch_size} ratings on {ranks} "
        f"rank{'s' * (ranks > 1)}, "
        f"2 dynamic tables of dimension {1 + chosen.dim}, {chosen.optimizer} at "
        f"{chosen.learning_rate:g}"
    )

    with strategy.scope():  # (*)
        estimator = strategy.estimator(  # (*) instead of tf.estimator.Estimator
            rating_model.make(
                strategy, lambda loss: [reports.Progress(loss, steps, chosen.batch_size, rank)]
            ),
            chosen.model_dir,
            tf.estimator.RunConfig(
                tf_random_seed=chosen.seed,
                log_step_count_steps=None,
                save_checkpoints_steps=chosen.steps_of_an_epoch(len(train)),
            ),
            {
                "dim": chosen.dim,
                "l2": chosen.l2,
                "optimizer": chosen.optimizer,
                "learning_rate": chosen.learning_rate,
            },
        )

        def training_input():
            # a model_dir of before: go on where it ended
            reached = inputs.step_reached(estimator.latest_checkpoint())
            # (*) batches of 1/N
            return inputs.training(train, chosen.batch_size, ranks, chosen.seed, reached)

        metrics, _ = estimator.train_and_evaluate(
            tf.estimator.TrainSpec(training_input, max_steps=steps),
            # after every epoch
            tf.estimator.EvalSpec(
                lambda: inputs.evaluation(test),
                steps=None,
                throttle_secs=0,
                exporters=[reports.Scores(len(test), say)],
            ),
        )
        if metrics is None:  # it was trained as far before
            say(reports.line(estimator.evaluate(lambda: inputs.evaluation(test)), len(test)))
        if split.reference:
            say(split.reference)
        if chosen.export_dir:
            exported = estimator.export_saved_model(chosen.export_dir, rating_model.serving_input)
            say(f"exported to {tf.compat.as_str(exported)}")


def print_now(line: str) -> None:
    print(line, flush=True)


def ignore(line: str) -> None:
    """What another rank than the first has to say."""


if __name__ == "__main__":
    sys.exit(main())
