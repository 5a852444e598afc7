"""Trains in one of several kinds of programs, for tests of --test-mode.

    tried_once.py KIND FOLDER

It would take a hundred steps, and prints the global steps of what it has saved.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective

tf.logging.set_verbosity(tf.logging.ERROR)
estimators = collective.estimator
strategy = collective.CollectiveStrategy()
SPEC = tf.saved_model.predict_signature_def


def records(count=80):
    ids = np.arange(count) ** 2 % 10
    return tf2.data.Dataset.from_tensor_slices(({"id": ids}, (ids % 2).astype(np.float32)))


def model_fn(features, labels, mode):
    with strategy.embedding_scope():
        table = tf.get_variable("t", [10, 2])
    score = tf.reduce_sum(tf.nn.embedding_lookup(table, features["id"]), axis=1)
    if mode == estimators.ModeKeys.PREDICT:
        return estimators.EstimatorSpec(mode, predictions={"score": score})
    loss = tf.reduce_mean(tf.square(score - labels))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    metrics = {"mean": tf.metrics.mean(score)}
    return estimators.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


def receiver():
    ids = {"id": tf.placeholder(tf.int64, [None])}
    return estimators.export.ServingInputReceiver(ids, ids)


def by_estimator(folder):
    exporter = estimators.FinalExporter("final", receiver)
    estimator = strategy.estimator(model_fn, folder)
    metrics, _ = estimator.train_and_evaluate(
        estimators.TrainSpec(lambda: records().batch(4).repeat(), max_steps=100),
        estimators.EvalSpec(lambda: records().batch(4), steps=None, exporters=[exporter]),
    )
    assert os.listdir(os.path.join(folder, "export", "final"))
    print(f"evaluated {metrics['global_step']}", flush=True)


def by_trainer(folder):
    from collective.trainer import Epoch

    trainer = collective.Trainer(model_fn, model_dir=folder, global_batch_size=8)
    training = trainer.fit(records, records, max_length=Epoch(10), validation_period=Epoch(1))
    trainer.export(os.path.join(folder, "export"), receiver)
    print(f"evaluated {training.metrics['global_step']}", flush=True)


def training_graph(data):
    features, labels = tf.data.make_one_shot_iterator(strategy.shard(data).batch(4)).get_next()
    return model_fn(features, labels, estimators.ModeKeys.TRAIN)


def by_monitored_session(folder):
    runs = 0
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        spec = training_graph(records().repeat())
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
            for _ in range(100):
                session.run(spec.train_op)
                runs += 1
    print(f"evaluated {runs}", flush=True)


def by_plain_session(folder):
    """A loop over steps of repeated data; then an evaluation to the end of other data."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        spec = training_graph(records().repeat())
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            for _ in range(100):
                session.run(spec.train_op)
            step = session.run(tf.train.get_global_step())
            saver.save(session, os.path.join(folder, "model.ckpt"), global_step=step)
    print(f"evaluated {step}", flush=True)


def by_feeds(folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids, labels = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None])
        spec = model_fn({"id": ids}, labels, estimators.ModeKeys.TRAIN)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [
                session.run([spec.loss, spec.train_op], {ids: [1, 2], labels: [0.0, 1.0]})[0]
                for _ in range(100)
            ]
            assert len(set(losses)) == 1
            step = session.run(tf.train.get_global_step())
            saver.save(session, os.path.join(folder, "model.ckpt"), global_step=step)
    print(f"evaluated {step}", flush=True)


def to_the_end_of_data(folder):
    """A loop that ends with the data, and then another, of an evaluation."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        spec = training_graph(records(400))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            steps = 0
            try:
                while True:
                    session.run(spec.train_op)
                    steps += 1
            except tf.errors.OutOfRangeError:
                pass
            tf.train.Saver().save(session, os.path.join(folder, "model.ckpt"), global_step=steps)
    print(f"evaluated {steps}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    saved = sys.argv[2] if sys.argv[1] != "by_trainer" else os.path.join(sys.argv[2], "test_mode")
    print(f"saved {os.path.basename(tf.train.latest_checkpoint(saved))}", flush=True)
