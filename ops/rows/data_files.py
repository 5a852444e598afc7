"""Writes data files of checkpoints past the page cache, and reads them into memory or variables.

`ops/native/data_file.h` and `restore_rows.cc` say how.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library

# Numbers of a slice for `RestoreOperation`.
SLICE_NUMBERS = 8
_MESSAGE_BYTES = 4096
_MASK_DELTA = 0xA282EAD8  # A bundle has checksums rotated and shifted by this much.
_GIVEN_UP = -1


@functools.cache
def _library_functions() -> Any:
    functions = native_library.functions()
    number, pointer, code, path = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for name, result, arguments in (
        ("buffer_bytes", number, []),
        ("new", pointer, []),
        ("free", None, [pointer]),
        ("open", code, [pointer, path]),
        ("append", code, [pointer, pointer, number, pointer]),
        ("append_rows", code, [pointer, number, number, pointer, number, pointer]),
        ("finish", code, [pointer]),
        ("read", code, [path, number, number, pointer, pointer]),
        ("checksum", ctypes.c_uint32, [path, number]),
        ("write_index", code, [path, path, pointer, number, path, number]),
    ):
        function = getattr(functions, f"data_file_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


def are_possible(path: str) -> bool:
    """Tells whether this module, not TensorFlow's operations, reads and writes files at `path`."""
    return "://" not in path and native_library.missing() is None


def buffer_bytes() -> int:
    """Returns how much memory a `DataFile` takes."""
    return int(_library_functions().data_file_buffer_bytes())


def masked(checksum: int) -> int:
    """Returns a CRC-32C in the form of a bundle's index."""
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return (rotated + _MASK_DELTA) & 0xFFFFFFFF


class DataFile:
    """Writes one file from its beginning to its end, and then other files.

    Its methods raise OSError with the error's number and the file's path.

    Attributes:
        size: the bytes that were appended.
    """

    def __init__(self) -> None:
        self._library = _library_functions()
        self._file = self._library.data_file_new()
        self._checksum = ctypes.c_uint32()
        self._path, self.size = "", 0

    def __del__(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Closes an unfinished file, so that its space is free once it is removed.

        Nothing can be written any more.
        """
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            self._library.data_file_free(file)

    def open(self, path: str) -> None:
        """Starts a file."""
        self._path, self.size = path, 0
        self._check(self._library.data_file_open(self._file, os.fsencode(path)))

    def append(self, array: np.ndarray) -> int:
        """Appends an array's bytes; returns their checksum in the form of a bundle's index."""
        array = np.ascontiguousarray(array)
        self._check(
            self._library.data_file_append(
                self._file, array.ctypes.data, array.nbytes, ctypes.byref(self._checksum)
            )
        )
        self.size += array.nbytes
        return masked(self._checksum.value)

    def append_rows(self, snapshot: int, shard: int, rows: np.ndarray, size: int) -> int | None:
        """Appends rows of a variable as a snapshot has them; returns their checksum.

        Args:
            snapshot, shard: the numbers of a snapshot and of a variable in it (`RowSnapshot`).
            rows: [b] int64 local rows.
            size: their bytes.

        Returns:
            The checksum; None if the save was given up.
        """
        error = self._library.data_file_append_rows(
            self._file,
            snapshot,
            shard,
            rows.ctypes.data,
            len(rows),
            ctypes.byref(self._checksum),
        )
        if error == _GIVEN_UP:
            return None
        self._check(error)
        self.size += size
        return masked(self._checksum.value)

    def finish(self) -> None:
        """Writes what is left; then the file has `size` bytes."""
        self._check(self._library.data_file_finish(self._file))

    def _check(self, error: int) -> None:
        if error:
            raise OSError(error, os.strerror(error), self._path)


def read(path: str, offset: int, size: int, out: np.ndarray) -> int | None:
    """Reads bytes of a file into `out`; returns their checksum, None if the file is too short."""
    total = ctypes.c_uint32()
    error = _library_functions().data_file_read(
        os.fsencode(path), offset, size, out.ctypes.data, ctypes.byref(total)
    )
    if error > 0:
        raise OSError(error, os.strerror(error), path)
    return None if error else masked(total.value)


def checksum(data: bytes) -> int | None:
    """Returns the checksum of bytes as in a bundle; None if nothing is compiled."""
    if native_library.missing() is not None:
        return None
    return masked(_library_functions().data_file_checksum(data, len(data)))


def write_index(path: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
    """Writes the index of a bundle.

    Args:
        path: the file's path.
        pairs: keys and values, by ascending keys.

    Raises:
        tf.errors.OpError: the storage failed.
    """
    lengths = np.array([[len(key), len(value)] for key, value in pairs], np.int64)
    text = b"".join(part for pair in pairs for part in pair)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    code = _library_functions().data_file_write_index(
        os.fsencode(path), text, lengths.ctypes.data, len(pairs), message, len(message)
    )
    if code:
        words = f"{path}: {message.value.decode(errors='replace')}"
        raise tf.errors.exception_type_from_error_code(code)(None, None, words)


class RestoreOperation:
    """Makes the operation that reads rows of data files directly into a variable.

    Args:
        handle: the variable's handle.
        dtype: the variable's type.
    """

    def __init__(self, handle: tf.Tensor, dtype: tf.DType):
        self._files = tf.placeholder(tf.string, [None])
        self._slices = tf.placeholder(tf.int64, [None, SLICE_NUMBERS])
        self._shape = tf.placeholder(tf.int64, [2])
        self._verifies = tf.placeholder(tf.bool, [])
        self.operation: tf.Operation = native_library.library().collective_restore_rows(
            handle, self._files, self._slices, self._shape, self._verifies, dtype=dtype
        )

    def feeds(
        self,
        files: Sequence[str],
        slices: np.ndarray,
        shape: tuple[int, int],
        verifies: bool = False,
    ) -> dict[tf.Tensor, Any]:
        """Returns the feeds of the operation.

        Args:
            files: paths.
            slices: [S, 8] int64: the number of a slice's file, its place, bytes and checksum; its
                first row that the variable has, and the distance to the next one; the variable's
                row for the first one, and the distance to the row for the next.
            shape: the variable's shape.
            verifies: whether to only read and check the slices, and leave the variable unchanged.
        """
        return {
            self._files: list(files),
            self._slices: slices,
            self._shape: shape,
            self._verifies: verifies,
        }
