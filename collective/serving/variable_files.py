"""Splits the variables of a SavedModel into data files; writes or links each.

    a large part of a table     files of its own, of at most so many bytes each
    small parts of tables       files together
    all other variables         other files together

The next version links equal files, so a file should stay the same if its rows do. Rows of a static
table are split by their number. A dynamic table has its rows in the order of keys, and a new key
moves all rows after it: they are split by the keys themselves, before each key whose hash is below
a bound, so that a new or removed key changes one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.index_keys import WHOLE
from collective.checkpoint.files.index_reader import BundleIndex
from collective.checkpoint.files.index_writer import IndexFile
from collective.checkpoint.files.tensor_bundle import Bundle, BundleWriter
from collective.ops import key_hashing
from collective.ops.rows import data_files
from collective.serving.base_version import BaseVersion
from collective.serving.export_record import ExportedFile, digest_of

# So many files of a table's rows are enough: a process that loads a SavedModel has all open.
FILES = 256
LEAST_FILE_BYTES = 1 << 20
MOST_FILE_BYTES = tensor_bundle.FILE_BYTES


def file_bytes(total: int, known: int | None = None) -> int:
    """Returns how many bytes of a table a data file has at most.

    Args:
        total: the bytes of all tables.
        known: the base's answer. It stands as long as tables haven't grown to several times what
            they were: with another one no file would be the same.
    """
    if known is not None and total <= 4 * FILES * known:
        return known
    size = LEAST_FILE_BYTES
    while size * FILES < total:
        size *= 2
    return min(size, MOST_FILE_BYTES)


def ends_by_number(count: int, most: int) -> list[int]:
    """Returns after which of `count` rows files end, with at most `most` rows each."""
    return [*range(most, count, most), count]


def ends_by_key(keys: Iterable[np.ndarray], most: int) -> list[int]:
    """Returns after which rows files end so that it depends on nearby keys alone.

    Args:
        keys: int64, of all rows, a block at a time.
        most: rows in a file.
    """
    # Every (most / 2)th key begins a file, on average.
    bound = np.uint64((1 << 64) * 2 // most - 1) if most > 2 else np.uint64((1 << 64) - 1)
    ends, count, last = [], 0, 0

    def end(row: int) -> None:
        nonlocal last
        steps = [*range(last + most, row, most), row] if row > last else []
        ends.extend(steps)
        last = row

    for block in keys:
        for row in np.flatnonzero(key_hashing.mix_np(block) < bound):
            end(count + int(row))
        count += len(block)
    end(count)
    return ends


class EntryReader:
    """Reads rows of an entry in ascending order; of the source, a block at a time.

    Args:
        source: the checkpoint.
        entry: the entry's name.
        block: rows that are read at once; 0: as many as a slice may have.
    """

    def __init__(self, source: Bundle, entry: str, block: int):
        self._source, self._entry = source, entry
        dtype, self.shape = source.entries[entry]
        self.dtype = np.dtype(dtype)
        self.dim = int(np.prod(self.shape[1:]))
        self.row_bytes = max(1, self.dim * self.dtype.itemsize)
        self._block = block or tensor_bundle.slice_rows(self.dim, dtype)
        self._first, self._rows = 0, np.zeros((0, *self.shape[1:]), dtype)

    def read(self, first: int, count: int) -> np.ndarray:
        """Reads rows [first, first + count)."""
        pieces: list[np.ndarray] = []
        while count or not pieces:
            if not self._first <= first < self._first + len(self._rows):
                self._first = first // self._block * self._block
                size = min(self._block, self.shape[0] - self._first)
                self._rows = self._source.read(self._entry, self._first, size)
            pieces.append(self._rows[first - self._first :][:count])
            first, count = first + len(pieces[-1]), count - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def blocks(self) -> Iterable[np.ndarray]:
        """Yields all rows, a block at a time."""
        for first in range(0, self.shape[0], self._block):
            yield self.read(first, min(self._block, self.shape[0] - first))


class _Rows(NamedTuple):
    """Holds rows of an entry, or all of it."""

    name: str
    shape: tuple[int, ...]
    first: int
    values: np.ndarray

    @property
    def is_whole(self) -> bool:
        return not self.shape or len(self.values) == self.shape[0]


class WrittenFile(NamedTuple):
    """Is a bundle of one data file that has been written or linked.

    Attributes:
        prefix: the bundle's.
        file: describes the data file.
    """

    prefix: str
    file: ExportedFile


class VariableFiles:
    """Writes data files of variables, each a bundle of its own, or links those that the base has.

    Args:
        stem: the bundles' prefixes are `<stem>-00000`, `<stem>-00001`, …
        most: bytes in a file.
        base: the version before; None if there is none.
    """

    def __init__(self, stem: str, most: int, base: BaseVersion | None):
        self._stem, self._most, self._base = stem, most, base
        self._of_tables: list[_Rows] = []
        self._others: list[_Rows] = []
        self._written: list[WrittenFile] = []

    def add_table_part(self, name: str, part: EntryReader, keys: EntryReader | None) -> None:
        """Adds a part of a table, or its keys, under the name `name`.

        Args:
            name: the variable's.
            part: its rows.
            keys: reads the keys of the rows, if the table is dynamic.
        """
        if part.shape[0] * part.row_bytes < self._most // 4:
            self._collect(self._of_tables, _Rows(name, part.shape, 0, part.read(0, part.shape[0])))
            return
        most_rows = max(1, self._most // part.row_bytes)
        if keys is None:
            ends = ends_by_number(part.shape[0], most_rows)
        else:
            ends = ends_by_key(keys.blocks(), most_rows)
        first, slice_rows = 0, tensor_bundle.slice_rows(part.dim, part.dtype)
        for end in ends:
            starts = range(first, end, slice_rows)
            sizes = [min(slice_rows, end - start) for start in starts]
            self._write(
                [
                    _Rows(name, part.shape, start, part.read(start, size))
                    for start, size in zip(starts, sizes)
                ]
            )
            first = end

    def add_other(self, name: str, values: np.ndarray) -> None:
        """Adds a variable that is no table."""
        whole = _Rows(name, values.shape, 0, values)
        if values.nbytes < self._most // 4:
            self._collect(self._others, whole)
        else:
            self._write([whole])

    def close(self) -> list[WrittenFile]:
        """Writes what is collected, and returns all files."""
        for collected in (self._of_tables, self._others):
            if collected:
                self._write(collected)
        return self._written

    def _collect(self, collected: list[_Rows], rows: _Rows) -> None:
        # Two such files and a large one are in memory at one time.
        if sum(each.values.nbytes for each in collected) + rows.values.nbytes > self._most // 2:
            self._write(collected)
            collected.clear()
        collected.append(rows)

    def _write(self, contents: Sequence[_Rows]) -> None:
        """Writes a file, or links it."""
        arrays = [np.asarray(rows.values, order="C") for rows in contents]
        prefix = f"{self._stem}-{len(self._written):05d}"
        # TensorFlow writes strings in a form of its own.
        has_strings = any(array.dtype.hasobject for array in arrays)
        can_link = data_files.are_possible(prefix) and not has_strings
        digest = "" if not can_link else digest_of(_bytes_of(array) for array in arrays)
        file = self._link(prefix, digest, contents, arrays)
        if file is None:
            with BundleWriter(prefix, file_bytes=1 << 62) as writer:
                for rows, array in zip(contents, arrays):
                    if rows.is_whole:
                        writer.add_whole(rows.name, array)
                    else:
                        writer.add(rows.name, rows.shape, rows.first, array)
                (prefix,) = writer.close()
            values = tuple(BundleIndex(prefix).stored_values())
            file = ExportedFile(sum(size for size, _ in values), digest, values)
        self._written.append(WrittenFile(prefix, file))

    def _link(
        self,
        prefix: str,
        digest: str,
        contents: Sequence[_Rows],
        arrays: Sequence[np.ndarray],
    ) -> ExportedFile | None:
        """Links the data file `prefix` and writes its index; None if it is to be written."""
        known = None if self._base is None or not digest else self._base.find(digest)
        # The same bytes may be cut otherwise: those of rows of another length, say.
        if known is None or [size for size, _ in known.values] != [a.nbytes for a in arrays]:
            return None
        assert self._base is not None
        if not self._base.link(digest, tensor_bundle.data_path(prefix, 0, 1)):
            return None
        index = IndexFile()
        for rows, array, (size, checksum) in zip(contents, arrays, known.values):
            extents = None
            if not rows.is_whole:
                extents = [(rows.first, len(array))] + [(0, WHOLE)] * (len(rows.shape) - 1)
            index.add(rows.name, array.dtype, rows.shape, extents, size, checksum)
        index.write(prefix)
        return ExportedFile(known.size, digest, known.values, linked=True)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
