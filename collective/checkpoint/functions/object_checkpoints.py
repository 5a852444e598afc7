"""Lets `tf.train.Checkpoint` and its manager save and restore tables of eager code.

The files are TensorFlow's own, with whole tables and slots: plain TensorFlow reads them, and any
number of ranks. All ranks call what a script calls, with the same paths. What has no tables is left
to TensorFlow: there a script may let rank 0 save alone, and restore.

A metric's state, which each rank keeps of its own records, is saved as that of all ranks; when it
is restored, rank 0 gets it, and the others begin with none.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.functions import whole_files
from collective.coordination import barrier
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.replication import eager_states
from collective.tables import dense_view
from collective.tables.table import Sharded
from collective.tensorflow_internals.checkpoints import checkpoint as checkpoint_lib
from collective.tensorflow_internals.variables import base, variables

# Not empty while this rank does what rank 0 does, less the files.
_following: list[bool] = []
# Not empty while all ranks restore a checkpoint together.
_restoring: list[bool] = []
# Not empty while all ranks save and restore together what may have no tables.
_together: list[bool] = []
# The numbers that TensorFlow gives to what all ranks have restored.
_restored: set[int] = set()
# By such a number, states of metrics that were restored before there was a table.
_early: dict[int, list[weakref.ref[Any]]] = collections.defaultdict(list)


def write(
    original: Callable[..., Any], checkpoint: Any, file_prefix: str, options: Any = None
) -> Any:
    """Replaces `tf.train.Checkpoint._write`: all ranks call it, and rank 0 writes.

    `write`, `save`, and `CheckpointManager.save` end there. The callbacks among the options note
    the checkpoint and delete older ones: they run on all ranks, and change files on rank 0.

    Raises:
        RankError: it failed on another rank, or another rank does something else.
    """
    if not _is_of_all_ranks(checkpoint):
        return original(checkpoint, file_prefix, options)
    doing = f"saving the tf.train.Checkpoint '{file_prefix}'"
    states = [
        ("A metric in the checkpoint", each) for each in _tracked(checkpoint) if _is_state(each)
    ]
    if dense_view.saves_whole():  # The file is Keras's, and each rank's has another path.
        with eager_states.of_all_ranks("metrics in a checkpoint", states):
            return original(checkpoint, file_prefix, options)

    def save(path: str) -> None:
        chosen = copy.copy(options)
        if chosen is not None and collectives.rank() > 0:
            chosen.experimental_write_callbacks = None
        with eager_states.of_all_ranks("metrics in a checkpoint", states):
            original(checkpoint, path, chosen)

    barrier.exchange(None, doing, {})
    whole_files.write(doing, file_prefix, save)
    if collectives.rank() > 0 and options is not None and options.experimental_write_callbacks:
        with _inside(_following):
            checkpoint_lib._execute_callbacks(options.experimental_write_callbacks, file_prefix)
    return file_prefix


def change_files(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces what notes and deletes checkpoints: of one of all ranks, rank 0 does it."""
    return None if _following else original(*args, **kwargs)


def refuse_threads(original: Callable[..., Any], checkpoint: Any) -> Any:
    """Replaces `tf.train.Checkpoint._async_checkpointer`, which saves in a thread of its own.

    Raises:
        NotImplementedError: there are tables, which ranks read together.
    """
    if _is_of_all_ranks(checkpoint):
        raise NotImplementedError(
            "CheckpointOptions(experimental_enable_async_checkpoint=True) isn't possible with "
            "tables, which the ranks read together: leave it out, or save by "
            "collective.keras.callbacks.Checkpoint."
        )
    return original(checkpoint)


def read(original: Callable[..., Any], checkpoint: Any, save_path: Any, options: Any = None) -> Any:
    """Replaces `tf.train.Checkpoint.read`: all ranks call it, and each takes its rows of tables.

    `restore`, `CheckpointManager.restore_or_initialize` and `load_weights` call it. Tables and
    slots that are made later are restored then (see `restore_table`).

    Raises:
        RankError: it failed on another rank, that one restores another checkpoint, or does
            something else.
    """
    if not _is_of_all_ranks(checkpoint):
        return original(checkpoint, save_path, options)
    path = None if save_path is None else os.fspath(save_path)
    doing = "restoring a tf.train.Checkpoint"
    said = barrier.exchange(None, doing, {"path": path})
    for rank, each in enumerate(said):
        if each["path"] != said[0]["path"]:
            raise RankError(
                f"{doing}: it is {said[0]['path']!r} on rank 0, and {each['path']!r} on rank "
                f"{rank}. Give all ranks the same path, in a folder that all of them see."
            )

    def restore() -> None:
        if path is not None:
            _refuse_names(path)
        status = original(checkpoint, save_path, options)
        if path is not None:
            _restored.add(status._checkpoint.restore_uid)
        results.append(status)

    results: list[Any] = []
    with _inside(_restoring):
        barrier.run_on_all_ranks(None, doing, restore)
    return results[0]


def _refuse_names(path: str) -> None:
    if not tf.train.load_checkpoint(path).has_tensor(base.OBJECT_GRAPH_PROTO_KEY):
        raise ValueError(
            f"The checkpoint '{path}' has variables by their names, as sessions and "
            "collective.keras.callbacks.Checkpoint save them, and slots have other names here. "
            "Restore it by collective.keras.callbacks.Checkpoint(folder).restore(model)."
        )


def restore_table(original: Callable[..., Any], variable: Any, tensors: Any) -> Any:
    """Replaces `Sharded._restore_from_tensors`: no rank alone restores a table or a slot.

    One that is made after `read` is restored when it is made. A rank that hasn't read a checkpoint
    wouldn't restore its rows. If it is the first table, the checkpoint turns out to be of all
    ranks, and rank 0 alone keeps the states of metrics from it.

    Raises:
        RankError: another rank does something else.
    """
    if collectives.size() > 1 and tf.executing_eagerly() and not _restoring:
        barrier.exchange(None, f"restoring '{variable.op.name}' of a tf.train.Checkpoint", {})
        _restored.add(variable._update_uid)
        for early in _early.pop(variable._update_uid, []):
            state = early()
            if state is not None:
                state.assign(eager_states.start_of(state))
    return original(variable, tensors)


def restore_state(original: Callable[..., Any], variable: Any, tensors: Any) -> Any:
    """Replaces `BaseResourceVariable._restore_from_tensors`: rank 0 gets the states of metrics."""
    done = original(variable, tensors)
    if _is_of_others(variable):
        variable.assign(eager_states.start_of(variable))
    elif collectives.rank() > 0 and tf.executing_eagerly() and _is_state(variable):
        _early[variable._update_uid].append(weakref.ref(variable))
    return done


def make_state(original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Metric.add_weight`: as `restore_state`, of a variable that begins restored."""
    variable = original(metric, *args, **kwargs)
    if tf.executing_eagerly_outside_functions():
        with tf.init_scope():
            if _is_of_others(variable):
                variable.assign(eager_states.start_of(variable))
    return variable


def _is_of_others(variable: Any) -> bool:
    """Tells whether rank 0 alone keeps the value that was restored to a variable."""
    is_restored = bool(_restoring) or getattr(variable, "_update_uid", -1) in _restored
    return collectives.rank() > 0 and is_restored and _is_state(variable)


def _is_state(each: Any) -> bool:
    """Tells whether it is a variable that ranks add up: the state of a metric."""
    return (
        isinstance(each, variables.Variable)
        and each.synchronization == tf.VariableSynchronization.ON_READ
        and each.aggregation == tf.VariableAggregation.SUM
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, all ranks save and restore together also what has no tables."""
    with _inside(_together):
        yield


def _is_of_all_ranks(checkpoint: Any) -> bool:
    """Tells whether a `tf.train.Checkpoint` has tables, or their slots, on several ranks."""
    if collectives.size() == 1 or not tf.executing_eagerly():
        return False
    return bool(_together) or any(isinstance(each, Sharded) for each in _tracked(checkpoint))


def _tracked(checkpoint: Any) -> list[Any]:
    return list(checkpoint._saver._graph_view.descendants())


@contextlib.contextmanager
def _inside(marks: list[bool]) -> Iterator[None]:
    marks.append(True)
    try:
        yield
    finally:
        marks.pop()
