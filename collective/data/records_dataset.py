"""Makes datasets of the records of TFRecord and text files, shuffled as a whole each epoch."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis
from collective.data.global_batches import GlobalBatches
from collective.data.parquet_files import list_files
from collective.data.permutation import shuffled
from collective.data.record_files import FORMATS, Format, RecordFiles
from collective.ops.counting import counted

_AT_ONCE = 1024  # records that are read for a dataset that isn't resumable


def records(
    files: Any,
    *,
    format: Format = "tfrecord",
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    skip_lines: int = 0,
) -> tf2.data.Dataset:
    """Makes a dataset of the records of files, in which `resumable` can seek.

        records = collective.data.records("train-*.tfrecord", shuffle=True, seed=7, epochs=3)
        dataset = collective.data.resumable(records, batch_size=4096)
        batch = dataset.map(lambda lines: tf.io.parse_example(lines, features)).prefetch(2)

    When the dataset is made, every rank reads all files once to find where each record is, which
    takes 16 bytes of memory per record. With shuffling, the records of all files come in a
    different order each epoch, which depends only on seed and epoch; no records are kept in memory
    for it. Records are read one by one, so files should be on a local disk, or fit in memory.

    An element is a record, a string scalar; after `resumable` it is a batch [n] of them.

    Args:
        files: A path, pattern, or folder, or a list of them; local, not compressed; the same on
            every rank.
        format: 'tfrecord'; or 'lines' of text, given without their ends.
        shuffle: Whether the records are shuffled.
        seed: Of the order, from 0 to 2³² - 1; the same on every rank.
        epochs: How often the records are read; None: without end.
        skip_lines: How many lines to leave out at the start of each file.

    Raises:
        OSError: a file can't be read.
        ValueError: there are no files or no records; a file is remote, compressed or incomplete; an
        option is invalid. The message names the file. tf.errors.InvalidArgumentError: while
        reading: a file has become shorter.
    """
    _check_options(format, seed, epochs, skip_lines)
    paths = list_files(files, "files", in_folder="*")
    for path in paths:
        if "://" in path:
            raise ValueError(
                f"{path}: records are read from local files. Copy it; or give resumable() a "
                "pipeline of tf.data.TFRecordDataset, or files of collective.data.parquet()."
            )
        if os.path.isdir(path):
            raise ValueError(f"{path}: it is a folder, not a file of records.")
    source = RecordFiles(paths, format, skip_lines)
    if not source.records:
        raise ValueError(f"{counted(len(paths), 'file')} without a record: {paths[0]}, …")
    read = FileRecords(source, epochs, seed if shuffle else None, skip_lines)
    with tf.name_scope(dataset_analysis.OF_READERS):
        dataset = read.batches(tf.constant(0, tf.int64), _AT_ONCE, False, 0, 1).unbatch()
    dataset.collective_records = read
    return dataset


@dataclasses.dataclass(frozen=True)
class FileRecords:
    """Gives the records of files from any global batch on (`resumable.SeekableRecords`).

    Attributes:
        source: the files.
        epochs: how often they are read; None: without end.
        seed: of the order; None: they aren't shuffled.
        skip_lines: see `records`.
    """

    source: RecordFiles
    epochs: int | None
    seed: int | None
    skip_lines: int

    @property
    def records(self) -> int:
        return self.source.records

    @property
    def digest(self) -> int:
        """Returns 63 bits of the files' names, sizes and numbers of records."""
        paths = [os.path.abspath(path) for path in self.source.paths]
        folder = os.path.dirname(os.path.commonprefix(paths))
        files = [
            (path[len(folder) :], os.path.getsize(path), count)
            for path, count in zip(paths, self.source.counts)
        ]
        return dataset_analysis.digest_of(repr((files, self.skip_lines)).encode())

    def batches(
        self, first: tf.Tensor, batch_size: int, drop_remainder: bool, rank: int, ranks: int
    ) -> tf2.data.Dataset:
        parts = GlobalBatches(self.records, self.epochs, batch_size, drop_remainder, rank, ranks)

        def read(number: np.int64) -> np.ndarray:
            records = [self._read(*piece) for piece in parts.part(int(number))]
            return np.array([record for piece in records for record in piece], object)

        def batch(number: tf.Tensor) -> tf.Tensor:
            records: tf.Tensor = tf.numpy_function(read, [number], tf.string)
            return tf.ensure_shape(records, [None])

        end = sys.maxsize if parts.end is None else parts.end
        return tf2.data.Dataset.range(first, end).map(batch)

    def _read(self, epoch: int, first: int, last: int) -> list[bytes]:
        numbers = np.arange(first, last)
        if self.seed is not None:
            numbers = shuffled(numbers, self.records, self.seed, epoch)
        return self.source.read(numbers)


def _check_options(format: str, seed: int, epochs: int | None, skip_lines: int) -> None:
    if format not in FORMATS:
        raise ValueError(f"records(format={format!r}): it is one of {FORMATS}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"records(seed={seed!r}): it is from 0 to 2**32 - 1.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"records(epochs={epochs!r}): it is 1 or more, or None for no end.")
    if skip_lines < 0 or (skip_lines and format != "lines"):
        raise ValueError(
            f"records(skip_lines={skip_lines!r}): it is 0 or more, and of format='lines'."
        )
