"""Trains, evaluates, exports and predicts clicks by an Estimator.

The lines marked with (*) are those that a script for one process doesn't have.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective import estimator as estimators
from common import click_options, click_report, click_source, optimizers, reporting
from common.checkpoints import trained_steps
from common.click_model import ClickModel
from common.counting import counted
from common.loss_record import LossRecord, LossRecordHook

tf.logging.set_verbosity(tf.logging.ERROR)  # to TensorFlow 2, all of Estimator is deprecated
# Of one rank. Whole batches are dealt, so they are the same for every number of ranks.
EVALUATION_BATCH = 2048


class ClickEstimator:
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
        self.progress: reporting.ProgressHook | None = None
        run_config = estimators.RunConfig(
            tf_random_seed=self.options.seed,
            log_step_count_steps=None,
            save_checkpoints_steps=self.options.save_steps or self.steps,
            keep_checkpoint_max=self.options.keep_checkpoints,
        )
        # (*) instead of tf.estimator.Estimator
        self.estimator = self.strategy.estimator(
            self._model_fn, self.options.checkpoint_dir, run_config
        )
        self.finished = trained_steps(self.estimator.latest_checkpoint())
        if self.options.mode != "train" and not self.estimator.latest_checkpoint():
            command_line.error(f"--checkpoint-dir {self.options.checkpoint_dir} has no checkpoint")

    def run(self) -> None:
        """Does what --mode says."""
        mode, options = self.options.mode, self.options
        if mode == "train":
            self._train()
        if mode in ("train", "evaluate"):
            scores = self.estimator.evaluate(self._test_input)
            step = int(scores["global_step"])
            self.report(click_report.scores(scores["auc"], scores["log_loss"], self.source, step))
        if self.progress is not None and self.progress.samples_per_second:
            self.report(click_report.cost(self.progress.samples_per_second))
        if mode == "predict":
            self._predict()
        if options.export_dir and mode in ("train", "export"):
            self.estimator.export_saved_model(options.export_dir, self._serving_input)

    def _train(self) -> None:
        tables = f"{counted(len(self.source.table_rows), 'column')} of dimension {self.options.dim}"
        rows = self.source.count("train")
        summary = reporting.summary(self.options, rows, "rows", self.ranks, tables)
        self.report(f"{summary}, by an Estimator")
        if self.finished:
            self.report(f"going on after step {self.finished}, from {self.options.checkpoint_dir}")
        self.estimator.train(self._training_input, max_steps=self.steps)

    def _predict(self) -> None:
        # (*) rank 0 gets all of them, in the order of the rows
        predictions = self.estimator.predict(self._test_input, gather=True)
        probabilities = (float(prediction["probability"]) for prediction in predictions)
        if self.rank == 0:
            click_report.write_predictions(self.options.predictions, 0, 1, probabilities, 1)
        else:
            list(probabilities)
        rows = self.source.count("test")
        self.report(f"predictions for {counted(rows, 'row')} are in {self.options.predictions}")

    def _training_input(self) -> Any:
        options = self.options
        records = click_source.training(
            self.source, options.batch_size, options.seed, self.finished
        )
        # (*) batches of 1/N, which the Estimator deals
        share = options.batch_size // self.ranks
        return click_source.batches(self.source, "train", records, share, whole=True)

    def _test_input(self) -> Any:
        records = self.source.records("test")
        return click_source.batches(self.source, "test", records, EVALUATION_BATCH, whole=False)

    def _serving_input(self) -> estimators.export.ServingInputReceiver:
        inputs = self.model.placeholders()
        return estimators.export.ServingInputReceiver(inputs, inputs)

    def _model_fn(self, features: dict, labels: None, mode: str) -> estimators.EstimatorSpec:
        del labels  # among the features
        if mode == estimators.ModeKeys.TRAIN:
            return self._training_spec(features)
        if mode == estimators.ModeKeys.EVAL:
            metrics = self.model.metrics(features)
            loss = metrics["log_loss"][0]
            return estimators.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        probability = tf.sigmoid(self.model.logits(features))
        return estimators.EstimatorSpec(mode, predictions={"probability": probability})

    def _training_spec(self, features: dict) -> estimators.EstimatorSpec:
        options = self.options
        loss = self.model.loss(features)
        optimizer = optimizers.create(options.optimizer, options.learning_rate)
        self.progress = reporting.ProgressHook(loss, self.steps, options.batch_size, self.rank)
        losses = LossRecord(options.losses, self.steps, self.rank, self.finished)
        return estimators.EstimatorSpec(
            estimators.ModeKeys.TRAIN,
            loss=loss,
            train_op=optimizer.minimize(loss, global_step=tf.train.get_global_step()),
            training_hooks=[self.progress, LossRecordHook(losses, loss)],
        )


def main(model_class: type[ClickModel]) -> None:
    ClickEstimator(model_class).run()
