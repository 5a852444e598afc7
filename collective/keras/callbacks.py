"""Saves and restores Keras models in checkpoints, in the place of a session's hooks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.checkpoint.files import storage
from collective.checkpoint.functions import entries, restores
from collective.checkpoint.functions.saves import ModelSaver
from collective.checkpoint.saving import saver_hook
from collective.job.info import job_info
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.tensorflow_internals.keras import Callback, backend
from collective.wrappers import keras_fit, keras_names

__all__ = ["Checkpoint"]

# What a checkpoint has of `fit`: [epoch, steps in it, which fit of the script it is], and whose
# training it is.
_PLACE, _TRAINING = "collective/fit", "collective/fit_of"


class Checkpoint(Callback):
    """Saves a model during `fit`, and restores it when `fit` starts: at any number of ranks.

        saved = collective.keras.callbacks.Checkpoint("ckpt", save_freq=1000)
        model.fit(dataset, epochs=3, callbacks=[saved])

    The checkpoints are those of sessions: every rank writes its shards of tables and their slots,
    one commit makes them the folder's latest. All weights are in them, the variables of optimizers
    and their steps. All ranks give the same arguments.

    A model that a session has trained goes on under `fit`, and back, if layers and optimizer have
    the same names: weights are called as Keras calls them (`users/embeddings`), slots as those of
    the legacy optimizers in a session (`Adam/users/embeddings/m`, `Adam/iter`; without `Adam/` in a
    model with dynamic tables), for new optimizers as well, so that either can go on with the
    other's. The step is also `global_step`. Slots of `tf.compat.v1.train`'s Adagrad, Adam, Adadelta
    and Ftrl are read, too.

    If the job is told to stop (preempted), all ranks stop after the same step, and it is saved.
    `fit` then raises `collective.Preempted`, which ends the program. An epoch that was being
    validated is complete: the next job goes on with the one after it.

    Not in a checkpoint is the position in the data: of an epoch that it has begun, as many batches
    are passed over, and with `steps_per_epoch` also those of earlier epochs, if Keras goes on in a
    dataset from epoch to epoch. `Dataset.shuffle` with a seed has the order of that epoch again, as
    have arrays that `fit` shuffles after `set_random_seed`, and a `Sequence` that shuffles in
    `on_epoch_end` by a seed of its own; a `Sequence` that `fit` shuffles (`shuffle=True`) hasn't.
    Datasets with several shuffles, or a repeated one, are read again up to that epoch.

    Neither are the states of metrics, which start again (the logs of an epoch that goes on are of
    its remaining batches), those of random numbers (`Dropout`), the vocabularies of lookup layers,
    and what other callbacks remember (`EarlyStopping` and `ReduceLROnPlateau` their best values and
    counts). The learning rate of an epoch that goes on is the one that was saved, whatever
    `LearningRateScheduler` sets at its beginning.

    Args:
        directory: the folder of the checkpoints; it is made if it doesn't exist.
        save_freq: when it saves: 'epoch', at the end of each, or a number of steps. Training that
            ends saves once more.
        continue_id: names the training. `fit` goes on in the epoch at which the checkpoint of this
            training was saved. A checkpoint of another one gives weights, slots and steps, and
            epochs begin at initial_epoch. Default: the job's (`job_info().job_id`); without one
            only restarts by the launcher go on in an epoch.
        max_to_keep: how many checkpoints are kept; None: all. Default: 5, as of `tf.train.Saver`.
        keep_checkpoint_every_n_hours: one more is kept for each such time. Default: 10,000.
        name: of the checkpoints, before their steps. Default: 'model.ckpt', as of sessions.

    Raises:
        ValueError: save_freq is neither 'epoch' nor a number of steps.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        continue_id: str | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str = "model.ckpt",
    ):
        super().__init__()
        every = None if save_freq == "epoch" else _steps(save_freq)
        if every == 0:
            raise ValueError(
                f"Checkpoint(save_freq={save_freq!r}): give 'epoch', or a number of steps from 1."
            )
        self._supports_tf_logs = True  # no values of logs are needed
        self._folder = os.fspath(directory)
        self._every = every
        job = job_info()
        self._training = continue_id or (job.job_id and f"job {job.job_id}") or ""
        self._saver = ModelSaver(
            os.path.join(self._folder, name), max_to_keep, keep_checkpoint_every_n_hours
        )
        self._epoch = self._steps = self._since = self._fits = 0
        self._is_training = False
        self._fit_saved = 0  # the number of the fit of which the latest checkpoint is
        self._saved: tuple[int, int, int] | None = None
        self._resumed: _Place | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the folder's latest checkpoint, if there is one.

        A second `fit` of the same callback trains the model as it is, unless the script was
        restarted and the checkpoint is of that `fit`.
        """
        if self._resumed is not None:
            self._resumed.leave()
        self._resumed, self._since = None, 0
        self._epoch = self._steps = 0
        self._fits += 1
        self._is_training = True
        if self.model.built:
            _checked(self.model)  # not only when it is saved
        if self._fits > max(1, self._fit_saved):
            return
        notes = self._restore(self.model) or {}
        if _PLACE in notes and self._is_same(notes.get(_TRAINING)):
            epoch, steps, self._fit_saved = (int(each) for each in notes[_PLACE])
            if self._fit_saved > self._fits:  # This one was over.
                epoch, steps = int(self.params["epochs"]), 0
            self._epoch, self._steps = epoch, steps
            earlier = keras_fit.steps_of_epochs(self.model, self.params.get("steps"), epoch)
            self._resumed = _Place(self.model, epoch, steps, earlier + steps)
            self._saved = (keras_names.step_of(self.model), epoch, steps)

    def restore(self, model: Any) -> int | None:
        """Restores the folder's latest checkpoint, for a loop of one's own or an evaluation.

        All ranks call it.

        Args:
            model: a model that has its weights, compiled with its optimizer or with its optimizers
                as attributes.

        Returns:
            The step of the checkpoint; None if the folder has none.

        Raises:
            ValueError: the model has no weights yet, or two with the same name; or an optimizer
                that isn't the compiled one has no slots yet.
            tf.errors.NotFoundError: the checkpoint lacks variables.
            tf.errors.InvalidArgumentError: some have another shape, dtype or kind there.
            tf.errors.DataLossError: a file is missing, cut off or damaged.
            RankError: it failed on another rank, or that one does something else.
        """
        return None if self._restore(model) is None else keras_names.step_of(model)

    def save(self, model: Any) -> str:
        """Saves a checkpoint, in a loop of one's own. All ranks call it.

        Args:
            model: as for `restore`.

        Returns:
            Its path, the same on all ranks, once it is the folder's latest checkpoint.

        Raises:
            ValueError: the model has no optimizer, or two variables with the same name.
            CheckpointStorageError: the storage failed.
            RankError: it failed on another rank, or that one does something else.
        """
        return self._saver.save(
            _checked(model), keras_names.step_of(model), keras_names.numbers_of(model)
        )

    def _restore(self, model: Any) -> dict[str, Any] | None:
        """Restores the latest checkpoint, and returns its notes; None if there is none."""
        if not tf.executing_eagerly():
            raise NotImplementedError(
                "collective.keras.callbacks.Checkpoint is for eager models. In a graph, save by a "
                "tf.train.Saver of its session (tf.compat.v1.keras.backend.get_session())."
            )
        collectives.init()
        latest = restores.find_latest(self._folder)
        if latest is None:
            return None
        keras_names.build_optimizers(model)
        wanted = [_PLACE, _TRAINING, keras_names.GLOBAL_STEP]
        notes = restores.restore(latest, _checked(model, restoring=True), wanted)
        self._saver.recover(latest.checkpoints)
        if collectives.rank() == 0:
            step = keras_names.step_of(model)
            tf.logging.info("Goes on with checkpoint '%s', at step %d", latest.prefix, step)
        return notes

    def _is_same(self, training: Any) -> bool:
        """Tells whether a checkpoint is one of this training."""
        there = "" if training is None else tf.compat.as_text(np.asarray(training).item())
        return there == self._training and (bool(there) or job_info().restarts > 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._steps = 0 if self._resumed is None else self._resumed.steps_in(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves if so many steps were made since the last time."""
        steps, self._steps = batch + 1 - self._steps, batch + 1
        self._since += steps
        if self._every is not None and self._since >= self._every:
            self._since = 0
            self._save(*self._place())

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes that an epoch is over, before it is validated."""
        if not self._steps:
            return
        last = (keras_names.step_of(self.model), self._epoch, self._steps)
        self._epoch, self._steps = self._epoch + 1, 0
        if self._saved == last:
            self._save(self._epoch, 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves if epochs are saved."""
        self._epoch, self._steps = epoch + 1, 0
        # A save of the last step didn't know that it was the last.
        is_saved_within = self._saved is not None and self._saved[0] == keras_names.step_of(
            self.model
        )
        if self._every is None or is_saved_within:
            self._save(epoch + 1, 0)

    def on_preempted(self) -> None:
        """Saves what isn't saved yet, when all ranks were told to stop."""
        # Before the first step an optimizer may have no slots yet.
        if self._is_training and keras_names.step_of(self.model):
            self.on_train_end()

    def on_train_end(self, logs: Any = None) -> None:
        """Saves what isn't saved yet."""
        self._is_training = False
        if self._resumed is not None:
            self._resumed.leave()
        self._save(*self._place(), is_last=True)
        self._saver.release()

    def _place(self) -> tuple[int, int]:
        """Returns the epoch in which training is, and how many steps of it are made."""
        known = self.params.get("steps")
        is_over = known is not None and self._steps >= known
        return (self._epoch + 1, 0) if is_over else (self._epoch, self._steps)

    def _save(self, epoch: int, steps: int, is_last: bool = False) -> None:
        step = keras_names.step_of(self.model)
        if self._saved == (step, epoch, steps):
            return
        notes = keras_names.numbers_of(self.model)
        place = [epoch, steps, self._fits]
        notes[_PLACE], notes[_TRAINING] = np.array(place, np.int64), self._training
        try:
            self._saver.save(_checked(self.model), step, notes)
            self._saved, self._fit_saved = (step, epoch, steps), self._fits
        except storage.CheckpointStorageError as error:
            if is_last:
                raise
            saver_hook.go_on_without(error)


def _steps(given: Any) -> int:
    """Returns a number of steps; 0 if it is none."""
    is_count = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    return int(given) if is_count and given > 0 else 0


def _checked(model: Any, restoring: bool = False) -> list[entries.Entry]:
    """Returns what checkpoints have of a model, before it is saved or restored."""
    of_model = keras_names.entries_of(model)
    entries.check_names(of_model)
    keras_names.follow_steps(model, restoring)
    return of_model


class _Place:
    """Lets `fit` begin where a checkpoint was saved, by what Keras asks its own backups.

    Args:
        model: the model that `fit` trains.
        epoch: the epoch, from 0.
        steps: how many steps of it are made.
        batches: how many batches these, and earlier epochs, have taken of the data.
    """

    def __init__(self, model: Any, epoch: int, steps: int, batches: int):
        self._model, self._epoch, self._steps, self._batches = model, epoch, steps, batches
        self._others = model._training_state
        model._training_state = self
        rate = getattr(model.optimizer, "learning_rate", None) if steps else None
        self._rate = backend.get_value(rate) if isinstance(rate, tf2.Variable) else None
        self._train = self._first = model.train_function
        if batches:
            self._first = model.train_function = self._after_batches(self._train)

    def leave(self) -> None:
        """Takes back what no step has used."""
        if self._model.train_function is self._first:
            self._model.train_function = self._train

    def steps_in(self, epoch: int) -> int:
        """Returns how many steps of an epoch are made when it begins."""
        return self._steps if epoch == self._epoch else 0

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int | None, initial_epoch: int, mode: Any = None
    ) -> tuple[int, int]:
        """Returns the first epoch, and the first step in it; Keras calls it once, at the start."""
        self._model._training_state = self._others
        keras_fit.pass_over_epochs(self._model, self._epoch)
        return self._epoch, self._steps

    def _after_batches(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what passes over the batches of the steps, at the first call, and trains."""

        def first(iterator: Any) -> Any:
            self._model.train_function = train
            try:
                for _ in range(self._batches):
                    next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise ValueError(
                    f"The checkpoint was saved after {counted(self._steps, 'step')} of epoch "
                    f"{self._epoch}, and this rank's data end before: they have less than "
                    f"{counted(self._batches, 'batch', 'batches')}. Give fit the data of that "
                    "epoch, or Checkpoint another continue_id: then all epochs are trained."
                ) from None
            if self._rate is not None:  # Callbacks have set that of the epoch's beginning.
                backend.set_value(self._model.optimizer.learning_rate, self._rate)
            return train(iterator)

        return first
