"""Rows of many tables into one buffer to send, in one launch.

`reference/gather.py` has the same function in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.elements import ELEMENTS, Element
from collective.ops.gpu.segments import THREADS, Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "gather.cu", tuple(f"gather_{table}_{wire}" for table in ELEMENTS for wire in ELEMENTS)
)
_IN_FLIGHT, _ROUNDS = 4, 2  # as in gather.cu
_WIDEST = 16  # bytes of one access


def gather(
    tables: Sequence[Any],
    rows: Any,
    segments: Segments,
    element: Element,
    wire: Element,
    workspace: Workspace,
) -> Any:
    """[E] of `wire`: one row after the other in the order of `rows`, E the sum of their dimensions.

    Of the same type the very bits are copied, NaNs too; else rounded to the nearest, ties to even,
    too large to infinity. A row outside of its table comes back as zeros. One kernel; the host
    waits for nothing.

    Accesses are of 16 bytes of the wider type where a table's address and dimension and the place
    in the buffer allow, else of
    one element: order sections so that odd dimensions come last. Bytes moved: for each row 8 of its
        number, D elements read and
    D written.

    Args:
        tables: S times [V, D] of `element`, C-contiguous, D at least 1 and V·D beyond 2**31 if need
            be; V and D by table.
        rows: [R] int64, row numbers.
        segments: M of them with R rows, whose sections are tables.
        element, wire: of the tables, and of what is returned.
        workspace: where the result lies until the next call with it.

    Raises:
        ValueError: a segment is of no table, or a table is not a contiguous matrix of `element`.
    """
    pieces, tiles, elements = _pieces(tables, segments, element, wire, workspace)
    out = workspace.take(f"gather.{wire}", elements, wire.storage)
    on_device = workspace.upload("gather.pieces", pieces)
    workspace.device.kernel(SOURCE, f"gather_{element}_{wire}")(
        tiles, THREADS, (on_device, np.int32(len(pieces)), rows, out)
    )
    return out


def check_tables(tables: Sequence[Any], segments: Segments, element: Element) -> None:
    """Raises what `gather` raises."""
    if len(segments.sections) and segments.sections.max() >= len(tables):
        raise ValueError(
            f"a segment is of table {segments.sections.max()}, but there are {len(tables)}"
        )
    for number, table in enumerate(tables):
        if (
            table.ndim != 2
            or table.shape[1] < 1
            or table.dtype != element.storage
            or not table.flags.c_contiguous
        ):
            raise ValueError(
                f"table {number} must be a contiguous matrix of {element}, but is "
                f"{table.dtype} {table.shape}"
            )


def _pieces(
    tables: Sequence[Any], segments: Segments, element: Element, wire: Element, workspace: Workspace
) -> tuple[np.ndarray, int, int]:
    """([P, 9] int64 as gather.cu reads them, how many tiles they have, E)."""
    check_tables(tables, segments, element)
    lengths = np.diff(segments.offsets)
    table = segments.sections
    dims = np.array([t.shape[1] for t in tables], np.int64)[table]
    addresses = np.array([workspace.device.pointer(t) for t in tables], np.int64)[table]
    table_rows = np.array([t.shape[0] for t in tables], np.int64)[table]
    out = np.cumsum(lengths * dims) - lengths * dims
    width = _WIDEST // max(element.size, wire.size)
    # The buffer itself begins at a multiple of 256 bytes.
    vectors = (dims % width == 0) & (addresses % (width * element.size) == 0) & (out % width == 0)
    accesses = np.where(vectors, dims // width, dims)
    lanes = np.minimum(32, 2 ** np.ceil(np.log2(accesses)).astype(np.int64))
    tiles = -(-lengths // (THREADS // lanes * _IN_FLIGHT * _ROUNDS))
    words = np.stack(
        [
            np.cumsum(tiles) - tiles,
            segments.offsets[:-1],
            segments.offsets[1:],
            addresses,
            table_rows,
            dims,
            out,
            lanes,
            vectors.astype(np.int64),
        ],
        1,
    )
    return words[lengths > 0], int(tiles.sum()), int((lengths * dims).sum())
