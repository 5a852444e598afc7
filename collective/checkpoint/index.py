"""Reads the index file of a tensor bundle: what a checkpoint holds, and where in its data files.

The file is a sorted string table as LevelDB's, uncompressed (LevelDB's "table_format.md"): blocks
of key and value pairs whose keys share prefixes with their predecessors, then a block that lists
the blocks, then a footer of 48 bytes. The empty key has a BundleHeaderProto, every other a
BundleEntryProto; one slice of an entry has a key of its own, which begins with a zero byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

MAGIC = 0xDB4775248B80FB57
# bytes; a trailer follows each block: its compression and its checksum
FOOTER, TRAILER = 48, 5

Entries = dict[str, tensor_bundle_pb2.BundleEntryProto]


def path(prefix: str) -> str:
    return f"{prefix}.index"


def data_path(prefix: str, shard: int, shards: int) -> str:
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


class Index:
    """What `prefix`.index says.

    Attributes:
        shards: how many data files there are.
        entries: by name.
        ends: of each data file that is used, the bytes that it must have at least.

    Raises:
        tf.errors.DataLossError: it isn't an index, or is damaged.
    """

    def __init__(self, prefix: str):
        self.entries: Entries = {}
        self.ends: dict[int, int] = {}
        name = path(prefix)
        with tf.io.gfile.GFile(name, "rb") as file:
            data = file.read()
        try:
            self.shards = self._read(data)
        except Exception as error:
            raise tf.errors.DataLossError(
                None, None, f"{name} is no index of a checkpoint, or is damaged: {error}"
            ) from None

    def _read(self, data: bytes) -> int:
        if len(data) < FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
            raise ValueError(f"its {len(data)} bytes do not end as an index does")
        # (start, size) of a block of no interest, and of the list
        footer = len(data) - FOOTER
        (_, after), numbers = _varint(data, footer), []
        for _ in range(3):
            number, after = _varint(data, after)
            numbers.append(number)
        header = None
        for _, handle in _pairs(_block(data, *numbers[1:])):
            first, after = _varint(handle, 0)
            for key, value in _pairs(_block(data, first, _varint(handle, after)[0])):
                if key == b"":
                    header = tensor_bundle_pb2.BundleHeaderProto.FromString(value)
                    continue
                entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
                if not entry.slices:
                    self.ends[entry.shard_id] = max(
                        self.ends.get(entry.shard_id, 0), entry.offset + entry.size
                    )
                if key[0] != 0:
                    self.entries[key.decode()] = entry
        if header is None:
            raise ValueError("it has no header")
        return int(header.num_shards)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number that begins at `place`, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _block(data: bytes, start: int, size: int) -> bytes:
    block = data[start : start + size]
    if len(block) < size or data[start + size] != 0:
        raise ValueError(f"the block at {start} is compressed, or cut off")
    return block


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = struct.unpack("<I", block[-4:])[0]
    end, place, key = len(block) - 4 * (restarts + 1), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        size, place = _varint(block, place)
        key = key[:shared] + block[place : place + own]
        yield key, block[place + own : place + own + size]
        place += own + size
