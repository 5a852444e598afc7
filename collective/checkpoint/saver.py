"""What stands in for the building of TensorFlow's Saver inside scope(), and for sessions' look for
a checkpoint (see `collective.patches`).

A Saver keeps its own operations for replicated variables. Tables and their slots are taken out of
them: every rank writes and reads its shards (`saving`, `restoring`). `original` is always the
method itself.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import saver_pb2
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.ops import variables
from tensorflow.python.training import saver as saver_lib
from tensorflow.python.training.saving import saveable_object_util

from collective.checkpoint.shards import Shard, shards_of
from collective.coordination import barrier
from collective.ops import collectives
from collective.tables.table import Table, shard_of

# a graph's collection: the tables that an imported copy of it can't have
TABLES = "collective/tables"


def build(
    original: Any, saver: Any, checkpoint_path: Any, build_save: bool, build_restore: bool
) -> None:
    """`Saver._build`, which makes the operations that save and restore."""

    def plainly() -> None:
        original(saver, checkpoint_path, build_save, build_restore)

    if tf.executing_eagerly() or saver._is_built or saver.saver_def:
        return plainly()
    listed = variables._all_saveable_objects() if saver._var_list is None else saver._var_list
    everything = named(listed)
    shards = shards_of(
        {name: v for name, v in everything.items() if isinstance(v, variables.Variable)}
    )
    if not shards:
        return plainly()
    if saver._write_version != saver_pb2.SaverDef.V2:
        raise ValueError(
            f"Saver(write_version=…): tables ('{shards[0].name}') need SaverDef.V2, the default."
        )
    saver._collective_shards = shards
    ours = {shard.name for shard in shards}
    rest = {name: v for name, v in everything.items() if name not in ours}
    if collectives.size() == 1 and not any(shard.dynamic for shard in shards):
        # What an exported graph is imported with stays complete; it isn't used here.
        plainly()
        saver._collective_rest = def_of_rest(saver, rest, checkpoint_path)
        return
    for shard in shards:
        if shard.slot_of is None:
            tf.add_to_collection(TABLES, shard.table.op.name)
    saver._is_built, saver._is_empty = True, False
    if saver._builder is None:
        saver._builder = saver_lib.BulkSaverBuilder(saver._write_version)
    saver._var_list = rest
    saver.saver_def = saver._collective_rest = def_of_rest(saver, rest, checkpoint_path)
    saver._check_saver_def()
    saver._next_checkpoint_time = time.time() + saver.saver_def.keep_checkpoint_every_n_hours * 3600


def named(listed: Any) -> dict[str, Any]:
    """What a Saver is to save, by the names it has in a checkpoint."""
    if isinstance(listed, dict):
        return {
            name: v[0]
            if isinstance(v, (list, tuple)) and len(v) == 1 and isinstance(v[0], Table)
            else v
            for name, v in listed.items()
        }
    flat = tf.nest.flatten(list(listed))
    own = [v for v in flat if isinstance(v, variables.Variable) and shard_of(v) is not None]
    out = saveable_object_util.op_list_to_dict(
        [v for v in flat if not any(v is o for o in own)], convert_variable_to_tensor=False
    )
    for variable in own:
        if variable.op.name in out:
            raise ValueError(f"At least two variables have the same name: {variable.op.name}")
        out[variable.op.name] = variable
    return out


def def_of_rest(saver: Any, rest: dict[str, Any], filename: Any) -> Any:
    """A SaverDef for the variables that aren't tables."""
    if rest:
        return saver._builder._build_internal(
            rest,
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


def shards_in(saver: Any, graph: tf.Graph) -> list[Shard]:
    """The tables and slots of a Saver; for one that was imported with a graph, an error if it
    should have some.
    """
    if not hasattr(saver, "_collective_shards"):
        made = {
            v.op.name
            for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if isinstance(v, Table)
        }
        lost = sorted({tf.compat.as_str(name) for name in graph.get_collection(TABLES)} - made)
        if lost:
            raise ValueError(
                f"This graph was imported, and tables ('{', '.join(lost)}') can't "
                f"be: build the model by its code "
                "inside scope(), then make a Saver and restore."
            )
    shards: list[Shard] = getattr(saver, "_collective_shards", [])
    return shards


def rest_def(saver: Any) -> Any:
    """The SaverDef for the variables that aren't tables."""
    return getattr(saver, "_collective_rest", None) or saver.saver_def


def rest_of(saver: Any) -> dict[str, Any]:
    """The variables that aren't tables, by their names in a checkpoint."""
    ours = {shard.name for shard in getattr(saver, "_collective_shards", [])}
    listed = saver._var_list if saver._var_list is not None else {}
    return {name: v for name, v in named(listed).items() if name not in ours}


def same_path(sess: Any, what: str, prefix: str) -> None:
    """An error on all ranks if they name different checkpoints."""
    told = [text["path"] for text in barrier.exchange(sess, what, {"path": prefix})]
    other = next((r for r, path in enumerate(told) if path != told[0]), None)
    if other is not None:
        raise ValueError(
            f"{what}: rank 0 names '{told[0]}', rank {other} '{told[other]}'. Every "
            f"rank must name the same path."
        )


def restore_latest(
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
    """`SessionManager._restore_checkpoint`: rank 0 looks which checkpoint is the latest."""
    if collectives.size() == 1 or not saver or not checkpoint_dir or checkpoint_filename_with_path:
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

    def find() -> Any:
        end = time.monotonic() + max_wait_secs
        while collectives.rank() == 0:
            found = checkpoint_management.get_checkpoint_state(checkpoint_dir)
            if found and found.model_checkpoint_path:
                return found.model_checkpoint_path, list(found.all_model_checkpoint_paths)
            if not wait_for_checkpoint or time.monotonic() > end:
                break
            time.sleep(manager._recovery_wait_secs)
        return None

    found = barrier.together(None, f"finding the latest checkpoint in '{checkpoint_dir}'", find)[0]
    if found is None:
        return original(manager, master, config=config)[0], False
    out = original(manager, master, saver, checkpoint_filename_with_path=found[0], config=config)
    saver.recover_last_checkpoints(found[1])
    return out


def write_graph(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`training_util.write_graph`, which CheckpointSaverHook calls: rank 0 alone writes."""
    return original(*args, **kwargs) if collectives.rank() == 0 else None


_last: list[str] = []


def note_last_checkpoint(prefix: str) -> None:
    """Notes that this process saved or restored the checkpoint `prefix`."""
    _last[:] = [prefix]


def last_checkpoint() -> str | None:
    """Returns the prefix of the checkpoint that this process saved or restored last, if any."""
    return _last[0] if _last else None
