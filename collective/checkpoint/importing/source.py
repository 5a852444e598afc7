"""Describes the contents of another framework's checkpoint, whatever the framework."""

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
        name: the variable's name.
        dim: D, the number of values in a row.
        dtype: the type of a value.
        count: how many rows there are.
        blocks: yields keys [b] int64 and rows [b, D], some at a time.
        origin: the name in the source, if it differs.
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
        slots: its optimizer's slots, and anything else with a row for each of its keys.
        refused: how often keys without rows occurred, [n, 1]; None if that isn't known.
        static: whether the keys are 0 … V - 1; else they are any int64.
    """

    rows: KeyedRows
    slots: list[KeyedRows]
    refused: KeyedRows | None = None
    static: bool = False


@dataclasses.dataclass(frozen=True)
class WholeVariable:
    """Describes a variable that is written as one entry.

    Attributes:
        name: the variable's name.
        dtype: the type of a value; object for strings.
        shape: its shape.
        blocks: yields (number of the first row, rows), by ascending numbers; or (0, all rows) if
            it is small.
        is_whole: whether `blocks` yields everything at once.
        note: says what was done to it, for the report.
        slot_of: the variable whose slot it is, if known.
        is_table: whether it is a static table, or a slot of one.
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
        path: its path.
        tables: its tables with keys.
        variables: everything else.
        left_out: {name: why it isn't converted}.
        notes: what the user should know, for the report.
    """

    path: str
    tables: list[KeyedTable] = dataclasses.field(default_factory=list)
    variables: list[WholeVariable] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def variable_of_entry(bundle: Bundle, name: str, slot_of: str | None = None) -> WholeVariable:
    """Describes an entry of a TensorFlow checkpoint that is copied unchanged."""
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
