"""Reads Parquet files as DeepRec's and HybridBackend's datasets do, with their signatures.

`collective.data` reads the files; this module has the names. A batch is a dict of columns; a column
of lists is a `RaggedTensor`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data.batch_reader import BatchReader
from collective.data.columns import Column
from collective.data.parquet_dataset import tensors
from collective.data.parquet_files import ParquetFiles
from collective.data.record_order import RecordOrder


@dataclasses.dataclass(frozen=True)
class Field:
    """Describes a column.

    Attributes:
        name: its name.
        dtype: its type; for a column of lists the type of the lists' elements.
        ragged_rank: how many levels of lists are around a value.
        shape: [size] for lists of a fixed size, else None.
        default_value: a record's value if files lack the column; only HybridBackend has it.
    """

    name: str
    dtype: Any = None
    ragged_rank: int | None = 0
    shape: Any = None
    default_value: Any = None

    def column(self) -> Column:
        """Returns the column in the form of `collective.data`."""
        depth = self.ragged_rank or 0
        width = int(self.shape[0]) if self.shape and not depth else None
        form = "ragged" if depth else "dense"
        return Column(self.name, tf2.as_dtype(self.dtype), depth, width).in_form(form)


class DataFrame:
    """Holds the names of a data frame: `DataFrame.Field`."""

    Field = Field


def ParquetDataset(  # noqa: N802 (DeepRec's name)
    filenames: Any,
    batch_size: int = 1,
    fields: Sequence[Any] | None = None,
    partition_count: int = 1,
    partition_index: int = 0,
    drop_remainder: bool = False,
    num_parallel_reads: Any = None,
    num_sequential_reads: Any = 1,
) -> Any:
    """Makes a dataset of batches of records: dicts of tensors by the columns' names.

    Each rank reads the files that it gets; `collective.data.parquet` deals batches to the ranks.

    Args:
        filenames: a path, or a list of paths; with `fields` also a tensor or dataset of paths.
        batch_size: the most records of a batch; each file ends with a batch of the rest.
        fields: the columns, by name or as `Field`; None: all columns of the first file.
        partition_count, partition_index: reads only the row groups i with i mod count = index.
        drop_remainder: whether to leave out batches with fewer records.
        num_parallel_reads, num_sequential_reads: no effect: files are read in order.

    Raises:
        ImportError: pyarrow isn't installed.
        ValueError: paths are in a tensor but fields with types are missing, or a column's type
            isn't supported. While reading: a file lacks a column, or a value is missing.
    """
    del num_parallel_reads, num_sequential_reads
    names, paths = names_of(fields), known_paths(filenames)
    if paths is not None:
        filenames = tf2.data.Dataset.from_tensor_slices(paths)
        columns = ParquetFiles(paths[:1], names).columns
    else:
        if not isinstance(filenames, tf2.data.Dataset):
            filenames = tf2.data.Dataset.from_tensor_slices(tf2.reshape(filenames, [-1]))
        if getattr(filenames, "collective_files", None):
            columns = ParquetFiles(filenames.collective_files[:1], names).columns
        elif fields and all(getattr(field, "dtype", None) for field in fields):
            columns = [field.column() for field in fields]
        else:
            raise ValueError(
                "ParquetDataset of a tensor or dataset of paths needs fields=[Field(name, "
                "dtype), …]: no file can be looked at."
            )
    files = _Files(columns, batch_size, (partition_index, partition_count), drop_remainder)
    return filenames.flat_map(files.batches_of)


def known_paths(filenames: Any) -> list[str] | None:
    """Returns the paths; None if a tensor or a dataset has them."""
    if not isinstance(filenames, (str, bytes, os.PathLike, list, tuple)):
        return None
    listed = [filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else filenames
    return [os.fsdecode(name) for name in listed]


def names_of(fields: Sequence[Any] | None) -> list[str] | None:
    """Returns the columns' names; None for all columns."""
    return None if fields is None else [str(getattr(field, "name", field)) for field in fields]


class _Files:
    """Reads batches of files whose paths are known only when they are read."""

    def __init__(
        self, columns: Sequence[Column], size: int, part: tuple[int, int], drop_remainder: bool
    ):
        self._columns, self._size, self._part = list(columns), size, part
        self._drop_remainder = drop_remainder
        # A reader that has reached the end of its file holds no records.
        self._reader = functools.lru_cache(maxsize=64)(self._make_reader)

    def batches_of(self, path: tf.Tensor) -> tf2.data.Dataset:
        """Returns a dataset of the batches of a file."""
        types = [dtype for column in self._columns for dtype in column.part_types]

        def batch(number: tf.Tensor) -> dict[str, Any]:
            return tensors(self._columns, tf.numpy_function(self._read, [path, number], types))

        count = tf.numpy_function(self._count, [path], tf.int64)
        count.set_shape([])
        return tf2.data.Dataset.range(count).map(batch)

    def _count(self, path: bytes) -> np.int64:
        return np.int64(self._reader_of(path).order.batches)

    def _read(self, path: bytes, number: np.int64) -> list[np.ndarray]:
        parts = self._reader_of(path).read(int(number))
        types = [dtype for column in self._columns for dtype in column.part_types]
        return [
            part if dtype == tf.string else part.astype(dtype.as_numpy_dtype, copy=False)
            for part, dtype in zip(parts, types)
        ]

    def _reader_of(self, path: bytes) -> BatchReader[RecordOrder]:
        name = os.fsdecode(path)
        version = None
        if "://" not in name and os.path.exists(name):
            version = os.stat(name).st_mtime_ns, os.stat(name).st_size
        return self._reader(name, version)

    def _make_reader(self, path: str, version: Any) -> BatchReader[RecordOrder]:
        del version  # Another file with the same name gets another reader.
        files = ParquetFiles([path], [column.name for column in self._columns], part=self._part)
        for column, there in zip(self._columns, files.columns):
            is_number = tf.string not in (column.dtype, there.dtype)
            is_cast = is_number and (column.depth, column.width) == (there.depth, there.width)
            if there.kind != column.kind and not is_cast:
                raise ValueError(
                    f"{path}, all row groups, column {column.name!r}: it is of {there.kind}, not "
                    f"of {column.kind}."
                )
        rows = [group.rows for group in files.groups]
        order = RecordOrder(rows, self._size, drop_remainder=self._drop_remainder)
        return BatchReader(files, order, order.batches)


def read_parquet(batch_size: int, fields: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Returns a function for `dataset.apply`, for a dataset of paths."""
    return lambda filenames: ParquetDataset(filenames, batch_size, fields, **options)
