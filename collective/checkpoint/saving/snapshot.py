"""Keeps this rank's part of a checkpoint as of one step, so that it is written during training.

    at the step's boundary          keys, counts and replicated variables are copied; rows of tables
                                    and slots stay in place, and are copied only just before they
                                    change (`collective.ops.rows.row_snapshots`)
    from a thread, any time later   `write`

Rows that can't be followed are written at the boundary: those of tables on a device, of tables with
rows in a file, and of tables that a session had begun to train before anyone asked to follow them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.rows import key_counts, table_io
from collective.checkpoint.rows.held_rows import HeldReads, HeldRows, Receiver, can_be_held
from collective.checkpoint.rows.shards import Shard, by_table
from collective.checkpoint.saving import unsharded
from collective.ops.communication import collectives
from collective.ops.rows import data_files
from collective.ops.rows.row_snapshots import CopyRoom
from collective.tables.rows import row_store
from collective.tables.updates import write_announcements

# How long training waits for a thread that writes nothing, before the save is given up.
PATIENCE = 120.0
# The least memory of a save, in slices (`tensor_bundle.SLICE_BYTES`).
LEAST_SLICES = 4
# The bundle of everything but tables.
REPLICATED = "replicated"


class PartSnapshot:
    """Holds this rank's part of a checkpoint at one moment.

    Attributes:
        room: the room that copies of rows take.

    Args:
        saver, session: the script's Saver and session.
        shards: the Saver's tables and slots.
        staging: the folder in which the part is written.
        buffer: bounds the memory for rows: bytes, or a share of the rows' bytes.
    """

    def __init__(
        self, saver: Any, session: Any, shards: Sequence[Shard], staging: str, buffer: int | float
    ):
        self._shards, self._stem = shards, os.path.join(staging, f"rank_{collectives.rank()}")
        followed = [shard for group in by_table(shards) if _is_followed(group) for shard in group]
        at_once = [shard for shard in shards if not any(shard is other for other in followed)]
        size = buffer
        if isinstance(buffer, float):
            size = int(buffer * table_io.bytes_in(session, followed))
        size = max(int(size), LEAST_SLICES * tensor_bundle.SLICE_BYTES)
        self._file_bytes = tensor_bundle.FILE_BYTES
        if data_files.are_possible(staging):
            on_its_way = min(data_files.buffer_bytes(), size // 2)
        else:  # One half is for a file: a slice arrives before the rest is written.
            self._file_bytes = min(self._file_bytes, max(1, size // 2 - tensor_bundle.SLICE_BYTES))
            on_its_way = self._file_bytes + tensor_bundle.SLICE_BYTES
        self.room = CopyRoom(size - on_its_way, PATIENCE)
        self._unsharded: list[tuple[str, str, np.ndarray]] = []
        self._unsharded_stem = ""
        self._written: list[str] = []
        self._rows: dict[str, int] = {}
        self._source = SnapshotRows(session, followed, self.room)
        try:
            if collectives.rank() == 0:
                self._take_unsharded(saver, session, staging)
            self._followed = followed
            if at_once:
                with tensor_bundle.BundleWriter(f"{self._stem}_at_once") as writer:
                    self._rows = table_io.write(session, at_once, writer)
                    self._written += writer.close()
        except BaseException:
            self.end()
            raise

    def write(self) -> tuple[list[str], dict[str, int]]:
        """Writes the part into the staging folder; called once, from any thread.

        Returns:
            (the prefixes of the bundles, how many rows each shard has here).
        """
        with tensor_bundle.BundleWriter(
            self._stem, file_bytes=self._file_bytes, when_written=self.room.note_progress
        ) as writer:
            rows = {**self._rows, **table_io.write(None, self._followed, writer, self._source)}
            prefixes = [*self._written, *writer.close()]
        with tensor_bundle.BundleWriter(self._unsharded_stem) as writer:
            for name, spec, value in self._unsharded:
                writer.add_slice(name, spec, value)
            return [*prefixes, *writer.close()], rows

    def end(self) -> None:
        """Releases its memory; training no longer has to preserve rows for it."""
        self.room.give_up()
        self._source.end()

    def _take_unsharded(self, saver: Any, session: Any, staging: str) -> None:
        """Copies what the Saver's own operations save; if that isn't possible, they save it now."""
        tensors, prefix = unsharded.saved_tensors(saver, session), os.path.join(staging, REPLICATED)
        if tensors is None:
            unsharded.save_itself(saver, session, prefix)
            self._written.append(prefix)
        else:
            self._unsharded = list(unsharded.values(session, tensors))
            self._unsharded_stem = prefix


class SnapshotRows:
    """Provides rows as of its creation, like `table_io.SessionRows` for a session.

    Each row can be read once. Any thread may read them.

    Args:
        session: the session.
        shards: the shards, whose writes are announced.
        room: the room for copies.
    """

    def __init__(self, session: Any, shards: Sequence[Shard], room: CopyRoom):
        self._keys: dict[str, np.ndarray] = {}
        self._counts: dict[str, key_counts.KeyCounts] = {}
        numbers = write_announcements.watch(session, [shard.variable for shard in shards])
        for group in by_table(shards):
            if group[0].dynamic:
                self._take_keys(session, group)
        counts = {name: len(keys) for name, keys in self._keys.items()}
        self._held = HeldRows(session, shards, counts, numbers, room)

    def _take_keys(self, session: Any, group: Sequence[Shard]) -> None:
        """Copies the keys of a dynamic table, and its counts."""
        table: Any = group[0].table
        table.initialize_slot_rows(session, [s.variable for s in group if s.slot_of is not None])
        self._keys[group[0].name] = np.array(table.store(session).all_keys())
        counts = key_counts.in_session(session, group[0])
        if counts is not None:
            self._counts[group[0].name] = counts.copied()

    def blocks(self, group: Sequence[Shard], block: int) -> tuple[int, table_io.Blocks]:
        if not group[0].dynamic:
            return group[0].shape[0], table_io.static_blocks(group[0].shape[0], block)
        keys = self._keys[group[0].name]
        in_order = row_store.in_ascending_order(keys, block)
        return len(keys), ((of_block, places + 1) for of_block, places in in_order)

    def reads(self, receive: Receiver) -> HeldReads:
        return self._held.reads(receive)

    def reader_by_key(self, group: Sequence[Shard]) -> None:
        return None  # All rows are in memory.

    def key_counts(self, shard: Shard) -> key_counts.KeyCounts | None:
        return self._counts.get(shard.name)

    def end(self) -> None:
        """Ends the snapshots, and releases their memory."""
        self._held.end()


def _is_followed(group: Sequence[Shard]) -> bool:
    """Tells whether all writes of a table, or of a static slot, are announced, in host memory."""
    return can_be_held(group) and all(
        write_announcements.is_announced(shard.variable) for shard in group
    )
