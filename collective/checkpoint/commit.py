"""How a checkpoint comes into being: whole, or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management

from collective.checkpoint import tensor_bundle
from collective.checkpoint.layout import ENTRY, FORMAT_ENTRY, VERSION, CheckpointLayout

RECORD, MERGED, META, STATE = "record", "merged", "graph.meta", "state"
# seconds that a network's file system may take to show what another host has written
PATIENCE = 10.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """What happens beside the checkpoint itself once it is durable.

    Attributes:
        meta: the path of the graph's description, or None: `Commit.meta` is moved there.
        state: the path of the file that tells the latest checkpoint, or None: `Commit.state` is
            moved there.
        doomed: checkpoints to be deleted, by their prefixes.
        meta_suffix: of their graphs' descriptions.
    """

    meta: str | None = None
    state: str | None = None
    doomed: Sequence[str] = ()
    meta_suffix: str = "meta"


class Commit:
    """One checkpoint on its way: everything is written into a folder of its own beside it, and then
    moved.

        <prefix>_temp_<id>/             the staging folder
            record                      what is being moved, for whoever finds the folder
            rank_0-00000.index …        1. what each rank wrote
            merged.index, merged.data-… 2. merged
        <prefix>.data-…                 3. data files moved, under names that an older checkpoint of
        this prefix hasn't got
        <prefix>.index                  4. moved, over the older one if there is one: from here on
        the checkpoint is there
        <prefix>.meta, checkpoint       5. moved: from here on it is the latest
                                        6. what is no longer needed deleted, the staging folder at
                                           the end

    Guarantee: a kill of any processes at any moment leaves every earlier checkpoint restorable, and
        the latest one is
    either the one before or this one, complete. On a local disk each step is on the disk before the
    next begins, so this holds for a loss of power, too. What a killed save leaves behind, the next
    save under the same base name removes (`clean`).

    Limits: moving is atomic where the file system renames atomically (POSIX does; object stores
        copy instead, and a kill
    while one of their files is copied over an older one may damage this one file). One job at a
    time saves under a base name in a folder.

    Only rank 0 makes an object of this class.

    Args:
        base: the path as the user gave it.
        prefix: the path of the checkpoint: `base`, or `<base>-<step>`.
    """

    def __init__(self, base: str, prefix: str):
        self.prefix = prefix
        self.staging = f"{prefix}_temp_{secrets.token_hex(8)}"
        self.meta, self.state = os.path.join(self.staging, META), os.path.join(self.staging, STATE)
        self._merged = os.path.join(self.staging, MERGED)
        self._shards = 0
        parent = os.path.dirname(prefix)
        if parent and not tf.io.gfile.isdir(parent):
            try:
                tf.io.gfile.mkdir(parent)
            except tf.errors.NotFoundError:
                raise ValueError(f"Parent directory of {base} doesn't exist, can't save.") from None
        clean(base)
        self._old = _data_files(prefix)
        tf.io.gfile.mkdir(self.staging)
        self._note({"prefix": prefix})

    def merge(self, written: Sequence[str], layout: CheckpointLayout) -> None:
        """Makes one bundle of those that the ranks wrote, and of the layout."""
        shards = sum(tensor_bundle.Index(path).shards for path in written)
        # One more file where the names would be those of the checkpoint that is there: it must last
        # until the index is swapped.
        together = tensor_bundle.data_path(self.prefix, 0, shards + 1) not in self._old
        labels: list[str] = []
        for number, entries in enumerate(
            [{ENTRY: layout.to_json(), FORMAT_ENTRY: str(VERSION)}]
            if together
            else [{ENTRY: layout.to_json()}, {FORMAT_ENTRY: str(VERSION)}]
        ):
            writer = tensor_bundle.Writer(os.path.join(self.staging, f"layout_{number}"))
            for name, value in entries.items():
                writer.add_whole(name, value)
            labels += writer.close()
        for path in labels:
            sync_bundle(path)
        self._shards = shards + len(labels)
        tensor_bundle.merge([*written, *labels], self._merged)
        sync(tensor_bundle.index_path(self._merged))

    def publish(self, ending: Ending) -> None:
        """Steps 3 to 6. An error on the way undoes what can be undone (`settle`)."""
        for path, wanted in ((self.meta, ending.meta), (self.state, ending.state)):
            if wanted:
                sync(path)
        self._note(
            {
                "prefix": self.prefix,
                "shards": self._shards,
                "meta": ending.meta,
                "state": ending.state,
                "existed": tf.io.gfile.exists(tensor_bundle.index_path(self.prefix)),
                "old": self._old,
                "doomed": list(ending.doomed),
                "meta_suffix": ending.meta_suffix,
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
        if ending.meta:
            move(self.meta, ending.meta)
            debug = os.path.splitext(self.meta)[0] + ".debug"
            if tf.io.gfile.exists(debug):
                move(debug, os.path.splitext(ending.meta)[0] + ".debug")
        if ending.state:
            move(self.state, ending.state)
            sync(os.path.dirname(ending.state))
        settle(self.staging)

    def _note(self, record: dict[str, Any]) -> None:
        path = os.path.join(self.staging, RECORD)
        with tf.io.gfile.GFile(path + ".new", "w") as file:
            file.write(json.dumps(record))
        sync(path + ".new")
        move(path + ".new", path)


def is_staged(staging: str) -> bool:
    """Whether this rank sees the staging folder that rank 0 made."""
    return appears(os.path.join(staging, RECORD))


def clean(base: str) -> None:
    """Removes what saves under this base name left behind when they were killed."""
    parent, name = os.path.split(base)
    left = re.compile(re.escape(name) + r"(-\d+)?_temp_[0-9a-f]{16}/?")
    for entry in tf.io.gfile.listdir(parent or "."):
        if left.fullmatch(entry):
            settle(os.path.join(parent, entry.rstrip("/")))


def settle(staging: str) -> None:
    """Ends what is under way in a staging folder: all of it if the checkpoint has become the
    latest, else nothing of it.

    This may be killed, too, and done again.
    """
    path = os.path.join(staging, RECORD)
    record: dict[str, Any] = {}
    if tf.io.gfile.exists(path):
        with tf.io.gfile.GFile(path, "r") as file:
            record = json.loads(file.read())
    if "shards" in record:
        _end(staging, record)
        # What is left of the folder tells nothing any more, whichever file of it goes first.
        _delete([path])
        sync(staging)
    if tf.io.gfile.exists(staging):
        tf.io.gfile.rmtree(staging)


def _end(staging: str, record: dict[str, Any]) -> None:
    prefix, shards = record["prefix"], record["shards"]
    new = [tensor_bundle.data_path(prefix, shard, shards) for shard in range(shards)]
    there = not tf.io.gfile.exists(tensor_bundle.index_path(os.path.join(staging, MERGED)))
    latest = there and not (record["state"] and tf.io.gfile.exists(os.path.join(staging, STATE)))
    if latest or there and record["existed"]:
        _delete(path for path in record["old"] if path not in new)
    else:
        _delete([tensor_bundle.index_path(prefix)] if there else [])
        _delete(path for path in new if path not in record["old"])
        _delete([record["meta"]] if record["meta"] and there else [])
    if latest:
        for doomed in record["doomed"]:
            checkpoint_management.remove_checkpoint(doomed, meta_graph_suffix=record["meta_suffix"])


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
    tf.io.gfile.rename(source, target, overwrite=True)


def sync(path: str) -> None:
    """Waits until a file or folder is on the disk, if it is a local one; other file systems see to
    that themselves.
    """
    if "://" in path:
        return
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_bundle(prefix: str) -> None:
    """`sync` of a bundle's files."""
    sync(tensor_bundle.index_path(prefix))
    shards = tensor_bundle.Index(prefix).shards
    for shard in range(shards):
        sync(tensor_bundle.data_path(prefix, shard, shards))


def appears(path: str) -> bool:
    """Whether a file that another host has written is seen here, for which it has `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not tf.io.gfile.exists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
