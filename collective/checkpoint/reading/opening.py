"""Opens checkpoints with their increments, and reads tables of them, without ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.checkpoint.files import chain
from collective.checkpoint.files.chain import Chain
from collective.checkpoint.files.layout import StoredTable
from collective.checkpoint.reading import merged_reader, table_reader


def open_checkpoint(path: str) -> Chain:
    """Opens the checkpoint or state `path`, or the newest one in the folder `path`."""
    return chain.open_chain(chain.prefix_of(path))


def read_table(
    path: str, name: str, block: int, frequencies: bool = False, last_used: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Reads a table (see `collective.checkpoint.read_table`)."""
    return read_table_of(open_checkpoint(path), name, block, frequencies, last_used)


def read_table_of(
    opened: Chain, name: str, block: int, frequencies: bool = False, last_used: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Reads a table of an open checkpoint (see `collective.checkpoint.read_table`)."""
    readers = (
        functools.partial(merged_reader.read_static, opened),
        functools.partial(merged_reader.read_dynamic, opened),
    )
    return table_reader.read_stored_table(opened.base, name, block, frequencies, last_used, readers)


def read_dynamic_tables(
    opened: Chain, stored_tables: list[StoredTable], block: int
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields (keys [b], [rows [b, D] of each]) for a dynamic table of the base and its slots."""
    return merged_reader.read_dynamic(opened, stored_tables, block)
