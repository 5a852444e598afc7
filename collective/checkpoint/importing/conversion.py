"""Writes another framework's checkpoint as a checkpoint of this library, and reports."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit
from collective.checkpoint.files.layout import DYNAMIC, CheckpointLayout, StoredTable
from collective.checkpoint.files.tensor_bundle import BundleWriter, slice_rows, stored_matrix
from collective.checkpoint.importing.key_buckets import KeyBuckets, bucket_count, first_repeated
from collective.checkpoint.importing.source import KeyedRows, KeyedTable, Source, WholeVariable
from collective.checkpoint.reading.name_map import NameMap
from collective.ops import placement
from collective.ops.counting import counted
from collective.tensorflow_internals.checkpoints import checkpoint_management


@dataclasses.dataclass
class Report:
    """Says what happened to each variable.

    Attributes:
        path: the source.
        target: the new checkpoint.
        taken: (name in the source, new name, kind) of each variable.
        left_out: {name: reason}.
        notes: what else the user should know.
    """

    path: str
    target: str
    taken: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.target}: from {self.path}"]
        for old, new, what in self.taken:
            lines.append(f"  {new}: {what}" + (f", from {old}" if old != new else ""))
        if self.left_out:
            lines.append("left out:")
            lines += [f"  {name}: {why}" for name, why in sorted(self.left_out.items())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class Conversion:
    """Writes one checkpoint.

    Args:
        source: what to convert.
        names: renames it.
        slots: whether to convert slots, too.
        writer: the writer of the new checkpoint.
        folder: for temporary files, which are as large as the largest table with its slots.
        report: is told what was converted.
    """

    def __init__(
        self,
        source: Source,
        names: NameMap,
        slots: bool,
        writer: BundleWriter,
        folder: str,
        report: Report,
    ):
        self._source, self._names, self._slots = source, names, slots
        self._writer, self._folder, self._report = writer, folder, report
        self._layout = CheckpointLayout(1)
        self._olds: dict[str, str] = {}  # by new name

    def write(self) -> CheckpointLayout:
        """Writes all of it, and returns the new checkpoint's layout."""
        for table in self._source.tables:
            self._write_table(table)
        for variable in self._source.variables:
            self._write_variable(variable)
        self._names.check_all_matched(
            [t.rows.name for t in self._source.tables] + [v.name for v in self._source.variables]
        )
        return self._layout

    def _rename(self, name: str, owner: str | None = None) -> str | None:
        new = self._names.rename(name, owner)
        if new is None:
            self._report.left_out[name] = "the map of names says so"
        elif new in self._olds:
            raise ValueError(
                f"'{self._olds[new]}' and '{name}' would both be '{new}': give one of them another "
                "name in the map."
            )
        else:
            self._olds[new] = name
        return new

    # ---- tables with keys

    def _write_table(self, table: KeyedTable) -> None:
        name = self._rename(table.rows.name)
        if name is None:
            return
        group = [(name, table.rows)]
        for slot in table.slots:
            is_optimizers = slot.name.rpartition("/")[2] not in ("frequency", "last_used")
            if is_optimizers and not self._slots:
                self._report.left_out[slot.name] = "slots are left out"
                continue
            new = self._rename(slot.name, table.rows.name)
            if new is not None:
                group.append((new, slot))
        row_bytes = sum(rows.dim * rows.dtype.itemsize + 8 for _, rows in group)
        buckets = bucket_count(table.rows.count, row_bytes)
        if table.static:
            self._write_static(group, buckets)
        else:
            self._write_dynamic(group, buckets, name)
        if table.refused is not None:
            new = f"{name}/refused"
            self._write_dynamic([(new, table.refused)], bucket_count(table.refused.count, 16), name)

    def _sorted(
        self,
        group: Sequence[tuple[str, KeyedRows]],
        buckets: int,
        bucket_of: Callable[[np.ndarray], np.ndarray],
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yields the keys of each bucket, ascending, and the rows of all members of the group."""
        sorters = []
        for number, (_, rows) in enumerate(group):
            stem = os.path.join(self._folder, f"rows-{number}")
            sorter = KeyBuckets(stem, rows.dim, rows.dtype, buckets, bucket_of)
            for keys, values in rows.blocks():
                sorter.add(keys, values)
            sorters.append(sorter)
        for bucket in range(buckets):
            keys, values = sorters[0].take(bucket)
            repeated = first_repeated(keys)
            if repeated is not None:
                raise ValueError(f"table '{group[0][1].name}' has the key {repeated} twice.")
            columns = [values]
            for sorter, (_, rows) in zip(sorters[1:], group[1:]):
                other_keys, values = sorter.take(bucket)
                if not np.array_equal(keys, other_keys):
                    alone = np.setxor1d(keys, other_keys)
                    raise ValueError(
                        f"slot '{rows.name}' and its table '{group[0][1].name}' don't have the "
                        f"same keys (key {alone[0]} is only in one, and "
                        f"{counted(len(alone) - 1, 'other')}): import with --without-slots, "
                        "and continue training with scope(missing_slots='fresh')."
                    )
                columns.append(values)
            yield keys, columns

    def _write_dynamic(
        self, group: Sequence[tuple[str, KeyedRows]], buckets: int, table: str
    ) -> None:
        """Writes a table with its slots, one part per bucket; or `table`'s keys without rows.

        A part has the keys that one of that many ranks would have saved.
        """
        keys_name = f"{group[0][0]}/keys"
        block = min(slice_rows(rows.dim, rows.dtype) for _, rows in group)
        stored_tables = [
            StoredTable(
                name=name,
                kind=DYNAMIC,
                rows=None,
                dim=rows.dim,
                dtype=tf.as_dtype(rows.dtype).name,
                block=block,
                parts=(0,) * buckets,
                slot_of=None if name == table else table,
                keys=keys_name,
            )
            for name, rows in group
        ]
        parts = []
        layout = self._layout
        in_buckets = self._sorted(group, buckets, placement.dynamic(buckets).owner)
        for part, (keys, columns) in enumerate(in_buckets):
            parts.append(len(keys))
            for first in range(0, max(1, len(keys)), block):
                piece = slice(first, first + block)
                entry = layout.keys_entry(stored_tables[0], part)
                self._writer.add(entry, (len(keys),), first, keys[piece])
                for stored, values in zip(stored_tables, columns):
                    shape = len(keys), stored.dim
                    self._writer.add(layout.entry(stored, part), shape, first, values[piece])
        for stored, (_, rows) in zip(stored_tables, group):
            stored = dataclasses.replace(stored, parts=tuple(parts))
            layout.tables[stored.name] = stored
            kind = "dynamic table" if stored.slot_of is None else "slot"
            self._note(stored.name, rows, f"{kind}, {counted(stored.count, 'row')}")

    def _write_static(self, group: Sequence[tuple[str, KeyedRows]], buckets: int) -> None:
        """Writes a table with the keys 0 … V - 1 and its slots, each as one entry."""
        count = group[0][1].count
        step = max(1, -(-count // buckets))
        in_buckets = self._sorted(group, buckets, lambda keys: keys // step)
        for bucket, (keys, columns) in enumerate(in_buckets):
            expected = np.arange(bucket * step, min((bucket + 1) * step, count))
            if not np.array_equal(keys, expected):
                raise ValueError(
                    f"table '{group[0][1].name}' doesn't have each of the keys 0 to {count - 1:,} "
                    "exactly once: it can't be a static table."
                )
            for (name, rows), values in zip(group, columns):
                self._add_rows(name, (count, rows.dim), bucket * step, values)
        for name, rows in group:
            kind = "static table" if name == group[0][0] else "slot"
            slot_of = None if name == group[0][0] else group[0][0]
            self._add_static(name, (count, rows.dim), rows.dtype, slot_of)
            self._note(name, rows, f"{kind}, {counted(count, 'row')}")

    def _note(self, name: str, rows: KeyedRows, what: str) -> None:
        what += f" of {rows.dim} {tf.as_dtype(rows.dtype).name}"
        self._report.taken.append((rows.origin or rows.name, name, what))

    def _add_rows(self, name: str, shape: tuple[int, ...], first: int, values: np.ndarray) -> None:
        block = slice_rows(int(np.prod(shape[1:])), values.dtype)
        for start in range(0, len(values), block):
            self._writer.add(name, shape, first + start, values[start : start + block])

    def _add_static(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, slot_of: str | None
    ) -> None:
        """Adds a static table, or a slot, of one part to the layout."""
        self._layout.tables[name] = stored_matrix(name, shape, dtype, slot_of)

    # ---- ordinary variables

    def _write_variable(self, variable: WholeVariable) -> None:
        if variable.slot_of is not None and not self._slots:
            self._report.left_out[variable.name] = "slots are left out"
            return
        name = self._rename(variable.name, variable.slot_of)
        if name is None:
            return
        for first, values in variable.blocks():
            if variable.is_whole:
                self._writer.add_whole(name, values)
            else:
                self._add_rows(name, variable.shape, first, values)
        if variable.is_table:
            owner = variable.slot_of and self._names.rename(variable.slot_of)
            self._add_static(name, variable.shape, np.dtype(variable.dtype), owner)
        what = f"{tf.as_dtype(variable.dtype).name} {list(variable.shape)}{variable.note}"
        self._report.taken.append((variable.name, name, what))


def convert(source: Source, target: str, names: NameMap, slots: bool = True) -> Report:
    """Makes the checkpoint `target` from a source; it appears completely or not at all.

    It becomes the latest checkpoint of its folder if there was none. Converting takes about 500 MB
    of memory, whatever the size of the tables.

    Raises:
        ValueError: `target` exists already; two variables would have the same name; a name in
            the map isn't a variable's; or a slot has other keys than its table.
    """
    report = Report(source.path, target, left_out=dict(source.left_out), notes=list(source.notes))

    def write(writer: BundleWriter, staging: str) -> CheckpointLayout:
        parent = None if "://" in target else staging
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            return Conversion(source, names, slots, writer, folder, report).write()

    commit.write_alone(target, write)
    folder = os.path.dirname(target)
    if checkpoint_management.get_checkpoint_state(folder or ".") is None:
        name = os.path.basename(target)
        checkpoint_management.update_checkpoint_state_internal(folder, name, [name], None, True)
        report.notes.append(
            "it is the latest checkpoint of its folder: a job with this checkpoint_dir goes on "
            "from it"
        )
    return report
