"""Converts files of Criteo's click logs, tab-separated text, to Parquet. It loads no TensorFlow."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collective.data import arrow
from collective.ops.counting import counted

LABEL = "label"
NUMBERS = tuple(f"I{i}" for i in range(1, 14))
KEYS = tuple(f"C{i}" for i in range(1, 27))
# Records in a row group: about 14 MB in 40 columns after reading.
ROWS_OF_A_GROUP = 1 << 16
_BLOCK = 1 << 24  # Bytes of text that are parsed at once.
_DIGITS = 8  # Hexadecimal digits of a key.


def plan(path: Any, folder: str | None = None) -> tuple[list[str], list[str]]:
    """Finds Criteo's files, and returns their paths and those of the files that they become.

    Args:
        path: a path, a pattern, or a list of them.
        folder: where new files go; None: next to their sources.

    Raises:
        ValueError: there is no such file, or two would get the same name.
    """
    given = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
    sources: list[str] = []
    for each in given:
        found = sorted(glob.glob(os.fsdecode(each)))
        if not found:
            raise ValueError(f"{os.fsdecode(each)}: there is no such file.")
        sources += found
    targets = [_target(source, folder) for source in sources]
    if len(set(targets)) < len(targets):
        raise ValueError("two of the files have the same name: give each its own folder.")
    return sources, targets


def convert_new(sources: Sequence[str], targets: Sequence[str]) -> None:
    """Converts files that haven't been converted yet, or have changed since.

    Raises:
        ValueError: see `convert`.
    """
    for source, target in zip(sources, targets):
        if not _is_done(source, target):
            convert(source, target)


def convert(source: str, target: str) -> int:
    """Converts one file, and returns the number of its records.

    Raises:
        ValueError: a line is malformed; the message names the file, and the line's number if
            pyarrow reports it.
    """
    pyarrow, parquet = arrow.module(), arrow.module("parquet")
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    unfinished = f"{target}.{os.getpid()}.unfinished"
    records = 0
    try:
        with contextlib.ExitStack() as files:
            writer = None
            for block in _blocks(source):
                if writer is None:
                    # LZ4 takes as much space as Snappy, the default, and is read twice as fast.
                    writer = files.enter_context(
                        parquet.ParquetWriter(unfinished, block.schema, compression="lz4")
                    )
                writer.write_table(block, row_group_size=ROWS_OF_A_GROUP)
                records += block.num_rows
        os.replace(unfinished, target)
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{source}: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
    return records


def _target(source: str, folder: str | None) -> str:
    name = os.path.basename(source)
    for ending in (".gz", ".txt", ".tsv", ".csv"):
        name = name.removesuffix(ending)
    return os.path.join(os.path.dirname(source) if folder is None else folder, f"{name}.parquet")


def _is_done(source: str, target: str) -> bool:
    return os.path.exists(target) and os.path.getmtime(target) >= os.path.getmtime(source)


def _blocks(source: str) -> Iterator[Any]:
    """Yields tables of whole row groups of a file's records; the last may be smaller."""
    pyarrow = arrow.module()
    waiting: list[Any] = []
    count = 0
    for batch in _parsed(source):
        waiting.append(_converted(batch))
        count += batch.num_rows
        if count >= ROWS_OF_A_GROUP:
            table = pyarrow.concat_tables(waiting)
            whole = count - count % ROWS_OF_A_GROUP
            yield table.slice(0, whole)
            waiting, count = [table.slice(whole)], count - whole
    if waiting:
        yield pyarrow.concat_tables(waiting)


def _parsed(source: str) -> Iterator[Any]:
    """Yields record batches of a file: numbers, and keys as text."""
    pyarrow, csv = arrow.module(), arrow.module("csv")
    names = _names(source)
    types = {name: pyarrow.int32() for name in (LABEL, *NUMBERS)}
    types.update((name, pyarrow.string()) for name in KEYS)
    with pyarrow.input_stream(source, compression="gzip" if _is_gzip(source) else None) as stream:
        yield from csv.open_csv(
            stream,
            # One thread, because its errors have the number of the line.
            csv.ReadOptions(column_names=names, block_size=_BLOCK, use_threads=False),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
        )


def _names(source: str) -> Sequence[str]:
    """Returns the names of a file's columns, by the fields of its first line."""
    pyarrow = arrow.module()
    with pyarrow.input_stream(source, compression="gzip" if _is_gzip(source) else None) as stream:
        line = stream.read(1 << 16).split(b"\n", 1)[0]
    names = [LABEL, *NUMBERS, *KEYS]
    fields = len(line.split(b"\t"))
    if fields not in (len(names), len(names) - 1):
        raise ValueError(
            f"the first line has {counted(fields, 'field')} between tabs: Criteo's "
            f"have {len(names)} (label, 13 numbers, 26 keys), or {len(names) - 1} without a label."
        )
    return names[-fields:]


def _is_gzip(source: str) -> bool:
    return source.endswith(".gz")


def _converted(batch: Any) -> Any:
    """Returns a record batch as a table of numbers: empty fields are 0, keys their value."""
    pyarrow = arrow.module()
    columns = []
    for name in batch.schema.names:
        column = batch.column(batch.schema.get_field_index(name))
        if name in KEYS:
            columns.append(pyarrow.array(_values_of_keys(name, column)))
        else:
            columns.append(column.fill_null(0))
    return pyarrow.table(columns, names=batch.schema.names)


def _values_of_keys(name: str, column: Any) -> np.ndarray:
    """Returns the values of hexadecimal keys as int64; an empty one is 0."""
    lengths = np.asarray(arrow.module("compute").binary_length(column))
    is_there = lengths > 0
    wrong = np.flatnonzero(is_there & (lengths != _DIGITS))
    if len(wrong):
        raise ValueError(_no_key(name, column[int(wrong[0])]))
    values = np.zeros(len(column), np.int64)
    _, offsets, data = column.buffers()
    if data is None or not is_there.any():
        return values
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    characters = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].reshape(-1, _DIGITS)
    digits = _DIGIT_VALUES[characters]
    unknown = np.flatnonzero((digits < 0).any(axis=1))
    if len(unknown):
        raise ValueError(_no_key(name, column[int(np.flatnonzero(is_there)[unknown[0]])]))
    shifts = np.arange(_DIGITS - 1, -1, -1, dtype=np.int64) * 4
    values[is_there] = (digits.astype(np.int64) << shifts).sum(axis=1)
    return values


def _no_key(name: str, value: Any) -> str:
    return f"column {name}: {value.as_py()!r} isn't a key of {_DIGITS} hexadecimal digits."


def _digit_values() -> np.ndarray:
    """Returns the values of hexadecimal digits by their ASCII codes; -1 for anything else."""
    values = np.full(256, -1, np.int8)
    for value, pair in enumerate(zip("0123456789abcdef", "0123456789ABCDEF")):
        for digit in pair:
            values[ord(digit)] = value
    return values


_DIGIT_VALUES = _digit_values()
