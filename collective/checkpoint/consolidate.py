"""What is in a checkpoint, and the same checkpoint as one rank would have saved it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint import commit, reading
from collective.checkpoint.layout import DYNAMIC, ENTRY, FORMAT_ENTRY, CheckpointLayout, StoredTable
from collective.checkpoint.tensor_bundle import WHOLE, Bundle, Writer, slice_rows


def description(path: str) -> str:
    """The tables of a checkpoint with their slots, and its other variables, as text."""
    bundle = reading.open_bundle(path)
    layout, known = bundle.layout, bundle.layout.entries() | {ENTRY, FORMAT_ENTRY}
    lines = [
        f"{bundle.prefix}: saved by {layout.ranks} rank{'s' * (layout.ranks > 1)}"
        if layout.columns
        else f"{bundle.prefix}: no tables, a plain TensorFlow checkpoint"
    ]
    for column in (c for c in layout.columns.values() if c.slot_of is None):
        lines.append(f"  table {column.name}: {column.kind}, {_column(bundle, column)}")
        lines += [
            f"    slot {slot.name}: {_column(bundle, slot)}"
            for slot in layout.slots_of(column.name)
        ]
    there = {c.name for c in layout.columns.values() if c.slot_of is None}
    lines += [
        f"  slot {c.name} of {c.slot_of}, which is not in it: {_column(bundle, c)}"
        for c in layout.columns.values()
        if c.slot_of is not None and c.slot_of not in there
    ]
    for name, (dtype, shape) in sorted(bundle.entries.items()):
        if name not in known:
            lines.append(
                f"  {name}: {tf.as_dtype(dtype).name} {list(shape)}, "
                f"{bundle.stored_bytes(name):,} bytes"
            )
    return "\n".join(lines)


def _column(bundle: Bundle, column: StoredTable) -> str:
    parts = ", ".join(f"{n:,}" for n in column.parts)
    size = column.count * column.dim * np.dtype(tf.as_dtype(column.dtype).as_numpy_dtype).itemsize
    return (
        f"{column.count:,} rows of {column.dim} {column.dtype} in {len(column.parts)} part"
        f"{'s' * (len(column.parts) > 1)} ({parts}), {size:,} bytes"
    )


def consolidate(path: str, target: str) -> None:
    """Makes the checkpoint `target` of the checkpoint `path`: what one rank would have saved.

    Static tables and their slots become whole entries of their own names, as in a plain TensorFlow
    checkpoint; a dynamic one and its slots `<name>/part_0`, with `<table>/keys/part_0`, by
    ascending keys. It holds about 400 MB, whatever their size.

    Raises:
        ValueError: there is no checkpoint `path`, or there is one `target`.
    """
    bundle = reading.open_bundle(path)
    if tf.io.gfile.exists(f"{target}.index"):
        raise ValueError(f"There is a checkpoint '{target}' already.")
    bundle.check_files()
    made = commit.Commit(target, target)
    try:
        writer = Writer(f"{made.staging}/rank_0")
        columns = list(bundle.layout.columns.values())
        one = CheckpointLayout(
            1, {c.name: dataclasses.replace(c, parts=(c.count,)) for c in columns}
        )
        for column in columns:
            if column.kind != DYNAMIC:
                for first, rows in reading.rows(bundle.prefix, column.name, column.block):
                    writer.add(column.name, (column.count, column.dim), first, rows)
                if not column.count:
                    writer.add(
                        column.name, (0, column.dim), 0, np.zeros((0, column.dim), column.dtype)
                    )
        for group in _dynamic_tables(columns):
            _merge(bundle, one, group, writer)
        known = bundle.layout.entries() | {ENTRY, FORMAT_ENTRY}
        for name in sorted(bundle.entries.keys() - known):
            _copy(bundle, name, writer)
        written = writer.close()
        for prefix in written:
            commit.sync_bundle(prefix)
        made.merge(written, one)
        made.publish(commit.Ending())
    except BaseException:
        commit.settle(made.staging)
        raise


def _dynamic_tables(columns: list[StoredTable]) -> Iterator[list[StoredTable]]:
    """The columns of each dynamic table."""
    for keys in sorted({c.keys for c in columns if c.keys}):
        yield [c for c in columns if c.keys == keys]


def _merge(bundle: Bundle, one: CheckpointLayout, group: list[StoredTable], writer: Writer) -> None:
    first, total = 0, group[0].count
    writer_keys = one.keys_entry(group[0], 0)
    for keys, values in reading.merged(
        bundle, group, group[0].block, lambda keys, values: (keys, values)
    ):
        writer.add(writer_keys, (total,), first, keys)
        for column, rows in zip(group, values):
            writer.add(one.entry(column, 0), (total, column.dim), first, rows)
        first += len(keys)
    if not total:
        writer.add(writer_keys, (0,), 0, np.zeros(0, np.int64))
        for column in group:
            writer.add(
                one.entry(column, 0), (0, column.dim), 0, np.zeros((0, column.dim), column.dtype)
            )


def _copy(bundle: Bundle, name: str, writer: Writer) -> None:
    """An entry that is no table's: in blocks if it is large."""
    dtype, shape = bundle.entries[name]
    if not shape or bundle.stored_bytes(name) <= WHOLE or np.dtype(dtype) == object:
        writer.add_whole(name, bundle.read_whole(name))
        return
    step = slice_rows(int(np.prod(shape[1:])), dtype)
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        writer.add(name, shape, first, bundle.read(name, first, count))
