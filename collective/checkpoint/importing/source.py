"""Describes what a checkpoint of another framework has, whichever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np

from collective.checkpoint.files.tensor_bundle import WHOLE_READ_BYTES, Bundle, slice_rows


@dataclasses.dataclass(frozen=True)
class KeyedRows:
    """Describes a table's rows, or a slot's, each with its key, in any order.

    Attributes:
        name: the variable's.
        dim: D, values in a row.
        dtype: a value's.
        count: rows.
        blocks: yields keys [b] int64 and rows [b, D], some at a time.
        origin: the name in the source, if it is another one.
    """

    name: str
    dim: int
    dtype: np.dtype
    count: int
    blocks: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
    origin: str = ""


@dataclasses.dataclass(frozen=True)
class KeyedTable:
    """Describes a table with keys.

    Attributes:
        rows: its rows.
        slots: its optimizer's slots, and what else has a row for each of its keys.
        refused: how often keys came that have no rows, [n, 1]; None if that isn't known.
        static: the keys are 0 … V - 1; else any int64.
    """

    rows: KeyedRows
    slots: list[KeyedRows]
    refused: KeyedRows | None = None
    static: bool = False


@dataclasses.dataclass(frozen=True)
class WholeVariable:
    """Describes a variable that is written as one entry.

    Attributes:
        name: the variable's.
        dtype: a value's; object for strings.
        shape: its shape.
        blocks: yields the number of the first row and rows, by ascending numbers; or (0, all of it)
            if it is small.
        is_whole: `blocks` yields all of it.
        note: says what was done to it, for the report.
        slot_of: the variable whose slot it is, if it is known to be one.
        is_table: it is a static table, or a slot of one.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[tuple[int, np.ndarray]]]
    is_whole: bool
    note: str = ""
    slot_of: str | None = None
    is_table: bool = False


@dataclasses.dataclass
class Source:
    """Describes a checkpoint of another framework.

    Attributes:
        path: where it is.
        tables: its tables with keys.
        variables: everything else.
        left_out: {name: why it isn't taken}.
        notes: what the user should know, for the report.
    """

    path: str
    tables: list[KeyedTable] = dataclasses.field(default_factory=list)
    variables: list[WholeVariable] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def variable_of_entry(bundle: Bundle, name: str, slot_of: str | None = None) -> WholeVariable:
    """Describes an entry of a TensorFlow checkpoint that is copied as it is."""
    dtype, shape = bundle.entries[name]
    is_small = bundle.stored_bytes(name) <= WHOLE_READ_BYTES
    if not shape or is_small or np.dtype(dtype) == object:
        return WholeVariable(
            name, dtype, shape, lambda: iter([(0, bundle.read_whole(name))]), True, "", slot_of
        )

    def blocks() -> Iterator[tuple[int, np.ndarray]]:
        block = slice_rows(int(np.prod(shape[1:])), dtype)
        for first in range(0, shape[0], block):
            yield first, bundle.read(name, first, min(block, shape[0] - first))

    return WholeVariable(name, dtype, shape, blocks, False, "", slot_of)
