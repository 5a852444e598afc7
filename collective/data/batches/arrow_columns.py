"""Converts columns of a batch from and to Arrow, and its bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collective.data import arrow

# A stream's own words, in the metadata of its schema. They are a format.
_FORMAT, _META, _SHAPE = b"collective.batch", b"collective.batch.meta", b"collective.batch.shape"
_VERSION = b"1"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of a stream of Arrow IPC


def is_array(value: Any) -> bool:
    """Tells whether it is an array or a chunked array of pyarrow, without importing pyarrow."""
    return type(value).__module__.startswith("pyarrow") and hasattr(value, "null_count")


def is_table(value: Any) -> bool:
    """Tells whether it is a table or a record batch of pyarrow, without importing pyarrow."""
    return type(value).__module__.startswith("pyarrow") and hasattr(value, "schema")


def columns_of(table: Any) -> dict[str, Any]:
    """Returns the columns of a table by name."""
    return dict(zip(table.schema.names, table.columns))


def read_parquet(
    path: str | os.PathLike[str], batch_size: int, columns: Sequence[str]
) -> Iterator[Any]:
    """Yields record batches of these columns.

    Raises:
        ValueError: it is no Parquet file. (A missing column isn't in the record batches.)
    """
    pyarrow, parquet = arrow.module(), arrow.module("parquet")
    try:
        with parquet.ParquetFile(os.fspath(path)) as file:
            yield from file.iter_batches(batch_size, columns=list(columns))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{os.fspath(path)}: it can't be read as Parquet: {error}") from None


def ragged(what: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values and the row splits of a column of numbers, or of lists of them."""
    pyarrow = arrow.module()
    array = _whole(what, value)
    types = pyarrow.types
    if types.is_fixed_size_list(array.type):
        values, size = array.flatten(), array.type.list_size
        splits = np.arange(len(array) + 1, dtype=np.int64) * size
    elif types.is_list(array.type) or types.is_large_list(array.type):
        splits = array.offsets.to_numpy().astype(np.int64)
        values, splits = array.flatten(), splits - splits[0]
    else:
        values, splits = array, np.arange(len(array) + 1, dtype=np.int64)
    return _numbers(what, values), splits


def dense(what: str, value: Any) -> np.ndarray:
    """Returns the numbers of a column: [B], or [B, n] of lists of fixed size."""
    pyarrow = arrow.module()
    array = _whole(what, value)
    if pyarrow.types.is_fixed_size_list(array.type):
        return _numbers(what, array.flatten()).reshape(len(array), array.type.list_size)
    return _numbers(what, array)


def _whole(what: str, value: Any) -> Any:
    """Returns an array in one piece without missing values."""
    if hasattr(value, "combine_chunks"):
        chunks = value.combine_chunks()
        # Older releases return a chunked array.
        value = chunks.chunk(0) if hasattr(chunks, "chunk") and chunks.num_chunks else chunks
    if hasattr(value, "chunks"):  # one without chunks
        value = arrow.module().array([], value.type)
    if value.null_count:
        raise ValueError(f"{what}: values are missing, {value.null_count} of {len(value)}.")
    return value


def _numbers(what: str, array: Any) -> np.ndarray:
    types = arrow.module().types
    kind = array.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise TypeError(f"{what}: a column of {kind} has no numbers that a batch can hold.")
    return np.asarray(_whole(what, array).to_numpy(zero_copy_only=False))


# ---- Bytes


def to_bytes(batch: Any) -> bytes:
    """Returns a stream with one record batch."""
    pyarrow = arrow.module()
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def record_batch(columns: Mapping[str, Any], meta: bytes) -> Any:
    """Returns a record batch.

    Args:
        columns: arrays, or `RaggedIds`, by name.
        meta: bytes that travel with them.
    """
    pyarrow = arrow.module()
    arrays, fields = [], []
    for name, value in columns.items():
        array, shape = _arrow_of(value)
        arrays.append(array)
        about = {_SHAPE: json.dumps(shape).encode()} if shape else None
        fields.append(pyarrow.field(name, array.type, nullable=False, metadata=about))
    schema = pyarrow.schema(fields, {_FORMAT: _VERSION, _META: meta})
    return pyarrow.record_batch(arrays, schema=schema)


def _arrow_of(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns a column, and the shape of a sample."""
    pyarrow = arrow.module()
    if hasattr(value, "row_splits"):
        values = pyarrow.array(value.values)
        return pyarrow.LargeListArray.from_arrays(value.row_splits, values), ()
    shape = tuple(int(size) for size in value.shape[1:])
    flat = pyarrow.array(np.ascontiguousarray(value).reshape(-1))
    if not shape:
        return flat, ()
    return pyarrow.FixedSizeListArray.from_arrays(flat, int(np.prod(shape))), shape


def from_bytes(data: Any) -> tuple[dict[str, Any], bytes]:
    """Returns columns, as `ragged` and `dense` take them or reshaped arrays, and the meta bytes.

    Raises:
        TypeError: `data` is no buffer.
        ValueError: it isn't a whole stream of `to_bytes`.
    """
    pyarrow = arrow.module()
    try:
        buffer = pyarrow.py_buffer(data)
    except (TypeError, ValueError):
        raise TypeError(f"a batch is read from bytes, not {type(data).__name__}.") from None
    try:
        batch = _only_batch(pyarrow, buffer)
    except (pyarrow.ArrowException, OSError, EOFError, KeyError, UnicodeError) as error:
        raise _not_a_batch(error) from None
    return from_record_batch(batch)


def from_record_batch(batch: Any) -> tuple[dict[str, Any], bytes]:
    """Returns columns, as `ragged` and `dense` take them or reshaped arrays, and the meta bytes.

    Raises:
        TypeError: it is no record batch.
        ValueError: it isn't one of `record_batch`.
    """
    pyarrow = arrow.module()
    if not isinstance(batch, pyarrow.RecordBatch):
        raise TypeError(f"a batch is read from a RecordBatch, not {type(batch).__name__}.")
    try:
        _check_version(pyarrow, batch.schema)
        batch.validate(full=True)
        columns = {
            field.name: _column(field, array) for field, array in zip(batch.schema, batch.columns)
        }
    except (pyarrow.ArrowException, OSError, EOFError, KeyError, UnicodeError) as error:
        raise _not_a_batch(error) from None
    if len(columns) != len(batch.columns):
        raise ValueError("these aren't the bytes of a Batch: a column occurs twice.")
    return columns, batch.schema.metadata.get(_META, b"")


def _not_a_batch(error: Exception) -> ValueError:
    text = " ".join(str(error).split())
    return ValueError(f"these aren't the bytes of a Batch, or not all of them: {text}")


def _check_version(pyarrow: Any, schema: Any) -> None:
    version = (schema.metadata or {}).get(_FORMAT)
    if version != _VERSION:
        raise pyarrow.ArrowInvalid(
            "the schema has no 'collective.batch'"
            if version is None
            else f"they are of version {version.decode(errors='replace')}, and this reads 1"
        )


def _only_batch(pyarrow: Any, buffer: Any) -> Any:
    source = pyarrow.BufferReader(buffer)
    with pyarrow.ipc.open_stream(source) as stream:
        _check_version(pyarrow, stream.schema)
        batches = list(stream)
    if len(batches) != 1 or source.tell() != buffer.size or not _ends(buffer):
        raise pyarrow.ArrowInvalid("there isn't one record batch up to the end")
    return batches[0]


def _ends(buffer: Any) -> bool:
    return bool(bytes(buffer[max(0, buffer.size - len(_END)) :]) == _END)


def _column(field: Any, array: Any) -> Any:
    shape = (field.metadata or {}).get(_SHAPE)
    if shape is None:
        return array
    sizes = _sizes(field.name, shape)
    numbers = dense(field.name, array)
    if numbers.ndim != 2 or int(np.prod(sizes)) != numbers.shape[1]:
        raise ValueError(f"these aren't the bytes of a Batch: {field.name} isn't of shape {sizes}.")
    return numbers.reshape(len(array), *sizes)


def _sizes(name: str, text: bytes) -> list[int]:
    try:
        sizes = json.loads(text)
    except ValueError:
        sizes = None
    if not (isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)):
        raise ValueError(f"these aren't the bytes of a Batch: {name} has a shape {text!r}.")
    return sizes
