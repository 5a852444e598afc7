"""Gives a trained model outside of training: `collective.load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain
from collective.checkpoint.reading import opening
from collective.checkpoint.reading.loaded import LoadedCheckpoint
from collective.checkpoint.saving import saved_code
from collective.checkpoint.saving.best import FOLDER as BEST
from collective.estimator.estimator import Estimator
from collective.strategy import CollectiveStrategy
from collective.trainer import inputs, record

_BATCH = 1024


def load(
    path: str,
    *,
    model_fn: Any = None,
    params: Mapping[str, Any] | None = None,
    run_code: bool = False,
) -> LoadedModel:
    """Opens a checkpoint, or the newest one of a job, as a model outside of training.

        model = collective.load("model/best", run_code=True)
        print(model.step, model.metrics, model.params)
        for prediction in model.predict(test_data):
            ...

    By itself it reads values only, and runs nothing that comes with the checkpoint. To predict, a
    model_fn is needed: your own, or the one in the code that `scope(save_code=True)` has stored.
    **run_code=True executes that code**: use it only for checkpoints of people whom you trust. It
    imports the script that trained, so that one should train under `if __name__ == "__main__":`.

    It works in one process, and on all ranks of a job alike. It is for
    `determined.pytorch.load_trial_from_checkpoint_path`.

    Args:
        path: a checkpoint's prefix, or a folder (a Trainer's or an Estimator's model_dir, or the
            folder `best` in it), whose newest checkpoint is opened.
        model_fn: builds the model, as in training.
        params: of model_fn; None: those of the training, if a Trainer has trained.
        run_code: whether to import the stored code for the model_fn that a Trainer has trained.

    Returns:
        The model.

    Raises:
        ValueError: there is no checkpoint; or there is no code, or it isn't known which function of
            it built the model.
    """
    prefix = chain.prefix_of(os.fspath(path))
    folder = _job_folder(prefix)
    found = record.read(folder)
    if run_code and model_fn is None:
        model_fn = _stored_model_fn(folder, found)
    if params is None:
        params = found.params if found is not None else {}
    return LoadedModel(prefix, found, model_fn, dict(params))


class LoadedModel:
    """Holds a checkpoint, what is known of its training, and perhaps the function that builds it.

    Attributes:
        checkpoint: its prefix.
        step: its global step.
        values: its variables and tables, by name, as of `collective.checkpoint.load`.
        params: the hyperparameters.
        metrics: those of its validation by a Trainer; {} if there was none.
        model_fn: builds the model; None if it isn't known.
    """

    def __init__(
        self,
        checkpoint: str,
        training: record.TrainingRecord | None,
        model_fn: Any,
        params: dict[str, Any],
    ):
        self.checkpoint, self.params = checkpoint, params
        self.values = LoadedCheckpoint(checkpoint)
        self.step = chain.step_of(opening.open_checkpoint(checkpoint).last) or 0
        self.metrics = training.validations.get(self.step, {}) if training is not None else {}
        self._batch = (training.batch if training is not None else 0) or _BATCH
        self.model_fn = model_fn
        self._estimator: Estimator | None = None

    def predict(self, data: Callable[..., Any], gather: bool = False) -> Iterator[Any]:
        """Yields the predictions for this rank's share of the records.

        Args:
            data: the data, as for a `collective.Trainer`.
            gather: whether rank 0 gets all predictions, in order, and the others none.

        Returns:
            An iterator of predictions, one for each record.

        Raises:
            ValueError: there is no model_fn.
        """
        predictions: Iterator[Any] = self._model().predict(
            inputs.evaluation_input(data, self._batch, self.params),
            checkpoint_path=self.checkpoint,
            gather=gather,
        )
        return predictions

    def evaluate(self, data: Callable[..., Any]) -> dict[str, Any]:
        """Returns the metrics of all records, the same on all ranks.

        Args:
            data: the data, as for a `collective.Trainer`.

        Returns:
            The metrics, by name.

        Raises:
            ValueError: there is no model_fn.
        """
        metrics: dict[str, Any] = self._model().evaluate(
            inputs.evaluation_input(data, self._batch, self.params),
            checkpoint_path=self.checkpoint,
        )
        return metrics

    def export(self, folder: str, serving_input_receiver_fn: Callable[[], Any]) -> str:
        """Exports a SavedModel that plain TensorFlow serves.

        Args:
            folder: where the version's folder is made.
            serving_input_receiver_fn: makes the inputs, as for
                `tf.estimator.Estimator.export_saved_model`.

        Returns:
            The path of the version, on every rank.

        Raises:
            ValueError: there is no model_fn.
        """
        exported = self._model().export_saved_model(
            folder, serving_input_receiver_fn, checkpoint_path=self.checkpoint
        )
        return tf.compat.as_str(exported)

    def _model(self) -> Estimator:
        """Returns an Estimator with a temporary folder, which never writes next to the checkpoint.

        Raises:
            ValueError: there is no model_fn.
        """
        if self.model_fn is None:
            raise ValueError(
                f"'{self.checkpoint}' has values, but which function builds the model isn't known: "
                "give collective.load() model_fn=…; or run_code=True, which executes the code that "
                "was stored with the checkpoint."
            )
        if self._estimator is None:
            takes_params = inputs.takes(self.model_fn, "params")
            self._estimator = CollectiveStrategy().estimator(
                self.model_fn, params=self.params if takes_params else None
            )
        return self._estimator


def _job_folder(prefix: str) -> str:
    """Returns the folder with the record and the code of a checkpoint."""
    folder = os.path.dirname(prefix) or "."
    parent = os.path.dirname(folder) or "."
    return parent if os.path.basename(folder) == BEST else folder


def _stored_model_fn(folder: str, found: record.TrainingRecord | None) -> Any:
    """Imports the function that built the model from the code stored in a folder."""
    code = saved_code.load_code(folder)
    if found is None or found.model_fn is None:
        raise ValueError(
            f"which function of the code in '{code.folder}' builds the model isn't known: a "
            "collective.Trainer notes it, if model_fn is a function of a module. Give model_fn=…: "
            f"collective.checkpoint.load_code('{folder}').module(…) imports a module of it."
        )
    module, _, name = found.model_fn.partition(":")
    try:
        return getattr(code.module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the code in '{code.folder}' has no {name} in {module}, which built the model "
            f"({error}). Give model_fn=…"
        ) from error
