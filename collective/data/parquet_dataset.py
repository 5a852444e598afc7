"""Makes datasets of Parquet files, whose batches are dealt to the ranks by their numbers."""

from __future__ import annotations

import dataclasses
import operator
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis, dealt_input, deduplication
from collective.data.batch_reader import BatchReader
from collective.data.columns import Column
from collective.data.global_batches import GlobalBatches, PartOrder
from collective.data.parquet_files import ParquetFiles, list_files
from collective.data.record_order import RecordOrder
from collective.ops.communication import collectives
from collective.ops.counting import counted

_DEALER = dealt_input.Dealer(
    "collective.data.parquet(): what it reads, or an option,",
    "batches",
    "Sort a list of files, and give all ranks the same options.",
)
# Where a row group is read by more ranks than this, a warning says how to have it read by fewer.
_READERS_OF_A_GROUP = 4


def parquet(
    files: Any,
    columns: Sequence[str] | Mapping[str, str | None] | None = None,
    batch_size: int = 1024,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    interleave: int = 1,
    drop_remainder: bool = False,
    missing: Any = None,
    deduplicate: Mapping[str, Sequence[str]] | None = None,
    start: int | tuple[int, int] = 0,
    rank: int | None = None,
    ranks: int | None = None,
) -> tf2.data.Dataset:
    """Makes a dataset of this rank's batches of the records of Parquet files.

        batch = tf.data.make_one_shot_iterator(
            collective.data.parquet("day_*.parquet", batch_size=512, shuffle=True).prefetch(2)
        ).get_next()                     # {'label': [512], 'I1': [512], …}

    Batches have numbers, which go on from epoch to epoch, and the records of each are a function of
    its number, the same for any number of ranks. Rank r of N has the batches r, r + N, r + 2N, …:
    those that `strategy.shard` would give it of the dataset of one rank. (It gives back a dataset
    of this function as it is, and an Estimator doesn't deal it again.) So each record is used once
    an epoch, by one rank, and (epoch, batch) alone says where a job is, whatever N was: see
    `start`. With interleave=1, N ranks with batches of B / N records take the steps that one rank
    takes with B, except for the end of an epoch that B doesn't divide.

    An element is a dict by the columns' names. A column of numbers or strings is [B]; of lists of a
    fixed size [B, size]; of other lists a `RaggedTensor`, nested as the file has it. Types and
    depths come from the footer of the first file. Numbers go to TensorFlow without a copy where a
    batch lies in one row group, unless memory isn't aligned.

    Memory: the columns of the row groups of a window (`interleave`) that have batches for this
    rank, and up to two more, which are read ahead.

    Args:
        files: a path, pattern, or folder (its *.parquet), or a list of them; also remote files and
            patterns, such as 's3://…' and 'hdfs://…', by fsspec if it has its package for them,
            otherwise files by pyarrow. The same on every rank.
        columns: names of columns, None for all; or a dict from names to forms: 'dense' (lists are
            padded), 'ragged', 'sparse', or None for the column's own.
        batch_size: how many records a batch of a rank has; the last one of an epoch may have fewer.
        shuffle: puts row groups, and the records of each, in another order each epoch. Batches then
            mix the records of one row group; `interleave` mixes row groups in a step.
        seed: of these orders, from 0 to 2³² - 1; the same on every rank.
        epochs: how often the records are read; None: without end.
        interleave: how many row groups are read side by side, a batch of each in turn. A multiple
            of N lets a rank read its part of the row groups only, not all of them. It is part of
            the order: keep it where a job goes on, or is compared, on another N.
        drop_remainder: leaves out an epoch's last batch if it has fewer records.
        missing: stands for missing values, and is of the columns' type; a dict says so by columns.
            A missing list is then empty. None: a missing value is an error.
        deduplicate: {index: [values, …]} where a file's row is a block of records. A column of
            `values` has lists of a block's distinct values, its column `index` for each record the
            number of its value in that list, from 0; any other column has a list with an entry for
            each record. The dataset has the records, without the columns of numbers; `batch_size`
            counts blocks.
        start: where to begin: (epoch, batch), or the number of batches that all ranks have used so
            far. `epochs` are counted from the very beginning.
        rank: the rank for which the batches are, this process's if None.
        ranks: the number of ranks, N if None. With rank=0 and ranks=1 a process reads everything.

    Raises:
        ImportError: pyarrow isn't installed.
        ValueError: an option can't be; there are no records; a file is no whole Parquet file; a
            column is missing, occurs twice, can't be read, or has another type than in the first
            file. The message names file and column.
        tf.errors.InvalidArgumentError: while reading: a row group can't be read, or a value is
            missing; the message names file, row group and column. Or a block of `deduplicate`
            contradicts itself; it names the columns. The other ranks get a `RankError`, and no rank
            applies the step.
    """
    is_dealt = rank is None and ranks is None
    takes_defaults = is_dealt and not drop_remainder
    if rank is None or ranks is None:
        collectives.init()
    ranks = collectives.size() if ranks is None else ranks
    rank = collectives.rank() if rank is None else rank
    _check_options(batch_size, seed, epochs, interleave, rank, ranks)
    source = ParquetFiles(list_files(files), columns, missing)
    order = RecordOrder(
        [group.rows for group in source.groups],
        batch_size,
        shuffle=shuffle,
        seed=seed,
        interleave=interleave,
        drop_remainder=drop_remainder,
    )
    if not order.batches:
        raise ValueError(
            f"{counted(len(source.groups), 'row group')} with {counted(order.records, 'record')}: "
            f"not a batch of {batch_size}."
        )
    _warn_of_many_readers(order, batch_size, interleave, rank, ranks)
    end = None if epochs is None else epochs * order.batches
    reader = BatchReader(source, order, end, ranks)
    first = _number(start, order.batches)
    numbers = _dealt(first, end, rank, ranks)
    dataset = batches(numbers, reader)
    if deduplicate:
        dataset = dataset.map(deduplication.restoring(deduplicate))
    records = ParquetRecords(source, order, epochs, seed if shuffle else None, deduplicate)
    if is_dealt:
        made_of = dataset_analysis.digest_of(repr((records.digest, seed, epochs, start)).encode())
        dealt_input.note_source(_DEALER, made_of, order.batches)
    if takes_defaults and first == 0:
        dataset.collective_records = records
    return dataset


@dataclasses.dataclass(frozen=True)
class ParquetRecords:
    """Gives the records of Parquet files from any global batch on (`resumable.SeekableRecords`).

    Attributes:
        source: the files.
        order: of their records.
        epochs: how often they are read; None: without end.
        seed: of the order; None: they aren't shuffled.
        deduplicate: see `parquet`.
    """

    source: ParquetFiles
    order: RecordOrder
    epochs: int | None
    seed: int | None
    deduplicate: Mapping[str, Sequence[str]] | None

    @property
    def records(self) -> int:
        return self.order.records

    @property
    def digest(self) -> int:
        """Returns 63 bits of the files' names and row groups, and of how their records mix."""
        folder = os.path.dirname(os.path.commonprefix([group.path for group in self.source.groups]))
        groups = [(g.path[len(folder) :], g.index, g.rows) for g in self.source.groups]
        return dataset_analysis.digest_of(repr((groups, self.order.mixing)).encode())

    def batches(
        self, first: tf.Tensor, batch_size: int, drop_remainder: bool, rank: int, ranks: int
    ) -> tf2.data.Dataset:
        parts = GlobalBatches(self.records, self.epochs, batch_size, drop_remainder, rank, ranks)
        reader = BatchReader(self.source, PartOrder(self.order, parts), parts.end)
        numbers = tf2.data.Dataset.range(first, sys.maxsize if parts.end is None else parts.end)
        dataset = batches(numbers, reader)
        if self.deduplicate:
            dataset = dataset.map(deduplication.restoring(self.deduplicate))
        return dataset


def batches(numbers: tf2.data.Dataset, reader: BatchReader[Any]) -> tf2.data.Dataset:
    """Returns the dataset of the batches whose numbers a dataset has."""

    def read(number: tf.Tensor) -> dict[str, Any]:
        return tensors(
            reader.files.columns, tf.numpy_function(reader.read, [number], reader.part_types)
        )

    return numbers.map(read)


def tensors(columns: Sequence[Column], parts: Sequence[tf.Tensor]) -> dict[str, Any]:
    """Returns the tensors of columns, of the parts of all, one column after the other."""
    remaining = iter(parts)
    return {
        column.name: column.tensor([next(remaining) for _ in column.part_types])
        for column in columns
    }


def _dealt(first: int, end: int | None, rank: int, ranks: int) -> tf2.data.Dataset:
    """Returns the numbers of a rank's batches."""
    # An Estimator knows by this name that the batches have been dealt (see input_sharding).
    with tf.name_scope("collective/data/"):
        numbers = tf2.data.Dataset.range(first, sys.maxsize if end is None else max(end, first))
        if ranks == 1:
            return numbers
        # The batches of rank r are those whose numbers are r mod N, wherever a job begins.
        numbers = numbers.shard(ranks, (rank - first) % ranks)
        numbers.collective_is_dealt = True
        return numbers


def _number(start: Any, batches_of_epoch: int) -> int:
    try:
        given = list(start) if isinstance(start, (tuple, list)) else [0, start]
        if any(isinstance(each, (bool, np.bool_)) for each in given):
            raise TypeError
        epoch, batch = map(operator.index, given)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"start={start!r}: it is a whole number of batches, or (epoch, batch)."
        ) from error
    if epoch < 0 or batch < 0:
        raise ValueError(f"start={start!r}: neither an epoch nor a batch is negative.")
    return epoch * batches_of_epoch + batch


def _check_options(
    batch_size: int, seed: int, epochs: int | None, interleave: int, rank: int, ranks: int
) -> None:
    for name, value in (("batch_size", batch_size), ("interleave", interleave), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: it is 1 or more.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs={epochs!r}: it is 1 or more, or None for no end.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: it is from 0 to 2**32 - 1.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank!r} of ranks={ranks!r}: ranks are counted from 0.")


def _warn_of_many_readers(
    order: RecordOrder, batch_size: int, interleave: int, rank: int, ranks: int
) -> None:
    readers = min(ranks // gcd(ranks, interleave), order.batches_of_a_group)
    if readers > _READERS_OF_A_GROUP and rank == 0:
        warnings.warn(
            f"parquet(): each row group is read by {counted(readers, 'rank')}, each of which uses "
            f"a part of its batches of {batch_size} records. With interleave={ranks} (or another "
            f"multiple of {ranks}) each is read by one; a rank then has more of them in memory "
            "only if fewer ranks read. The order of the records changes.",
            stacklevel=3,
        )
