"""Writes and reads how often keys of dynamic tables occurred that have no rows.

    <table>/refused             how often each occurred, counted exactly: [keys, 1] int64
    <table>/filter/<shape>      the partitions of a counting Bloom filter: [partitions, bytes] uint8

Both are stored as slots with their own keys, so that any number of ranks can read its part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import DYNAMIC, CheckpointLayout, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle, BundleWriter, slice_rows
from collective.checkpoint.rows.shards import Shard
from collective.ops import placement
from collective.ops.communication import collectives
from collective.ops.placement import Placement
from collective.ops.rows.compiled_row_store import FilterShape
from collective.tables.policies import bloom_filter


def entry_of(table: str) -> str:
    """Returns the name under which ranks tell each other how many counts of a table they have."""
    return f"{table}/counts"


def stored(shard: Shard, of_ranks: list[int]) -> StoredTable | None:
    """Describes the counts of a table's keys in a checkpoint; None if the table counts none.

    Args:
        shard: the table.
        of_ranks: how many keys, or partitions, each rank has.
    """
    parts = shard.of_parts(of_ranks)
    admission = shard.table.admission if shard.dynamic else None
    if admission is None or not admission.counts_keys:
        return None
    if admission.filter is None:
        return _stored(shard.name, f"{shard.name}/refused", 1, "int64", parts)
    row_bytes = admission.filter.cells * admission.filter.dtype.itemsize
    return _stored(
        shard.name, _filter_name(shard.name, admission.filter), row_bytes, "uint8", parts
    )


def _stored(table: str, name: str, dim: int, dtype: str, parts: list[int]) -> StoredTable:
    return StoredTable(
        name=name,
        kind=DYNAMIC,
        rows=None,
        dim=dim,
        dtype=dtype,
        block=slice_rows(dim, dtype),
        parts=tuple(parts),
        slot_of=table,
        keys=f"{name}/keys",
    )


def _filter_name(table: str, shape: FilterShape) -> str:
    return f"{table}/filter/{shape.hashes}x{shape.cells}x{shape.dtype.name}"


@dataclasses.dataclass(frozen=True)
class KeyCounts:
    """Holds this rank's counts of a table's keys in the form in which they are written.

    Attributes:
        target: how they are stored, with this rank's number of keys for every rank.
        keys: [K] int64, in any order.
        values: the counts, among others: key i has row places[i].
        places: [K].
        part: which part of a checkpoint they are; None if this rank has none of the table's keys.
    """

    target: StoredTable
    keys: np.ndarray
    values: np.ndarray
    places: np.ndarray
    part: int | None

    def copied(self) -> KeyCounts:
        """Returns a copy that no run changes."""
        places = np.arange(len(self.keys))
        return KeyCounts(self.target, self.keys.copy(), self.values[self.places], places, self.part)

    def write(self, layout: CheckpointLayout, writer: BundleWriter) -> int:
        """Writes them, by ascending keys; returns how many there are."""
        count, target = len(self.keys), self.target
        if self.part is None:
            return 0
        order = np.argsort(self.keys)
        for first in range(0, max(1, count), target.block):
            places = order[first : first + target.block]
            writer.add(layout.keys_entry(target, self.part), (count,), first, self.keys[places])
            rows = np.ascontiguousarray(self.values[self.places[places]])
            rows = rows if target.dtype == "int64" else rows.view(np.uint8)
            writer.add(
                layout.entry(target, self.part),
                (count, target.dim),
                first,
                rows.reshape(len(places), target.dim),
            )
        return count


def in_session(session: Any, shard: Shard) -> KeyCounts | None:
    """Returns this rank's counts of a table in a session; None if the table counts no keys.

    The next run changes some of that memory.
    """
    ranks = collectives.size()
    if stored(shard, [0] * ranks) is None:
        return None
    table: Any = shard.table
    store, part = table.store(session), shard.part
    if part is None:
        keys = places = np.zeros(0, np.int64)
        values = keys[:, None]
    elif table.admission.filter is None:
        keys, counts = store.keys.counts()
        values, places = counts[:, None], np.arange(len(keys))
    else:
        values = store.keys.cells()
        places = np.flatnonzero(values.any(1))
        numbers = bloom_filter.numbers(table.admission.filter.step, part, table.placement.parts)
        keys = bloom_filter.keys(numbers[places])
    target = stored(shard, [len(keys)] * ranks)
    assert target is not None
    return KeyCounts(target, keys, values, places, part)


def read(bundle: Bundle, shard: Shard, saved_as: str, store: Any) -> None:
    """Reads the counts of this rank's keys of a table into a new store, if it counts keys.

    A filter can continue exact counts. The counts of a filter only fit a filter of the same shape;
    otherwise keys without rows are counted from 0, which rank 0 reports.

    Args:
        bundle: the checkpoint.
        shard: the table.
        saved_as: the table's name in the checkpoint.
        store: the table's rows, which have already been read.
    """
    if stored(shard, [0] * collectives.size()) is None:
        return
    admission: Any = shard.table.admission
    tables, shape, now = bundle.layout.tables, admission.filter, shard.table.placement
    same = None if shape is None else tables.get(_filter_name(saved_as, shape))
    exact = tables.get(f"{saved_as}/refused")
    if same is not None:
        cells = store.keys.cells()
        for partitions, values in _partitions(bundle, same, shape, now):
            rows = np.ascontiguousarray(values).view(shape.dtype)
            places = partitions // shape.step
            # Ranks with the same partition counted different keys in it: no sum is too small.
            for place, row in zip(places, rows):
                np.maximum(cells[place], row, out=cells[place])
    elif exact is not None:
        for keys, values in _blocks(bundle, exact, now):
            is_owned = now.owner(keys) == collectives.rank()
            store.keys.add_counts(keys[is_owned], values[is_owned, 0])
    elif any(name.startswith(f"{saved_as}/filter/") for name in tables) and not collectives.rank():
        tf.logging.warning(
            f"checkpoint '{bundle.prefix}' counts the keys of table '{saved_as}' without rows by "
            "a Bloom filter of another shape: they are counted from 0 again. Keys that have rows "
            "keep them."
        )


def _partitions(
    bundle: Bundle, stored_filter: StoredTable, shape: FilterShape, now: Placement
) -> Any:
    """Yields numbers of this rank's partitions and their counters."""
    of_filter = placement.dynamic(shape.partitions)
    for keys, values in _blocks(bundle, stored_filter, now):
        partitions = of_filter.owner(keys)
        is_own = of_filter.may_hold(partitions, now, collectives.rank())
        yield partitions[is_own], values[is_own]


def _blocks(bundle: Bundle, stored_table: StoredTable, now: Placement) -> Any:
    """Yields keys, and the values stored with them, a block at a time.

    They are those of the parts in which this rank can have keys, as `now` places them.
    """
    layout = bundle.layout
    for part in stored_table.placement.parts_of(now, collectives.rank()):
        for first in range(0, stored_table.parts[part], stored_table.block):
            count = min(stored_table.block, stored_table.parts[part] - first)
            keys = bundle.read(layout.keys_entry(stored_table, part), first, count)
            yield keys, bundle.read(layout.entry(stored_table, part), first, count)
