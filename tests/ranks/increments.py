"""Trains a small model in monitored sessions that save increments, and restores what is there."""

import contextlib
import os

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain_names
from tests.ranks import reference
from tests.ranks.dynamic_tables import D

V = 40


def build(strategy):
    with strategy.embedding_scope():
        table = reference.table("s", V, D)
    ids = tf.placeholder_with_default(tf.constant([1, 2], tf.int64), [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return table, ids, train, step


def increments_in(folder):
    names = (entry[: -len(".index")] for entry in os.listdir(folder) if entry.endswith(".index"))
    return sorted(name for name in names if chain_names.split(name)[1])


class Stopped(Exception):
    """Ends a session without a last save, as a kill does."""


def sessions_of(strategy, folder, **options):
    """Yields a model in a monitored session that saves increments in each step; it is killed."""
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        table, ids, train, step = build(strategy)
        with (
            contextlib.suppress(Stopped),
            tf.train.MonitoredTrainingSession(
                checkpoint_dir=folder, save_checkpoint_steps=4, save_incremental_checkpoint_steps=1
            ) as session,
        ):
            yield lambda row: session.run(train, {ids: [row]})
            raise Stopped


def restored(strategy, folder):
    """Returns the step and the rows that a job in this folder goes on with."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, _, _, step = build(strategy)
        rows = tf.nn.embedding_lookup(table, tf.range(V))
        path = tf.train.latest_checkpoint(folder)
        with tf.Session() as session:
            tf.train.Saver().restore(session, path)
            return session.run([step, rows])


def trained(strategy, *rows):
    """Returns all rows of the table after a step with each of these."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, ids, train, _ = build(strategy)
        every = tf.nn.embedding_lookup(table, tf.range(V))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for row in rows:
                session.run(train, {ids: [row]})
            return session.run(every)
