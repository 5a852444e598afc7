"""Reads the footers and the row groups of Parquet files."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow.compat.v1 as tf

from collective.data import arrow
from collective.data.columns import Column, column_of
from collective.ops.counting import counted
from collective.ops.rows import file_systems

# How many footers are read at once: where files are remote, reading them is waiting.
_FOOTERS_AT_ONCE = 16
_SHOWN = 5  # names in one error


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """Names a row group: number `index` of the file `path`, of `rows` records."""

    path: str
    index: int
    rows: int


class ParquetFiles:
    """Holds what the footers of files say, and reads their row groups.

    Attributes:
        columns: the columns that are read.
        groups: the row groups of all files, in the order of the files.
    """

    def __init__(
        self,
        paths: Sequence[str],
        wanted: Sequence[str] | Mapping[str, str | None] | None = None,
        missing: Any = None,
        part: tuple[int, int] = (0, 1),
    ):
        """Reads all footers.

        Args:
            paths: of the files.
            wanted, missing: see `collective.data.parquet`.
            part: (i, k): of each file only the row groups i, i + k, i + 2k, ….

        Raises:
            ImportError: there is no pyarrow.
            ValueError: a file is no whole Parquet file, lacks a column, or has it twice or in
                another type than the first file; a column is named twice, or what stands for its
                missing values isn't of its type. The message names the file and the column.
        """
        arrow.module("parquet")  # An error says so once, not from a thread.
        # The footer that was read last, with its path: a file's row groups follow each other.
        self._footer: tuple[str, Any] = ("", None)
        forms = wanted if isinstance(wanted, Mapping) else {}
        wanted = [wanted] if isinstance(wanted, str) else wanted
        _check_named_once([] if wanted is None else list(wanted))
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            footers = threads.map(_footer, paths)
            self.columns: list[Column] = []
            self.groups: list[RowGroup] = []
            for path, (schema, rows) in zip(paths, footers):
                names = list(wanted) if wanted is not None else schema.names
                if self.columns:
                    self._check_same(path, schema, paths[0])
                else:
                    self.columns = [
                        _column(path, schema, name).in_form(forms.get(name)) for name in names
                    ]
                first, step = part
                self.groups += [
                    RowGroup(path, index, rows[index]) for index in range(first, len(rows), step)
                ]
        if not self.columns:
            raise ValueError("no column is named: name one, or give columns=None for all.")
        unknown = sorted(set(_names_of(missing)) - {column.name for column in self.columns})
        if unknown:
            raise ValueError(f"missing= names {unknown[0]!r}, which is no column that is read.")
        by_name = missing if isinstance(missing, Mapping) else dict.fromkeys(names, missing)
        self._fills = {c.name: c.fill_value(by_name.get(c.name)) for c in self.columns}

    @property
    def records(self) -> int:
        """Returns how many records all row groups have."""
        return sum(group.rows for group in self.groups)

    def read(self, number: int) -> Any:
        """Reads a row group, by its number in `groups`; returns an Arrow table, a chunk a column.

        Raises:
            ValueError: it can't be read, or a value is missing; the message names the file, the
                row group and the column.
        """
        group, pyarrow = self.groups[number], arrow.module()
        names = [column.name for column in self.columns]
        try:
            with self._open(group.path) as file:
                table = file.read_row_group(group.index, names)
        except (OSError, ValueError) as error:
            raise self._unreadable(group, error) from error
        if table.num_rows != group.rows:
            raise ValueError(
                f"{group.path}, row group {group.index}: it has {table.num_rows} records, and had "
                f"{group.rows} when reading began. Files must stay as they are."
            )
        arrays = []
        for column in self.columns:
            try:
                chunk = one_chunk(table.column(column.name))
                arrays.append(column.without_missing(chunk, self._fills[column.name]))
            except ValueError as error:
                raise ValueError(_place(group, column.name, error)) from error
        return pyarrow.table(arrays, names=names)

    def _open(self, path: str) -> Any:
        known, metadata = self._footer
        file = _opened(path, metadata if known == path else None)
        self._footer = (path, file.metadata)
        return file

    def _check_same(self, path: str, schema: Any, first_path: str) -> None:
        for column in self.columns:
            here = _column(path, schema, column.name)
            if here.kind != column.kind:
                raise ValueError(
                    f"{path}, all row groups, column {column.name!r}: it is of {here.kind}, and of "
                    f"{column.kind} in {first_path}. All files must have the same types: write the "
                    "file again, or leave it or the column out."
                )

    def _unreadable(self, group: RowGroup, error: Exception) -> ValueError:
        """Returns the error of a row group that can't be read; it names the column if it can."""
        for column in self.columns:
            try:
                with self._open(group.path) as file:
                    file.read_row_group(group.index, [column.name])
            except (OSError, ValueError) as of_column:
                return ValueError(_place(group, column.name, of_column))
        return ValueError(f"{group.path}, row group {group.index}: {error}")


def list_files(files: Any, kind: str = "Parquet files", in_folder: str = "*.parquet") -> list[str]:
    """Returns the paths that `files` names: paths, patterns and folders, in a stable order.

    Raises:
        ValueError: there are no files.
    """
    given = [files] if isinstance(files, (str, bytes, os.PathLike)) else list(files)
    paths: list[str] = []
    for each in given:
        path = os.fsdecode(each)
        if any(mark in path for mark in "*?["):
            file_systems.check(path)
            paths += sorted(tf.io.gfile.glob(path))
        elif "://" not in path and os.path.isdir(path):
            paths += sorted(tf.io.gfile.glob(os.path.join(path, in_folder)))
        else:
            paths.append(path)
    if not paths:
        shown = ", ".join(os.fsdecode(each) for each in given[:_SHOWN])
        raise ValueError(f"there are no {kind}: {shown or 'the list is empty'}.")
    return paths


def _names_of(missing: Any) -> Iterator[str]:
    if isinstance(missing, Mapping):
        yield from missing


def _check_named_once(names: Sequence[str]) -> None:
    for name, times in collections.Counter(names).items():
        if times > 1:
            raise ValueError(f"columns= names {name!r} {counted(times, 'time')}: name it once.")


def _column(path: str, schema: Any, name: str) -> Column:
    times = schema.names.count(name)
    if not times:
        raise ValueError(f"{path}: it has no column {name!r}: it has {schema.names}.")
    if times > 1:
        raise ValueError(
            f"{path}: it has {times} columns named {name!r}: write the file again with "
            "different names, or read only other columns: columns=[…]."
        )
    try:
        return column_of(schema.field(name))
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from error


def _place(group: RowGroup, column: str, error: Exception) -> str:
    return f"{group.path}, row group {group.index}, column {column!r}: {error}"


def _opened(path: str, metadata: Any = None) -> Any:
    parquet = arrow.module("parquet")
    if "://" not in path:
        return parquet.ParquetFile(path, metadata=metadata)
    fs = arrow.module("fs")
    found = file_systems.fsspec_file_system(path)
    if found is None:
        filesystem, inner = fs.FileSystem.from_uri(path)
    else:
        of_fsspec, inner = found
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(of_fsspec))
    return parquet.ParquetFile(filesystem.open_input_file(inner), metadata=metadata)


def _footer(path: str) -> tuple[Any, list[int]]:
    """Returns a file's schema, and the number of rows of each row group."""
    try:
        with _opened(path) as file:
            metadata = file.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return file.schema_arrow, rows
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file.") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: it is no Parquet file, or isn't whole: its footer can't be read ({error})."
        ) from error


def one_chunk(column: Any) -> Any:
    """Returns a column of a table as one Arrow array; copied only if it is in several."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@functools.cache
def reading_threads() -> ThreadPoolExecutor:
    """Returns the threads that read row groups ahead; they live as long as the process."""
    return ThreadPoolExecutor(2, thread_name_prefix="collective-parquet")
