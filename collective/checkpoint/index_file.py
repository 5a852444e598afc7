"""Writes the index of a bundle whose data file is there already, as one that was linked.

The index is a sorted table of LevelDB's format (see `collective.checkpoint.tensor_bundle`); here
one block has all entries, and no key leaves out what it shares with the last one.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from collective.checkpoint import tensor_bundle
from collective.checkpoint.index_keys import WHOLE, slice_key

_TRAILER_BYTES = 5  # behind each block
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed


@dataclasses.dataclass(frozen=True)
class IndexedRows:
    """Describes rows of an entry that lie in a data file, one behind the other.

    Attributes:
        name: the entry's.
        dtype: a value's.
        shape: the whole entry's.
        first: the number of the first row.
        count: rows; None: the entry isn't cut.
        size: their bytes.
        checksum: of their bytes, as an index has it.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    first: int
    count: int | None
    size: int
    checksum: int


def write_index(prefix: str, contents: Sequence[IndexedRows]) -> None:
    """Writes `prefix`.index of the one data file that has `contents`, in this order."""
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1)
    header.version.producer = 1
    entries = {b"": header}
    offset = 0
    for rows in contents:
        of_all = entries.setdefault(rows.name.encode(), _entry(rows, rows.shape))
        of_rows = of_all
        if rows.count is not None:
            extents = [(rows.first, rows.count)] + [(0, WHOLE)] * (len(rows.shape) - 1)
            stored = of_all.slices.add()
            for start, length in extents:
                extent = stored.extent.add()
                if length != WHOLE:
                    extent.start, extent.length = start, length
            of_rows = _entry(rows, (rows.count, *rows.shape[1:]))
            entries[slice_key(rows.name, extents)] = of_rows
        of_rows.offset, of_rows.size, of_rows.crc32c = offset, rows.size, rows.checksum
        offset += rows.size
    pairs = {key: entry.SerializeToString() for key, entry in entries.items()}
    with tf.io.gfile.GFile(tensor_bundle.index_path(prefix), "wb") as file:
        file.write(_table(pairs))


def _entry(rows: IndexedRows, shape: Sequence[int]) -> tensor_bundle_pb2.BundleEntryProto:
    entry = tensor_bundle_pb2.BundleEntryProto(dtype=tf.as_dtype(rows.dtype).as_datatype_enum)
    entry.shape.CopyFrom(tf.TensorShape(shape).as_proto())
    return entry


def _table(pairs: dict[bytes, bytes]) -> bytes:
    """Returns a file of pairs: a block of them, one that isn't used, one that lists the first."""
    entries, unused = _stored(sorted(pairs.items())), _stored([])
    listing = _stored([(max(pairs), _handle(0, entries))])
    footer = _handle(len(entries), unused) + _handle(len(entries) + len(unused), listing)
    footer = footer.ljust(tensor_bundle.BundleIndex.FOOTER_BYTES - 8, b"\x00")
    magic = struct.pack("<Q", tensor_bundle.BundleIndex.MAGIC)
    return entries + unused + listing + footer + magic


def _handle(start: int, stored: bytes) -> bytes:
    """Tells where a block lies, and its size without what `_stored` adds behind it."""
    return _varint(start) + _varint(len(stored) - _TRAILER_BYTES)


def _stored(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns a block of pairs, and behind it that it isn't compressed, and its checksum."""
    block = _block(pairs) + b"\x00"
    return block + struct.pack("<I", masked_crc32c(block))


def _block(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    data = b"".join(
        _varint(0) + _varint(len(key)) + _varint(len(value)) + key + value for key, value in pairs
    )
    return data + struct.pack("<II", 0, 1)  # one place to start reading from: its beginning


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of some bytes, changed as TensorFlow's files have it."""
    remainder, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        remainder = table[(remainder ^ byte) & 0xFF] ^ (remainder >> 8)
    remainder ^= 0xFFFFFFFF
    return (((remainder >> 15) | (remainder << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return table
