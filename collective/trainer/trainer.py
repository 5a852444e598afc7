"""Offers `collective.Trainer`: an Estimator that trains, validates and saves by periods."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain
from collective.checkpoint.saving import saved_code
from collective.checkpoint.saving.best import FOLDER as BEST
from collective.checkpoint.saving.best import KeepBest
from collective.coordination import barrier
from collective.estimator.estimator import Estimator
from collective.estimator.run_config import RunConfig
from collective.job import job_file
from collective.job.info import job_info
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.policy import is_whole
from collective.scope import SCOPES
from collective.strategy import CollectiveStrategy
from collective.tensorflow_internals.checkpoints import checkpoint_management
from collective.trainer import inputs, record, start
from collective.trainer.boundaries import BoundaryHook, OnValidation, Validator
from collective.trainer.job_arguments import JobArguments
from collective.trainer.record import TrainingRecord
from collective.trainer.reports import Reports
from collective.trainer.schedule import Batch, Epoch, Schedule, Unit

CheckpointPolicy = Literal["best", "all", "none"]
POLICIES = ("best", "all", "none")
TEST_FOLDER = "test_mode"
EVERY_100_BATCHES = Batch(100)
_USUAL_KEPT = 5  # checkpoints: RunConfig's default


@dataclasses.dataclass(frozen=True)
class Training:
    """Says how a `Trainer.fit` has ended; the same on every rank.

    Attributes:
        step: the number of global batches used, over restarts.
        metrics: those of the last validation; {} if there is nothing to validate.
        checkpoint: the last checkpoint.
        best_checkpoint: the best one; None without validations, or unless checkpoint_policy='best'.
        stopped: whether a rank ended it early (`Trainer.stop`).
        reports: what was reported in this process: step, loss (the mean over all records since the
            report before), samples_per_s (of all ranks, since then, without validations and saves;
            None for a report after the first step), seconds, and epochs where they are known.
    """

    step: int
    metrics: Mapping[str, Any]
    checkpoint: str
    best_checkpoint: str | None
    stopped: bool
    reports: Sequence[Mapping[str, Any]]


class Trainer:
    """Trains, validates, saves and reports by periods, on all ranks, over `strategy.estimator`.

        from collective.trainer import Batch, Epoch

        trainer = collective.Trainer(model_fn, {"lr": 0.1}, model_dir="model",
                                     global_batch_size=4096, metric="auc", smaller_is_better=False)
        training = trainer.fit(training_data, test_data, max_length=Epoch(3),
                               validation_period=Batch(1000))
        trainer.export("served", serving_input, checkpoint="best")

    It is for Determined's `Trainer`, with an Estimator's model_fn instead of a Trial. Make it on
    every rank, inside or outside scope(), and call its methods in the same order. Its methods use
    the options of the scope() in which it is made.

    Data are functions that return a `tf.data.Dataset` of all single records, the same on every
    rank, not in batches; they may name the arguments `mode`, `params` and `config`. For training
    the Trainer repeats them, and makes global batches, of which each rank gets its part: so any
    number of ranks takes the same steps, and a restart continues with the next batch. Shuffle with
    a seed, and give RunConfig a tf_random_seed. A function may also return a
    `collective.data.resumable` dataset itself.

    `collective launch job.yaml` gives what the script leaves out: model_dir, records_per_epoch,
    metric, smaller_is_better and hyperparameters, a seed and how many checkpoints are kept for
    `config`, and arguments of `fit`. If both give a value, it must be the same.

    Args:
        model_fn: builds the model, as for `tf.estimator.Estimator`; its tables in
            `strategy.embedding_scope()`.
        params: the hyperparameters, passed to model_fn. None: those of `collective.job_info()`.
        model_dir: the folder of checkpoints, which all ranks can reach. None: that of the job file,
            of `config`, or a temporary one.
        global_batch_size: records of a step, of all ranks together. None: that of `params`.
        records_per_epoch: records of an epoch. None: that of the job file, of `params`, or the size
            of the training data, if TensorFlow knows it. Only Epoch needs it.
        metric: the metric by which a checkpoint is the best. None: that of the job file, or 'loss'.
        smaller_is_better: whether a smaller metric is better. None: as the job file says, or True.
        config: a `collective.RunConfig`. The periods take the place of its save_checkpoints_….
        strategy: a `CollectiveStrategy`. None: a new one.

    Raises:
        ValueError: there is no global_batch_size, or a number isn't a whole one from 1, or the job
            file has another value of an argument.
    """

    def __init__(
        self,
        model_fn: Any,
        params: Mapping[str, Any] | None = None,
        *,
        model_dir: str | None = None,
        global_batch_size: int | None = None,
        records_per_epoch: int | None = None,
        metric: str | None = None,
        smaller_is_better: bool | None = None,
        config: Any = None,
        strategy: CollectiveStrategy | None = None,
    ):
        self._strategy = strategy or CollectiveStrategy()
        self._model_fn = model_fn
        self._job = job = JobArguments(job_info())
        self._params = job.params(params)
        batch = self._number("global_batch_size", global_batch_size)
        if batch is None:
            raise ValueError(
                "Trainer(global_batch_size=…) is missing: how many records a step has, of all "
                "ranks together. (It may be in params, too.)"
            )
        self._batch = batch
        records_per_epoch = job.argument(
            "Trainer(records_per_epoch)", records_per_epoch, "records_per_epoch"
        )
        self._records = self._number("records_per_epoch", records_per_epoch)
        metric = job.argument("Trainer(metric)", metric, "searcher.metric")
        smaller = job.argument(
            "Trainer(smaller_is_better)", smaller_is_better, "searcher.smaller_is_better"
        )
        self._best = KeepBest(metric or "loss", "max" if smaller is False else "min")
        self._config = self._configured(RunConfig() if config is None else config)
        self._options = dict(SCOPES.given)
        self._estimator = self._make(job.folder(model_dir))  # settles on one folder for all ranks
        self._folder: str = self._estimator.model_dir
        self._hook: BoundaryHook | None = None

    def fit(
        self,
        train: Callable[..., Any],
        validation: Callable[..., Any] | None = None,
        *,
        max_length: Unit | None = None,
        checkpoint_period: Unit | None = None,
        validation_period: Unit | None = None,
        reporting_period: Unit | None = EVERY_100_BATCHES,
        checkpoint_policy: CheckpointPolicy | None = None,
        latest_checkpoint: str | None = "auto",
        continue_id: str | None = None,
        step_zero_validation: bool | None = None,
        test_mode: bool | None = None,
        profile: str | None = None,
        hooks: Sequence[Any] = (),
        on_validation: OnValidation | None = None,
    ) -> Training:
        """Trains to max_length, and validates, saves and reports on the way, and at the end.

        A period is over after the first step that completes it: Epoch(1) of 10 records in batches
        of 4 after the steps 3, 5, 8. Positions are after the first step that reaches them. None:
        only at the end. At a boundary the ranks validate, save, report, and then stop if one of
        them wants to (`stop`), in this order. A validation evaluates a checkpoint, so each has one;
        checkpoint_policy says which stay. The end always has a validation and a checkpoint.

        Args:
            train: the training data (see the class).
            validation: the data to validate with; None: none.
            max_length: when training ends, of all attempts together: `Batch(5000)`, `Epoch(3)`,
                `Record(10**6)` or `Seconds(3600)`. Left out, it is the job file's, as are periods,
                checkpoint_policy, latest_checkpoint, continue_id and step_zero_validation.
            checkpoint_period: when to save.
            validation_period: when to validate.
            reporting_period: when to report loss and samples per second: to TensorBoard, to
                <model_dir>/metrics.jsonl, to the log, and in the result. Default: every 100
                batches.
            checkpoint_policy: 'best' (the default) keeps the best checkpoint in <model_dir>/best,
                'all' keeps every one, 'none' adds nothing. Other than with 'all', RunConfig's
                keep_checkpoint_max of the latest ones stay.
            latest_checkpoint: 'auto' continues with that of model_dir, if there is one. A path, or
                a folder, is a checkpoint elsewhere. None starts from nothing, and refuses a
                model_dir that has one, unless the launcher has restarted the job.
            continue_id: names the training. A checkpoint with the same id continues: step, epoch,
                position in the data, Python's and NumPy's generators. Of one elsewhere with
                another id, or if this is None, only the weights are taken. In model_dir another id
                is an error, and None continues.
            step_zero_validation: whether to validate before the first step of all.
            test_mode: one training batch, one validation batch, and a checkpoint, in
                <model_dir>/test_mode, which is emptied first. Everything else is the same. None:
                as `collective launch --test-mode` says.
            profile: a folder for a profile, as of scope(profile=…).
            hooks: `tf.train.SessionRunHook`s for training.
            on_validation: is called after each validation, on every rank, with the step and the
                metrics; it may call `stop`, as to end training early.

        Returns:
            How it has ended.

        Raises:
            TypeError: a length or period has no unit.
            ValueError: an argument is invalid, or missing in both script and job file, or differs
                in the two; or model_dir has the checkpoints of another training (see continue_id),
                or train_op doesn't raise the global step by 1.
            RankError: another rank failed.
            Preempted: the job was told to stop, and has saved.
        """
        job_file.follow()
        of_fit = self._job.of_fit
        max_length = of_fit("max_length", max_length)
        if max_length is None:
            raise ValueError(
                "fit(max_length=…) is missing: when training ends, as Epoch(3) or Batch(5000). (A "
                "job file may have max_length, too.)"
            )
        checkpoint_period = of_fit("checkpoint_period", checkpoint_period)
        validation_period = of_fit("validation_period", validation_period)
        reporting_period = of_fit("reporting_period", reporting_period, EVERY_100_BATCHES)
        checkpoint_policy = of_fit("checkpoint_policy", checkpoint_policy) or "best"
        latest_checkpoint = of_fit("latest_checkpoint", latest_checkpoint, "auto")
        continue_id = of_fit("continue_id", continue_id)
        validates_first = bool(of_fit("step_zero_validation", step_zero_validation))
        if checkpoint_policy not in POLICIES:
            raise ValueError(f"checkpoint_policy={checkpoint_policy!r}: it is one of {POLICIES}.")
        periods = (validation_period, checkpoint_period, reporting_period)
        records = self._epoch_records(train, (max_length, *periods))
        schedule = Schedule(max_length, self._batch, records, *periods)
        is_test = job_info().test_mode if test_mode is None else test_mode
        folder, validation_batches = self._folder, None
        options: dict[str, Any] = {} if profile is None else {"profile": profile}
        if is_test:
            folder, latest_checkpoint = os.path.join(folder, TEST_FOLDER), "auto"
            schedule, validation_batches = dataclasses.replace(schedule, max_length=Batch(1)), 1
        with self._strategy.scope(**{**self._options, **options}):
            if is_test:
                _empty(folder)
            kept, weights = start.decide(folder, latest_checkpoint, continue_id)
            kept.model_fn, kept.batch = _name(self._model_fn), self._batch
            kept.params = record.plain_params(self._params)
            self._estimator = self._make(
                folder,
                weights,
                self._best if checkpoint_policy == "best" and validation is not None else None,
                keeps_all=checkpoint_policy == "all",
            )
            validator, reports = None, Reports(folder, schedule)
            if validation is not None:
                validator = Validator(
                    self._estimator,
                    inputs.evaluation_input(validation, self._batch, self._params),
                    validation_batches,
                    kept,
                    reports,
                    on_validation,
                )
            self._hook = hook = BoundaryHook(
                folder, schedule, kept, validator, reports, validates_first
            )
            try:
                if not self._is_over(schedule, kept):
                    self._estimator.train(
                        inputs.training_input(train, self._batch, self._params),
                        [*hooks, hook],
                        max_steps=schedule.last_step,
                    )
                return self._end(schedule, kept, validator)
            finally:
                reports.close()

    def stop(self) -> None:
        """Asks all ranks to stop at the next boundary of `fit`, with a validation and a checkpoint.

        Any rank may call it, from a hook or from on_validation: all stop after the same step.
        """
        if self._hook is not None:
            self._hook.wants_stop = True

    def evaluate(
        self, data: Callable[..., Any], checkpoint: str | None = None, name: str = "evaluation"
    ) -> dict[str, Any]:
        """Returns the metrics of all records, the same on all ranks.

        Args:
            data: the data (see the class).
            checkpoint: 'best', or a path; None: the latest.
            name: says in TensorBoard which data these are.

        Returns:
            The metrics, by name.

        Raises:
            ValueError: there is no checkpoint, or a metric isn't the same on all ranks.
        """
        input_fn = inputs.evaluation_input(data, self._batch, self._params)
        metrics: dict[str, Any] = self._estimator.evaluate(
            input_fn, checkpoint_path=self._checkpoint(checkpoint), name=name
        )
        return metrics

    def predict(
        self, data: Callable[..., Any], checkpoint: str | None = None, gather: bool = False
    ) -> Iterator[Any]:
        """Yields the predictions for this rank's share of the records.

        Every rank must iterate over them, in step.

        Args:
            data: the data (see the class).
            checkpoint: 'best', or a path; None: the latest.
            gather: whether rank 0 gets all predictions, in order, and the others none.

        Returns:
            An iterator of predictions, one for each record.

        Raises:
            ValueError: there is no checkpoint.
        """
        input_fn = inputs.evaluation_input(data, self._batch, self._params)
        predictions: Iterator[Any] = self._estimator.predict(
            input_fn, checkpoint_path=self._checkpoint(checkpoint), gather=gather
        )
        return predictions

    def export(
        self,
        folder: str,
        serving_input_receiver_fn: Callable[[], Any],
        checkpoint: str | None = None,
        base: str | None = None,
    ) -> str:
        """Exports a SavedModel that plain TensorFlow serves.

        Args:
            folder: where the version's folder is made.
            serving_input_receiver_fn: makes the inputs, as for
                `tf.estimator.Estimator.export_saved_model`.
            checkpoint: 'best', or a path; None: the latest.
            base: a version, or a folder of versions, whose equal files are linked.

        Returns:
            The path of the version, on every rank.

        Raises:
            ValueError: there is no checkpoint.
        """
        exported = self._estimator.export_saved_model(
            folder,
            serving_input_receiver_fn,
            checkpoint_path=self._checkpoint(checkpoint),
            base=base,
        )
        return tf.compat.as_str(exported)

    # -- inside

    def _number(self, name: str, given: int | None) -> int | None:
        """Returns an argument, or the hyperparameter of its name; None if there is neither."""
        own = self._params.get(name)
        if None not in (given, own) and given != own:
            raise ValueError(f"{name}={given!r}, but params has {own!r}. Give it once.")
        value = own if given is None else given
        if value is not None and not (is_whole(value) and value >= 1):
            raise ValueError(f"{name}={value!r}: it is a whole number from 1.")
        return value

    def _configured(self, config: Any) -> Any:
        """Returns a RunConfig with the job file's seed and number of checkpoints."""
        kept = config.keep_checkpoint_max
        found = {
            "tf_random_seed": self._job.argument(
                "RunConfig(tf_random_seed)", config.tf_random_seed, "seed"
            ),
            "keep_checkpoint_max": self._job.argument(
                "RunConfig(keep_checkpoint_max)",
                None if kept == _USUAL_KEPT else kept,
                "checkpoints.keep",
            ),
        }
        changes = {name: value for name, value in found.items() if value is not None}
        return config.replace(**changes) if changes else config

    def _make(
        self,
        folder: str | None,
        weights: str | None = None,
        keep_best: KeepBest | None = None,
        keeps_all: bool = False,
    ) -> Estimator:
        config = self._config
        if folder is not None:
            config = config.replace(model_dir=folder)
        if keeps_all:
            config = config.replace(keep_checkpoint_max=None)
        takes_params = inputs.takes(self._model_fn, "params")
        return self._strategy.estimator(
            self._model_fn,
            folder,
            config,
            self._params if takes_params else None,
            warm_start_from=weights,
            keep_best=keep_best,
        )

    def _epoch_records(self, train: Callable[..., Any], units: Sequence[Unit | None]) -> int | None:
        """Returns the records of an epoch, if they are known or needed."""
        if not any(isinstance(unit, Epoch) for unit in units):
            return self._records
        found = inputs.count_records(train, self._params)
        if None not in (found, self._records) and found != self._records:
            raise ValueError(
                f"records_per_epoch is {self._records}, but the training data have {found} "
                "records. Leave records_per_epoch out."
            )
        return found or self._records

    def _is_over(self, schedule: Schedule, kept: TrainingRecord) -> bool:
        """Tells whether the clock says that no step is left; of steps the Estimator knows."""
        seconds = kept.seconds[max(kept.seconds)] if kept.seconds else 0.0
        return schedule.last_step is None and schedule.boundary(1, 0.0, seconds).ends

    def _end(
        self, schedule: Schedule, kept: TrainingRecord, validator: Validator | None
    ) -> Training:
        """Validates the last checkpoint, if that wasn't done, and says how training has ended."""
        hook, folder = self._hook, self._estimator.model_dir
        assert hook is not None
        latest, step = start.latest(folder)
        if validator is not None and step not in kept.validations:
            validator(latest, step)
        if not hook.has_stopped and schedule.last_step is not None and step < schedule.last_step:
            warnings.warn(
                f"training ended after {counted(step, 'step')}, before max_length="
                f"{schedule.max_length} ({counted(schedule.last_step, 'step')}), because the data "
                "ended, or a hook has stopped it.",
                stacklevel=3,
            )
        best = checkpoint_management.latest_checkpoint(os.path.join(folder, BEST))
        return Training(
            step=step,
            metrics=kept.validations.get(step, {}),
            checkpoint=latest,
            best_checkpoint=best,
            stopped=hook.has_stopped,
            reports=tuple(hook.reports),
        )

    def _checkpoint(self, checkpoint: str | None) -> str | None:
        """Returns the path of a checkpoint: 'best', a path, or None for the latest."""
        if checkpoint != "best":
            return None if checkpoint is None else chain.prefix_of(checkpoint)
        folder = os.path.join(self._estimator.model_dir, BEST)
        best: str | None = checkpoint_management.latest_checkpoint(folder)
        if best is None:
            raise ValueError(
                f"there is no best checkpoint in '{folder}': fit() keeps one if it has validation "
                "data and checkpoint_policy='best'."
            )
        return best


def _empty(folder: str) -> None:
    """Removes what an earlier test has left in a folder. Every rank calls it."""

    def remove() -> None:
        if collectives.rank() == 0 and tf.io.gfile.isdir(folder):
            tf.io.gfile.rmtree(folder)

    barrier.run_on_all_ranks(None, f"emptying '{folder}'", remove)


def _name(function: Any) -> str | None:
    """Returns the module and name by which a function can be imported; None if it can't."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or not name.isidentifier():
        return None
    script = saved_code.main_script() if module == "__main__" else None
    if script is not None:
        module = os.path.splitext(os.path.basename(script))[0]
    return f"{module}:{name}"
