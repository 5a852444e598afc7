"""Parses the index of a checkpoint: names, types, shapes and places of its entries."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence

import tensorflow.compat.v1 as tf

from collective.checkpoint.files.index_keys import WHOLE, slice_key
from collective.ops.rows import data_files
from collective.tensorflow_internals.checkpoints import tensor_bundle_pb2


def index_path(prefix: str) -> str:
    return f"{prefix}.index"


def data_path(prefix: str, shard: int, shards: int) -> str:
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


@dataclasses.dataclass(frozen=True, order=True)
class RowSlice:
    """Tells where some rows of an entry are stored.

    Attributes:
        first: the number of the first row.
        count: how many rows there are.
        shard: the number of the data file.
        offset: their place in it.
        size: the number of their bytes.
        checksum: the checksum of their bytes.
    """

    first: int
    count: int
    shard: int
    offset: int
    size: int
    checksum: int = 0


class BundleIndex:
    """Parses `prefix`.index.

    `tf.train.load_checkpoint` gives only names, types and shapes. This class adds the number of
    data files, the bytes that each must have, and the place in its file of an entry without slices.

    The file is a sorted table in LevelDB's format without compression: blocks of (key, value)
    pairs, one of which lists the others, and a footer with the place of this list.

    Attributes:
        shards: how many data files there are.
        entries: the index's record of each entry, by name.
        least_sizes: the least number of bytes of each data file, by its number.

    Raises:
        tf.errors.DataLossError: the file isn't an index, or is damaged.
    """

    MAGIC = 0xDB4775248B80FB57
    FOOTER_BYTES = 48

    def __init__(self, prefix: str):
        self.entries: dict[str, tensor_bundle_pb2.BundleEntryProto] = {}
        self.least_sizes: dict[int, int] = {}
        self._slices: dict[bytes, tensor_bundle_pb2.BundleEntryProto] = {}  # by `slice_key`
        path = index_path(prefix)
        with tf.io.gfile.GFile(path, "rb") as file:
            data = file.read()
        try:
            self.shards = self._parse(data)
        except Exception as error:
            raise tf.errors.DataLossError(
                None, None, f"{path} isn't the index of a checkpoint, or is damaged: {error}"
            ) from None

    def _parse(self, data: bytes) -> int:
        """Fills the attributes; returns the number of data files."""
        if len(data) < self.FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != self.MAGIC:
            raise ValueError(f"its {len(data)} bytes do not end as an index does")
        # The footer begins with the start and size of an unused block, then those of the list.
        place, footer = len(data) - self.FOOTER_BYTES, []
        for _ in range(4):
            number, place = _varint(data, place)
            footer.append(number)
        header = None
        for _, handle in _pairs(_block(data, *footer[2:])):
            start, place = _varint(handle, 0)
            size, _ = _varint(handle, place)
            for key, value in _pairs(_block(data, start, size)):
                if key == b"":
                    header = tensor_bundle_pb2.BundleHeaderProto.FromString(value)
                else:
                    self._add(key, tensor_bundle_pb2.BundleEntryProto.FromString(value))
        if header is None:
            raise ValueError("it has no header")
        return int(header.num_shards)

    def stored_values(self) -> list[tuple[int, int]]:
        """Returns size and checksum of each entry or slice of a bundle with one data file, in the
        order in which they are stored.
        """
        entries = [*self.entries.values(), *self._slices.values()]
        stored = [entry for entry in entries if not entry.slices]
        # An entry without values has the place where the next one begins.
        stored.sort(key=lambda entry: (entry.offset, entry.size))
        return [(int(entry.size), int(entry.crc32c)) for entry in stored]

    def _add(self, key: bytes, entry: tensor_bundle_pb2.BundleEntryProto) -> None:
        if not entry.slices:
            end = entry.offset + entry.size
            self.least_sizes[entry.shard_id] = max(self.least_sizes.get(entry.shard_id, 0), end)
        # A slice of an entry has its own key, which begins with a zero.
        if key[0] == 0:
            self._slices[key] = entry
        else:
            self.entries[key.decode()] = entry

    def row_slices(self, name: str, shape: Sequence[int]) -> list[RowSlice]:
        """Returns where the rows of an entry are stored (see `Bundle.row_slices`)."""
        entry = self.entries[name]
        if not entry.slices:
            return [RowSlice(0, shape[0], entry.shard_id, entry.offset, entry.size, entry.crc32c)]
        parts = []
        for stored in entry.slices:
            extents = [
                (extent.start, extent.length if extent.HasField("length") else WHOLE)
                for extent in stored.extent
            ]
            place = self._slices.get(slice_key(name, extents))
            cut = [n for n, (_, length) in zip(shape[1:], extents[1:]) if length not in (WHOLE, n)]
            if place is None or cut:
                return []
            first, count = extents[0]
            count = shape[0] if count == WHOLE else count
            parts.append(
                RowSlice(first, count, place.shard_id, place.offset, place.size, place.crc32c)
            )
        return sorted(parts)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at `place`, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _block(data: bytes, start: int, size: int) -> bytes:
    """Returns a block. One byte after it tells its compression, which must be none, and
    four bytes its checksum.
    """
    end = start + size + 1
    if end + 4 > len(data) or data[end - 1] != 0:
        raise ValueError(f"the block at {start} is compressed, or cut off")
    checksum = data_files.checksum(data[start:end])
    if checksum not in (None, *struct.unpack("<I", data[end : end + 4])):
        raise ValueError(f"the checksum of the block at {start} differs")
    return data[start : end - 1]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block; a key omits what it shares with the previous one."""
    restarts = struct.unpack("<I", block[-4:])[0]
    end, place, key = len(block) - 4 * (restarts + 1), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        unshared, place = _varint(block, place)
        size, place = _varint(block, place)
        key = key[:shared] + block[place : place + unshared]
        place += unshared
        yield key, block[place : place + size]
        place += size
