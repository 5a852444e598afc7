"""Trains, evaluates, exports and predicts clicks by a session.

The lines marked with (*) are those that a script for one process doesn't have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from common import (
    click_options,
    click_report,
    click_source,
    optimizers,
    reporting,
    training_course,
)
from common.checkpoints import trained_steps
from common.click_model import ClickModel, Features
from common.counting import counted
from common.loss_record import LossRecord

# To TensorFlow 2, half of a session script is deprecated.
tf.logging.set_verbosity(tf.logging.ERROR)
EVALUATION_BATCH = 4096  # of all ranks together, about


class ClickSession:
    """Holds a program: its options, its data, its model and the rank that it is.

    Args:
        model_class: the model.
        arguments: the command line; None: that of the process.
    """

    def __init__(self, model_class: type[ClickModel], arguments: list[str] | None = None):
        rank = int(os.environ.get("HOROVOD_RANK", 0))
        defaults = model_class.defaults
        self.options = click_options.parse(defaults, arguments, rank)
        self.strategy = CollectiveStrategy()  # (*)
        self.rank, self.ranks = self.strategy.rank(), self.strategy.world_size()  # (*)
        self.report = reporting.reporter(self.rank)
        command_line = click_options.parser(defaults, self.rank)
        command_line.check_batch_size(self.options.batch_size, self.ranks)
        self.source = model_class.source(self.options, command_line.error)
        command_line.check_full_batch(self.options.batch_size, self.source.count("train"))
        self.steps = self.options.total_steps(self.source.count("train"))
        # (*) what is made in embedding_scope() is sharded, everything else replicated
        self.model = model_class(
            self.options, self.source.table_rows, self.strategy.embedding_scope
        )
        self.checkpoint = None
        if self.options.checkpoint_dir:
            self.checkpoint = tf.train.latest_checkpoint(self.options.checkpoint_dir)
        if self.options.mode != "train" and not self.checkpoint:
            command_line.error(f"--checkpoint-dir {self.options.checkpoint_dir} has no checkpoint")

    def run(self) -> None:
        """Does what --mode says."""
        if self.options.mode == "train":
            self._train()
        elif self.options.mode == "evaluate":
            self._evaluate()
        elif self.options.mode == "predict":
            self._predict()
        if self.options.export_dir and self.options.mode in ("train", "export"):
            # (*) the checkpoint, served by TensorFlow alone
            self.strategy.export_saved_model(
                self.options.export_dir, self.options.checkpoint_dir, self._signature
            )

    def _train(self) -> None:
        options, finished = self.options, trained_steps(self.checkpoint)
        tables = f"{counted(len(self.source.table_rows), 'column')} of dimension {options.dim}"
        rows = self.source.count("train")
        self.report(reporting.summary(options, rows, "rows", self.ranks, tables))
        if finished:
            self.report(f"going on after step {finished}, from {options.checkpoint_dir}")
        losses = LossRecord(options.losses, self.steps, self.rank, finished)
        with self.strategy.scope(), tf.Graph().as_default():  # (*)
            tf.set_random_seed(options.seed)
            with _reusing_variables():
                loss = self.model.loss(self._training_batch(finished))
                optimizer = optimizers.create(options.optimizer, options.learning_rate)
                global_step = tf.train.get_or_create_global_step()
                train_op = optimizer.minimize(loss, global_step=global_step)
            evaluation = _Evaluation(self.model, self._test_batches())
            course = self.model.course(self.rank, self.ranks)
            scaffold = tf.train.Scaffold(saver=tf.train.Saver(max_to_keep=options.keep_checkpoints))
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=options.checkpoint_dir,
                scaffold=scaffold,
                save_checkpoint_secs=None,
                save_checkpoint_steps=options.save_steps or max(1, self.steps),
            ) as session:
                with reporting.Progress(
                    self.steps, options.batch_size, self.rank, finished
                ) as progress:
                    for step in range(finished + 1, self.steps + 1):
                        _, step_loss = session.run([train_op, loss])
                        progress.step(step_loss)
                        losses.step(step_loss)
                        if course.is_due(step) and step < self.steps:
                            course.record(session, step, evaluation.scores(session))
                last_step = max(finished, self.steps)
                scores = self._report_scores(session, evaluation, last_step)
                for line in training_course.lines(course.record(session, last_step, scores)):
                    self.report(line)
        if progress.samples_per_second:
            self.report(click_report.cost(progress.samples_per_second))

    def _evaluate(self) -> None:
        with self.strategy.scope(), tf.Graph().as_default():  # (*)
            evaluation = _Evaluation(self.model, self._test_batches())
            with self._restored() as session:
                self._report_scores(session, evaluation, trained_steps(self.checkpoint))

    def _predict(self) -> None:
        with self.strategy.scope(), tf.Graph().as_default():  # (*)
            with _reusing_variables():
                test_batch = tf.data.make_one_shot_iterator(self._test_batches()).get_next()
                probability = tf.sigmoid(self.model.logits(test_batch))
            with self._restored() as session:
                # (*) row i is on rank i mod N, and every rank writes its own
                click_report.write_predictions(
                    self.options.predictions,
                    self.rank,
                    self.ranks,
                    (float(value) for values in _runs(session, probability) for value in values),
                    self.ranks,
                )
        rows = self.source.count("test")
        self.report(f"predictions for {counted(rows, 'row')} are in {self.options.predictions}")

    def _report_scores(self, session: Any, evaluation: _Evaluation, step: int) -> dict[str, float]:
        scores = evaluation.scores(session)
        self.report(click_report.scores(scores["auc"], scores["log_loss"], self.source, step))
        return scores

    def _restored(self) -> Any:
        tf.train.get_or_create_global_step()
        return tf.train.MonitoredSession(
            tf.train.ChiefSessionCreator(checkpoint_filename_with_path=self.checkpoint)
        )

    def _training_batch(self, finished: int) -> Features:
        options = self.options
        records = click_source.training(self.source, options.batch_size, options.seed, finished)
        batches = self._batches("train", records, options.batch_size, whole=True)
        return tf.data.make_one_shot_iterator(batches).get_next()

    def _test_batches(self) -> Any:
        return self._batches("test", self.source.records("test"), EVALUATION_BATCH, whole=False)

    def _batches(self, split: str, records: Any, size: int, whole: bool) -> Any:
        """Makes batches of this rank's share of records."""
        share = self.strategy.shard(records)  # (*)
        size = max(1, size // self.ranks)  # (*)
        return click_source.batches(self.source, split, share, size, whole)

    def _signature(self) -> Any:
        inputs = self.model.placeholders()
        with _reusing_variables():
            probability = tf.sigmoid(self.model.logits(inputs))
        return tf.saved_model.predict_signature_def(inputs, {"probability": probability})


class _Evaluation:
    """Scores a model on all test rows, as often as it is asked to.

    Args:
        model: the model.
        batches: this rank's share of the test rows.
    """

    def __init__(self, model: ClickModel, batches: Any):
        iterator = tf.data.make_initializable_iterator(batches)
        with _reusing_variables():
            self._metrics = model.metrics(iterator.get_next())
        states = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
        self._restart = [iterator.initializer, tf.variables_initializer(states)]

    def scores(self, session: Any) -> dict[str, float]:
        session.run(self._restart)
        for _ in _runs(session, [update for _, update in self._metrics.values()]):
            pass
        # (*) those of all ranks' rows
        return session.run({name: value for name, (value, _) in self._metrics.items()})


def _reusing_variables() -> Any:
    """Opens the variable scope in which a model finds the tables that it made before."""
    return tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE)


def _runs(session: Any, fetches: Any) -> Iterator[np.ndarray]:
    """Yields the values of runs until the data of all ranks have ended."""
    while True:
        try:
            values = session.run(fetches)
        except tf.errors.OutOfRangeError:
            return
        yield values


def main(model_class: type[ClickModel]) -> None:
    ClickSession(model_class).run()
