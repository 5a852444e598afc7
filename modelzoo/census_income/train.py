"""Trains a model of census income with sharded embedding tables, and prints its test AUC.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/census_income/train.py

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import numpy as np
import tensorflow.compat.v1 as tf

from census_income import batches, data_source, model, options, overview, serving
from census_income.columns import LABEL
from census_income.features import Encoder
from census_income.input_pipeline import next_batch
from collective import CollectiveStrategy
from common import metrics, optimizers, reporting
from common.checkpoints import trained_steps

# To TensorFlow 2, half of a session script is deprecated.
tf.logging.set_verbosity(tf.logging.ERROR)
EVALUATION_BATCH = 4096


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line = options.parser(rank)
    command_line.check_batch_size(chosen.batch_size, ranks)
    options.check_export(chosen, rank)

    train_rows, test_rows, reference = data_source.load(chosen, report, command_line.error)
    command_line.check_full_batch(chosen.batch_size, len(train_rows[LABEL]))
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    steps = chosen.total_steps(len(train))
    tables = f"{len(train.ids)} tables of dimension {chosen.dim}"
    report(reporting.summary(chosen, len(train), "rows", ranks, tables))

    checkpoint = None
    if chosen.checkpoint_dir:
        checkpoint = tf.train.latest_checkpoint(chosen.checkpoint_dir)
    finished = trained_steps(checkpoint)
    if finished:
        report(f"going on after step {finished}, from {chosen.checkpoint_dir}")

    def training_batches():  # (*) this rank's share
        return batches.training(
            len(train), chosen.batch_size, steps, chosen.seed, rank, ranks, finished
        )

    def test_batches():  # all of them on every rank: the test data are small
        return batches.evaluation(len(test), EVALUATION_BATCH)

    with strategy.scope(), tf.Graph().as_default():  # (*)
        tf.set_random_seed(chosen.seed)
        batch = next_batch(train, training_batches)
        test_batch = next_batch(test, test_batches)

        # (*) its tables in strategy.embedding_scope()
        network = model.create(strategy, encoder, chosen.dim)
        loss = model.mean_loss(batch["label"], network(batch))
        optimizer = optimizers.create(chosen.optimizer, chosen.learning_rate)
        train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
        test_logits = network(test_batch)

        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=chosen.checkpoint_dir,
            save_checkpoint_secs=None,
            save_checkpoint_steps=chosen.save_steps,
        ) as session:
            with reporting.Progress(steps, chosen.batch_size, rank, finished) as progress:
                try:
                    while not session.should_stop():
                        _, step_loss = session.run([train_op, loss])
                        progress.step(step_loss)
                except tf.errors.OutOfRangeError:
                    pass  # the batches are used up, on every rank after the same step
            logits = np.concatenate([session.run(test_logits) for _ in test_batches()])
        plan = strategy.plan() if finished < steps else None

    auc, accuracy = metrics.auc(test.label, logits), metrics.accuracy(test.label, logits)
    report(f"test AUC {auc:.4f}  accuracy {accuracy:.4f}  ({len(test)} rows)")
    report("\n".join(overview.lines(plan, chosen.batch_size, auc, reference)))
    if chosen.export_dir:
        # (*) the checkpoint at the end of training, served by TensorFlow alone
        strategy.export_saved_model(
            chosen.export_dir,
            chosen.checkpoint_dir,
            lambda: serving.signature(strategy, encoder, chosen.dim),
        )


if __name__ == "__main__":
    sys.exit(main())
