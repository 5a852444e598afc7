"""Reads Parquet files as HybridBackend's `hb.data` does, with its names and signatures.

`collective.data` reads the files; this module has the names. A rank reads the files that its script
names; `collective.data.parquet` deals batches to the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.compat.parquet import ParquetDataset, known_paths, names_of
from collective.data import deduplication
from collective.data.batch_reader import BatchReader
from collective.data.parquet_dataset import batches
from collective.data.parquet_files import ParquetFiles
from collective.data.record_order import RecordOrder
from collective.ops.counting import counted

# How many records are read at once if they are shuffled, or batched later.
READ_AHEAD = 8192
Batch = dict[str, Any]


class Dataset:
    """Holds HybridBackend's function that makes a dataset of records: `Dataset.from_parquet`."""

    @classmethod
    def from_parquet(
        cls,
        filenames: Any,
        fields: Sequence[Any] | None = None,
        partition_count: int = 1,
        partition_index: int = 0,
        skip_corrupted_data: bool = False,
        to_dense: bool | Mapping[str, bool] = False,
        num_parallel_reads: Any = None,
        num_parallel_parser_calls: Any = None,
        field_ignore_case: bool = False,
        field_map_fn: Any = None,
        key_idx_field_names: Sequence[str] | None = None,
        value_field_names: Sequence[Sequence[str]] | None = None,
    ) -> Any:
        """Makes a dataset of records, for `batch` or `shuffle_batch`.

        A batch is a dict of columns; a column of lists is a `SparseTensor`, or padded.

        Args:
            filenames: a path, a list of paths, or a tensor or dataset of paths.
            fields: the columns, by name or as `Field`; None: all columns of the first file. A
                column with a default value may be missing in the files.
            partition_count, partition_index: reads only the row groups i with i mod count = index.
            to_dense: whether to pad lists; a dict says so per column.
            num_parallel_reads, num_parallel_parser_calls: no effect.
            key_idx_field_names, value_field_names: columns that files store once for several
                records, see `deduplicate`.

        Raises:
            NotImplementedError: it is asked to skip unreadable data, or to rename columns.
            ValueError: see `ParquetDataset`.
        """
        del num_parallel_reads, num_parallel_parser_calls
        for name, value, instead in (
            ("skip_corrupted_data", skip_corrupted_data, "leave files out that can't be read"),
            ("field_ignore_case", field_ignore_case, "name fields as the files do"),
            ("field_map_fn", field_map_fn, "name fields as the files do"),
        ):
            if value:
                raise NotImplementedError(
                    f"hb.data.Dataset.from_parquet({name}=…) is not supported: {instead}."
                )
        stored, added = _stored_and_added(filenames, fields)
        part = (partition_index, partition_count)
        restore = deduplicate(key_idx_field_names or (), value_field_names or ())
        records = ParquetDataset(
            filenames, READ_AHEAD, stored, partition_count, partition_index
        ).unbatch()
        batch_records = records.batch

        def batch(batch_size: int, drop_remainder: bool = False) -> Any:
            read = _in_batches(filenames, stored, batch_size, part, drop_remainder)
            if read is None:
                read = batch_records(batch_size, drop_remainder)
            return _mapped(read.apply(restore), finished)

        def shuffle_batch(
            batch_size: int,
            drop_remainder: bool = False,
            buffer_size: int | None = None,
            seed: int | None = None,
            reshuffle_each_iteration: bool | None = None,
        ) -> Any:
            mixed = records.shuffle(buffer_size or batch_size, seed, reshuffle_each_iteration)
            return _mapped(mixed.batch(batch_size, drop_remainder).apply(restore), finished)

        def finished(read: Batch) -> Batch:
            kept = {n: read[n] for n in read if n not in (key_idx_field_names or ())}
            return _with_defaults(_parsed(kept, to_dense), added, None)

        records.batch, records.shuffle_batch = batch, shuffle_batch
        return records

    @classmethod
    def from_orc(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuses ORC files.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "hb.data.Dataset.from_orc is not supported: write the files as Parquet."
        )


def _mapped(dataset: Any, function: Callable[[Batch], Batch]) -> Any:
    """Returns the dataset of a function's results for each batch; the function has no branches."""
    return dataset.map(tf.autograph.experimental.do_not_convert(function))


def _stored_and_added(filenames: Any, fields: Sequence[Any] | None) -> tuple[Any, list[Any]]:
    """Returns the fields that the files have, and those that only have a default value."""
    paths = known_paths(filenames)
    optional = [f for f in fields or () if getattr(f, "default_value", None) is not None]
    if fields is None or not optional or paths is None:
        return fields, []
    there = {column.name for column in ParquetFiles(paths[:1]).columns}
    added = [field for field in optional if field.name not in there]
    return [field for field in fields if field not in added], added


def _in_batches(
    filenames: Any,
    fields: Sequence[Any] | None,
    batch_size: int,
    part: tuple[int, int],
    drop_remainder: bool,
) -> Any:
    """Returns a dataset that is read in batches; None if paths aren't known yet."""
    paths = known_paths(filenames)
    if paths is None:
        return None
    files = ParquetFiles(paths, names_of(fields), part=part)
    rows = [group.rows for group in files.groups]
    order = RecordOrder(rows, batch_size, drop_remainder=drop_remainder)
    numbers = tf2.data.Dataset.range(order.batches)
    return batches(numbers, BatchReader(files, order, order.batches))


def deduplicate(
    key_idx_field_names: Sequence[str],
    value_field_names: Sequence[Sequence[str]],
    fields: Any = None,
) -> Callable[[Any], Any]:
    """Returns a function for `dataset.apply` that restores values stored once per block.

    Afterwards columns of values have an entry for each record; the others stay as they are.

    Args:
        key_idx_field_names: for each group of columns, the column that numbers its values.
        value_field_names: the groups of columns.
        fields: no effect.
    """
    del fields
    if len(key_idx_field_names) != len(value_field_names):
        raise ValueError(
            f"hb.data.deduplicate: {counted(len(key_idx_field_names), 'column')} of numbers for "
            f"{counted(len(value_field_names), 'group')} of columns of values."
        )
    groups = dict(zip(key_idx_field_names, value_field_names))

    def restore(blocks: Batch) -> Batch:
        return {**blocks, **deduplication.restored_values(blocks, groups)}

    return lambda dataset: _mapped(dataset, restore)


def parse(num_parallel_calls: Any = None, pad: Any = False) -> Callable[[Any], Any]:
    """Returns a function for `dataset.apply` that turns lists into sparse tensors, or pads them.

    Args:
        num_parallel_calls: no effect.
        pad: whether to pad lists; a dict says so per column.

    Raises:
        NotImplementedError: `pad` is a shape.
    """
    del num_parallel_calls
    _check_pad(pad)
    return lambda dataset: _mapped(dataset, lambda batch: _parsed(batch, pad))


def _check_pad(pad: Any) -> None:
    for each in pad.values() if isinstance(pad, Mapping) else [pad]:
        if not isinstance(each, bool):
            raise NotImplementedError(
                f"hb.data.parse(pad={each!r}) is not supported: pad=True pads to the "
                "longest list of a batch; tf.pad makes it longer."
            )


def _parsed(batch: Batch, pad: Any) -> Batch:
    _check_pad(pad)
    parsed = {}
    for name, tensor in batch.items():
        is_padded = pad.get(name, False) if isinstance(pad, Mapping) else pad
        if isinstance(tensor, tf.RaggedTensor):
            tensor = tensor.to_tensor() if is_padded else tensor.to_sparse()
        parsed[name] = tensor
    return parsed


def populate_defaults(
    all_fields: Sequence[Any], batch_size: int | None, num_parallel_calls: Any = None
) -> Callable[[Any], Any]:
    """Returns a function for `dataset.apply` that adds the default values of missing columns.

    Args:
        all_fields: the columns, as `Field`.
        batch_size: how many records a batch has; None: one.
        num_parallel_calls: no effect.
    """
    del num_parallel_calls
    count = 1 if batch_size is None else batch_size
    return lambda dataset: _mapped(dataset, lambda read: _with_defaults(read, all_fields, count))


def _with_defaults(batch: Batch, fields: Sequence[Any], count: int | None) -> Batch:
    """Returns a batch with the default values of fields that it lacks.

    Args:
        batch: the columns.
        fields: the fields.
        count: how many records it has; None: the batch's own number.
    """
    added = {}
    for field in fields:
        if field.name in batch or field.default_value is None:
            continue
        value = tf.convert_to_tensor(field.default_value, field.dtype)
        records = _count(batch) if count is None else count
        added[field.name] = tf.repeat(value[None], records, axis=0)
    return {**batch, **added}


def _count(batch: Batch) -> tf.Tensor:
    column = next(iter(batch.values()))
    is_sparse = isinstance(column, tf.SparseTensor)
    return column.dense_shape[0] if is_sparse else tf.shape(column, out_type=tf.int64)[0]


def rebatch(
    batch_size: int, drop_remainder: bool = False, fields: Any = None
) -> Callable[[Any], Any]:
    """Returns a function for `dataset.apply` that makes batches of another size.

    Args:
        batch_size: how many records a batch has.
        drop_remainder: whether a last batch of fewer records is left out.
        fields: no effect.
    """
    del fields
    return lambda dataset: dataset.unbatch().batch(batch_size, drop_remainder)
