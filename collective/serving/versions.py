"""Finds the versions of a SavedModel in a folder, and tells which are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from collective.checkpoint.files.tensor_bundle import Bundle
from collective.ops.counting import counted
from collective.serving.export_record import ExportRecord
from collective.tensorflow_internals.saved_models import saved_model_pb2

GRAPHS = ("saved_model.pb", "saved_model.pbtxt")


def is_saved_model(path: str) -> bool:
    """Tells whether a folder has the graph of a SavedModel."""
    return any(tf.io.gfile.exists(os.path.join(path, name)) for name in GRAPHS)


def versions_in(folder: str) -> list[tuple[int, str]]:
    """Returns (number, path) of what may be versions, the newest first.

    They are the entries whose names are numbers, as for TensorFlow Serving: others are skipped,
    such as those that are being written. A missing folder has none.

    Raises:
        tf.errors.OpError: the folder can't be read.
    """
    try:
        entries = [entry.rstrip("/") for entry in tf.io.gfile.listdir(folder)]
    except tf.errors.NotFoundError:
        return []
    numbers = [entry for entry in entries if entry.isascii() and entry.isdigit()]
    return sorted(((int(name), os.path.join(folder, name)) for name in numbers), reverse=True)


def newest_complete(folder: str) -> str | None:
    """Returns the path of the newest version that is complete; None if there is none."""
    complete = (path for _, path in versions_in(folder) if problem_of(path) is None)
    return next(complete, None)


def problem_of(path: str) -> str | None:
    """Returns what a version lacks; None if it is complete.

    The graph is parsed, and all other files are checked for existence and full length. TensorFlow
    compares checksums of variables when it loads them.
    """
    try:
        return next(_problems(path), None)
    except (tf.errors.OpError, OSError, ValueError) as error:
        return str(getattr(error, "message", error))


def _problems(path: str) -> Iterator[str]:
    if not is_saved_model(path):
        yield f"it has no {GRAPHS[0]}"
        return
    binary = os.path.join(path, GRAPHS[0])
    if tf.io.gfile.exists(binary) and not _is_graph(binary):
        yield f"its {GRAPHS[0]} is damaged"
    variables = os.path.join(path, "variables")
    if tf.io.gfile.isdir(variables) and tf.io.gfile.listdir(variables):
        Bundle(os.path.join(variables, "variables")).check_files()
    record = ExportRecord.read(path)
    for name, file in {} if record is None else record.files.items():
        size = tf.io.gfile.stat(os.path.join(path, name)).length
        if size != file.size:
            yield f"its file {name} has {counted(size, 'byte')}, not {file.size:,}"


def _is_graph(path: str) -> bool:
    with tf.io.gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        return bool(saved_model_pb2.SavedModel.FromString(data).meta_graphs)
    except Exception:  # protobuf's kinds differ between its implementations
        return False
