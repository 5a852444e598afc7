"""Says which keys belong to which section, and how blocks of threads share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STATIC, DYNAMIC, ON_ONE_RANK = range(3)  # kinds of tables, as in ops/placement.py
THREADS = 256  # threads of a block
TILE = 2048  # keys per block; both as in segments.cuh
MOST = 2**31 - 1  # keys in one call
_WARPS = THREADS // 32
MOST_RANKS = 48 * 1024 // (4 * _WARPS)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Describes M adjacent runs of keys, in the order of a look-up's inputs or of a received
    message. The host knows their sizes.

    Attributes:
        offsets: [M + 1] int64, ascending from 0: segment m has the keys from offsets[m] to before
            offsets[m + 1].
        sections: [M] int64, the section, or table, of each segment. Several may belong to the same
            one.
    """

    offsets: np.ndarray
    sections: np.ndarray

    @classmethod
    def of(
        cls, lengths: Sequence[int] | np.ndarray, sections: Sequence[int] | np.ndarray
    ) -> Segments:
        """Makes segments of [M] numbers of keys and [M] sections."""
        return cls(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))]),
            np.asarray(sections, np.int64),
        )

    def __post_init__(self) -> None:
        lengths = np.diff(self.offsets)
        if (
            len(self.offsets) != len(self.sections) + 1
            or self.offsets[0] != 0
            or np.any(lengths < 0)
        ):
            raise ValueError(
                f"offsets must ascend from 0, one more than there are sections, "
                f"{len(self.sections)}: {self.offsets}"
            )
        if len(self.sections) and self.sections.min() < 0:
            raise ValueError(f"sections must not be negative: {self.sections}")

    @property
    def keys(self) -> int:
        """Returns K."""
        return int(self.offsets[-1])


class Plan(NamedTuple):
    """Says how blocks share the keys: each block takes a tile of one segment; tiles are numbered by
    section, then position.

    Attributes:
        segments: [M', 7] int64, the segments that have keys, as segments.cuh reads them.
        section_tiles: [S + 1] uint32, the first tile of each section, and the number of tiles.
        tiles: the number of tiles.
    """

    segments: np.ndarray
    section_tiles: np.ndarray
    tiles: int


def plan(segments: Segments, kinds: Sequence[int]) -> Plan:
    """Plans the tiles of segments, for the `kinds` of S sections' tables.

    Raises:
        ValueError: a segment has no section, or there are too many keys.
    """
    sections = len(kinds)
    if segments.keys > MOST:
        raise ValueError(
            f"{segments.keys:,} keys at once, but no more than {MOST:,} can be: use smaller batches"
        )
    if len(segments.sections) and segments.sections.max() >= sections:
        raise ValueError(
            f"a segment is of section {segments.sections.max()}, but there are {sections}"
        )
    order = np.argsort(segments.sections, kind="stable")
    lengths = np.diff(segments.offsets)[order]
    order, lengths = order[lengths > 0], lengths[lengths > 0]
    section = segments.sections[order]
    tiles = -(-lengths // TILE)
    first_tile = np.cumsum(tiles) - tiles
    keys = np.bincount(section, lengths, sections).astype(np.int64)
    slots = 2 * (np.cumsum(keys) - keys)
    first = segments.offsets[order]
    words = (
        np.stack(
            [
                first_tile,
                first,
                first + lengths,
                section,
                np.asarray(kinds, np.int64)[section],
                slots[section],
                2 * keys[section],
            ],
            1,
        )
        if len(order)
        else np.zeros((0, 7), np.int64)
    )
    section_tiles = np.concatenate([[0], np.cumsum(np.bincount(section, tiles, sections))]).astype(
        np.uint32
    )
    return Plan(words.astype(np.int64), section_tiles, int(tiles.sum()))


def check_ranks(ranks: int) -> None:
    """Raises ValueError for more ranks than the kernels' shared memory has room for."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{ranks} ranks: there can be 1 to {MOST_RANKS}")
