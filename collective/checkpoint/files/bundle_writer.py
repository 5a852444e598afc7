"""Writes a bundle of numbers in TensorFlow's format: a data file and an index.

TensorFlow's own writer goes through the page cache, which costs more processor time than all the
rest together (see `ops/native/data_file.h`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.checkpoint.files.index_keys import WHOLE
from collective.checkpoint.files.index_reader import data_path
from collective.checkpoint.files.index_writer import IndexFile
from collective.ops.rows import data_files


class BundleFile:
    """Writes one bundle, and then other bundles.

    Its methods raise OSError if the storage fails, or an error of the source of the values.
    """

    def __init__(self) -> None:
        self._data = data_files.DataFile()
        self._index = IndexFile()
        self._prefix = ""

    @property
    def is_open(self) -> bool:
        """Tells whether a bundle has been started."""
        return bool(self._prefix)

    def open(self, prefix: str) -> None:
        """Starts a bundle."""
        self._prefix, self._index = prefix, IndexFile()
        self._data.open(data_path(prefix, 0, 1))

    def add(self, name: str, spec: str, values: Any) -> None:
        """Writes an entry, or a slice of one.

        Args:
            name: the entry's name.
            spec: names the slice as `SaveV2` does; '' for the whole entry.
            values: an array, or a `row_snapshots.SnapshotSlice`.
        """
        if isinstance(values, np.ndarray):
            checksum = self._data.append(values)
        else:
            checksum = values.append_to(self._data)
        shape, extents = parse_slice(spec) if spec else (values.shape, None)
        self._index.add(name, values.dtype, shape, extents, values.nbytes, checksum)

    def give_up(self) -> None:
        """Closes what is open; afterwards nothing can be written."""
        self._data.give_up()

    def finish(self) -> None:
        """Completes the bundle."""
        self._data.finish()
        prefix, self._prefix = self._prefix, ""
        self._index.write(prefix)


def parse_slice(spec: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the full shape, and the first index and length of each dimension: '50 2 10,5:-'."""
    *shape, cuts = spec.split(" ")
    extents = [
        (0, WHOLE) if cut == "-" else (int(cut.split(",")[0]), int(cut.split(",")[1]))
        for cut in cuts.split(":")
    ]
    return [int(size) for size in shape], extents
