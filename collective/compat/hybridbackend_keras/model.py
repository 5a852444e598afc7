"""Trains Keras models in a session of all ranks, as `hb.keras.Model` does.

A model is called once for training and once for evaluation, in the default graph, with the same
variables. One session keeps their values from `fit` to `evaluate` and `predict`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.compat import hybridbackend_functions
from collective.compat.hybridbackend_evaluation import DefaultNames
from collective.compat.hybridbackend_keras.arguments import (
    UNSUPPORTED,
    check_compiled,
    check_dataset,
    is_better_if_larger,
    loss_of,
    metric_of,
    name_of,
    refusing,
    use,
)
from collective.coordination.common_folder import settle
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.tensorflow_internals.keras import Model as KerasModel
from collective.tensorflow_internals.keras import package as keras


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method run in `hb.scope()`."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hybridbackend_functions.scope():
            return method(*args, **kwargs)

    return call


@dataclasses.dataclass
class _Part:
    """Holds what a session runs for training, evaluation or prediction.

    Attributes:
        update: the operation of a step: updates of variables and of metrics.
        start: resets the metrics.
        values: the loss and the metrics by name, of all records since the start.
        predictions: the model's outputs.
        iterator: the dataset's.
    """

    update: Any
    start: Any
    values: dict[str, Any]
    predictions: Any
    iterator: Any


@dataclasses.dataclass
class _Weights:
    """Says from which checkpoint the first values come: `load_weights`."""

    folder: str
    scope: str | None
    skips_missing: bool


@dataclasses.dataclass
class _State:
    """Holds a model's settings, and its session."""

    optimizer: Any = None
    loss: Any = None
    metrics: tuple[Any, ...] = ()
    is_compiled: bool = False
    weights: _Weights | None = None
    first_names: DefaultNames | None = None
    session: Any = None
    initialized: set[str] = dataclasses.field(default_factory=set)
    folder: str | None = None


class Training:
    """Adds HybridBackend's `compile`, `fit`, `evaluate`, `export_saved_model` to a Keras model."""

    # Keras's, of the model that this is a part of.
    losses: Any
    updates: Any
    non_trainable_weights: Any
    __call__: Callable[..., Any]

    def compile(
        self, optimizer: Any = None, loss: Any = None, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Sets what `fit` and `evaluate` use; nothing is built yet.

        Args:
            optimizer: an optimizer of `tf.train`, or a legacy optimizer of Keras, or its name.
            loss: a function of (labels, predictions), one of Keras's losses, or its name. A
                function that returns a number returns the mean over the batch.
            metrics: a list of Keras's metrics, functions or names.
            kwargs: Keras's others; those that would change numbers are refused.

        Raises:
            NotImplementedError: an argument isn't supported.
        """
        use("compile", kwargs)
        if isinstance(optimizer, str):
            optimizer = keras.optimizers.get(optimizer, use_legacy_optimizer=True)
        check_compiled(optimizer, loss, metrics)
        state = self._state
        state.optimizer, state.loss, state.metrics = optimizer, loss, tuple(metrics or ())
        state.is_compiled = True

    def load_weights(
        self, ckpt_dir: str, scope: str | None = None, skip_mismatched: bool = True
    ) -> None:
        """Makes variables start from a checkpoint; call it before `compile`.

        Args:
            ckpt_dir: a folder, whose latest checkpoint is read, or a checkpoint's prefix.
            scope: only variables whose names start so.
            skip_mismatched: whether variables that the checkpoint lacks keep their initializers;
                otherwise they are an error.

        Raises:
            RuntimeError: it is called after `compile`.
        """
        if self._state.is_compiled:
            raise RuntimeError("hb.keras.Model.load_weights: call it before compile.")
        self._state.weights = _Weights(ckpt_dir, scope, skip_mismatched)

    @_in_scope
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        verbose: int = 1,
        validation_data: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_freq: int = 1,
        checkpoint_dir: str | None = None,
        keep_checkpoint_max: int | None = None,
        keep_checkpoint_every_n_hours: float | None = None,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        **kwargs: Any,
    ) -> Any:
        """Trains on this rank's data, together with the other ranks.

        Args:
            x: a dataset of (features, labels), which is read once, as in HybridBackend: epochs go
                on where the last one ended, and training ends with the data.
            epochs: the epoch to end with.
            verbose: 0 is silent; otherwise rank 0 prints the values of an epoch.
            validation_data: a dataset, evaluated at the end of epochs.
            initial_epoch: the epoch to begin with.
            steps_per_epoch: None: as many as there are data.
            validation_steps: batches of an evaluation, which goes on where the last one ended; None
                evaluates the whole dataset each time.
            validation_freq: evaluates each so many epochs.
            checkpoint_dir: where training starts from the latest checkpoint, if there is one, and
                saves at the end of epochs. None keeps values in the session alone.
            keep_checkpoint_max: how many checkpoints to keep; None: all. save_best_only keeps 1.
            keep_checkpoint_every_n_hours: also keeps one in so many hours.
            monitor: the value by which an epoch is the best.
            save_best_only: whether to save only if the value is the best so far.
            mode: 'min', 'max', or 'auto': 'max' if the name contains 'acc', otherwise 'min'.

        Returns:
            Keras's `History`: `history` is a dict of lists, of the values after each epoch. A loss
            is the mean over all ranks' records; so are metrics.

        Raises:
            NotImplementedError, TypeError: an argument is not supported.
            ValueError: there are no datasets, no loss, or no value to monitor.
        """
        use("fit", {"y": y, **kwargs})
        check_dataset("fit", "x", x)
        if validation_data is not None:
            check_dataset("fit", "validation_data", validation_data)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"hb.keras.Model.fit(mode={mode!r}) is 'auto', 'min' or 'max'.")
        training = self._part("fit", x, trains=True)
        evaluation: _Part | None = None
        names = list(training.values)
        if validation_data is not None:
            again = validation_data.repeat() if validation_steps else validation_data
            evaluation = self._part("fit", again)
            names += [f"val_{name}" for name in evaluation.values]
        if save_best_only and monitor not in names:
            raise ValueError(
                f"hb.keras.Model.fit(monitor={monitor!r}, save_best_only=True): the values are "
                f"{', '.join(names)}."
            )
        session, saver = self._open(checkpoint_dir), None
        folder = self._state.folder
        if folder:
            saver = tf.train.Saver(
                max_to_keep=1 if save_best_only else keep_checkpoint_max,
                keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours or 10000.0,
            )
        is_largest = mode == "max" or (mode == "auto" and is_better_if_larger(monitor))
        best, history = -np.inf if is_largest else np.inf, keras.callbacks.History()
        history.set_model(self)
        history.on_train_begin()
        session.run(training.iterator.initializer)
        if evaluation is not None:
            session.run(evaluation.iterator.initializer)
        for epoch in range(initial_epoch, epochs):
            session.run(training.start)
            steps = _run(session, training.update, steps_per_epoch)
            is_out = steps_per_epoch is None or steps < steps_per_epoch
            if steps:
                logs = session.run(training.values)
                if evaluation is not None and (epoch + 1) % validation_freq == 0:
                    found = self._evaluated(evaluation, validation_steps, not validation_steps)
                    logs.update({f"val_{name}": value for name, value in found.items()})
                history.on_epoch_end(epoch, logs)
                if verbose:
                    values = ", ".join(f"{name} {value:.4f}" for name, value in logs.items())
                    _say(f"epoch {epoch + 1}/{epochs}: {counted(steps, 'step')}, {values}")
                value = logs.get(monitor)
                is_best = value is not None and (value > best if is_largest else value < best)
                if is_best:
                    best = value
                if folder and saver and (is_best or not save_best_only):
                    prefix = os.path.join(folder, "model.ckpt")
                    saver.save(session, prefix, tf.train.get_global_step())
            if is_out:
                if epoch + 1 < epochs:
                    _say(f"hb.keras.Model.fit: the data ended in epoch {epoch + 1} of {epochs}")
                break
        return history

    @_in_scope
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        verbose: int = 1,
        steps: int | None = None,
        checkpoint_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluates the model on the records of all ranks; each counts once.

        Args:
            x: a dataset of (features, labels).
            verbose: 0 is silent; otherwise rank 0 prints the values.
            steps: the most batches of a rank; None: all.
            checkpoint_dir: evaluates its latest checkpoint, whose values the model then has; None:
                the model as it has been trained.

        Returns:
            The loss, or the list of the loss and the metrics.
        """
        use("evaluate", {"y": y, **kwargs})
        check_dataset("evaluate", "x", x)
        evaluation = self._part("evaluate", x)
        self._open(checkpoint_dir, is_read=True)
        logs = self._evaluated(evaluation, steps, True)
        if verbose:
            _say("evaluation: " + ", ".join(f"{name} {value:.4f}" for name, value in logs.items()))
        values = list(logs.values())
        return values if len(values) > 1 else values[0]

    @_in_scope
    def predict(
        self,
        x: Any,
        *,
        verbose: int = 0,
        steps: int | None = None,
        checkpoint_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the model's outputs for this rank's records, as an array.

        Args:
            x: a dataset of features, or of (features, labels).
            verbose: no effect: nothing is printed.
            steps: the most batches; None: all.
            checkpoint_dir: predicts by its latest checkpoint, whose values the model then has;
                None: the model as it is.
        """
        del verbose
        use("predict", kwargs)
        check_dataset("predict", "x", x, has_labels=False)
        iterator = tf.data.make_initializable_iterator(x)
        batch = iterator.get_next()
        features = batch[0] if isinstance(batch, tuple) else batch
        outputs = self._output("predict", features, trains=False)
        session = self._open(checkpoint_dir, is_read=True)
        session.run(iterator.initializer)
        return np.concatenate(list(_fetched(session, outputs, steps)))

    @_in_scope
    def export_saved_model(
        self,
        saved_model_path: str,
        signature_def_fn: Callable[[], Any],
        checkpoint_path: str | None = None,
        custom_objects: Any = None,
        as_text: bool = False,
    ) -> str:
        """Exports a checkpoint as a SavedModel; all ranks call it.

        Args:
            saved_model_path: the folder of versions.
            signature_def_fn: builds the served graph, and returns its signature.
            checkpoint_path: a checkpoint's prefix; None: the latest one of `checkpoint_dir` of
                `fit`, `evaluate` or `predict`.
            custom_objects: files to copy, by their paths in `assets.extra`.
            as_text: whether to write saved_model.pbtxt.

        Returns:
            The path of the version.

        Raises:
            ValueError: there is no checkpoint.
        """
        saved = checkpoint_path or self._state.folder
        if saved is None:
            raise ValueError(
                "hb.keras.Model.export_saved_model: there is no checkpoint. Give fit a "
                "checkpoint_dir, or give checkpoint_path."
            )
        path: str = hybridbackend_functions.strategy().export_saved_model(
            saved_model_path,
            saved,
            signature_def_fn,
            assets_extra=custom_objects,
            as_text=as_text,
        )
        return path

    @property
    def metrics_names(self) -> list[str]:
        """Returns the names of the values of `evaluate`, after `compile`."""
        return ["loss", *(name_of(metric) for metric in self._state.metrics)]

    @property
    def _state(self) -> _State:
        state: _State = self.__dict__.setdefault("_hybridbackend_state", _State())
        return state

    def _apply_layers(self, features: Any, trains: bool) -> Any:
        """Calls the model; from the second time on with the variables of the first."""
        state = self._state
        if state.first_names is not None:
            with state.first_names.again("hb.keras.Model"):
                return self(features, training=trains)
        state.first_names = DefaultNames.now()
        outputs = self(features, training=trains)
        if state.weights is not None:
            _start_from(state.weights)
        return outputs

    def _output(self, function: str, features: Any, trains: bool) -> Any:
        outputs = self._apply_layers(features, trains)
        if not isinstance(outputs, tf.Tensor):
            raise NotImplementedError(
                f"hb.keras.Model.{function}: the model returns {type(outputs).__name__}; one "
                "tensor is supported."
            )
        return outputs

    def _part(self, function: str, dataset: Any, trains: bool = False) -> _Part:
        """Builds the training, or an evaluation, by a dataset."""
        state = self._state
        if not state.is_compiled or state.loss is None:
            raise ValueError(f"hb.keras.Model.{function}: call compile(optimizer, loss) before.")
        iterator = tf.data.make_initializable_iterator(dataset)
        features, labels = iterator.get_next()
        step = tf.train.get_or_create_global_step()
        earlier = [*self.losses, *self.updates, *tf.get_collection(tf.GraphKeys.UPDATE_OPS)]
        outputs = self._output(function, features, trains)

        def new(found: Any) -> list[Any]:
            return [each for each in found if not any(each is old for old in earlier)]

        total = tf.add_n([loss_of(state.loss, labels, outputs), *new(self.losses)])
        records = tf.cast(tf.shape(outputs)[0], tf.float32)
        mean = keras.metrics.Mean(name="loss")
        updates, variables = [mean.update_state(total, records)], list(mean.variables)
        values = {"loss": mean.result()}
        for given in state.metrics:
            metric = metric_of(given, labels, outputs)
            updates.append(metric.update_state(labels, outputs))
            variables += metric.variables
            values[name_of(given)] = metric.result()
        if trains:
            updates += new([*self.updates, *tf.get_collection(tf.GraphKeys.UPDATE_OPS)])
            updates.append(self._train(total, step))
        return _Part(
            tf.group(updates), tf.variables_initializer(variables), values, outputs, iterator
        )

    def _train(self, loss: Any, step: Any) -> Any:
        """Returns the operation that updates the variables and counts the step."""
        state, frozen = self._state, {id(v) for v in self.non_trainable_weights}
        variables = [v for v in tf.trainable_variables() if id(v) not in frozen]
        if not isinstance(state.optimizer, tf.train.Optimizer):
            return tf.group(state.optimizer.get_updates(loss, variables), tf.assign_add(step, 1))
        return state.optimizer.minimize(loss, step, variables)

    def _open(self, folder: str | None, is_read: bool = False) -> Any:
        """Returns the session, with a value for each variable: a folder's, if it has any.

        Raises:
            ValueError: `is_read`, and the folder has no checkpoint.
        """
        state = self._state
        if state.session is None:
            state.session = tf.Session()
        variables = {v.op.name: v for v in (*tf.global_variables(), *tf.local_variables())}
        new = [name for name in variables if name not in state.initialized]
        state.session.run(
            [tf.variables_initializer([variables[name] for name in new]), tf.tables_initializer()]
        )
        state.initialized.update(new)
        if not is_read:
            state.folder = None  # An export takes no checkpoint of an earlier training.
        if folder is not None:
            state.folder = settle("hb.keras.Model", "checkpoint_dir", folder, stacklevel=4)
            latest = tf.train.latest_checkpoint(state.folder)
            if latest:
                tf.train.Saver().restore(state.session, latest)
            elif is_read:
                raise ValueError(f"hb.keras.Model: checkpoint_dir={folder!r} has no checkpoint.")
        return state.session

    def _evaluated(self, part: _Part, steps: int | None, starts: bool) -> dict[str, Any]:
        session = self._state.session
        session.run([part.start, part.iterator.initializer] if starts else part.start)
        _run(session, part.update, steps)
        values: dict[str, Any] = session.run(part.values)
        return values


def _fetched(session: Any, fetches: Any, steps: int | None) -> Iterator[Any]:
    """Yields what runs fetch, until the data end, at most `steps` times."""
    for _ in itertools.count() if steps is None else range(steps):
        try:
            found = session.run(fetches)
        except tf.errors.OutOfRangeError:
            return
        yield found


def _run(session: Any, operation: Any, steps: int | None) -> int:
    """Runs an operation until the data end, at most `steps` times; returns how many times."""
    return sum(1 for _ in _fetched(session, operation, steps))


def _say(text: str) -> None:
    if collectives.rank() == 0:
        print(f"collective: {text}", flush=True)


def _start_from(weights: _Weights) -> None:
    """Makes the variables of the default graph start from a checkpoint.

    Raises:
        ValueError: it lacks a variable, and none is to be skipped.
    """
    saved = {re.sub(r"/part_\d+$", "", name) for name, _ in tf.train.list_variables(weights.folder)}
    variables = {v.op.name: v for v in tf.global_variables(weights.scope)}
    variables.pop(tf.GraphKeys.GLOBAL_STEP, None)
    missing = [name for name in variables if name not in saved]
    if missing and not weights.skips_missing:
        raise ValueError(
            f"hb.keras.Model.load_weights({weights.folder!r}): the checkpoint has no "
            f"{', '.join(missing)}; skip_mismatched=True leaves them to their initializers."
        )
    if missing:
        _say(f"hb.keras.Model.load_weights: {weights.folder!r} has no {', '.join(missing)}")
    tf.train.init_from_checkpoint(
        weights.folder, {name: v for name, v in variables.items() if name in saved}
    )


for _name in UNSUPPORTED:
    setattr(Training, _name, refusing(_name))


def _is_of_tensors(args: Any, kwargs: Any) -> bool:
    return bool(args) or "inputs" in kwargs or "outputs" in kwargs


class _FunctionalModel(Training, KerasModel):
    """Is made of inputs and outputs; Keras makes a functional model of the class."""


class Model(Training, KerasModel):
    """Is `hb.keras.Model`: derive a class with a `call`, or pass `tf.keras.Input`s and outputs.

    Args:
        inputs: the inputs of a functional model.
        outputs: its outputs.
        name: the model's name.
        train_drop_remainder: training ends when the first rank is out of data; False is refused.
        eval_drop_remainder: no effect: an evaluation counts every record.
        predict_drop_remainder: no effect: so does a prediction.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model and _is_of_tensors(args, kwargs):
            return _FunctionalModel(*args, **_without_remainders(kwargs))
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        if _is_of_tensors(args, kwargs):
            raise NotImplementedError(
                f"{type(self).__name__}(inputs, outputs) is not supported: a class derived from "
                "hb.keras.Model has a call; hb.keras.Model(inputs, outputs) itself makes a model "
                "of tensors."
            )
        super().__init__(**_without_remainders(kwargs))


def _without_remainders(kwargs: dict[str, Any]) -> dict[str, Any]:
    remainders = {name: kwargs[name] for name in kwargs if name.endswith("_drop_remainder")}
    use("__init__", remainders)
    return {name: value for name, value in kwargs.items() if name not in remainders}
