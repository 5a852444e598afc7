"""Commits checkpoints: each comes into being whole, or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management

from collective.checkpoint import tensor_bundle
from collective.checkpoint.chain_names import increments_of
from collective.checkpoint.layout import FORMAT_ENTRY, LAYOUT_ENTRY, CheckpointLayout
from collective.checkpoint.storage import StorageFailure

# Files of a staging folder.
RECORD, MERGED, META, STATE = "record", "merged", "graph.meta", "state"
# A network's file system may take so many seconds to show what another host has written.
VISIBILITY_TIMEOUT = 10.0
# A file that is read whole to see whether it was moved.
SHORT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Publication:
    """Lists what happens beside the checkpoint itself once it is durable.

    Attributes:
        meta: the path of the graph's description, or None: `Commit.meta` is moved there.
        state: the path of the file that tells the latest checkpoint, or None: `Commit.state` is
            moved there.
        superseded: checkpoints to be deleted, by their prefixes.
        meta_suffix: the suffix of their graphs' descriptions.
    """

    meta: str | None = None
    state: str | None = None
    superseded: Sequence[str] = ()
    meta_suffix: str = "meta"


class Commit:
    """Makes one checkpoint: everything is written into a folder beside it, and then moved.

        <prefix>_temp_<id>/             the staging folder
            record                      tells what is being moved, for whoever finds the folder
            rank_0-00000.index …        1. what each rank wrote
            merged.index, merged.data-… 2. merged
        <prefix>.data-…                 3. data files moved, under names that an older checkpoint
                                           of this prefix hasn't got
        <prefix>.index                  4. moved, over the older one if there is one: from here on
                                           the checkpoint is there
        <prefix>.meta, checkpoint       5. moved: from here on it is the latest
                                        6. files that are no longer needed deleted, the staging
                                           folder at the end

    Guarantee: a kill of any processes at any moment leaves every earlier checkpoint restorable, and
    the latest one is either the one before or this one, complete. On a local disk each step is on
    the disk before the next begins, so this holds for a loss of power, too. The next save under the
    same base name removes what a killed save leaves behind (`recover_all`).

    Limits: moving is atomic where the file system renames atomically. POSIX does; object stores
    copy instead, and a kill while one of their files is copied over an older one may damage this
    one file. One job at a time saves under a base name in a folder (`ownership`).

    An increment of a checkpoint is committed like one. A checkpoint that takes the place of an
    older one of its name, or is deleted, takes the older one's increments with it.

    Only rank 0 makes an object of this class.

    Attributes:
        id: the checkpoint's, once it is merged.

    Args:
        base: the path as the user gave it.
        prefix: the path of the checkpoint: `base`, or `<base>-<step>`.
    """

    def __init__(self, base: str, prefix: str):
        self.prefix, self.id = prefix, ""
        self.staging = f"{prefix}_temp_{secrets.token_hex(8)}"
        self.meta, self.state = os.path.join(self.staging, META), os.path.join(self.staging, STATE)
        self._merged = os.path.join(self.staging, MERGED)
        self._shards = 0
        make_parent(base)
        recover_all(base)
        self._old_data_files = _data_files(prefix)
        self._existed = tf.io.gfile.exists(tensor_bundle.index_path(prefix))
        tf.io.gfile.mkdir(self.staging)
        try:
            self._write_record({"prefix": prefix})
        except Exception:  # nobody has an object yet that could be recovered
            tf.io.gfile.rmtree(self.staging)
            raise

    def merge(self, written: Sequence[str], layout: CheckpointLayout) -> None:
        """Makes one bundle of the bundles that the ranks wrote, and of the layout."""
        shards = sum(tensor_bundle.BundleIndex(path).shards for path in written)
        self.id = secrets.token_hex(8)
        layout = dataclasses.replace(
            layout, id=self.id, replaced=_id_of(self.prefix) if self._existed else ""
        )
        entries = {LAYOUT_ENTRY: layout.to_json(), FORMAT_ENTRY: str(layout.version)}
        bundles = [entries]
        if tensor_bundle.data_path(self.prefix, 0, shards + 1) in self._old_data_files:
            # The checkpoint that is there has data files of these names, and must last until the
            # index is swapped: one more file gives all of them other names.
            bundles = [{name: value} for name, value in entries.items()]
        layout_bundles: list[str] = []
        for number, entries in enumerate(bundles):
            writer = tensor_bundle.BundleWriter(os.path.join(self.staging, f"layout_{number}"))
            for name, value in entries.items():
                writer.add_whole(name, value)
            layout_bundles += writer.close()
        for path in layout_bundles:
            sync_bundle(path)
        self._shards = shards + len(layout_bundles)
        tensor_bundle.merge([*written, *layout_bundles], self._merged)
        sync(tensor_bundle.index_path(self._merged))

    def publish(self, publication: Publication) -> None:
        """Takes steps 3 to 6. After an error on the way, `recover` undoes what can be undone."""
        if publication.meta:
            sync(self.meta)
        if publication.state:
            sync(self.state)
        self._write_record(
            {
                "prefix": self.prefix,
                "shards": self._shards,
                "meta": publication.meta,
                "state": publication.state,
                "existed": self._existed,
                "old": self._old_data_files,
                "doomed": list(publication.superseded),
                "meta_suffix": publication.meta_suffix,
            }
        )
        sync(self.staging)
        for shard in range(self._shards):
            move(
                tensor_bundle.data_path(self._merged, shard, self._shards),
                tensor_bundle.data_path(self.prefix, shard, self._shards),
            )
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
                sync(os.path.dirname(publication.state))
            recover(self.staging)
        except (OSError, tf.errors.OpError) as error:
            # It is there, and no save that failed: increments have to follow it.
            tf.logging.warning(
                "checkpoint '%s' is complete, but what is needless now can't be removed (%s: %s). "
                "The next save tries again.",
                *(self.prefix, type(error).__name__, getattr(error, "message", error)),
            )

    def _write_record(self, record: dict[str, Any]) -> None:
        path = os.path.join(self.staging, RECORD)
        with tf.io.gfile.GFile(path + ".new", "w") as file:
            file.write(json.dumps(record))
        sync(path + ".new")
        move(path + ".new", path)


def write_alone(
    target: str, write: Callable[[tensor_bundle.BundleWriter, str], CheckpointLayout]
) -> None:
    """Makes a checkpoint where no ranks run; it appears whole, or not at all.

    Args:
        target: its prefix.
        write: is given what takes the entries, and the staging folder; returns the layout.

    Raises:
        ValueError: there is a checkpoint `target`.
    """
    if tf.io.gfile.exists(tensor_bundle.index_path(target)):
        raise ValueError(f"There is a checkpoint '{target}' already.")
    started = Commit(target, target)
    try:
        writer = tensor_bundle.BundleWriter(os.path.join(started.staging, "rank_0"))
        layout = write(writer, started.staging)
        prefixes = writer.close()
        for prefix in prefixes:
            sync_bundle(prefix)
        started.merge(prefixes, layout)
        started.publish(Publication())
    except BaseException:
        recover(started.staging)
        raise


def make_parent(base: str) -> None:
    """Makes the folder of checkpoints called `base`, but not the one around it."""
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
    """Removes what killed saves under this base name left behind."""
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
                raise  # it has to be undone first
            tf.logging.warning(
                "'%s', which a save has left behind, can't be removed (%s: %s). Saves go on.",
                *(path, type(error).__name__, getattr(error, "message", error)),
            )


def recover(staging: str) -> None:
    """Finishes a commit if its checkpoint has become the latest, else undoes it.

    This may be killed, too, and done again.
    """
    record = _record(staging)
    if "shards" in record:
        _finish_or_undo(staging, record)
        # The folder's remaining files say nothing any more, whichever of them goes first.
        _delete([os.path.join(staging, RECORD)])
        sync(staging)
    if tf.io.gfile.exists(staging):
        tf.io.gfile.rmtree(staging)


def _record(staging: str) -> dict[str, Any]:
    """Reads what a commit has noted of itself; {} if it hasn't, or not any more."""
    path = os.path.join(staging, RECORD)
    if not tf.io.gfile.exists(path):
        return {}
    with tf.io.gfile.GFile(path, "r") as file:
        record: dict[str, Any] = json.loads(file.read())
    return record


def _is_there(staging: str, record: dict[str, Any]) -> bool:
    """Tells whether the checkpoint of a commit is in its place."""
    return not tf.io.gfile.exists(
        tensor_bundle.index_path(os.path.join(staging, MERGED))
    ) and tf.io.gfile.exists(tensor_bundle.index_path(record["prefix"]))


def _has_become_latest(staging: str, record: dict[str, Any]) -> bool:
    """Tells whether it is, and the folder's state names it."""
    state_waits = record["state"] and tf.io.gfile.exists(os.path.join(staging, STATE))
    return _is_there(staging, record) and not state_waits


def _finish_or_undo(staging: str, record: dict[str, Any]) -> None:
    prefix, shards = record["prefix"], record["shards"]
    new_data_files = [tensor_bundle.data_path(prefix, shard, shards) for shard in range(shards)]
    is_there, is_latest = _is_there(staging, record), _has_become_latest(staging, record)
    if is_latest or is_there and record["existed"]:
        _delete(path for path in record["old"] if path not in new_data_files)
        # They followed the checkpoint that was there.
        _remove_increments(prefix)
    else:
        # The index last but for the data files: a kill in between must not hide that it was there.
        _delete([record["meta"]] if record["meta"] and is_there else [])
        _delete([tensor_bundle.index_path(prefix)] if is_there else [])
        _delete(path for path in new_data_files if path not in record["old"])
    if is_latest:
        for superseded in record["doomed"]:
            _remove_increments(superseded)
            checkpoint_management.remove_checkpoint(
                superseded, meta_graph_suffix=record["meta_suffix"]
            )


def _remove_increments(prefix: str) -> None:
    """Deletes the increments of a checkpoint, the last one first: never is one left in between."""
    for _, increment in reversed(increments_of(prefix)):
        _delete([tensor_bundle.index_path(increment)])
        _delete(_data_files(increment))


def _id_of(prefix: str) -> str:
    """Returns the id of the checkpoint that is there; '' if it has none, or can't be read."""
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
    """Moves a file over whatever is there, and looks after it where a network is between.

    Raises:
        StorageFailure: the file system said that it did, and did not.
    """
    if "://" not in target:
        tf.io.gfile.rename(source, target, overwrite=True)
        return
    before = _identity(source)
    tf.io.gfile.rename(source, target, overwrite=True)
    if not becomes_visible(target) or _identity(target) != before:
        raise StorageFailure(f"'{source}' was moved to '{target}', but is not there")


def _identity(path: str) -> tuple[int, bytes]:
    """Returns a file's length, and its content if that is short."""
    length = tf.io.gfile.stat(path).length
    if length > SHORT_BYTES:
        return length, b""
    with tf.io.gfile.GFile(path, "rb") as file:
        return length, file.read()


def sync(path: str) -> None:
    """Waits until a local file or folder is on the disk; other file systems do it by themselves."""
    if "://" in path:
        return
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_bundle(prefix: str) -> None:
    """Waits until a bundle's files are on the disk."""
    sync(tensor_bundle.index_path(prefix))
    shards = tensor_bundle.BundleIndex(prefix).shards
    for shard in range(shards):
        sync(tensor_bundle.data_path(prefix, shard, shards))


def becomes_visible(path: str) -> bool:
    """Waits up to `VISIBILITY_TIMEOUT` for a file that another host wrote; tells if it is seen."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not tf.io.gfile.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
