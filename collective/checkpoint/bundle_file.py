"""Writes one bundle of numbers, which is a data file and an index, in TensorFlow's format.

TensorFlow's own writer goes through the page cache, which costs more of the processor than all else
together (see `ops/native/data_file.h`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import tensor_shape_pb2, tensor_slice_pb2
from tensorflow.core.protobuf import tensor_bundle_pb2

from collective.checkpoint.bundle_index import data_path, index_path
from collective.checkpoint.index_keys import WHOLE, slice_key
from collective.ops import data_files

_VERSION = 1  # of the format


class BundleFile:
    """Writes a bundle, and another one afterwards.

    Its functions raise OSError where the storage fails, or an error of what gives the values.
    """

    def __init__(self) -> None:
        self._data = data_files.DataFile()
        self._prefix = ""
        self._entries: dict[bytes, tensor_bundle_pb2.BundleEntryProto] = {}

    @property
    def is_open(self) -> bool:
        """Tells whether a bundle has been begun."""
        return bool(self._prefix)

    def open(self, prefix: str) -> None:
        """Begins a bundle."""
        self._prefix, self._entries = prefix, {}
        self._data.open(data_path(prefix, 0, 1))

    def add(self, name: str, spec: str, values: Any) -> None:
        """Writes an entry, or a slice of one.

        Args:
            name: the entry's.
            spec: names the slice as `SaveV2` does; '' for all of it.
            values: an array, or a `row_snapshots.SnapshotSlice`.
        """
        entry = tensor_bundle_pb2.BundleEntryProto(
            dtype=tf.as_dtype(values.dtype).as_datatype_enum, offset=self._data.size
        )
        entry.shape.CopyFrom(_shape(values.shape))
        if isinstance(values, np.ndarray):
            entry.crc32c = self._data.append(values)
        else:
            entry.crc32c = values.append_to(self._data)
        entry.size = values.nbytes
        key = name.encode()
        if spec:
            full_shape, extents = parse_slice(spec)
            whole = tensor_bundle_pb2.BundleEntryProto(dtype=entry.dtype)
            whole.shape.CopyFrom(_shape(full_shape))
            whole = self._entries.setdefault(key, whole)
            whole.slices.append(_slice(extents))
            key = slice_key(name, extents)
        self._entries[key] = entry

    def finish(self) -> None:
        """Ends the bundle."""
        self._data.finish()
        header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1)
        if sys.byteorder == "big":
            header.endianness = tensor_bundle_pb2.BundleHeaderProto.BIG
        header.version.producer = _VERSION
        pairs = [(key, entry.SerializeToString()) for key, entry in sorted(self._entries.items())]
        index = index_path(self._prefix)
        self._prefix, self._entries = "", {}
        data_files.write_index(index, [(b"", header.SerializeToString()), *pairs])


def parse_slice(spec: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the full shape, and the first index and length of each dimension: '50 2 10,5:-'."""
    *shape, cuts = spec.split(" ")
    extents = [
        (0, WHOLE) if cut == "-" else (int(cut.split(",")[0]), int(cut.split(",")[1]))
        for cut in cuts.split(":")
    ]
    return [int(size) for size in shape], extents


def _shape(sizes: Sequence[int]) -> tensor_shape_pb2.TensorShapeProto:
    shape = tensor_shape_pb2.TensorShapeProto()
    for size in sizes:
        shape.dim.add(size=size)
    return shape


def _slice(extents: Sequence[tuple[int, int]]) -> tensor_slice_pb2.TensorSliceProto:
    proto = tensor_slice_pb2.TensorSliceProto()
    for first, length in extents:
        extent = proto.extent.add()
        if length != WHOLE:
            extent.start, extent.length = first, length
    return proto
