"""Holds the memory of tables and slots, and reads their rows in place.

A run that fetched them would copy them into new memory, which takes longer than writing them to a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.rows.shards import RowReads, RowRequest, Shard, by_table
from collective.ops import kernel_device, native_library
from collective.ops.graph import graphs
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows.row_snapshots import CopyRoom, HoldOperation, RowSnapshot

Receiver = Callable[[Shard, int, Any], None]


def can_be_held(group: Sequence[Shard]) -> bool:
    """Tells whether a dynamic table with its slots, or a static shard, is in the host's memory."""
    table: Any = group[0].table
    if native_library.missing() is not None or kernel_device.on_device(group[0].dynamic):
        return False
    return not group[0].dynamic or (table.policy.storage is None and table.compiled)


class HeldRows:
    """Holds shards, from its creation to `end`.

    Args:
        session: the session with the shards.
        shards: shards for which `can_be_held` is true.
        counts: the number of rows of each dynamic table, by its name; not needed if nothing changes
            meanwhile.
        numbers: the numbers under which they are watched, if they may change meanwhile; then copies
            need room. Without numbers nothing may write them.
        room: the room for copies.
    """

    def __init__(
        self,
        session: Any,
        shards: Sequence[Shard],
        counts: dict[str, int] | None = None,
        numbers: Sequence[int] | None = None,
        room: CopyRoom | None = None,
    ):
        room = room or CopyRoom(0, 0.0)
        self._snapshots: list[RowSnapshot] = []
        self._places: dict[str, tuple[RowSnapshot, int]] = {}
        number_of = dict(zip((s.name for s in shards), numbers or range(-1, -1 - len(shards), -1)))
        holds = _hold_operations(session, shards)
        feeds: dict[Any, int] = {}
        for group in by_table(shards):
            snapshot = RowSnapshot(room)
            self._snapshots.append(snapshot)
            # Row 0 of a dynamic table belongs to no key.
            rows = counts[group[0].name] + 1 if counts and group[0].dynamic else -1
            for shard in group:
                number = number_of[shard.name]
                self._places[shard.name] = snapshot, number
                feeds.update(holds[shard.name].feeds(snapshot, number, rows))
        if holds:
            run_unpatched(session, [hold.operation for hold in holds.values()], feeds)
        for snapshot in self._snapshots:
            snapshot.listen()

    def reads(self, receive: Receiver, others: RowReads | None = None) -> HeldReads:
        """Returns a reader of the held rows; `receive` gets them, and must use them at once.

        Args:
            receive: see `shards.RowReads`.
            others: reads the rows of other shards.
        """
        return HeldReads(self._places, receive, others)

    def end(self) -> None:
        """Releases the memory; nothing is copied any more."""
        for snapshot in self._snapshots:
            snapshot.end()


class HeldReads:
    """Reads rows of held shards, like `shards.RowReads` for all shards."""

    def __init__(
        self,
        places: dict[str, tuple[RowSnapshot, int]],
        receive: Receiver,
        others: RowReads | None,
    ):
        self._places, self._receive, self._others = places, receive, others

    def add(self, request: RowRequest) -> None:
        shard = request.shard
        if shard.name not in self._places:
            assert self._others is not None
            self._others.add(request)
            return
        snapshot, number = self._places[shard.name]
        rows = snapshot.rows(number, request.local_rows, shard.dim, shard.dtype)
        self._receive(shard, request.first, rows)

    def flush(self) -> None:
        if self._others is not None:
            self._others.flush()


def _hold_operations(session: Any, shards: Sequence[Shard]) -> dict[str, HoldOperation]:
    """Returns the operations that hold shards, by name, each made once."""
    with graphs.open_for_changes(session.graph), session.graph.as_default(), tf.init_scope():
        for shard in shards:
            if not hasattr(shard.variable, "_collective_hold"):
                with tf.control_dependencies(None), tf.name_scope("collective/snapshot/"):
                    shard.variable._collective_hold = HoldOperation(shard.variable.handle)
    return {shard.name: shard.variable._collective_hold for shard in shards}
