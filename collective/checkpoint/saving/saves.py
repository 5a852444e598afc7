"""Saves inside scope(): every rank writes its shards, and one commit makes a checkpoint of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, commit, storage, tensor_bundle
from collective.checkpoint.files.layout import CheckpointLayout
from collective.checkpoint.rows import table_io
from collective.checkpoint.rows.shards import Shard, dynamic_tables
from collective.checkpoint.saving import background, ownership, running_chain, saved_code, unsharded
from collective.checkpoint.saving.gathered_state import gathered_states
from collective.checkpoint.saving.retention import Retention
from collective.checkpoint.saving.saver import (
    common_prefix,
    knows_folder,
    note_last_checkpoint,
    shards_of_saver,
    unsharded_bytes,
    write_postponed_graph,
)
from collective.checkpoint.saving.saver_hook import blocks
from collective.checkpoint.saving.saver_options import TablesSaver, options_of
from collective.checkpoint.saving.snapshot import REPLICATED, PartSnapshot
from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.ops.rows import file_systems
from collective.scope import SCOPES
from collective.tables import served_table
from collective.tables.policies import eviction
from collective.tables.rows import waiting_gradients
from collective.tensorflow_internals.checkpoints import checkpoint_management
from collective.tensorflow_internals.sessions import session as session_lib
from collective.tensorflow_internals.sessions import training_util


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
    """Replaces `Saver.save`: rank 0 writes what isn't sharded.

    Returns:
        The checkpoint's path, the same on all ranks, once it is the latest checkpoint.
    """
    served = served_table.served_graph(sess.graph) if hasattr(sess, "graph") else None
    if served is not None:
        return served.write_variables(sess, saver, save_path)
    is_usable = isinstance(sess, session_lib.SessionInterface) and saver._is_built
    shards = shards_of_saver(saver, sess.graph) if is_usable else []
    is_plain = collectives.size() == 1 and not shards
    if is_usable and is_plain:
        folder = os.path.dirname(tf.compat.as_str(save_path))
        is_plain = not running_chain.is_enabled(sess.graph, folder)
    if not is_usable or saver._is_empty or is_plain:
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
            note_last_checkpoint(path, is_saved=True)
            _save_code(saver, path)
        return path
    state_name = latest_filename or "checkpoint"
    base = tf.compat.as_str(save_path)
    file_systems.check(base)
    background.settle(sess)
    prefix, is_blocking = _prefix(saver, sess, base, global_step, state_name), blocks(saver)
    prefix = common_prefix(
        sess,
        "saving a checkpoint" if is_blocking else "saving a checkpoint during training",
        prefix,
    )
    base = os.path.join(os.path.dirname(prefix), os.path.basename(base))
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
    options = {"strip_default_attrs": strip_default_attrs, "save_debug_info": save_debug_info}
    sharded_save = ShardedSave(
        saver, sess, shards, base, prefix, state_name, retention, publication, options
    )
    as_latest = write_state and state_name == "checkpoint"
    saved = (base, prefix, as_latest, lambda: sharded_save.id)
    new_chain = running_chain.of_base(saver, sess, shards, *saved)
    if is_blocking:
        with new_chain:
            sharded_save.run()
    else:
        sharded_save.start(options_of(saver).checkpoint_buffer, new_chain)
    return prefix


# For each folder of checkpoints: whether this process could save its code there.
_with_code: dict[str, bool] = {}


def _save_code(saver: Any, prefix: str) -> None:
    """Saves the script next to a job's first checkpoint in a folder: `scope(save_code=True)`.

    Rank 0 does it, and repeats it if the folder was removed meanwhile. If it isn't possible, the
    job continues.
    """
    folder = os.path.dirname(prefix) or "."
    if not options_of(saver).save_code or collectives.rank() > 0:
        return
    if folder in _with_code and (not _with_code[folder] or saved_code.is_in(folder)):
        return
    _with_code[folder] = False
    why = "it is on no local file system"
    if "://" not in folder:
        try:
            if saved_code.save(folder, SCOPES.given, collectives.size()):
                _with_code[folder] = True
                return
            why = "the program is no script (a notebook, or python -c)"
        except OSError as error:
            why = str(error)
    tf.logging.warning(f"scope(save_code=True): no code is saved in '{folder}': {why}.")


@dataclasses.dataclass
class ShardedSave:
    """Makes a checkpoint of all ranks' shards, in steps that all ranks take together.

    Attributes:
        saver, session: the script's Saver and session.
        shards: the Saver's tables and slots.
        base: the path as given by the user.
        prefix: the checkpoint's prefix.
        state_name: the name of the file that names the latest checkpoint.
        retention: decides which checkpoints are kept afterwards.
        publication: what else happens with the checkpoint.
        meta_graph_options: for `Saver.export_meta_graph`.
        started: the commit; None on all ranks but 0.
    """

    saver: Any
    session: Any
    shards: list[Shard]
    base: str
    prefix: str
    state_name: str
    retention: Retention
    publication: commit.Publication
    meta_graph_options: dict[str, Any]
    started: commit.Commit | None = None

    at_most: ClassVar[str] = ""  # precedes the number of bytes that it needs

    @property
    def id(self) -> str:
        """Returns the checkpoint's id on rank 0, once it is merged."""
        return "" if self.started is None else self.started.id

    @property
    def owner(self) -> Any:
        """Returns what saves, until whose end no other job may save under the same name."""
        return self.session

    def run(self) -> None:
        """Carries out the steps; after an error on any rank, undoes what can be undone.

        Raises:
            CheckpointStorageError: the storage failed, on whichever rank.
        """
        with self._undone_if_it_fails():
            staging = self._step("preparing", self._begin)[0]
            self._gather()
            messages = self._step("writing", lambda: _write(self, staging))
            self._step("publishing", lambda: self._publish(messages))
        self._succeeded()

    def start(
        self, buffer: int | float, new_chain: contextlib.AbstractContextManager[None]
    ) -> None:
        """Records what belongs to the checkpoint, and writes it in the background.

        Args:
            buffer: bounds the memory for rows (`scope(checkpoint_buffer=…)`).
            new_chain: is entered now, and left once the outcome of the save is known.

        Raises:
            CheckpointStorageError: the storage failed while recording.
        """
        parts: list[PartSnapshot] = []

        def take() -> None:
            _check_staged(staging)
            self._stage_graph_and_state()
            parts.append(PartSnapshot(self.saver, self.session, self.shards, staging, buffer))

        with contextlib.ExitStack() as entered:
            entered.enter_context(new_chain)
            with self._undone_if_it_fails():
                staging = self._step("preparing", self._begin)[0]
                self._gather()
                try:
                    self._step("taking", take)
                except BaseException:
                    for part in parts:
                        part.end()
                    raise
            left_later = entered.pop_all()
        background.BackgroundSave(
            self.session,
            self.prefix,
            staging,
            parts[0],
            publish=self._merge_and_publish,
            undo=self._undo,
            over=lambda error: self._leave(left_later, error),
            storage_error=self._storage_error,
        ).start()

    def _leave(self, new_chain: contextlib.ExitStack, error: Exception | None) -> None:
        """Notes the outcome of a background save, once all ranks know it."""
        if error is None:
            new_chain.close()
            self._succeeded()
            return
        with contextlib.suppress(type(error)):
            new_chain.__exit__(type(error), error, None)

    def _succeeded(self) -> None:
        self.retention.apply(self.saver)
        if not isinstance(self.saver, TablesSaver):
            note_last_checkpoint(self.prefix, is_saved=True)
        if self.publication.state is not None:
            _save_code(self.saver, self.prefix)

    def write_tables(self, writer: tensor_bundle.BundleWriter) -> dict[str, Any]:
        """Writes this rank's rows; returns what `layout` needs to know about them."""
        return dict(table_io.write(self.session, self.shards, writer))

    def write_unsharded(self, prefix: str) -> list[str]:
        """Writes everything except tables, on rank 0; returns the prefixes of the bundles."""
        return _write_unsharded(self.saver, self.session, prefix)

    def layout(self, written_by_rank: list[dict[str, Any]]) -> CheckpointLayout:
        """Returns the layout, given what each rank has written."""
        return table_io.layout_of(self.shards, written_by_rank)

    def _step(self, doing: str, step: Callable[[], Any]) -> list[Any]:
        """Carries out a step on every rank; returns the results in the order of the ranks.

        Raises:
            _StorageFailed: the storage failed on some rank; raised on all ranks.
        """
        causes: list[Exception] = []

        def carry_out() -> dict[str, Any]:
            try:
                return {"result": step()}
            except Exception as error:
                if not storage.is_failure(error):
                    raise
                causes.append(error)
                return {"failure": storage.described(error, collectives.rank())}

        outcomes = barrier.run_on_all_ranks(
            self.session, f"{doing} checkpoint '{self.prefix}'", carry_out
        )
        words = [outcome["failure"] for outcome in outcomes if "failure" in outcome]
        if words:
            raise _StorageFailed(words) from (causes[0] if causes else None)
        return [outcome["result"] for outcome in outcomes]

    @contextlib.contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except _StorageFailed as failed:
            raise self._storage_error(failed.words) from failed.__cause__
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        if self.started is not None:
            commit.recover(self.started.staging)

    def _storage_error(self, words: list[str]) -> storage.CheckpointStorageError:
        """Returns the error that all ranks raise after a storage failure, once all is cleaned up.

        Every rank calls it.

        Args:
            words: texts that say what failed on which ranks.
        """
        size = table_io.bytes_in(self.session, self.shards)
        if collectives.rank() == 0:
            size += unsharded_bytes(self.saver)
        payload: dict[str, Any] = {"bytes": size}
        folder = os.path.dirname(self.base)
        if collectives.rank() == 0:
            try:
                with storage.failures():
                    self._undo()
            except OSError as error:
                payload["left"] = f"{error}"
            payload["free"] = storage.free_bytes(folder)
            payload["latest"] = self._latest(folder)
        doing = f"removing what there is of checkpoint '{self.prefix}'"
        payloads = barrier.exchange(self.session, doing, payload)
        of_rank_0, needed = payloads[0], sum(payload["bytes"] for payload in payloads)
        left, latest = of_rank_0.get("left"), of_rank_0["latest"]
        return storage.CheckpointStorageError(
            f"checkpoint '{self.prefix}' was not written, since its storage failed: "
            f"{'; '.join(words).rstrip('.')}. "
            + (
                f"It needs {self.at_most}{storage.amount(needed)}, and in '{folder or '.'}' "
                f"{storage.amount(of_rank_0['free'])} are free. "
                if storage.may_lack_room(words)
                else ""
            )
            + (
                f"What is left of it is removed by the next save ({left}). "
                if left
                else "Nothing of it is left. "
            )
            + (
                f"The latest checkpoint is {latest}."
                if latest
                else "There is no earlier checkpoint."
            )
        )

    def _latest(self, folder: str) -> str | None:
        """Names the latest checkpoint in a folder, with its increments, if it can be read."""
        try:
            state = checkpoint_management.get_checkpoint_state(folder or ".", self.state_name)
            path = state.model_checkpoint_path if state else ""
            is_there = path and checkpoint_management.checkpoint_exists_internal(path)
            return chain.newest_state(path) if is_there else None
        except (OSError, ValueError, tf.errors.OpError):
            return None

    def _gather(self) -> None:
        """Combines the ranks' contributions to states that are saved as one."""
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
        with storage.failures():
            try:
                commit.make_parent(self.base)
            except ValueError as error:
                if not knows_folder(os.path.dirname(self.base)):
                    raise
                raise storage.StorageFailure(f"the folder is gone: {error}") from error
            ownership.marks().hold(self.owner, self.base)
            write_postponed_graph(os.path.dirname(self.base))
            self.started = commit.Commit(self.base, self.prefix)
        return self.started.staging

    def _publish(self, messages: list[dict[str, Any]]) -> None:
        """Makes the checkpoint on rank 0 from everything that the ranks wrote."""
        self._stage_graph_and_state()
        self._merge_and_publish(messages)

    def _merge_and_publish(self, messages: list[dict[str, Any]]) -> None:
        if self.started is None:
            return
        layout = self.layout([message["rows"] for message in messages])
        with storage.failures():
            self.started.merge(_visible(self.started.staging, messages), layout)
            self.started.publish(self.publication)

    def _stage_graph_and_state(self) -> None:
        """Writes the files next to the checkpoint into the staging folder, on rank 0."""
        if self.started is None:
            return
        if self.publication.meta is not None:
            with self.session.graph.as_default(), storage.failures():
                self.saver.export_meta_graph(self.started.meta, **self.meta_graph_options)
        if self.publication.state is not None:
            with storage.failures():
                self._stage_state(self.started)

    def _stage_state(self, started: commit.Commit) -> None:
        """Writes the file that names the latest checkpoint into the staging folder."""
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


class _StorageFailed(Exception):
    """Says, on all ranks alike, that the storage failed in a step.

    Attributes:
        words: texts that say what failed on which ranks.
    """

    def __init__(self, words: list[str]):
        super().__init__("; ".join(words))
        self.words = words


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
    """Writes this rank's part; returns the files and their rows as a message for the others."""
    host, rank = socket.gethostname(), collectives.rank()
    _check_staged(staging)
    with tensor_bundle.BundleWriter(os.path.join(staging, f"rank_{rank}")) as writer:
        rows = save.write_tables(writer)
        prefixes = writer.close()
    if rank == 0:
        prefixes += save.write_unsharded(os.path.join(staging, REPLICATED))
    commit.sync_bundles(prefixes)
    return {"host": host, "rows": rows, "files": [os.path.basename(prefix) for prefix in prefixes]}


def _write_unsharded(saver: Any, sess: Any, prefix: str) -> list[str]:
    """Writes everything except tables; returns the prefixes of the bundles."""
    tensors = unsharded.saved_tensors(saver, sess)
    if tensors is None:
        unsharded.save_itself(saver, sess, prefix)
        return [prefix]
    with tensor_bundle.BundleWriter(prefix) as writer:
        for name, spec, value in unsharded.values(sess, tensors):
            writer.add_slice(name, spec, value)
        return writer.close()


def _check_staged(staging: str) -> None:
    """Checks that this rank sees the staging folder that rank 0 made."""
    if not commit.is_staged(staging):
        raise OSError(
            f"the ranks need a common file system: rank {collectives.rank()} on host "
            f"{socket.gethostname()} does not see the folder '{staging}', which rank 0 has just "
            "made"
        )


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
