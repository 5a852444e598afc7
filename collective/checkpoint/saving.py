"""`Saver.save` inside scope(): every rank writes its shards, and one commit makes a checkpoint of
them.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.client import session as session_lib
from tensorflow.python.training import training_util

from collective.checkpoint import commit, table_io, tensor_bundle
from collective.checkpoint.saver import note_last_checkpoint, rest_def, same_path, shards_in
from collective.checkpoint.shards import Shard
from collective.coordination import barrier
from collective.ops import collectives
from collective.ops.sessions import run_unpatched
from collective.tables import served_table


def save(
    original: Any,
    saver: Any,
    sess: Any,
    save_path: Any,
    global_step: Any = None,
    latest_filename: str | None = None,
    meta_graph_suffix: str = "meta",
    write_meta_graph: bool = True,
    write_state: bool = True,
    strip_default_attrs: bool = False,
    save_debug_info: bool = False,
) -> Any:
    """`Saver.save`: rank 0 writes what isn't sharded; all return the same path, once it is the
    latest checkpoint.
    """
    served = served_table.served_graph(sess.graph) if hasattr(sess, "graph") else None
    if served is not None:
        return served.write_variables(sess, saver, save_path)
    first = collectives.rank() == 0
    shards = (
        shards_in(saver, sess.graph)
        if isinstance(sess, session_lib.SessionInterface) and saver._is_built
        else []
    )
    if (
        collectives.size() == 1
        and not shards
        or saver._is_empty
        or not saver._is_built
        or not isinstance(sess, session_lib.SessionInterface)
    ):
        path = original(
            saver,
            sess,
            save_path,
            global_step,
            latest_filename,
            meta_graph_suffix,
            write_meta_graph and first,
            write_state,
            strip_default_attrs,
            save_debug_info,
        )
        return _noted(path) if write_state and path else path
    state = latest_filename or "checkpoint"
    base, prefix = _paths(saver, sess, tf.compat.as_str(save_path), global_step, state)
    same_path(sess, "saving a checkpoint", prefix)
    kept = Kept.after(saver, prefix if write_state else None)
    mine: list[commit.Commit] = []

    def begin() -> str:
        if first:
            mine.append(commit.Commit(base, prefix))
        return mine[0].staging if mine else ""

    def publish() -> None:
        if not first:
            return
        here = mine[0]
        here.merge(
            _visible(staging, written),
            table_io.layout_of(shards, [told["rows"] for told in written]),
        )
        meta = (
            checkpoint_management.meta_graph_filename(prefix, meta_graph_suffix)
            if write_meta_graph
            else None
        )
        if meta:
            with sess.graph.as_default():
                saver.export_meta_graph(
                    here.meta,
                    strip_default_attrs=strip_default_attrs,
                    save_debug_info=save_debug_info,
                )
        if write_state:
            checkpoint_management.update_checkpoint_state_internal(
                os.path.dirname(base),
                prefix,
                [path for path, _ in kept.last],
                os.path.relpath(here.state, os.path.dirname(base) or ".")
                if "://" not in base
                else os.path.join(os.path.basename(here.staging), commit.STATE),
                saver._save_relative_paths,
            )
        here.publish(
            commit.Ending(
                meta,
                os.path.join(os.path.dirname(base), state) if write_state else None,
                kept.doomed,
                meta_graph_suffix,
            )
        )

    try:
        staging = barrier.together(sess, f"preparing checkpoint '{prefix}'", begin)[0]
        written = barrier.together(
            sess, f"writing checkpoint '{prefix}'", lambda: _write(saver, sess, shards, staging)
        )
        barrier.together(sess, f"publishing checkpoint '{prefix}'", publish)
    except BaseException:
        if mine:
            commit.settle(mine[0].staging)
        raise
    kept.become(saver)
    return _noted(prefix)


def _noted(prefix: str) -> str:
    note_last_checkpoint(prefix)
    return prefix


def _paths(
    saver: Any, sess: Any, save_path: str, global_step: Any, latest_filename: str
) -> tuple[str, str]:
    """The base name and the checkpoint's prefix, as TensorFlow makes and checks them."""
    if os.path.split(latest_filename)[0]:
        raise ValueError("'latest_filename' must not contain path components")
    if global_step is None:
        if os.path.basename(save_path) == latest_filename:
            raise ValueError(
                f"'latest_filename' collides with 'save_path': '{latest_filename}' "
                f"and '{save_path}'"
            )
        return save_path, save_path
    if not isinstance(global_step, tf.compat.integral_types):
        global_step = training_util.global_step(sess, global_step)
    step = f"{global_step:08d}" if saver._pad_step_number else f"{global_step:d}"
    return save_path, f"{save_path}-{step}"


def _write(saver: Any, sess: Any, shards: list[Shard], staging: str) -> dict[str, Any]:
    """Writes what is this rank's; tells the files and the rows in them."""
    host, rank = socket.gethostname(), collectives.rank()
    if not commit.is_staged(staging):
        raise OSError(
            f"the ranks need a common file system: rank {rank} on host {host} does not "
            f"see the folder '{staging}', "
            "which rank 0 has just made"
        )
    writer = tensor_bundle.Writer(os.path.join(staging, f"rank_{rank}"))
    rows = table_io.write(sess, shards, writer)
    prefixes = writer.close()
    if rank == 0:
        rest, path = rest_def(saver), os.path.join(staging, "replicated")
        run_unpatched(sess, rest.save_tensor_name, {rest.filename_tensor_name: path})
        prefixes += [path] if tf.io.gfile.exists(f"{path}.index") else []
    for prefix in prefixes:
        commit.sync_bundle(prefix)
    return {"host": host, "rows": rows, "files": [os.path.basename(prefix) for prefix in prefixes]}


def _visible(staging: str, written: list[dict[str, Any]]) -> list[str]:
    """The prefixes of all that the ranks wrote, if this rank sees it."""
    out = []
    for rank, told in enumerate(written):
        for file in told["files"]:
            out.append(os.path.join(staging, file))
            if not commit.appears(f"{out[-1]}.index"):
                raise OSError(
                    f"the ranks need a common file system: rank {rank} on host "
                    f"{told['host']} wrote "
                    f"'{out[-1]}.index', which rank 0 on host {written[0]['host']} does "
                    f"not see"
                )
    return out


@dataclasses.dataclass
class Kept:
    """A Saver's list of checkpoints once another one is there, as TensorFlow keeps it.

    Attributes:
        last: [(path, seconds)] of those that are kept, the newest at the end.
        waiting: of those to be deleted later.
        next_time: after which one more is kept for good (`keep_checkpoint_every_n_hours`).
        doomed: paths of those to be deleted now.
    """

    last: list[Any]
    waiting: list[Any]
    next_time: float
    doomed: list[str]

    @staticmethod
    def after(saver: Any, prefix: str | None) -> Kept:
        """`prefix` is the new one, or None if it isn't counted."""
        most, hours = saver.saver_def.max_to_keep, saver.saver_def.keep_checkpoint_every_n_hours
        out = Kept(
            list(saver._last_checkpoints),
            list(saver._checkpoints_to_be_deleted),
            saver._next_checkpoint_time,
            [],
        )
        if prefix is None:
            return out
        if most:
            out.last = [*(one for one in out.last if one[0] != prefix), (prefix, time.time())]
            if len(out.last) > most:
                out.waiting.append(out.last.pop(0))
        if out.waiting:
            path, seconds = out.waiting.pop(0)
            if seconds > out.next_time:
                out.next_time += hours * 3600
            elif path != prefix:
                out.doomed.append(path)
        return out

    def become(self, saver: Any) -> None:
        saver._last_checkpoints, saver._checkpoints_to_be_deleted = self.last, self.waiting
        saver._next_checkpoint_time = self.next_time
