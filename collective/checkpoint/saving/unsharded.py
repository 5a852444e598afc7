"""Reads what a Saver's own operations save, so that others can write it: all but tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.saving.saver import unsharded_def
from collective.ops.graph import graph_analysis
from collective.ops.graph.sessions import errors_without_stacks, run_unpatched


class SavedTensor(NamedTuple):
    """Describes a tensor that a Saver saves.

    Attributes:
        name: its name in the checkpoint.
        spec: names its part of the entry, in the form of `SaveV2`; '' for the whole entry.
        tensor: the tensor.
    """

    name: str
    spec: str
    tensor: tf.Tensor


def saved_tensors(saver: Any, session: Any) -> list[SavedTensor] | None:
    """Returns what a Saver's own operations save; None if Python can't hold some of it."""
    top = session.graph.get_tensor_by_name(unsharded_def(saver).save_tensor_name).op
    walked = graph_analysis.walk([top], stop=_is_save)
    saves = sorted(filter(_is_save, walked), key=lambda op: str(op.name))
    if not saves:
        return []
    with errors_without_stacks():
        named = run_unpatched(session, [list(op.inputs[1:3]) for op in saves])
    found = []
    for op, (names, specs) in zip(saves, named):
        for name, spec, tensor in zip(names, specs, op.inputs[3:]):
            if tensor.dtype in (tf.variant, tf.resource):
                return None
            found.append(SavedTensor(name.decode(), spec.decode(), tensor))
    return found


def values(session: Any, tensors: Sequence[SavedTensor]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (name, spec, value) of each tensor; at most a file's bytes are read at a time."""
    batch: list[SavedTensor] = []
    size = 0
    for each in tensors:
        elements = each.tensor.shape.num_elements() if each.tensor.shape.rank is not None else 0
        of_this = (elements or 0) * each.tensor.dtype.size
        if batch and size + of_this > tensor_bundle.FILE_BYTES:
            yield from _read(session, batch)
            batch, size = [], 0
        batch.append(each)
        size += of_this
    if batch:
        yield from _read(session, batch)


def _read(session: Any, batch: Sequence[SavedTensor]) -> Iterator[tuple[str, str, np.ndarray]]:
    with errors_without_stacks():
        read = run_unpatched(session, [each.tensor for each in batch])
    for each, value in zip(batch, read):
        yield each.name, each.spec, np.asarray(value)


def save_itself(saver: Any, session: Any, prefix: str) -> None:
    """Lets the Saver's own operations write a bundle."""
    saver_def = unsharded_def(saver)
    with errors_without_stacks():
        run_unpatched(session, saver_def.save_tensor_name, {saver_def.filename_tensor_name: prefix})


def _is_save(op: tf.Operation) -> bool:
    return bool(op.type == "SaveV2")
