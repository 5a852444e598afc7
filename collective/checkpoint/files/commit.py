"""Commits checkpoints: each appears completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.chain_names import increments_of, split
from collective.checkpoint.files.layout import FORMAT_ENTRY, LAYOUT_ENTRY, CheckpointLayout
from collective.checkpoint.files.storage import StorageFailure
from collective.ops.counting import counted
from collective.tensorflow_internals.checkpoints import checkpoint_management

# Files of a staging folder.
RECORD, MERGED, META, STATE = "record", "merged", "graph.meta", "state"
# How many seconds a network file system may take to show what another host has written.
VISIBILITY_TIMEOUT = 10.0
# A file up to this size is read completely to check whether it was moved.
SHORT_BYTES = 1 << 20
# How many files are synced at the same time.
SYNCS = 8


@dataclasses.dataclass(frozen=True)
class Publication:
    """Lists what else happens once the checkpoint is durable.

    Attributes:
        meta: the path to which `Commit.meta`, the graph's description, is moved; or None.
        state: the path to which `Commit.state`, the file that names the latest checkpoint, is
            moved; or None.
        superseded: the prefixes of checkpoints to delete.
        meta_suffix: the suffix of their graphs' descriptions.
    """

    meta: str | None = None
    state: str | None = None
    superseded: Sequence[str] = ()
    meta_suffix: str = "meta"


class Commit:
    """Makes one checkpoint: everything is written into a folder next to it, and then moved.

        <prefix>_temp_<id>/             the staging folder
            record tells what is being moved, for a process that finds the folder; empty before that
            rank_0-00000.index …        1. what each rank wrote
            merged.index, merged.data-… 2. merged
        <prefix>.data-…                 3. data files moved, under names that an older checkpoint
                                           of this prefix hasn't got
        <prefix>.index                  4. moved, over the older one if there is one: from here on
                                           the checkpoint is there
        <prefix>.meta, checkpoint       5. moved: from here on it is the latest
                                        6. files that are no longer needed deleted, the staging
                                           folder at the end

    Guarantee: if any processes are killed at any moment, every earlier checkpoint can be restored,
    and the latest checkpoint is either the previous one or this one, complete. On a local disk,
    files are synced before they are moved, and each move from step 3 on is synced before the next
    step begins; so this holds for a loss of power, too. The next save under the same base name
    removes what a killed save has left (`recover_all`).

    Limits: a move is atomic if the file system renames atomically. POSIX does. Object stores copy
    instead: a kill while one of their files is copied over an older one may damage this one file.
    Only one job at a time may save under a base name in a folder (`ownership`).

    An increment is committed like a checkpoint. A checkpoint that replaces an older one of the same
    name, or is deleted, takes the older one's increments with it.

    Only rank 0 makes objects of this class.

    Attributes:
        id: the checkpoint's id, once it is merged.

    Args:
        base: the path as given by the user.
        prefix: the path of the checkpoint: `base`, or `<base>-<step>`.
    """

    def __init__(self, base: str, prefix: str):
        self.prefix, self.id = prefix, ""
        self.staging = f"{prefix}_temp_{secrets.token_hex(8)}"
        self.meta, self.state = os.path.join(self.staging, META), os.path.join(self.staging, STATE)
        self._merged = os.path.join(self.staging, MERGED)
        self._shards, self._unsynced = 0, list[str]()
        make_parent(base)
        recover_all(base)
        self._old_data_files = _data_files(prefix)
        self._existed = tf.io.gfile.exists(tensor_bundle.index_path(prefix))
        tf.io.gfile.mkdir(self.staging)
        try:
            _write(os.path.join(self.staging, RECORD), "")
        except Exception:  # no object exists yet that could undo it
            tf.io.gfile.rmtree(self.staging)
            raise

    def merge(self, written: Sequence[str], layout: CheckpointLayout) -> None:
        """Merges the bundles that the ranks wrote, and the layout, into one bundle."""
        shards = sum(tensor_bundle.BundleIndex(path).shards for path in written)
        self.id = secrets.token_hex(8)
        layout = dataclasses.replace(
            layout, id=self.id, replaced=_id_of(self.prefix) if self._existed else ""
        )
        entries = {LAYOUT_ENTRY: layout.to_json(), FORMAT_ENTRY: str(layout.version)}
        bundles = [entries]
        if tensor_bundle.data_path(self.prefix, 0, shards + 1) in self._old_data_files:
            # The checkpoint of this name has data files with these names, and must last until the
            # index is replaced: one more file gives all of them other names.
            bundles = [{name: value} for name, value in entries.items()]
        layout_bundles: list[str] = []
        for number, entries in enumerate(bundles):
            stem = os.path.join(self.staging, f"layout_{number}")
            with tensor_bundle.BundleWriter(stem) as writer:
                for name, value in entries.items():
                    writer.add_whole(name, value)
                layout_bundles += writer.close()
        self._shards = shards + len(layout_bundles)
        tensor_bundle.merge([*written, *layout_bundles], self._merged)
        # The layout's data files are the last ones. The ranks have synced their own.
        self._unsynced = [tensor_bundle.index_path(self._merged)] + [
            tensor_bundle.data_path(self._merged, shard, self._shards)
            for shard in range(shards, self._shards)
        ]

    def publish(self, publication: Publication) -> None:
        """Takes steps 3 to 6. After an error in between, `recover` undoes what can be undone."""
        record = {
            "prefix": self.prefix,
            "shards": self._shards,
            "meta": publication.meta,
            "state": publication.state,
            "existed": self._existed,
            "old": self._old_data_files,
            "doomed": list(publication.superseded),
            "meta_suffix": publication.meta_suffix,
        }
        path = os.path.join(self.staging, RECORD)
        _write(path, json.dumps(record))
        meta_and_state = [self.meta] * bool(publication.meta) + [self.state] * bool(
            publication.state
        )
        # The moved files are complete, and are found together with the record.
        sync(path, self.staging, *self._unsynced, *meta_and_state)
        for shard in range(self._shards):
            move(
                tensor_bundle.data_path(self._merged, shard, self._shards),
                tensor_bundle.data_path(self.prefix, shard, self._shards),
            )
        # No index may be durable without its data files, and no state without its index.
        sync(os.path.dirname(self.prefix))
        move(tensor_bundle.index_path(self._merged), tensor_bundle.index_path(self.prefix))
        sync(os.path.dirname(self.prefix))
        if publication.meta:
            move(self.meta, publication.meta)
            debug = os.path.splitext(self.meta)[0] + ".debug"
            if tf.io.gfile.exists(debug):
                move(debug, os.path.splitext(publication.meta)[0] + ".debug")
        if publication.state:
            move(self.state, publication.state)
        try:
            if publication.state:
                # Older checkpoints stay until the state names another one.
                sync(os.path.dirname(publication.state))
            recover(self.staging)
        except (OSError, tf.errors.OpError) as error:
            # The checkpoint exists, so the save hasn't failed: increments have to follow it.
            tf.logging.warning(
                "checkpoint '%s' is complete, but files that it replaces can't be removed "
                "(%s: %s). The next save tries again.",
                *(self.prefix, type(error).__name__, getattr(error, "message", error)),
            )


def write_alone(
    target: str, write: Callable[[tensor_bundle.BundleWriter, str], CheckpointLayout]
) -> None:
    """Makes a checkpoint where no ranks run; it appears completely or not at all.

    Args:
        target: its prefix.
        write: gets the writer of the entries and the staging folder; returns the layout.

    Raises:
        ValueError: `target` exists already, or doesn't name a checkpoint.
    """
    check_new(target)
    started = Commit(target, target)
    try:
        with tensor_bundle.BundleWriter(os.path.join(started.staging, "rank_0")) as writer:
            layout = write(writer, started.staging)
            prefixes = writer.close()
        sync_bundles(prefixes)
        started.merge(prefixes, layout)
        started.publish(Publication())
    except BaseException:
        recover(started.staging)
        raise


def check_new(target: str) -> None:
    """Checks that a checkpoint `target` wouldn't overwrite anything.

    Raises:
        ValueError: says what exists, and what helps.
    """
    name = os.path.basename(target)
    if not name or tf.io.gfile.isdir(target):
        raise ValueError(
            f"'{target}' is a folder, and a new checkpoint needs a prefix: give a name inside the "
            f"folder, such as '{os.path.join(target, 'model.ckpt')}'."
        )
    if split(name)[1] is not None:
        raise ValueError(
            f"'{target}' is the name of an increment, and this makes a whole checkpoint: give a "
            "name without '.increment-'."
        )
    index = tensor_bundle.index_path(target)
    files = [index] if tf.io.gfile.exists(index) else []
    files += _data_files(target)
    files += [tensor_bundle.index_path(prefix) for _, prefix in increments_of(target)]
    if files:
        what = "a checkpoint" if files[0] == index else "files of a checkpoint"
        more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        raise ValueError(
            f"There {'is' if files[0] == index else 'are'} {what} '{target}' already: {files[0]}"
            f"{more}. Nothing is overwritten: give another name, or delete it first."
        )


def make_parent(base: str) -> None:
    """Makes the folder of the checkpoints `base`, but not that folder's parent."""
    parent = os.path.dirname(base)
    if parent and not tf.io.gfile.isdir(parent):
        try:
            tf.io.gfile.mkdir(parent)
        except tf.errors.NotFoundError:
            raise ValueError(f"Parent directory of {base} doesn't exist, can't save.") from None


def is_staged(staging: str) -> bool:
    """Tells whether this rank sees the staging folder that rank 0 made."""
    return becomes_visible(os.path.join(staging, RECORD))


def recover_all(base: str) -> None:
    """Removes what killed saves under this base name have left."""
    parent, name = os.path.split(base)
    staging = re.compile(re.escape(name) + r"(-\d+)?(\.increment-\d+)?_temp_[0-9a-f]{16}/?")
    for entry in tf.io.gfile.listdir(parent or "."):
        if not staging.fullmatch(entry):
            continue
        path = os.path.join(parent, entry.rstrip("/"))
        try:
            recover(path)
        except (OSError, tf.errors.OpError) as error:
            record = _record(path)
            if "shards" in record and not _has_become_latest(path, record):
                raise  # it must be undone first
            tf.logging.warning(
                "'%s', left by an earlier save, can't be removed (%s: %s). Saving continues.",
                *(path, type(error).__name__, getattr(error, "message", error)),
            )


def recover(staging: str) -> None:
    """Completes a commit if its checkpoint has become the latest, else undoes it.

    This may itself be killed, and repeated.
    """
    record = _record(staging)
    if "shards" in record:
        _finish_or_undo(staging, record)
        # Without it the folder's remaining files mean nothing, in whatever order they are deleted.
        _delete([os.path.join(staging, RECORD)])
        sync(staging)
    if tf.io.gfile.exists(staging):
        tf.io.gfile.rmtree(staging)


def _record(staging: str) -> dict[str, Any]:
    """Reads what a commit has recorded about itself; {} if it hasn't yet, or has no longer.

    A record that was cut off while it was written counts as empty: nothing has been moved before
    the whole record was on the disk.
    """
    path = os.path.join(staging, RECORD)
    if not tf.io.gfile.exists(path):
        return {}
    with tf.io.gfile.GFile(path, "r") as file:
        text = file.read()
    try:
        record: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return record


def _write(path: str, text: str) -> None:
    with tf.io.gfile.GFile(path, "w") as file:
        file.write(text)


def _is_there(staging: str, record: dict[str, Any]) -> bool:
    """Tells whether a commit's checkpoint is in its place."""
    return not tf.io.gfile.exists(
        tensor_bundle.index_path(os.path.join(staging, MERGED))
    ) and tf.io.gfile.exists(tensor_bundle.index_path(record["prefix"]))


def _has_become_latest(staging: str, record: dict[str, Any]) -> bool:
    """Tells whether the checkpoint is in its place, and the folder's state names it."""
    state_waits = record["state"] and tf.io.gfile.exists(os.path.join(staging, STATE))
    return _is_there(staging, record) and not state_waits


def _finish_or_undo(staging: str, record: dict[str, Any]) -> None:
    prefix, shards = record["prefix"], record["shards"]
    new_data_files = [tensor_bundle.data_path(prefix, shard, shards) for shard in range(shards)]
    is_there, is_latest = _is_there(staging, record), _has_become_latest(staging, record)
    if is_latest or is_there and record["existed"]:
        _delete(path for path in record["old"] if path not in new_data_files)
        # They followed the previous checkpoint.
        _remove_increments(prefix)
    else:
        # The index goes last, except for the data files: a kill in between must not hide that the
        # checkpoint was there.
        _delete([record["meta"]] if record["meta"] and is_there else [])
        _delete([tensor_bundle.index_path(prefix)] if is_there else [])
        _delete(path for path in new_data_files if path not in record["old"])
    if is_latest:
        for superseded in record["doomed"]:
            _remove_increments(superseded)
            meta = checkpoint_management.meta_graph_filename(superseded, record["meta_suffix"])
            _delete([meta, tensor_bundle.index_path(superseded)])
            _delete(_data_files(superseded))


def _remove_increments(prefix: str) -> None:
    """Deletes the increments of a checkpoint, the last one first, so that there is never a gap."""
    for _, increment in reversed(increments_of(prefix)):
        _delete([tensor_bundle.index_path(increment)])
        _delete(_data_files(increment))


def _id_of(prefix: str) -> str:
    """Returns the id of an existing checkpoint; '' if it has none, or can't be read."""
    try:
        return tensor_bundle.Bundle(prefix).layout.id
    except (ValueError, tf.errors.OpError):
        return ""


def _delete(paths: Any) -> None:
    for path in paths:
        if tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)


def _data_files(prefix: str) -> list[str]:
    parent, name = os.path.split(prefix)
    if not tf.io.gfile.isdir(parent or "."):
        return []
    data = re.compile(re.escape(name) + r"\.data-\d{5,}-of-\d{5,}")
    return [
        os.path.join(parent, entry)
        for entry in tf.io.gfile.listdir(parent or ".")
        if data.fullmatch(entry)
    ]


def move(source: str, target: str) -> None:
    """Moves a file over an existing one, and on a network file system checks the result.

    Raises:
        StorageFailure: the file system reported success, but didn't move the file.
    """
    if "://" not in target:
        tf.io.gfile.rename(source, target, overwrite=True)
        return
    before = _identity(source)
    tf.io.gfile.rename(source, target, overwrite=True)
    if not becomes_visible(target) or _identity(target) != before:
        raise StorageFailure(f"'{source}' was moved to '{target}', but doesn't exist there")


def _identity(path: str) -> tuple[int, bytes]:
    """Returns a file's length, and its content if the file is short."""
    length = tf.io.gfile.stat(path).length
    if length > SHORT_BYTES:
        return length, b""
    with tf.io.gfile.GFile(path, "rb") as file:
        return length, file.read()


def sync(*paths: str) -> None:
    """Waits until local files or folders are on the disk; other file systems do it by themselves.

    They are synced in parallel: otherwise each would wait for the disk in turn.
    """
    local = [path for path in paths if "://" not in path]
    errors: list[OSError] = []
    first, *others = [local[i::SYNCS] for i in range(max(1, min(SYNCS, len(local))))]
    threads = [threading.Thread(target=_sync_each, args=(share, errors)) for share in others]
    for thread in threads:
        thread.start()
    _sync_each(first, errors)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _sync_each(paths: Sequence[str], errors: list[OSError]) -> None:
    try:
        for path in paths:
            handle = os.open(path or ".", os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError as error:
        errors.append(error)


def sync_bundles(prefixes: Sequence[str]) -> None:
    """Waits until the data files of bundles are on the disk.

    Their indices needn't be: `Commit.merge` makes one index of them all, and syncs it.
    """
    paths: list[str] = []
    for prefix in prefixes:
        shards = tensor_bundle.BundleIndex(prefix).shards
        paths += [tensor_bundle.data_path(prefix, shard, shards) for shard in range(shards)]
    sync(*paths)


def becomes_visible(path: str) -> bool:
    """Waits up to `VISIBILITY_TIMEOUT` for a file from another host; tells whether it appears."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not tf.io.gfile.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
