"""Orders keys by owner without de-duplication; finds the owner's rows of received keys.

`reference/partition.py` has the same functions in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.ops.gpu.segments import THREADS, TILE, Plan, Segments, check_ranks, plan
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

SOURCE = Source(
    "partition.cu",
    (
        "partition_count",
        "partition_scan",
        "partition_scatter",
        "local_rows",
    ),
)
_SCAN_THREADS = 1024
_WARPS = THREADS // 32


class Partition(NamedTuple):
    """Holds keys ordered by owner.

    Attributes:
        keys: [K] int64: rank 0's keys first, then rank 1's, …; each owner's keys by section, then
            in their original order.
        counts: [N, S] int32, how many keys of each section each rank owns.
        positions: [K] int32, the new position of each key.
    """

    keys: Any
    counts: Any
    positions: Any


class Tiled(NamedTuple):
    """Holds the arguments of all kernels that work by tiles: `plan` on the device, and room for
    counts by owner and tile.
    """

    plan: Plan
    segments: Any  # [M', 7] int64
    counts: Any  # [N * (tiles + 1)] uint32
    starts: Any  # [N + 1] uint32
    section_counts: Any  # [N, S] int32


def tiled(
    segments: Segments, kinds: Sequence[int], ranks: int, workspace: Workspace, name: str
) -> Tiled:
    """Puts the plan of `segments` on the device; arrays are named by `name`."""
    check_ranks(ranks)
    made = plan(segments, kinds)
    return Tiled(
        made,
        workspace.upload(f"{name}.segments", made.segments),
        workspace.take(f"{name}.tile_counts", ranks * (made.tiles + 1), np.uint32),
        workspace.take(f"{name}.starts", ranks + 1, np.uint32),
        workspace.take(f"{name}.counts", ranks * len(kinds), np.int32).reshape(ranks, len(kinds)),
    )


def scan(tiles: Tiled, ranks: int, workspace: Workspace, name: str) -> None:
    """Turns counts by tile into sums of the counts before, and fills `starts`, `section_counts`."""
    scan_counts(
        tiles.counts, tiles.plan.section_tiles, tiles.section_counts, tiles.starts, workspace, name
    )


def scan_counts(
    counts: Any,
    section_tiles: np.ndarray,
    section_counts: Any,
    starts: Any,
    workspace: Workspace,
    name: str,
) -> None:
    """Turns counts [N, tiles + 1] into sums of the counts before, and fills `starts` [N + 1] and
    `section_counts` [N, S]; `section_tiles`, [S + 1] uint32, says where each section's tiles begin.
    """
    count = int(section_tiles[-1])
    ended = workspace.keep(f"{name}.ended", lambda: workspace.device.zeros(1, np.uint32))
    workspace.device.kernel(SOURCE, "partition_scan")(
        int(starts.size) - 1,
        min(_SCAN_THREADS, 32 * -(-max(count, 1) // 32)),
        (
            counts,
            np.uint32(count),
            workspace.upload(f"{name}.section_tiles", section_tiles),
            np.uint32(len(section_tiles) - 1),
            section_counts,
            starts,
            ended,
        ),
    )


def partition(
    keys: Any, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Workspace
) -> Partition:
    """Orders keys by owner, stably. Launches 3 kernels; the host waits for nothing.

    Bytes moved: 8 K for the counts; 8 K read, 8 K + 4 K written for the order; 4 N per 2,048
        keys, four times.

    Args:
        keys: [K] int64, any values. `placement.cuh` has their owners.
        segments: M of them with K keys.
        kinds: S of them, of the sections' tables.
        ranks: N, up to `MOST_RANKS`.
        workspace: holds the results until the next call with it.

    Raises:
        ValueError: too many ranks or keys, or a segment without a section.
    """
    tiles = tiled(segments, kinds, ranks, workspace, "partition")
    ordered = workspace.take("partition.keys", segments.keys, np.int64)
    positions = workspace.take("partition.positions", segments.keys, np.int32)
    device, count = workspace.device, tiles.plan.tiles
    by_tile = (
        keys,
        tiles.segments,
        np.int32(len(tiles.plan.segments)),
        np.uint32(ranks),
        tiles.counts,
        np.uint32(count),
    )
    device.kernel(SOURCE, "partition_count")(count, THREADS, by_tile, shared=4 * ranks)
    scan(tiles, ranks, workspace, "partition")
    device.kernel(SOURCE, "partition_scatter")(
        count, THREADS, (*by_tile, tiles.starts, ordered, positions), shared=4 * _WARPS * ranks
    )
    return Partition(ordered, tiles.section_counts, positions)


def local_rows(
    keys: Any, segments: Segments, kinds: Sequence[int], ranks: int, workspace: Workspace
) -> Any:
    """Finds the owner's row of each key that it received, [K] int64. One kernel.

    For a static table that is dealt to all ranks it is key div N, rounded down, else the key.
    Bytes moved: 8 K read, 8 K written.

    Args:
        keys, segments, kinds, ranks, workspace: as for `partition`. All keys belong to this rank;
            that isn't checked.
    """
    check_ranks(ranks)
    rows = workspace.take("local_rows.rows", segments.keys, np.int64)
    words, tiles = keys_words(segments, kinds, *map(workspace.device.pointer, (keys, rows)))
    on_device = workspace.upload("local_rows.pieces", words)
    workspace.device.kernel(SOURCE, "local_rows")(
        tiles, THREADS, (on_device, np.int32(len(words)), np.uint32(ranks))
    )
    return rows


def keys_words(
    segments: Segments, kinds: Sequence[int], keys: int, rows: int
) -> tuple[np.ndarray, int]:
    """Returns [P, 5] int64, the segments that have keys, as `local_rows` of partition.cu reads
    them, for keys and rows at these addresses; and how many tiles there are.
    """
    lengths, offsets = np.diff(segments.offsets), 8 * segments.offsets[:-1]
    tiles = -(-lengths // TILE)
    kind = np.asarray(kinds, np.int64)[segments.sections]
    first = np.cumsum(tiles) - tiles
    words = np.stack([first, keys + offsets, rows + offsets, lengths, kind], 1)
    return words[lengths > 0], int(tiles.sum())
