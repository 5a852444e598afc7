"""Trains a model of census income, its embedding tables sharded over the ranks, and prints its AUC on the test rows.

    COLLECTIVE_STRATEGY=hb python -m collective.launch -np 2 modelzoo/census_income/train.py

Without the launcher it is one rank. The lines marked with (*) are those that a script for one process doesn't have.
"""
from __future__ import annotations

import os
import sys

import batches
import click_log
import model
import numpy as np
import options
import scores
import tensorflow.compat.v1 as tf
from columns import LABEL
from features import Encoder, Examples
from progress import Progress

from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, half of a session script is deprecated
EVALUATION_BATCH = 4096  # of all ranks together


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get('HOROVOD_RANK', 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    say = print_now if rank == 0 else ignore
    options.check_batch_size(chosen.batch_size, rank, ranks)

    train_rows, test_rows, reference = load(chosen, rank, say)
    options.check_rows(chosen.batch_size, len(train_rows[LABEL]), rank)
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    steps = chosen.total_steps(len(train))
    say(f'{len(train)} training rows, {steps} steps of {chosen.batch_size} rows on {ranks} rank{"s" * (ranks > 1)}, '
        f'{len(train.ids)} tables of dimension {chosen.dim}, {chosen.optimizer} at {chosen.learning_rate:g}')

    with strategy.scope(), tf.Graph().as_default():  # (*)
        tf.set_random_seed(chosen.seed)
        batch = next_batch(train, lambda: batches.training(
            len(train), chosen.batch_size, steps, chosen.seed, rank, ranks))  # (*) this rank's share
        test_batch = next_batch(test, lambda: batches.evaluation(len(test), EVALUATION_BATCH, rank, ranks))

        with strategy.embedding_scope():  # (*) what is made here is sharded, everything else replicated
            tables = model.create_tables(encoder, chosen.dim)
        network = model.Network(inputs=chosen.dim * len(tables) + train.numeric.shape[1])

        loss = model.mean_loss(batch['label'], network(batch, tables))
        train_op = model.optimizer(chosen.optimizer, chosen.learning_rate).minimize(
            loss, global_step=tf.train.get_or_create_global_step())
        test_logits = network(test_batch, tables)

        with tf.train.MonitoredTrainingSession('') as session:
            with Progress(steps, chosen.batch_size, rank) as progress:
                try:
                    while not session.should_stop():
                        _, step_loss = session.run([train_op, loss])
                        progress.step(step_loss)
                except tf.errors.OutOfRangeError:
                    pass  # the batches are used up, on every rank after the same step
            # Every rank makes as many runs, even where its last share is empty: a run is a matter of all ranks. (*)
            logits = [session.run(test_logits) for _ in range(batches.evaluation_steps(len(test), EVALUATION_BATCH))]

    logits = gather(np.concatenate(logits), len(test), rank, ranks)  # (*)
    say(f'test AUC {scores.auc(test.label, logits):.4f}  accuracy {scores.accuracy(test.label, logits):.4f}  '
        f'({len(test)} rows)')
    say(reference)


def next_batch(examples: Examples, shares) -> dict:
    """The tensors of the next batch: the rows that `shares()` yields, one array of row numbers after the other."""
    signature = tf.nest.map_structure(lambda values: tf.TensorSpec([None, *values.shape[1:]], values.dtype),
                                      examples.take(np.arange(0)))
    dataset = tf.data.Dataset.from_generator(lambda: (examples.take(rows) for rows in shares()),
                                             output_signature=signature)
    return tf.data.make_one_shot_iterator(dataset.prefetch(2)).get_next()


def load(chosen: options.Options, rank: int, say) -> tuple:
    """Training rows, test rows and the line that says what AUC to compare with."""
    if not chosen.click_log:
        import prepared  # here, because tensorflow-datasets takes its time
        from dataset import DownloadFailed, MalformedFile
        try:
            return (*prepared.load(chosen.folder, say), 'PERSIA publishes 0.8929 on these rows')
        except DownloadFailed as failure:
            say('The census data could not be downloaded, so a generated click log of the same columns takes its place '
                f'({failure})')
        except (MalformedFile, OSError) as error:
            options.parser(rank).error(f'the census data could not be prepared: {error}')
    log = click_log.generate()
    return log.train, log.test, f'the best possible AUC on these generated rows is {log.best_auc:.4f}'


def gather(logits: np.ndarray, rows: int, rank: int, ranks: int) -> np.ndarray:
    """All ranks' predictions, in the order of the rows."""
    if ranks == 1:
        return logits
    import horovod.tensorflow as hvd
    ordered = np.empty(rows, np.float32)
    with tf.device('/CPU:0'):
        for other, part in enumerate(hvd.allgather_object(logits, name='test_logits')):
            where = np.concatenate(list(batches.evaluation(rows, EVALUATION_BATCH, other, ranks)))
            ordered[where] = part
    return ordered


def print_now(line: str) -> None:
    print(line, flush=True)


def ignore(line: str) -> None:
    """What another rank than the first has to say."""


if __name__ == '__main__':
    sys.exit(main())
