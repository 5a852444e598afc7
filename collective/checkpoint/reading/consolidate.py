"""Describes checkpoints, and converts one to the checkpoint that a single rank would have saved."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit
from collective.checkpoint.files.chain import Chain, last_increment, open_chain, open_links, step_of
from collective.checkpoint.files.chain_names import bases_in
from collective.checkpoint.files.layout import (
    DYNAMIC,
    FORMAT_ENTRY,
    LAYOUT_ENTRY,
    CheckpointLayout,
    StoredTable,
)
from collective.checkpoint.files.tensor_bundle import (
    WHOLE_READ_BYTES,
    Bundle,
    BundleWriter,
    slice_rows,
)
from collective.checkpoint.reading import merged_reader, opening
from collective.ops.counting import counted


def description(path: str) -> str:
    """Describes the tables of a checkpoint with their slots, and its other variables, as text."""
    chain = opening.open_checkpoint(path)
    lines = [describe(chain.base), *map(_increment_text, chain.increments)]
    if chain.increments:
        followed = counted(len(chain.increments), "increment")
        lines.insert(
            0, f"{chain.last.prefix}: a whole checkpoint and {followed}{_at_step(chain.last)}"
        )
    return "\n".join(lines)


def _at_step(bundle: Bundle) -> str:
    step = None
    with contextlib.suppress(tf.errors.OpError):  # its data may be damaged, or gone
        step = step_of(bundle)
    return "" if step is None else f", at step {step:,}"


def describe(bundle: Bundle) -> str:
    """Describes an open checkpoint (see `description`)."""
    layout = bundle.layout
    stored_tables = layout.tables.values()
    names = {stored.name for stored in stored_tables if stored.slot_of is None}
    saved_by = "no tables, a plain TensorFlow checkpoint"
    if layout.tables:
        saved_by = f"saved by {layout.ranks} rank{'s' * (layout.ranks > 1)}"
    lines = [f"{bundle.prefix}: {saved_by}{_at_step(bundle)}"]
    for stored in stored_tables:
        if stored.slot_of is None:
            lines.append(f"  table {stored.name}: {stored.kind}, {_sizes(stored)}")
            for slot in layout.slots_of(stored.name):
                lines.append(f"    slot {slot.name}: {_sizes(slot)}")
    for stored in stored_tables:
        if stored.slot_of is not None and stored.slot_of not in names:
            lines.append(
                f"  slot {stored.name} of {stored.slot_of}, which is not in it: {_sizes(stored)}"
            )
    for name in other_entries(bundle):
        dtype, shape = bundle.entries[name]
        lines.append(
            f"  {name}: {tf.as_dtype(dtype).name} {list(shape)}, "
            f"{counted(bundle.stored_bytes(name), 'byte')}"
        )
    return "\n".join(lines)


def _increment_text(bundle: Bundle) -> str:
    """Describes an increment: the changes of each table."""
    place, lines = bundle.layout.increment, []
    assert place is not None
    lines.append(
        f"  increment {place.number}, {bundle.prefix}: saved by "
        f"{counted(bundle.layout.ranks, 'rank')}{_at_step(bundle)}"
    )
    for stored in bundle.layout.tables.values():
        if stored.slot_of is not None or stored.whole is None:
            continue
        gone = sum(stored.removed or ())
        lines.append(
            f"    table {stored.name}: {counted(stored.count, 'row')}"
            + (f", {counted(gone, 'key')} gone" if gone else "")
            + (", whole" if all(stored.whole) else "")
        )
    return "\n".join(lines)


def verify(path: str) -> str:
    """Reads a checkpoint and its increments completely, which verifies their checksums.

    Args:
        path: a prefix; or a folder, for all checkpoints in it, each with its increments.

    Returns:
        A description as text, one line per checkpoint.

    Raises:
        ValueError: there is no checkpoint, or an increment follows another base.
        tf.errors.DataLossError: a part is missing or damaged; says what can be restored.
    """
    if not tf.io.gfile.isdir(path):
        return _verify(open_chain(path))
    prefixes = bases_in(path)
    if not prefixes:
        raise ValueError(f"There is no checkpoint in '{path}'.")
    lines, problems = list[str](), list[str]()
    for prefix in prefixes:
        try:
            lines.append(_verify(open_links(prefix, last_increment(prefix))))
        except (ValueError, tf.errors.OpError) as error:
            problems.append(str(getattr(error, "message", error)))
    if problems:
        raise tf.errors.DataLossError(None, None, "\n".join([*problems, *lines]))
    return "\n".join(lines)


def _verify(chain: Chain) -> str:
    for bundle in (chain.base, *chain.increments):
        with chain.advising(bundle):
            bundle.check_files()
            for name in sorted(bundle.entries):
                _read_through(bundle, name)
    followed = f" and {counted(len(chain.increments), 'increment')}" if chain.increments else ""
    return f"{chain.base.prefix}{followed}: whole"


def _read_through(bundle: Bundle, name: str) -> None:
    for _ in _blocks_of(bundle, name):
        pass


def _sizes(stored: StoredTable) -> str:
    parts = ", ".join(f"{rows:,}" for rows in stored.parts)
    size = stored.count * stored.dim * np.dtype(tf.as_dtype(stored.dtype).as_numpy_dtype).itemsize
    return (
        f"{counted(stored.count, 'row')} of {stored.dim} {stored.dtype} in "
        f"{counted(len(stored.parts), 'part')} ({parts}), {counted(size, 'byte')}"
    )


def other_entries(bundle: Bundle) -> list[str]:
    """Returns the names of the entries that hold neither tables nor the layout."""
    known = bundle.layout.entries() | {LAYOUT_ENTRY, FORMAT_ENTRY}
    return sorted(bundle.entries.keys() - known)


def consolidate(path: str, target: str) -> None:
    """Makes the checkpoint `target` as one rank would have saved it instead of `path`.

    Static tables and their slots become single entries under their own names, as in a plain
    TensorFlow checkpoint. A dynamic table and its slots become `<name>/part_0`, with
    `<table>/keys/part_0`, by ascending keys. It takes about 400 MB of memory, whatever their size.

    Raises:
        ValueError: there is no checkpoint `path`, or `target` exists already.
    """
    commit.check_new(target)  # before a large checkpoint is read
    chain = opening.open_checkpoint(path)
    chain.base.check_files()

    def write(writer: BundleWriter, _: str) -> CheckpointLayout:
        stored_tables = list(chain.base.layout.tables.values())
        counts = _counts(chain, stored_tables)
        layout = CheckpointLayout(
            1, {s.name: dataclasses.replace(s, parts=(counts[s.name],)) for s in stored_tables}
        )
        for stored in stored_tables:
            if stored.kind != DYNAMIC:
                _copy_static(chain, stored, writer)
        for group in _dynamic_tables(stored_tables):
            _merge_dynamic(chain, layout, group, writer)
        for name in other_entries(chain.last):
            _copy_entry(chain.last, name, writer)
        return layout

    commit.write_alone(target, write)


def _dynamic_tables(stored_tables: list[StoredTable]) -> Iterator[list[StoredTable]]:
    """Yields the stored tables that have the same keys: a dynamic table and its slots."""
    for keys in sorted({stored.keys for stored in stored_tables if stored.keys}):
        yield [stored for stored in stored_tables if stored.keys == keys]


def _counts(chain: Chain, stored_tables: list[StoredTable]) -> dict[str, int]:
    """Returns how many rows each stored table has."""
    counts = {stored.name: stored.count for stored in stored_tables}
    for group in _dynamic_tables(stored_tables):
        count = merged_reader.count_dynamic(chain, group[0])
        counts.update((stored.name, count) for stored in group)
    return counts


def _copy_static(chain: Chain, stored: StoredTable, writer: BundleWriter) -> None:
    for first, rows in merged_reader.read_static(chain, stored, stored.block):
        writer.add(stored.name, (stored.count, stored.dim), first, rows)
    if not stored.count:
        empty = np.zeros((0, stored.dim), stored.dtype)
        writer.add(stored.name, (0, stored.dim), 0, empty)


def _merge_dynamic(
    chain: Chain, layout: CheckpointLayout, group: list[StoredTable], writer: BundleWriter
) -> None:
    """Writes a dynamic table and its slots in one part.

    Args:
        chain: the checkpoint with the parts.
        layout: the layout of the new checkpoint.
        group: the stored tables with the same keys.
        writer: writes the new checkpoint.
    """
    first, total = 0, layout.tables[group[0].name].count
    keys_entry = layout.keys_entry(group[0], 0)
    for keys, values in merged_reader.read_dynamic(chain, group, group[0].block):
        writer.add(keys_entry, (total,), first, keys)
        for stored, rows in zip(group, values):
            writer.add(layout.entry(stored, 0), (total, stored.dim), first, rows)
        first += len(keys)
    if not total:
        writer.add(keys_entry, (0,), 0, np.zeros(0, np.int64))
        for stored in group:
            empty = np.zeros((0, stored.dim), stored.dtype)
            writer.add(layout.entry(stored, 0), (0, stored.dim), 0, empty)


def _copy_entry(bundle: Bundle, name: str, writer: BundleWriter) -> None:
    """Copies an entry that belongs to no table, in blocks if it is large."""
    _, shape = bundle.entries[name]
    for first, rows in _blocks_of(bundle, name):
        if first is None:
            writer.add_whole(name, rows)
        else:
            writer.add(name, shape, first, rows)


def _blocks_of(bundle: Bundle, name: str) -> Iterator[tuple[int | None, np.ndarray]]:
    """Yields (number of the first row, rows) of an entry; (None, everything) of a small one."""
    dtype, shape = bundle.entries[name]
    is_small = bundle.stored_bytes(name) <= WHOLE_READ_BYTES
    if not shape or is_small or np.dtype(dtype) == object:
        yield None, bundle.read_whole(name)
        return
    block = slice_rows(int(np.prod(shape[1:])), dtype)
    for first in range(0, shape[0], block):
        count = min(block, shape[0] - first)
        yield first, bundle.read(name, first, count)
