"""Sums rows by segment: computes the gradients of rows, which are written here or applied at once
(`update.py`).

A segment holds the occurrences of one row (`occurrences.py`). A group of threads sums a row with up
to `LONG` occurrences. Many blocks sum a row with more: first pieces of it, whose sums are then
treated as occurrences. There are no atomics: sums are always the same, to the last bit.

`reference/sums.py` has the same function in NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu.device import Device, Kernel
from collective.ops.gpu.occurrences import Occurrences
from collective.ops.gpu.segments import THREADS, Segments
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source("sums.cu", ("sum_pieces", "sum_rows", "sum_rows_long"))
NULL = np.uint64(0)
SLOTS = 3  # as in targets.cuh, whose words `target_words` writes
_WIDTH, _FLOAT_BYTES = 4, 4  # elements of one access, and the bytes of one
_IN_FLIGHT = 4
_FEWEST_LANES = 4  # as in sums.cuh
_PIECE_BLOCKS, _LONG_BLOCKS = 8, 2  # per multiprocessor


def group_lanes(dims: np.ndarray) -> np.ndarray:
    """Returns for each dimension how many threads work on a row: a power of two that covers its
    accesses, up to a warp.
    """
    accesses = -(-np.maximum(dims, 1) // _WIDTH)
    return np.clip(2 ** np.ceil(np.log2(accesses)).astype(np.int64), _FEWEST_LANES, 32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Describes rows in several runs, numbered across the runs. It holds addresses: the
    code that makes it keeps the arrays alive.

    Attributes:
        addresses: [P] int64, the address of each run's first row.
        counts: [P] int64, the number of its rows.
        dims: [P] int64, their dimension.
    """

    addresses: np.ndarray
    counts: np.ndarray
    dims: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[Any], device: Device) -> Rows:
        """Numbers the rows of contiguous float32 matrices [R, D] across the matrices.

        Raises:
            ValueError: one of them isn't contiguous, or has another type.
        """
        for number, array in enumerate(arrays):
            if (
                array.ndim != 2
                or array.dtype != np.float32
                or not array.flags.c_contiguous
                or array.shape[1] < 1
            ):
                raise ValueError(
                    f"array {number} must be a contiguous matrix of float32, but is {array.dtype} "
                    f"{array.shape}"
                )
        return cls(
            np.array([device.pointer(array) for array in arrays], np.int64),
            np.array([array.shape[0] for array in arrays], np.int64),
            np.array([array.shape[1] for array in arrays], np.int64),
        )

    @classmethod
    def flat(cls, buffer: Any, segments: Segments, dims: Sequence[int], device: Device) -> Rows:
        """Numbers the rows of a buffer that `gather` returned: the rows of sections with dimensions
        `dims`, one section after the other.
        """
        lengths, width = np.diff(segments.offsets), np.asarray(dims, np.int64)[segments.sections]
        sizes = lengths * width
        if buffer.size != sizes.sum():
            raise ValueError(
                f"the buffer has {counted(buffer.size, 'element')}, its rows {sizes.sum():,}"
            )
        return cls(
            device.pointer(buffer) + (np.cumsum(sizes) - sizes) * _FLOAT_BYTES,
            lengths,
            width,
        )

    def words(self) -> np.ndarray:
        """Returns [P', 3] int64 as sums.cuh reads them; adjacent rows are one run."""
        firsts, keep = np.cumsum(self.counts) - self.counts, self.counts > 0
        words = np.stack([firsts, self.counts, self.addresses], 1)[keep]
        if len(words) == 0:
            return np.zeros((1, 3), np.int64)
        dims = self.dims[keep]
        ends = words[:, 2] + words[:, 1] * dims * _FLOAT_BYTES
        new = np.concatenate([[True], (dims[1:] != dims[:-1]) | (ends[:-1] != words[1:, 2])])
        starts = np.flatnonzero(new)
        merged = words[starts]
        merged[:, 1] = np.add.reduceat(words[:, 1], starts)
        return merged


def target_words(
    segments: Segments,
    dims: np.ndarray,
    addresses: np.ndarray,
    counts: np.ndarray,
    each: int,
    touched: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Returns ([T, 13] int64 as targets.cuh reads them, how many tiles they have). What is summed
    for a target is in any run, of which `launch` gives the number.

    Args:
        segments: the rows, by section.
        dims, counts: [M], the dimension of each segment, and the most rows that it can have.
        addresses: [M, 1 + SLOTS], the addresses of values and slots.
        each: the rows per group of threads.
        touched: [M], addresses.
    """
    lengths, lanes = np.diff(segments.offsets), group_lanes(dims)
    tiles = -(-lengths // (THREADS // lanes * each))
    words = np.column_stack(
        [
            np.cumsum(tiles) - tiles,
            segments.offsets[:-1],
            segments.offsets[1:],
            dims,
            lanes,
            addresses[:, 0],
            counts,
            addresses[:, 1:],
            np.zeros_like(dims) if touched is None else touched,
            np.zeros_like(dims),
            np.zeros_like(dims),
        ]
    )
    return words[lengths > 0].astype(np.int64), int(tiles.sum())


def launch(
    kernel: Kernel,
    long_kernel: Kernel,
    targets: np.ndarray,
    tiles: int,
    rows: Any,
    gradients: Rows,
    occurrences: Occurrences,
    terms: Any,
    along: Any,
    extra: Sequence[Any],
    workspace: Workspace,
    name: str,
) -> None:
    """Launches `kernel` for all segments: once by tiles and, if some can be long, for their pieces
    and then for the long segments.

    Args:
        kernel, long_kernel: take targets.cuh's parameters, then `extra`; the second is for long
            segments.
        targets, tiles: the result of `target_words`.
        rows: for each target the address of its rows, int64; NULL if they are in order.
        terms, along: as for `sum_rows`, NULL for none.
    """
    device, most = workspace.device, len(occurrences.pieces)
    if occurrences.terms is not None:
        terms = occurrences.terms
    if len(targets) == 0:
        return
    width = int(-(-targets[:, 3].max() // _WIDTH) * _WIDTH)
    partials = workspace.take(f"{name}.partials", most * width, np.float32)
    partial_along = workspace.take(f"{name}.along", most, np.float32)
    runs = gradients.words()
    count = np.int32(len(runs))
    runs = workspace.upload(
        f"{name}.runs", np.concatenate([runs, [[0, most, device.pointer(partials)]]])
    )
    targets[:, -1] = count
    before = (
        workspace.upload(f"{name}.targets", targets),
        np.int32(len(targets)),
        occurrences.offsets,
        rows,
        occurrences.counters,
    )
    after = (
        along,
        partial_along,
        np.int64(width),
        occurrences.order,
        terms,
        runs,
        count,
    )
    kernel(tiles, THREADS, (*before, NULL, *after, *extra))
    if len(occurrences.longs):
        device.kernel(SOURCE, "sum_pieces")(
            _PIECE_BLOCKS * device.multiprocessors,
            THREADS,
            (*before, NULL, *after, occurrences.pieces, partials, partial_along),
        )
        long_kernel(
            _LONG_BLOCKS * device.multiprocessors,
            THREADS,
            (*before, occurrences.longs, *after, *extra),
        )


def sum_rows(
    gradients: Rows,
    occurrences: Occurrences,
    segments: Segments,
    dims: Sequence[int],
    workspace: Workspace,
    terms: Any = None,
    scale: float = 1.0,
    along: Any = None,
    own: Rows | None = None,
) -> Any:
    """Sums the occurrences of each of U rows, [E] float32, one row after the other.

    Sums are float32, rounded to nearest at the end. A row that doesn't occur is zeros. One kernel,
    or three if there are more than `LONG` occurrences; the host waits for nothing. Bytes moved: 4
    per row, 4 (with terms 12, or 8 where `occurrences` has them) and D elements per occurrence
    read; D elements per row written.

    Args:
        gradients: R rows.
        occurrences: the occurrences of U rows. Without terms, occurrence k is row k of `gradients`,
            times 1.
        segments: M of them with U rows, by section.
        dims: S of them, the dimension of each section's rows and of their occurrences.
        workspace: holds the result until the next call with it.
        terms: [K, 2] uint32, for each occurrence a row of `gradients` and, as the bits of a
            float32, its factor; not needed if `occurrences` has them.
        scale: the factor of each sum.
        along: [K] float32, for each occurrence the factor with which the row in `own` is added;
            only if `occurrences` has no terms.
        own: U rows in the order of the result.
    """
    device, lengths = workspace.device, np.diff(segments.offsets)
    width = np.asarray(dims, np.int64)[segments.sections]
    sizes = lengths * width
    out = workspace.take("sum_rows", int(sizes.sum()), np.float32)
    addresses = np.zeros((len(lengths), 1 + SLOTS), np.int64)
    addresses[:, 0] = device.pointer(out) + (np.cumsum(sizes) - sizes) * _FLOAT_BYTES
    if along is not None and own is not None:
        addresses[:, 1] = own.addresses
    targets, tiles = target_words(segments, width, addresses, lengths, _IN_FLIGHT)
    launch(
        device.kernel(SOURCE, "sum_rows"),
        device.kernel(SOURCE, "sum_rows_long"),
        targets,
        tiles,
        NULL,
        gradients,
        occurrences,
        NULL if terms is None else terms,
        NULL if along is None else along,
        (np.float32(scale),),
        workspace,
        "sum_rows",
    )
    return out
