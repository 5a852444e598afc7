"""Trains by a Trainer, and prints what each rank's steps were: for tests of restarts.

trained_by_trainer.py FOLDER [RANK:STEP:EVENT ...]    (events of resumable_training.py)
"""

import hashlib
import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective
from collective.trainer import Batch, Epoch
from tests.jobs.resumable_training import happen

tf.logging.set_verbosity(tf.logging.ERROR)
RECORDS, B = 60, 12


def records():
    draw = np.random.default_rng(3)
    ids, labels = draw.integers(0, 20, (RECORDS, 2)), draw.normal(size=RECORDS).astype(np.float32)
    return tf2.data.Dataset.from_tensor_slices(({"ids": ids}, labels)).shuffle(RECORDS, seed=4)


def model_fn(features, labels, mode):
    strategy = collective.CollectiveStrategy()
    with strategy.embedding_scope():
        table = tf.get_variable("t", [20, 4])
    rows = tf.reshape(tf.nn.embedding_lookup(table, features["ids"]), [-1, 8])
    score = tf.matmul(rows, tf.get_variable("w", [8, 1]))[:, 0]
    loss = tf.reduce_mean(tf.square(score - labels))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return collective.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


class Events(tf.train.SessionRunHook):
    def __init__(self, folder, events):
        self._folder, self._events = folder, events

    def after_create_session(self, session, coord):
        self._step = int(session.run(tf.train.get_global_step()))
        print(f"began at {self._step}", flush=True)

    def after_run(self, context, values):
        self._step += 1
        for event in self._events:
            happen(event, self._folder, collective.job_info().rank, self._step)


def main(folder, events):
    saved = os.path.join(folder, "saved")
    with collective.CollectiveStrategy().scope(plan="quiet", deterministic=True):
        trainer = collective.Trainer(
            model_fn,
            model_dir=saved,
            global_batch_size=B,
            config=collective.RunConfig(tf_random_seed=1),
        )
    training = trainer.fit(
        records,
        records,
        max_length=Epoch(4),
        checkpoint_period=Batch(3),
        validation_period=Epoch(1),
        continue_id="job",
        hooks=[Events(folder, events)],
    )
    model = collective.checkpoint.load(training.checkpoint)
    values = [np.asarray(model[name]) for name in ("t", "w")]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    print(f"weights {digest} after {training.step}, loss {training.metrics['loss']!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
