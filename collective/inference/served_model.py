"""Loads one SavedModel into a session of its own, and answers with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.data.batches.batch import Batch
from collective.inference.signature import Signature
from collective.ops import key_hashing
from collective.ops.graph.sessions import errors_without_stacks, run_unpatched
from collective.serving.export_record import ExportRecord
from collective.tables.served_table import ServedTable
from collective.tensorflow_internals.saved_models import SavedModelLoader


class ServedModel:
    """Is a version of a model in memory.

    Any number of threads ask it at the same time, each inside of `with model:`. It is freed when it
    was retired and the last of these has ended.

    Args:
        path: the SavedModel's folder.
        number: the version's.

    Attributes:
        path, number: as given.
        signatures: by their keys.
        tables: the names of the tables whose rows `lookup` gives.

    Raises:
        ValueError: TensorFlow can't load it; the message says why.
    """

    def __init__(self, path: str, number: int):
        self.path, self.number = path, number
        self._lock, self._users, self._is_retired = threading.Lock(), 0, False
        self._lookups: dict[str, tuple[Any, Any, ServedTable]] = {}
        graph = tf.Graph()
        self._session = tf.Session(graph=graph)
        try:
            with graph.as_default():
                found = SavedModelLoader(path).load(
                    self._session, [tf.saved_model.tag_constants.SERVING]
                )
                self.signatures = {
                    key: Signature(key, proto, graph)
                    for key, proto in sorted(found.signature_def.items())
                    if not key.startswith("__")
                }
                self._add_lookups(path)
        except (tf.errors.OpError, OSError, RuntimeError, KeyError, ValueError) as error:
            self._session.close()
            reason = str(getattr(error, "message", None) or error).partition("\n")[0]
            raise ValueError(f"'{path}' can't be loaded as a SavedModel: {reason}") from error
        self.tables: Sequence[str] = sorted(self._lookups)
        graph.finalize()

    def _add_lookups(self, path: str) -> None:
        record = ExportRecord.read(path)
        variables = {variable.op.name: variable for variable in tf.global_variables()}
        for name, table in ((record and record.tables) or {}).items():
            ids = tf.placeholder(tf.int64, [None])
            served = table.table(name, variables)
            self._lookups[name] = ids, served.fetch(ids), served
        self._words = tf.placeholder(tf.string, [None])
        self._keys_of_words = key_hashing.of_strings(self._words)

    # ---- Answers

    def predict(self, values: Any, key: str | None = None) -> dict[str, Any]:
        """Returns the outputs by name; see `InferenceContext.predict`."""
        signature = self.signature(key)
        if isinstance(values, Batch):
            values = signature.select({**values.labels, **values.dense, **values.ids})
        if not isinstance(values, Mapping):
            raise TypeError(
                "predict(…) takes a collective.data.Batch, or a dict of arrays by the names of "
                f"inputs, not {type(values).__name__}."
            )
        outputs: dict[str, Any] = self._run(signature.outputs, signature.feed(values))
        return outputs

    def signature(self, key: str | None) -> Signature:
        """Returns a signature; None: the default one, or the only one.

        Raises:
            ValueError: there is none with this key.
        """
        if key is None:
            key = tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
            if key not in self.signatures and len(self.signatures) == 1:
                key = next(iter(self.signatures))
        if key in self.signatures:
            return self.signatures[key]
        has = ", ".join(self.signatures)
        if not has:
            raise ValueError(
                "the model has tables and no function that predicts. Of a checkpoint, give what "
                "builds the model: model_fn=…, signature_def_fn=… or run_code=True."
            )
        raise ValueError(f"the model has no signature {key!r}; it has {has}.")

    def lookup(self, ids: Any, table: str | None = None) -> np.ndarray:
        """Returns rows; see `InferenceContext.lookup`."""
        name = self._table(table)
        placeholder, rows, served = self._lookups[name]
        array = np.asarray(ids)
        if array.dtype.kind in "OSU" and array.size:
            words = np.array([tf.compat.as_bytes(each) for each in array.reshape(-1)], object)
            hashed = self._run(self._keys_of_words, {self._words: words})
            array = hashed.reshape(array.shape)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"ids of table '{name}' are integers, not {array.dtype}.")
        keys = array.reshape(-1).astype(np.int64)
        if served.rows is not None and keys.size:
            wrong = (keys < 0) | (keys >= served.rows)
            if wrong.any():
                raise ValueError(
                    f"table '{name}' has rows 0 … {served.rows - 1:,}, and none of id "
                    f"{array.reshape(-1)[wrong][0]}."
                )
        found: np.ndarray = self._run(rows, {placeholder: keys})
        return found.reshape(*array.shape, served.dim)

    def _table(self, name: str | None) -> str:
        if name is None and len(self._lookups) == 1:
            return next(iter(self._lookups))
        if name in self._lookups:
            return str(name)
        if not self._lookups:
            raise ValueError(
                f"which variables of '{self.path}' are tables isn't recorded: it was exported by "
                "plain TensorFlow, by an older release, or has no table. Export it again."
            )
        which = "name a table" if name is None else f"there is no table {name!r}"
        raise ValueError(f"{which}: the model has {', '.join(self.tables)}.")

    def _run(self, fetches: Any, feeds: Mapping[Any, Any]) -> Any:
        with errors_without_stacks():
            return run_unpatched(self._session, fetches, feeds)

    # ---- Life

    def __enter__(self) -> ServedModel:
        """Keeps it in memory until the end of the `with` statement, if it isn't retired before."""
        with self._lock:
            self._users += 1
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_retired and not self._users
        if is_last:
            self._session.close()

    def retire(self) -> None:
        """Frees it as soon as nobody uses it."""
        with self._lock:
            is_last = not self._is_retired and not self._users
            self._is_retired = True
        if is_last:
            self._session.close()


def number_of(path: str) -> int:
    """Returns the number of the version in a folder; 1 if its name is no number."""
    name = os.path.basename(os.path.normpath(path))
    return int(name) if name.isascii() and name.isdigit() else 1
