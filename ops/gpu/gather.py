"""Gathers rows of many tables into one buffer to send, in one launch.

`reference/gather.py` has the same function in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.gpu.segments import THREADS, Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source("gather.cu", ("gather_rows", "spread_rows", "scale_values"))
_IN_FLIGHT, _ROUNDS = 4, 2  # as in gather.cu
_WIDTH, _FLOAT_BYTES = 4, 4  # elements of the widest access, and the bytes of one
_NUMBER_BYTES = 8  # for a row's number


def gather(tables: Sequence[Any], rows: Any, segments: Segments, workspace: Workspace) -> Any:
    """Copies rows one after the other, in the order of `rows`.

    Bits are copied unchanged, also of NaNs. A row outside of its table comes back as zeros. One
    kernel; the host waits for nothing.

    Accesses have 16 bytes if a table's address and dimension and the place in the buffer allow it,
    else one element: order sections so that odd dimensions come last. Bytes moved: per row 8 for
    its number, D elements read and D written.

    Args:
        tables: S times [V, D] float32, C-contiguous, D at least 1; V and D differ by table, and V·D
            may exceed 2**31.
        rows: [R] int64, row numbers.
        segments: M of them with R rows, whose sections are tables.
        workspace: holds the result until the next call with it.

    Returns:
        [E] float32, E the sum of the rows' dimensions.

    Raises:
        ValueError: a segment belongs to no table, or a table is not a contiguous matrix of float32.
    """
    pieces, tiles, elements = _pieces(tables, rows, segments, workspace)
    out = workspace.take("gather", elements, np.float32)
    on_device = workspace.upload("gather.pieces", pieces)
    workspace.device.kernel(SOURCE, "gather_rows")(
        tiles, THREADS, (on_device, np.int32(len(pieces)), out)
    )
    return out


def check_tables(tables: Sequence[Any], segments: Segments) -> None:
    """Raises the errors of `gather`."""
    if len(segments.sections) and segments.sections.max() >= len(tables):
        raise ValueError(
            f"a segment is of table {segments.sections.max()}, but there are {len(tables)}"
        )
    for number, table in enumerate(tables):
        if (
            table.ndim != 2
            or table.shape[1] < 1
            or table.dtype != np.float32
            or not table.flags.c_contiguous
        ):
            raise ValueError(
                f"table {number} must be a contiguous matrix of float32, but is {table.dtype} "
                f"{table.shape}"
            )


def _pieces(
    tables: Sequence[Any], rows: Any, segments: Segments, workspace: Workspace
) -> tuple[np.ndarray, int, int]:
    """Returns ([P, 9] int64 as gather.cu reads them, how many tiles they have, E)."""
    check_tables(tables, segments)
    lengths = np.diff(segments.offsets)
    table = segments.sections
    dims = np.array([t.shape[1] for t in tables], np.int64)[table]
    addresses = np.array([workspace.device.pointer(t) for t in tables], np.int64)[table]
    table_rows = np.array([t.shape[0] for t in tables], np.int64)[table]
    out = np.cumsum(lengths * dims) - lengths * dims
    # The buffer itself begins at a multiple of 256 bytes.
    aligned = addresses % (_WIDTH * _FLOAT_BYTES) == 0
    vectors = (dims % _WIDTH == 0) & aligned & (out % _WIDTH == 0)
    accesses = np.where(vectors, dims // _WIDTH, dims)
    lanes = np.minimum(32, 2 ** np.ceil(np.log2(accesses)).astype(np.int64))
    tiles = -(-lengths // (THREADS // lanes * _IN_FLIGHT * _ROUNDS))
    words = np.stack(
        [
            np.cumsum(tiles) - tiles,
            workspace.device.pointer(rows) + _NUMBER_BYTES * segments.offsets[:-1],
            lengths,
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
