"""Trains a model of census income, its embedding tables sharded over the ranks, and prints its AUC
on the test rows.

    COLLECTIVE_STRATEGY=hb python -m collective.launch -np 2 modelzoo/census_income/train.py

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys

import batches
import model
import numpy as np
import options
import pipeline
import scores
import serving
import source
import tensorflow.compat.v1 as tf
from columns import LABEL
from features import Encoder
from progress import Progress, speaker

from collective import CollectiveStrategy

# to TensorFlow 2, half of a session script is deprecated
tf.logging.set_verbosity(tf.logging.ERROR)
EVALUATION_BATCH = 4096  # of all ranks together


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    say = speaker(rank)
    options.check_batch_size(chosen.batch_size, rank, ranks)
    options.check_export(chosen, rank)

    train_rows, test_rows, reference = source.load(chosen, rank, say)
    options.check_rows(chosen.batch_size, len(train_rows[LABEL]), rank)
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    steps = chosen.total_steps(len(train))
    say(
        f"{len(train)} training rows, {steps} steps of {chosen.batch_size} rows on {ranks} "
        f"rank{'s' * (ranks > 1)}, "
        f"{len(train.ids)} tables of dimension {chosen.dim}, {chosen.optimizer} at "
        f"{chosen.learning_rate:g}"
    )

    done = pipeline.steps_done(chosen.checkpoint_dir)
    if done:
        say(f"going on after step {done}, from {chosen.checkpoint_dir}")

    with strategy.scope(), tf.Graph().as_default():  # (*)
        tf.set_random_seed(chosen.seed)
        batch = pipeline.next_batch(
            train,
            lambda: batches.training(
                # (*) this rank's share
                len(train),
                chosen.batch_size,
                steps,
                chosen.seed,
                rank,
                ranks,
                done,
            ),
        )
        test_batch = pipeline.next_batch(
            test, lambda: batches.evaluation(len(test), EVALUATION_BATCH, rank, ranks)
        )

        # (*) its tables in strategy.embedding_scope()
        network = model.create(strategy, encoder, chosen.dim)
        loss = model.mean_loss(batch["label"], network(batch))
        train_op = model.optimizer(chosen.optimizer, chosen.learning_rate).minimize(
            loss, global_step=tf.train.get_or_create_global_step()
        )
        test_logits = network(test_batch)

        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=chosen.checkpoint_dir,
            save_checkpoint_secs=None,
            save_checkpoint_steps=chosen.save_steps,
        ) as session:
            with Progress(steps, chosen.batch_size, rank, done) as progress:
                try:
                    while not session.should_stop():
                        _, step_loss = session.run([train_op, loss])
                        progress.step(step_loss)
                except tf.errors.OutOfRangeError:
                    pass  # the batches are used up, on every rank after the same step
            # Every rank makes as many runs, even where its last share is empty: a run is a matter
            # of all ranks. (*)
            logits = [
                session.run(test_logits)
                for _ in range(batches.evaluation_steps(len(test), EVALUATION_BATCH))
            ]

    logits = gather(np.concatenate(logits), len(test), rank, ranks)  # (*)
    say(
        f"test AUC {scores.auc(test.label, logits):.4f}  accuracy "
        f"{scores.accuracy(test.label, logits):.4f}  "
        f"({len(test)} rows)"
    )
    say(reference)
    if chosen.export_dir:
        # (*) the checkpoint at the end of training, served by TensorFlow alone
        exported = strategy.export_saved_model(
            chosen.export_dir,
            chosen.checkpoint_dir,
            lambda: serving.signature(strategy, encoder, chosen.dim),
        )
        say(f"exported to {exported}")


def gather(logits: np.ndarray, rows: int, rank: int, ranks: int) -> np.ndarray:
    """All ranks' predictions, in the order of the rows."""
    if ranks == 1:
        return logits
    import horovod.tensorflow as hvd

    ordered = np.empty(rows, np.float32)
    with tf.device("/CPU:0"):
        for other, part in enumerate(hvd.allgather_object(logits, name="test_logits")):
            where = np.concatenate(list(batches.evaluation(rows, EVALUATION_BATCH, other, ranks)))
            ordered[where] = part
    return ordered


if __name__ == "__main__":
    sys.exit(main())
