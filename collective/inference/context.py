"""Answers with a trained model in one process, and follows its versions meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.inference.served_model import ServedModel
from collective.inference.sources import ModelCode, Source, Version, described, source_of


class InferenceContext:
    """Answers with a trained model, in one process, without ranks or Horovod.

        with collective.InferenceContext("served") as model:
            model.predict(batch)["score"]       # a collective.data.Batch, or a dict of arrays
            model.lookup([3, 5], table="user")  # [2, D], rows of a table

    TensorFlow's own operations compute the answers, those of a SavedModel, with the numbers of
    evaluation: an unknown key of a dynamic table reads zeros (or its policy's
    `default_value_no_permission`), an id outside of a static table is an error, and nothing is
    inserted.

    Versions that come later are loaded by a thread, and take over between two answers. Meanwhile
    both are in memory. Each answer is given by one version. If a later version can't be loaded, it
    warns, and the previous one goes on.

    Any number of threads may ask at the same time. It is for PERSIA's `InferCtx`.

    Args:
        path: a SavedModel; a folder of versions, whose newest complete version answers (those of
            `strategy.export_saved_model`, say); a checkpoint's prefix, or a folder of checkpoints,
            whose newest state answers, with its increments.
        model_fn: of a checkpoint: builds the model of an Estimator or a Trainer, as in training.
        params: of model_fn; None: those of the training, if a Trainer has trained.
        serving_input_receiver_fn: of a checkpoint, with model_fn: makes the inputs, as for
            `Estimator.export_saved_model`; with `run_code` the stored code's function of this name.
        signature_def_fn: of a checkpoint that a session saved: builds the model and returns its
            signatures, as for `strategy.export_saved_model`.
        run_code: of a checkpoint: whether to import the code that is stored with it for model_fn
            (see `collective.load`). **It executes that code.**
        interval: seconds between two looks for a new version. Default: 5.
        wait: seconds to wait for the first version; None: without end. Default: 0.

    A checkpoint is exported to a temporary SavedModel, which takes space for its tables. Without
    anything that builds the model, only `lookup` answers.

    Attributes:
        path: as given.
        version: the number of the version that answers: its folder's, or a checkpoint's global
            step.
        tables: the names of the tables that `lookup` knows.

    Raises:
        ValueError: there is no model at `path`, or it can't be loaded; a checkpoint is opened in a
            job of several ranks, or without serving_input_receiver_fn.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model_fn: Any = None,
        params: Mapping[str, Any] | None = None,
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        signature_def_fn: Callable[[], Any] | None = None,
        run_code: bool = False,
        interval: float = 5.0,
        wait: float | None = 0.0,
    ):
        self.path = tf.compat.as_str(os.fspath(path))
        _check_seconds("interval", interval, lambda seconds: seconds > 0)
        if wait is not None:
            _check_seconds("wait", wait, lambda seconds: seconds >= 0)
        code = ModelCode(signature_def_fn, model_fn, params, serving_input_receiver_fn, run_code)
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._source, first = self._begin(code, interval, wait)
        self._problems: dict[int, str] = {}
        try:
            self._model: ServedModel | None = ServedModel(*first)
        except BaseException:
            self._source.close()
            raise
        self._source.loaded(first)
        self._thread = threading.Thread(
            target=self._follow, name="collective-inference", daemon=True
        )
        self._thread.start()

    def _begin(
        self, code: ModelCode, interval: float, wait: float | None
    ) -> tuple[Source, Version]:
        """Finds the source and its first version.

        Raises:
            ValueError: there is none after the time to wait.
        """
        ends = None if wait is None else time.monotonic() + wait
        while True:
            source = source_of(self.path, interval, code)
            first = None if source is None else source.first()
            if source is not None and first is not None:
                return source, first
            if source is not None:
                source.close()
            left = interval if ends is None else ends - time.monotonic()
            if left <= 0:
                raise ValueError(
                    f"There is no model at '{self.path}': {described(self.path)}. Give a "
                    "SavedModel, a folder of versions of it, or a checkpoint; wait=… waits for the "
                    "first one."
                )
            time.sleep(min(interval, left))

    def _follow(self) -> None:
        for version in self._source.later():
            try:
                model = ServedModel(*version)
            except ValueError as error:
                self._problems[version.number] = str(error)
                warnings.warn(
                    f"{str(error).rstrip('.')}. Version {self.version} goes on answering.",
                    RuntimeWarning,
                    stacklevel=1,
                )
                continue
            with self._lock:
                before, self._model = self._model, model
                if self._is_closed.is_set():
                    self._model = None
            self._problems.clear()
            for retired in (before, model if self._is_closed.is_set() else None):
                if retired is not None:
                    retired.retire()
            self._source.loaded(version)

    # ---- What a user calls

    def predict(self, batch: Any, signature: str | None = None) -> dict[str, Any]:
        """Returns the model's outputs for a batch.

        Args:
            batch: a `collective.data.Batch`, whose ids, dense numbers and labels go to the inputs
                of the same names; others of it aren't used. Or a dict by the names of inputs: of
                arrays, of nested lists, of `RaggedIds` or lists of lists for ragged and sparse
                inputs.
            signature: the name of the function of the SavedModel. Default: 'serving_default', or
                the only one.

        Returns:
            Arrays by the names of outputs, as `session.run` returns them.

        Raises:
            ValueError: there is no such signature; an input is missing or unknown, or has another
                type, shape or number of samples. The message names it.
            TypeError: `batch` is neither.
            tf.errors.InvalidArgumentError: the model refuses a value, such as an id outside of a
                static table.
            RuntimeError: the context is closed.
        """
        with self.current() as model:
            return model.predict(batch, signature)

    def lookup(self, ids: Any, table: str | None = None) -> np.ndarray:
        """Returns the rows of ids.

        Args:
            ids: integers, an array or nested lists of any shape; text for a table of string keys.
                uint64 ids mean the int64 of the same 64 bits.
            table: the table's name. Default: the only one.

        Returns:
            [*, D], `*` being the shape of `ids`.

        Raises:
            ValueError: there is no such table; or an id is outside of a static table.
            TypeError: ids are neither integers nor text.
            RuntimeError: the context is closed.
        """
        with self.current() as model:
            return model.lookup(ids, table)

    @property
    def version(self) -> int:
        with self.current() as model:
            return model.number

    @property
    def tables(self) -> list[str]:
        with self.current() as model:
            return list(model.tables)

    @contextlib.contextmanager
    def current(self) -> Iterator[ServedModel]:
        """Keeps the version that answers now in memory, for several questions to the same one.

        Raises:
            RuntimeError: the context is closed.
        """
        with self._lock:
            model = self._model
            if model is None:
                raise RuntimeError(f"InferenceContext('{self.path}') is closed.")
            model.__enter__()
        try:
            yield model
        finally:
            model.__exit__()

    def problems(self) -> dict[int, str]:
        """Returns why versions after the current one could not be loaded, by their numbers."""
        return dict(self._problems)

    def close(self) -> None:
        """Ends following, lets answers that are being computed end, and frees the model."""
        self._is_closed.set()
        self._source.close()
        with self._lock:
            model, self._model = self._model, None
        if model is not None:
            model.retire()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._source.close()

    def __enter__(self) -> InferenceContext:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _check_seconds(name: str, value: Any, is_right: Callable[[float], bool]) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not is_right(value):
        raise ValueError(f"InferenceContext({name}={value!r}): it is a number of seconds, as in 5.")
