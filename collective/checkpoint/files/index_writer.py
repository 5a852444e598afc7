"""Writes the index of a bundle with one data file: what is stored where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage
from collective.checkpoint.files.index_keys import WHOLE, slice_key
from collective.checkpoint.files.index_reader import index_path
from collective.ops.rows import data_files
from collective.tensorflow_internals.checkpoints import tensor_bundle_pb2
from collective.tensorflow_internals.graphs import tensor_shape_pb2, tensor_slice_pb2

_VERSION = 1  # of the format

# The first index and the length of each dimension; `WHOLE` for all of it.
Extents = Sequence[tuple[int, int]]


class IndexFile:
    """Collects the contents of a data file, in the order in which they are stored.

    Attributes:
        size: the number of bytes added so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._entries: dict[bytes, tensor_bundle_pb2.BundleEntryProto] = {}

    def add(
        self,
        name: str,
        dtype: Any,
        shape: Sequence[int],
        extents: Extents | None,
        size: int,
        checksum: int,
    ) -> None:
        """Adds an entry, or a slice of one.

        Args:
            name: the entry's name.
            dtype: the type of its values.
            shape: the shape of the whole entry.
            extents: the slice; None for the whole entry.
            size: the number of bytes of the entry or slice.
            checksum: the checksum of these bytes, in the form of an index.
        """
        key, stored = name.encode(), _entry(dtype, shape)
        if extents is not None:
            whole = self._entries.setdefault(key, stored)
            whole.slices.append(_slice(extents))
            key = slice_key(name, extents)
            stored = _entry(
                dtype, [n if length == WHOLE else length for n, (_, length) in zip(shape, extents)]
            )
        stored.offset, stored.size, stored.crc32c = self.size, size, checksum
        self._entries[key] = stored
        self.size += size

    def write(self, prefix: str) -> None:
        """Writes `prefix`.index.

        Raises:
            StorageFailure: the storage failed.
        """
        header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1)
        if sys.byteorder == "big":
            header.endianness = tensor_bundle_pb2.BundleHeaderProto.BIG
        header.version.producer = _VERSION
        pairs = [(key, entry.SerializeToString()) for key, entry in sorted(self._entries.items())]
        with storage.failures():
            data_files.write_index(index_path(prefix), [(b"", header.SerializeToString()), *pairs])


def _entry(dtype: Any, shape: Sequence[int]) -> tensor_bundle_pb2.BundleEntryProto:
    entry = tensor_bundle_pb2.BundleEntryProto(dtype=tf.as_dtype(dtype).as_datatype_enum)
    entry.shape.CopyFrom(tensor_shape_pb2.TensorShapeProto())
    for size in shape:
        entry.shape.dim.add(size=size)
    return entry


def _slice(extents: Extents) -> tensor_slice_pb2.TensorSliceProto:
    proto = tensor_slice_pb2.TensorSliceProto()
    for first, length in extents:
        extent = proto.extent.add()
        if length != WHOLE:
            extent.start, extent.length = first, length
    return proto
