"""Builds TensorFlow's Savers inside scope(), and finds a session's latest checkpoint.

A Saver keeps its own operations for the variables that aren't sharded. Tables and their slots are
taken out: every rank writes and reads its shards itself (`saving`, `restoring`).

Functions with an argument `original` replace a method of TensorFlow; `original` is that method (see
`collective.interception.patches`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage
from collective.checkpoint.rows.shards import Shard, find_shards
from collective.checkpoint.saving import ownership
from collective.coordination import barrier, common_folder, milestones
from collective.ops.communication import collectives
from collective.ops.graph.optional_variables import may_be_missing
from collective.ops.rows import file_systems
from collective.scope import SCOPES
from collective.tables.table import Table, shard_of
from collective.tensorflow_internals.checkpoints import (
    checkpoint_management,
    saveable_object_util,
    saver_pb2,
)
from collective.tensorflow_internals.checkpoints import saver as saver_lib
from collective.tensorflow_internals.variables import variables

# A collection of the graph: the names of its tables, which an imported copy of it can't have.
TABLES = "collective/tables"


@dataclasses.dataclass(frozen=True)
class SaverState:
    """Keeps what the library knows about a Saver that has tables.

    Attributes:
        shards: its tables and slots.
        unsharded_def: the SaverDef of its operations for the other variables.
    """

    shards: list[Shard]
    unsharded_def: Any


def state_of_saver(saver: Any) -> SaverState | None:
    """Returns the record of a Saver; None if it has no tables, or was imported with a graph."""
    state: SaverState | None = getattr(saver, "_collective_state", None)
    return state


def build(
    original: Any, saver: Any, checkpoint_path: Any, build_save: bool, build_restore: bool
) -> None:
    """Replaces `Saver._build`, which makes the operations that save and restore."""

    def build_plainly() -> None:
        original(saver, checkpoint_path, build_save, build_restore)

    if tf.executing_eagerly() or saver._is_built or saver.saver_def:
        return build_plainly()
    var_list = variables._all_saveable_objects() if saver._var_list is None else saver._var_list
    by_name = variables_by_name(var_list)
    shards = find_shards({n: v for n, v in by_name.items() if isinstance(v, variables.Variable)})
    if not shards:
        return build_plainly()
    if saver._write_version != saver_pb2.SaverDef.V2:
        raise ValueError(
            f"Saver(write_version=…): tables ('{shards[0].name}') need SaverDef.V2, the default."
        )
    shard_names = {shard.name for shard in shards}
    unsharded = {name: v for name, v in by_name.items() if name not in shard_names}
    if collectives.size() == 1 and not any(shard.dynamic for shard in shards):
        # An exported graph is imported with a complete Saver, though the part for tables isn't
        # used here.
        build_plainly()
        unsharded_def = make_unsharded_def(saver, unsharded, checkpoint_path)
        saver._collective_state = SaverState(shards, unsharded_def)
        return
    for shard in shards:
        if shard.slot_of is None:
            tf.add_to_collection(TABLES, shard.table.op.name)
    if saver._builder is None:
        saver._builder = saver_lib.BulkSaverBuilder(saver._write_version)
    saver._var_list = unsharded
    saver.saver_def = make_unsharded_def(saver, unsharded, checkpoint_path)
    saver._collective_state = SaverState(shards, saver.saver_def)
    saver._is_built, saver._is_empty = True, False
    saver._check_saver_def()
    saver._next_checkpoint_time = time.time() + saver.saver_def.keep_checkpoint_every_n_hours * 3600


def variables_by_name(var_list: Any) -> dict[str, Any]:
    """Returns the variables that a Saver is to save, by their names in a checkpoint."""
    if isinstance(var_list, dict):
        return {name: _without_list(v) for name, v in var_list.items()}
    flat = tf.nest.flatten(list(var_list))
    sharded = [v for v in flat if isinstance(v, variables.Variable) and shard_of(v) is not None]
    by_name: dict[str, Any] = saveable_object_util.op_list_to_dict(
        [v for v in flat if not any(v is s for s in sharded)], convert_variable_to_tensor=False
    )
    for variable in sharded:
        if variable.op.name in by_name:
            raise ValueError(f"At least two variables have the same name: {variable.op.name}")
        by_name[variable.op.name] = variable
    return by_name


def _without_list(value: Any) -> Any:
    is_list = isinstance(value, (list, tuple)) and len(value) == 1
    return value[0] if is_list and isinstance(value[0], Table) else value


def make_unsharded_def(saver: Any, unsharded: dict[str, Any], filename: Any) -> Any:
    """Makes the operations that save and restore some variables, and their SaverDef."""
    if unsharded:
        return saver._builder._build_internal(
            unsharded,
            reshape=saver._reshape,
            sharded=saver._sharded,
            max_to_keep=saver._max_to_keep,
            keep_checkpoint_every_n_hours=saver._keep_checkpoint_every_n_hours,
            name=saver._name,
            restore_sequentially=saver._restore_sequentially,
            filename=filename,
        )
    with tf.name_scope(saver._name or "save"):
        path = tf.placeholder_with_default(filename or "model", [], "Const")
        return saver_pb2.SaverDef(
            filename_tensor_name=path.name,
            save_tensor_name=tf.identity(path).name,
            restore_op_name=tf.no_op().name,
            max_to_keep=saver._max_to_keep or 0,
            sharded=saver._sharded,
            version=saver._write_version,
            keep_checkpoint_every_n_hours=saver._keep_checkpoint_every_n_hours,
        )


def shards_of_saver(saver: Any, graph: tf.Graph) -> list[Shard]:
    """Returns the tables and slots of a Saver.

    Raises:
        ValueError: the Saver was imported with a graph that had tables.
    """
    state = state_of_saver(saver)
    if state is not None:
        return state.shards
    variables_here = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    tables_here = {v.op.name for v in variables_here if isinstance(v, Table)}
    tables_trained = {tf.compat.as_str(name) for name in graph.get_collection(TABLES)}
    lost = sorted(tables_trained - tables_here)
    if lost:
        raise ValueError(
            f"This graph was imported, and its tables ('{', '.join(lost)}') cannot be: build the "
            "model by its code inside scope(), then make a Saver and restore. To freeze it, export "
            "a SavedModel by strategy.export_saved_model, which plain TensorFlow can freeze."
        )
    return []


def unsharded_def(saver: Any) -> Any:
    """Returns the SaverDef for the variables that aren't tables."""
    state = state_of_saver(saver)
    return saver.saver_def if state is None else state.unsharded_def


def unsharded_variables(saver: Any) -> dict[str, Any]:
    """Returns the variables that aren't tables, by their names in a checkpoint."""
    state = state_of_saver(saver)
    shard_names = set() if state is None else {shard.name for shard in state.shards}
    by_name = variables_by_name({} if saver._var_list is None else saver._var_list)
    return {name: v for name, v in by_name.items() if name not in shard_names}


def optional_variables(saver: Any) -> dict[str, Any]:
    """Returns the variables that a checkpoint may lack, by their names in it."""
    return {name: v for name, v in unsharded_variables(saver).items() if may_be_missing(v)}


def unsharded_bytes(saver: Any) -> int:
    """Returns approximately how many bytes all variables but tables take in a checkpoint."""
    shapes = [
        (variable.shape.num_elements(), variable.dtype.base_dtype.size)
        for variable in unsharded_variables(saver).values()
        if isinstance(variable, variables.Variable)
    ]
    return sum((count or 0) * size for count, size in shapes)


def common_prefix(session: Any, doing: str, prefix: str) -> str:
    """Returns the checkpoint that all ranks mean: rank 0's, if they name different folders.

    A script may have made a folder on every rank, for example with `tempfile`.

    Raises:
        ValueError: the ranks name different checkpoints; raised on all ranks.
    """
    paths = [message["path"] for message in barrier.exchange(session, doing, {"path": prefix})]
    first, others = paths[0], [rank for rank, path in enumerate(paths) if path != paths[0]]
    for rank in others:
        if os.path.basename(paths[rank]) != os.path.basename(first):
            raise ValueError(
                f"{doing}: rank 0 names '{first}', rank {rank} '{paths[rank]}'. Every rank must "
                "name the same path."
            )
    if others and collectives.rank() == 0:
        warnings.warn(
            f"{doing}: rank 0 names '{first}', rank {others[0]} '{paths[others[0]]}'. Every rank "
            "saves and restores its shards of the tables, so all of them use rank 0's folder.",
            stacklevel=3,
        )
    return str(first)


def restore_latest(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `SessionManager._restore_checkpoint`: rank 0 finds the latest checkpoint.

    It notes whether the session's variables come from one (`was_restored`).
    """
    session, is_restored = _restore_latest(original, manager, *args, **kwargs)
    manager._collective_restored = is_restored
    return session, is_restored


def was_restored(manager: Any) -> bool:
    """Tells whether a SessionManager's last session came from its own checkpoint."""
    return getattr(manager, "_collective_restored", False)


def _restore_latest(
    original: Any,
    manager: Any,
    master: str,
    saver: Any = None,
    checkpoint_dir: str | None = None,
    checkpoint_filename_with_path: str | None = None,
    wait_for_checkpoint: bool = False,
    max_wait_secs: float = 7200,
    config: Any = None,
) -> Any:
    if collectives.size() == 1 or not saver or not checkpoint_dir or checkpoint_filename_with_path:
        if saver and checkpoint_dir and not checkpoint_filename_with_path:
            latest_state(checkpoint_dir)
        return original(
            manager,
            master,
            saver,
            checkpoint_dir,
            checkpoint_filename_with_path,
            wait_for_checkpoint,
            max_wait_secs,
            config,
        )

    def find_latest() -> Any:
        deadline = time.monotonic() + max_wait_secs
        while collectives.rank() == 0:
            state = latest_state(checkpoint_dir)
            if state is not None:
                return state.model_checkpoint_path, list(state.all_model_checkpoint_paths)
            if not wait_for_checkpoint or time.monotonic() > deadline:
                break
            time.sleep(manager._recovery_wait_secs)
        return None

    doing, own = "finding the latest checkpoint", os.fsdecode(checkpoint_dir)
    by_rank = barrier.run_on_all_ranks(None, doing, lambda: (own, find_latest()))
    folders = [folder for folder, _ in by_rank]
    common_folder.rank_0s(doing, "checkpoint_dir", folders, own, stacklevel=2)
    _, found_by_rank_0 = by_rank[0]
    if found_by_rank_0 is None:
        return original(manager, master, config=config)[0], False
    latest, last_checkpoints = found_by_rank_0
    out = original(manager, master, saver, checkpoint_filename_with_path=latest, config=config)
    saver.recover_last_checkpoints(last_checkpoints)
    return out


def latest_state(folder: str) -> Any:
    """Reads which checkpoints a folder has, and which is the latest; None if it has none.

    TensorFlow treats an unreadable file as a missing one: a job would start from the beginning,
    next to the checkpoints that it has saved.

    Raises:
        StorageFailure: the file can't be read.
    """
    path = os.path.join(folder, "checkpoint")
    with storage.failures():
        if not tf.io.gfile.exists(path):
            return None
    state = None
    with contextlib.suppress(ValueError):
        state = checkpoint_management.get_checkpoint_state(folder)
    if state is None or not state.model_checkpoint_path:
        raise storage.StorageFailure(
            f"'{path}', which names the latest checkpoint, can't be read, or is damaged. If its "
            "storage was missing, start the job again. Otherwise write the file again by "
            "tf.train.update_checkpoint_state, or remove it: then the job begins at its start."
        )
    return state


def write_graph(
    original: Any, graph_or_graph_def: Any, logdir: str, name: str, as_text: bool = True
) -> Any:
    """Replaces `training_util.write_graph` (CheckpointSaverHook): only rank 0 writes.

    It doesn't touch a folder in which another job may save. The save that follows finds out, and
    then either raises an error or writes the graph. Training continues if the storage fails, as it
    does without a checkpoint.
    """
    if collectives.rank() > 0:
        return None
    write = functools.partial(original, graph_or_graph_def, logdir, name, as_text)
    if ownership.marks().others_in(logdir):
        _postponed_graphs[_normal(logdir)] = write
        return None
    file_systems.check(logdir)
    try:
        with storage.failures():
            return write()
    except OSError as error:
        if not storage.is_failure(error) or SCOPES.options.checkpoint_on_error == "stop":
            raise
        tf.logging.warning(
            "the graph can not be written to '%s' (%s). Training continues.", logdir, error
        )
        return None


def write_postponed_graph(folder: str) -> None:
    """Writes the graph that wasn't written to `folder` before the folder's owner was known."""
    write = _postponed_graphs.pop(_normal(folder), None)
    if write is not None:
        write()


def _normal(folder: Any) -> str:
    return os.path.normpath(os.fsdecode(folder or "."))


_postponed_graphs: dict[str, Callable[[], Any]] = {}  # by folder


_last_checkpoint: list[str] = []
_notes = [True]
_folders: set[str] = set()  # folders in which this process has saved or restored checkpoints


def note_last_checkpoint(prefix: str, step: int | None = None, is_saved: bool = False) -> None:
    """Notes that this process has saved or restored the checkpoint `prefix`.

    Args:
        prefix: the prefix of the checkpoint, or of an increment.
        step: its global step; None: its name has it.
        is_saved: it was saved.
    """
    if not _notes[-1]:
        return
    _last_checkpoint[:] = [prefix]
    _folders.add(_normal(os.path.dirname(prefix)))
    milestones.poster().has_checkpoint(prefix, step)
    if is_saved:
        milestones.poster().has_saved()


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Allows saving a temporary checkpoint, which doesn't count as this process's last one."""
    _notes.append(False)
    try:
        yield
    finally:
        _notes.pop()


def last_checkpoint() -> str | None:
    """Returns the prefix of the checkpoint that this process saved or restored last, if any."""
    return _last_checkpoint[0] if _last_checkpoint else None


def knows_folder(folder: str) -> bool:
    """Tells whether this process has saved or restored a checkpoint in a folder."""
    return _normal(folder) in _folders
