"""Finds what an `InferenceContext` loads: versions of a SavedModel, or states of a checkpoint.

a SavedModel              itself, once
a folder of versions      the newest complete one, and each that comes later
a checkpoint, a folder    the newest state, and each that comes later: exported to a temporary
  of checkpoints          SavedModel, so that TensorFlow's own operations answer in each case
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, chain_names
from collective.checkpoint.reading import opening
from collective.errors import RankError
from collective.inference.served_model import number_of
from collective.ops.counting import counted
from collective.serving import export, version_watch, versions
from collective.strategy import CollectiveStrategy
from collective.trainer import inputs
from collective.trainer.loaded_model import load

RECEIVER = "serving_input_receiver_fn"


class Version(NamedTuple):
    """Names a SavedModel to load, and its number."""

    path: str
    number: int


class Source(Protocol):
    """Describes where versions come from. One thread uses it; any may close it."""

    def first(self) -> Version | None:
        """Returns the newest version, without waiting; None if there is none yet."""

    def later(self) -> Iterator[Version]:
        """Waits for versions that come after the last one that was given."""

    def loaded(self, version: Version) -> None:
        """Is told that a version is in memory, and those before it aren't needed any more."""

    def close(self) -> None:
        """Ends the waiting, and removes what is temporary once nobody waits."""


class OneSavedModel:
    """Gives the SavedModel in a folder."""

    def __init__(self, path: str):
        self._path = path

    def first(self) -> Version | None:
        return Version(self._path, number_of(self._path))

    def later(self) -> Iterator[Version]:
        return iter(())

    def loaded(self, version: Version) -> None:
        pass

    def close(self) -> None:
        pass


class FolderOfVersions:
    """Gives the versions in a folder; see `collective.serving.watch`."""

    def __init__(self, path: str, interval: float):
        self._watch = version_watch.watch(path, interval, None)

    def first(self) -> Version | None:
        path = self._watch.latest()
        return None if path is None else Version(path, number_of(path))

    def later(self) -> Iterator[Version]:
        return (Version(path, number_of(path)) for path in self._watch)

    def loaded(self, version: Version) -> None:
        pass

    def close(self) -> None:
        self._watch.close()


class ModelCode(NamedTuple):
    """Holds the arguments of an `InferenceContext` that say what builds a checkpoint's model."""

    signature_def_fn: Callable[[], Any] | None
    model_fn: Any
    params: Mapping[str, Any] | None
    serving_input_receiver_fn: Callable[[], Any] | None
    run_code: bool


class Checkpoints:
    """Gives the newest state of a checkpoint, with its increments, as SavedModels.

    Args:
        path: a checkpoint's prefix, or a folder of checkpoints.
        interval: seconds between two looks at the folder.
        code: what builds the model.

    Raises:
        ValueError: the job has several ranks; or what builds the model isn't known whole.
    """

    def __init__(self, path: str, interval: float, code: ModelCode):
        self._path, self._interval = path, interval
        self._strategy = CollectiveStrategy()
        if self._strategy.world_size() > 1:
            raise ValueError(
                f"InferenceContext('{path}'): a checkpoint is opened by one process, and this job "
                f"has {counted(self._strategy.world_size(), 'rank')}. Call "
                "strategy.export_saved_model(…) on all of them, and open what it has written."
            )
        self._export = self._exporter(path, code)
        self._folder = tempfile.mkdtemp(prefix="collective-inference-")
        # Also at the end of a program that doesn't close it.
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._is_closed = threading.Event()
        self._given: tuple[str, int] | None = None
        self._base: str | None = None
        self._count = 0

    def first(self) -> Version | None:
        return self._export_state(self._state())

    def later(self) -> Iterator[Version]:
        warned = None
        while not self._is_closed.wait(self._interval):
            state = None
            try:
                state = self._state()
                if state != self._given:
                    yield self._export_state(state)
            except (ValueError, OSError, RankError, tf.errors.OpError) as error:
                reason = str(getattr(error, "message", None) or error)
                if not self._is_closed.is_set() and warned != (state, reason):
                    warned = state, reason
                    warnings.warn(
                        f"'{self._path}': its newest state can't be read now: "
                        f"{reason.rstrip('.')}. The previous one goes on answering.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        shutil.rmtree(self._folder, ignore_errors=True)

    def loaded(self, version: Version) -> None:
        if self._base is not None and self._base != version.path:
            shutil.rmtree(os.path.dirname(self._base), ignore_errors=True)
        self._base = version.path

    def close(self) -> None:
        self._is_closed.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _state(self) -> tuple[str, int]:
        """Returns the newest whole checkpoint, and the number of increments to apply to it.

        Raises:
            ValueError: there is no checkpoint.
        """
        prefix = chain.prefix_of(self._path)
        base, number = chain_names.split(prefix)
        return base, chain.newest(base) if number is None else number

    def _export_state(self, state: tuple[str, int]) -> Version:
        base, number = state
        prefix = chain_names.increment_prefix(base, number) if number else base
        step = chain.step_of(opening.open_checkpoint(prefix).last)
        self._count += 1
        # In a folder of its own: exports into one would wait for a second with a new name.
        folder = os.path.join(self._folder, str(self._count))
        with self._strategy.scope(plan="quiet"):
            path = self._export(folder, prefix, self._base)
        self._given = state
        return Version(path, self._count if step is None else step)

    def _exporter(self, path: str, code: ModelCode) -> Callable[[str, str, str | None], str]:
        """Returns what exports a checkpoint: a function of (folder, prefix, base)."""
        strategy, signatures = self._strategy, code.signature_def_fn
        if signatures is not None:
            if code.model_fn is not None or code.run_code:
                raise ValueError(
                    "InferenceContext(…) takes signature_def_fn=… for what a session has trained, "
                    "or model_fn=… or run_code=True for an Estimator's or a Trainer's; not both."
                )
            return lambda folder, prefix, base: strategy.export_saved_model(
                folder, prefix, signatures, base=base
            )
        if code.model_fn is None and not code.run_code:
            return export.of_tables
        model = load(path, model_fn=code.model_fn, params=code.params, run_code=code.run_code)
        receiver = code.serving_input_receiver_fn
        if receiver is None and code.run_code:
            receiver = getattr(model.model_fn, "__globals__", {}).get(RECEIVER)
        if receiver is None:
            where = " (the code that was stored has no function of this name)" * code.run_code
            raise ValueError(
                f"InferenceContext('{path}') needs {RECEIVER}=…, which makes the placeholders of "
                f"the model's inputs, as for Estimator.export_saved_model{where}."
            )
        takes_params = inputs.takes(model.model_fn, "params")
        estimator = strategy.estimator(
            model.model_fn, params=model.params if takes_params else None
        )
        return lambda folder, prefix, base: tf.compat.as_str(
            estimator.export_saved_model(folder, receiver, checkpoint_path=prefix, base=base)
        )


def source_of(path: str, interval: float, code: ModelCode) -> Source | None:
    """Returns the source that a path names; None if nothing is there yet."""
    if versions.is_saved_model(path):
        return OneSavedModel(path)
    if versions.versions_in(path):
        return FolderOfVersions(path, interval)
    is_folder = tf.io.gfile.isdir(path)
    prefix = tf.train.latest_checkpoint(path) if is_folder else path
    if prefix and tf.io.gfile.exists(f"{chain_names.split(prefix)[0]}.index"):
        return Checkpoints(path, interval, code)
    return None


def described(path: str) -> str:
    """Says what a path is, of which `source_of` is None."""
    if tf.io.gfile.isdir(path):
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(path))
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        return f"the folder has {shown}" if names else "the folder is empty"
    is_there = tf.io.gfile.exists(path)
    return f"'{os.path.basename(path)}' is another file" if is_there else "it doesn't exist"
