"""Finds and reads the records of TFRecord files, and the lines of others."""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

Format = Literal["tfrecord", "lines"]
FORMATS = ("tfrecord", "lines")
_HEADER, _FOOTER = 12, 4  # of a TFRecord: its length and that one's checksum; the data's checksum
_BLOCK = 1 << 24
_OPEN_FILES = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"\x78\x9c": "zlib", b"\x78\x01": "zlib"}


class RecordFiles:
    """Holds the location of each record of some files, and reads any of them.

    Attributes:
        paths: of the files.
        counts: how many records each has.
    """

    def __init__(self, paths: Sequence[str], format: Format, skip_lines: int = 0):
        """Finds the records by reading all files once.

        Args:
            paths: local files.
            format: 'tfrecord' or 'lines'.
            skip_lines: how many lines to leave out at the start of each file.

        Raises:
            OSError: a file can't be read.
            ValueError: it is compressed, or not a complete file of this format. The message names
                it.
        """
        self.paths, self._format = list(paths), format
        find = functools.partial(_find_lines, skip=skip_lines)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(_find_tfrecords if format == "tfrecord" else find, paths))
        self.counts = [len(starts) for starts, _ in found]
        self._firsts = np.cumsum([0, *self.counts])
        self._starts = np.concatenate([starts for starts, _ in found] or [np.zeros(0, np.int64)])
        self._lengths = np.concatenate([sizes for _, sizes in found] or [np.zeros(0, np.int64)])
        self._file = functools.lru_cache(_OPEN_FILES)(_OpenFile)

    @property
    def records(self) -> int:
        """Returns how many records all files have."""
        return int(self._firsts[-1])

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns records by their numbers, those of the first file first.

        Raises:
            ValueError: a file has changed. The message names it.
        """
        files = np.searchsorted(self._firsts, numbers, "right") - 1
        out = []
        for file, start, length in zip(
            files.tolist(), self._starts[numbers].tolist(), self._lengths[numbers].tolist()
        ):
            record = self._file(self.paths[file]).read(start, length)
            if self._format == "lines" and record.endswith(b"\r"):
                record = record[:-1]
            out.append(record)
        return out


class _OpenFile:
    """Keeps a file open."""

    def __init__(self, path: str):
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, length: int) -> bytes:
        record = os.pread(self._descriptor, length, start)
        if len(record) < length:
            size = os.fstat(self._descriptor).st_size
            raise ValueError(
                f"{self._path}: it has {size} bytes, and had a record up to byte {start + length} "
                "when reading began. Files must stay as they are."
            )
        return record


def _find_tfrecords(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the data of each record begin, and how long they are, in bytes."""
    starts, sizes = [], []
    size = os.path.getsize(path)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length_at = struct.Struct("<Q").unpack_from
        place = 0
        while place < size:
            end = size + 1
            if place + _HEADER <= size:
                (length,) = length_at(content, place)
                end = place + _HEADER + length + _FOOTER
            if end > size:
                raise ValueError(_not_whole(path, content[:2], place, size))
            starts.append(place + _HEADER)
            sizes.append(length)
            place = end
    return np.array(starts, np.int64), np.array(sizes, np.int64)


def _find_lines(path: str, skip: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each line begins, and how long it is without its end, in bytes."""
    ends, place = [], 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            if not place:
                _check_not_compressed(path, block[:2])
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + place)
            place += len(block)
            last_byte = block[-1:]
    if not place:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if last_byte != b"\n":
        ends.append(np.array([place]))
    all_ends = np.concatenate(ends).astype(np.int64)
    starts = np.concatenate([[0], all_ends[:-1] + 1]).astype(np.int64)
    return starts[skip:], (all_ends - starts)[skip:]


def _check_not_compressed(path: str, first: bytes) -> None:
    kind = _COMPRESSED.get(first)
    if kind is not None:
        raise ValueError(
            f"{path}: it is compressed ({kind}), so its records can't be found one by one. "
            "Decompress it, or give resumable() a tf.data pipeline."
        )


def _not_whole(path: str, first: bytes, place: int, size: int) -> str:
    try:
        _check_not_compressed(path, first)
    except ValueError as error:
        return str(error)
    return (
        f"{path}: it is no whole TFRecord file: the record at byte {place} would go beyond the "
        f"file's {size} bytes. (Lines of text are read by format='lines'.)"
    )
