"""Saves inside scope(): every rank writes its shards, and one commit makes a checkpoint of them."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.client import session as session_lib
from tensorflow.python.training import training_util

from collective.checkpoint import (
    commit,
    ownership,
    running_chain,
    saved_code,
    table_io,
    tensor_bundle,
)
from collective.checkpoint.gathered import gathered_states
from collective.checkpoint.layout import CheckpointLayout
from collective.checkpoint.saver import (
    check_same_path,
    note_last_checkpoint,
    shards_of_saver,
    unsharded_def,
    write_postponed_graph,
)
from collective.checkpoint.shards import Shard, dynamic_tables
from collective.coordination import barrier
from collective.ops import collectives
from collective.ops.sessions import errors_without_stacks, run_unpatched
from collective.scope import SCOPES
from collective.tables import eviction, served_table, waiting_gradients


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
    """Stands in for `Saver.save`: rank 0 writes what isn't sharded.

    Returns:
        The checkpoint's path, the same on all ranks, once it is the latest checkpoint.
    """
    served = served_table.served_graph(sess.graph) if hasattr(sess, "graph") else None
    if served is not None:
        return served.write_variables(sess, saver, save_path)
    is_usable = isinstance(sess, session_lib.SessionInterface) and saver._is_built
    shards = shards_of_saver(saver, sess.graph) if is_usable else []
    if not is_usable or saver._is_empty or (collectives.size() == 1 and not shards):
        path = original(
            saver,
            sess,
            save_path,
            global_step,
            latest_filename,
            meta_graph_suffix,
            write_meta_graph and collectives.rank() == 0,
            write_state,
            strip_default_attrs,
            save_debug_info,
        )
        if write_state and path:
            note_last_checkpoint(path)
            _save_code(path)
        return path
    state_name = latest_filename or "checkpoint"
    base = tf.compat.as_str(save_path)
    prefix = _prefix(saver, sess, base, global_step, state_name)
    check_same_path(sess, "saving a checkpoint", prefix)
    evicting = [table for table in dynamic_tables(shards) if eviction.evicts(table.policy)]
    if evicting and not waiting_gradients.any_in(sess):
        barrier.run_on_all_ranks(
            sess,
            f"evicting rows before checkpoint '{prefix}'",
            lambda: eviction.at_save(sess, evicting),
        )
    meta = state = None
    if write_meta_graph:
        meta = checkpoint_management.meta_graph_filename(prefix, meta_graph_suffix)
    if write_state:
        state = os.path.join(os.path.dirname(base), state_name)
    retention = Retention.after(saver, prefix if write_state else None)
    publication = commit.Publication(meta, state, retention.superseded, meta_graph_suffix)
    sharded_save = ShardedSave(saver, sess, shards, base, prefix, retention, publication)
    with running_chain.of_base(saver, sess, shards, base, prefix):
        sharded_save.run(strip_default_attrs=strip_default_attrs, save_debug_info=save_debug_info)
    retention.apply(saver)
    note_last_checkpoint(prefix)
    if write_state:
        _save_code(prefix)
    return prefix


_with_code: set[str] = set()  # folders beside whose checkpoints this process has saved its code


def _save_code(prefix: str) -> None:
    """Saves the script beside a job's first checkpoint in a folder: `scope(save_code=True)`.

    Rank 0 does it, and the job goes on where it can't be done.
    """
    folder = os.path.dirname(prefix) or "."
    if not SCOPES.options.save_code or collectives.rank() > 0 or folder in _with_code:
        return
    _with_code.add(folder)
    why = "it is on no local file system"
    if "://" not in folder:
        try:
            if saved_code.save(folder, SCOPES.given, collectives.size()):
                return
            why = "the program is no script (a notebook, or python -c)"
        except OSError as error:
            why = str(error)
    tf.logging.warning(f"scope(save_code=True): no code is saved in '{folder}': {why}.")


@dataclasses.dataclass
class ShardedSave:
    """Makes a checkpoint of all ranks' shards, in steps that the ranks take together.

    Attributes:
        saver, session: of the script.
        shards: the saver's tables and slots.
        base: the path as the user gave it.
        prefix: the checkpoint's.
        retention: the checkpoints that are kept afterwards.
        publication: what happens beside the checkpoint.
        started: the commit; None on all ranks but 0.
    """

    saver: Any
    session: Any
    shards: list[Shard]
    base: str
    prefix: str
    retention: Retention
    publication: commit.Publication
    started: commit.Commit | None = None

    def run(self, **meta_graph_options: Any) -> None:
        """Takes the steps; an error on any rank undoes what can be undone.

        Args:
            meta_graph_options: for `Saver.export_meta_graph`.
        """
        try:
            staging = self._step("preparing", self._begin)[0]
            self._gather()
            messages = self._step("writing", lambda: _write(self, staging))
            self._step("publishing", lambda: self._publish(messages, meta_graph_options))
        except BaseException:
            if self.started is not None:
                commit.recover(self.started.staging)
            raise

    def write_tables(self, writer: tensor_bundle.BundleWriter) -> dict[str, Any]:
        """Writes this rank's rows; returns what `layout` has to know of them."""
        return dict(table_io.write(self.session, self.shards, writer))

    def layout(self, written_by_rank: list[dict[str, Any]]) -> CheckpointLayout:
        """Returns the layout, of what each rank has written."""
        return table_io.layout_of(self.shards, written_by_rank)

    def _step(self, doing: str, step: Callable[[], Any]) -> list[Any]:
        return barrier.run_on_all_ranks(self.session, f"{doing} checkpoint '{self.prefix}'", step)

    def _gather(self) -> None:
        """Brings together what the ranks contribute to states that are saved as one."""
        states = gathered_states(self.saver)
        if not states:
            return
        contributions = self._step(
            "gathering for", lambda: {name: state.contribution() for name, state in states.items()}
        )
        for name, state in states.items():
            state.gather([of_rank[name] for of_rank in contributions])

    def _begin(self) -> str:
        if collectives.rank() > 0:
            return ""
        commit.make_parent(self.base)
        ownership.marks().hold(self.session, self.base)
        write_postponed_graph(os.path.dirname(self.base))
        self.started = commit.Commit(self.base, self.prefix)
        return self.started.staging

    def _publish(self, messages: list[dict[str, Any]], meta_graph_options: dict[str, Any]) -> None:
        """Makes the checkpoint on rank 0, of everything that the ranks wrote."""
        if self.started is None:
            return
        layout = self.layout([message["rows"] for message in messages])
        self.started.merge(_visible(self.started.staging, messages), layout)
        if self.publication.meta is not None:
            with self.session.graph.as_default():
                self.saver.export_meta_graph(self.started.meta, **meta_graph_options)
        if self.publication.state is not None:
            self._stage_state(self.started)
        self.started.publish(self.publication)

    def _stage_state(self, started: commit.Commit) -> None:
        """Writes the file that tells the latest checkpoint into the staging folder."""
        folder = os.path.dirname(self.base)
        if "://" in self.base:
            filename = os.path.join(os.path.basename(started.staging), commit.STATE)
        else:
            filename = os.path.relpath(started.state, folder or ".")
        checkpoint_management.update_checkpoint_state_internal(
            folder,
            self.prefix,
            [path for path, _ in self.retention.last],
            filename,
            self.saver._save_relative_paths,
        )


def _prefix(saver: Any, sess: Any, base: str, global_step: Any, state_name: str) -> str:
    """Makes the checkpoint's prefix, and checks the names, as TensorFlow does."""
    if os.path.split(state_name)[0]:
        raise ValueError("'latest_filename' must not contain path components")
    if global_step is None:
        if os.path.basename(base) == state_name:
            raise ValueError(
                f"'latest_filename' collides with 'save_path': '{state_name}' and '{base}'"
            )
        return base
    if not isinstance(global_step, tf.compat.integral_types):
        global_step = training_util.global_step(sess, global_step)
    step = f"{global_step:08d}" if saver._pad_step_number else f"{global_step:d}"
    return f"{base}-{step}"


def _write(save: ShardedSave, staging: str) -> dict[str, Any]:
    """Writes this rank's part; returns the files and their rows as a message to the others."""
    host, rank = socket.gethostname(), collectives.rank()
    if not commit.is_staged(staging):
        raise OSError(
            f"the ranks need a common file system: rank {rank} on host {host} does not see the "
            f"folder '{staging}', which rank 0 has just made"
        )
    writer = tensor_bundle.BundleWriter(os.path.join(staging, f"rank_{rank}"))
    rows = save.write_tables(writer)
    prefixes = writer.close()
    if rank == 0:
        saver_def, path = unsharded_def(save.saver), os.path.join(staging, "replicated")
        feed = {saver_def.filename_tensor_name: path}
        with errors_without_stacks():
            run_unpatched(save.session, saver_def.save_tensor_name, feed)
        prefixes += [path] if tf.io.gfile.exists(tensor_bundle.index_path(path)) else []
    for prefix in prefixes:
        commit.sync_bundle(prefix)
    return {"host": host, "rows": rows, "files": [os.path.basename(prefix) for prefix in prefixes]}


def _visible(staging: str, written: list[dict[str, Any]]) -> list[str]:
    """Returns the prefixes of all bundles that the ranks wrote, once this rank sees them."""
    prefixes = []
    for rank, message in enumerate(written):
        for file in message["files"]:
            prefix = os.path.join(staging, file)
            index = tensor_bundle.index_path(prefix)
            if not commit.becomes_visible(index):
                raise OSError(
                    f"the ranks need a common file system: rank {rank} on host {message['host']} "
                    f"wrote '{index}', which rank 0 on host {written[0]['host']} does not see"
                )
            prefixes.append(prefix)
    return prefixes


@dataclasses.dataclass
class Retention:
    """Decides which checkpoints a Saver keeps once another one is there, as TensorFlow does.

    Attributes:
        last: [(path, seconds)] of the checkpoints that are kept, the newest at the end.
        to_be_deleted: [(path, seconds)] of checkpoints to be deleted later.
        next_time: after which one more is kept for good (`keep_checkpoint_every_n_hours`).
        superseded: paths of the checkpoints to be deleted now.
    """

    last: list[Any]
    to_be_deleted: list[Any]
    next_time: float
    superseded: list[str]

    @staticmethod
    def after(saver: Any, prefix: str | None) -> Retention:
        """Decides for the new checkpoint `prefix`; None if it isn't counted."""
        saver_def = saver.saver_def
        out = Retention(
            last=list(saver._last_checkpoints),
            to_be_deleted=list(saver._checkpoints_to_be_deleted),
            next_time=saver._next_checkpoint_time,
            superseded=[],
        )
        if prefix is None:
            return out
        if saver_def.max_to_keep:
            out.last = [entry for entry in out.last if entry[0] != prefix]
            out.last.append((prefix, time.time()))
            if len(out.last) > saver_def.max_to_keep:
                out.to_be_deleted.append(out.last.pop(0))
        if out.to_be_deleted:
            path, seconds = out.to_be_deleted.pop(0)
            if seconds > out.next_time:
                out.next_time += saver_def.keep_checkpoint_every_n_hours * 3600
            elif path != prefix:
                out.superseded.append(path)
        return out

    def apply(self, saver: Any) -> None:
        """Makes the Saver remember what was decided."""
        saver._last_checkpoints = self.last
        saver._checkpoints_to_be_deleted = self.to_be_deleted
        saver._next_checkpoint_time = self.next_time
