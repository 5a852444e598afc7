"""Reads and writes TensorFlow's checkpoint files, a block of rows at a time.

TensorFlow's own operations do it, in a session of this module's own on the CPU: no user's graph and
no ranks are involved.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from collective.checkpoint.layout import ENTRY, CheckpointLayout
from collective.ops.sessions import run_unpatched

# bytes of the largest slice that is written: a read of some rows holds one of them
SLICE = 16 << 20
FILE = 96 << 20  # bytes after which a file is written out: what a writer holds
# bytes beyond which an entry without slices is not read whole for some of its rows
WHOLE = 64 << 20

Entries = dict[str, tuple[np.dtype, tuple[int, ...]]]


def slice_rows(dim: int, dtype: Any) -> int:
    """How many rows of `dim` values of `dtype` make a slice."""
    return max(1, SLICE // max(1, dim * np.dtype(dtype).itemsize))


class Bundle:
    """A checkpoint, for reading.

    Attributes:
        prefix: its path without `.index`.
        entries: {name: (dtype, shape)}.
        layout: its tables; `Layout()` if plain TensorFlow wrote it.

    Raises:
        ValueError: there is no checkpoint at `prefix`.
        tf.errors.DataLossError: its index is damaged.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        if not tf.io.gfile.exists(index_path(prefix)):
            raise ValueError(f"There is no checkpoint '{prefix}': no file {index_path(prefix)}.")
        self._index = Index(prefix)
        try:
            self.entries: Entries = {
                name: (
                    tf.as_dtype(entry.dtype).as_numpy_dtype,
                    tuple(d.size for d in entry.shape.dim),
                )
                for name, entry in self._index.entries.items()
            }
        except TypeError as error:
            raise tf.errors.DataLossError(
                None, None, f"the index of checkpoint '{prefix}' is damaged: {error}"
            ) from None
        told = self.read_whole(ENTRY) if ENTRY in self.entries else None
        self.layout = (
            CheckpointLayout() if told is None else CheckpointLayout.from_json(told.item().decode())
        )

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) of an entry.

        Memory beyond the result is at most 64 MB. Checksums are verified, but for those of entries
        of more than 64 MB that were saved without slices (plain TensorFlow's): the rows are then
        read from their place in the file.
        """
        dtype, shape = self.entries[name]
        entry = self._index.entries[name]
        if count == 0:
            return np.zeros((0, *shape[1:]), dtype)
        if not entry.slices and entry.size > WHOLE and (first, count) != (0, shape[0]):
            return self._read_in_place(name, first, count)
        if (first, count) == (0, shape[0]):
            return self.read_whole(name)
        spec = (
            " ".join(map(str, shape))
            + " "
            + ":".join([f"{first},{count}"] + ["-"] * (len(shape) - 1))
        )
        return self._restore(name, spec)

    def read_whole(self, name: str) -> np.ndarray:
        """An entry as one array (an array of objects for strings)."""
        return self._restore(name, "")

    def check_files(self) -> None:
        """Whether every data file is there, in its whole length; reads none of them.

        Raises:
            tf.errors.DataLossError: a file is missing or cut off.
        """
        for shard, end in sorted(self._index.ends.items()):
            path = self.data_path(shard)
            try:
                size = tf.io.gfile.stat(path).length
            except tf.errors.NotFoundError:
                raise tf.errors.DataLossError(
                    None,
                    None,
                    f"checkpoint '{self.prefix}': its data file {path} is missing. {_OTHER}",
                ) from None
            if size < end:
                raise tf.errors.DataLossError(
                    None,
                    None,
                    f"checkpoint '{self.prefix}': its data file {path} has {size} "
                    f"bytes, not {end}. {_OTHER}",
                )

    def data_path(self, shard: int) -> str:
        return data_path(self.prefix, shard, self._index.shards)

    def data_paths(self) -> list[str]:
        """The paths of all data files."""
        return [self.data_path(shard) for shard in range(self._index.shards)]

    def stored_bytes(self, name: str) -> int:
        """The size of an entry."""
        dtype, shape = self.entries[name]
        entry = self._index.entries[name]
        return int(np.prod(shape)) * np.dtype(dtype).itemsize if entry.slices else int(entry.size)

    def _restore(self, name: str, spec: str) -> np.ndarray:
        try:
            return _ops().restore(self.prefix, name, spec, tf.as_dtype(self.entries[name][0]))
        except tf.errors.OpError as error:
            message = f"checkpoint '{self.prefix}': its entry '{name}' can't be read, {error.message}. {_OTHER}"
            # A file that is too short is "out of range", which a session would take for the end of
            # its data.
            kind = (
                tf.errors.DataLossError
                if isinstance(error, tf.errors.OutOfRangeError)
                else type(error)
            )
            raise kind(None, None, message) from None

    def _read_in_place(self, name: str, first: int, count: int) -> np.ndarray:
        dtype, shape = self.entries[name]
        entry = self._index.entries[name]
        row = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
        with tf.io.gfile.GFile(self.data_path(entry.shard_id), "rb") as file:
            file.seek(entry.offset + first * row)
            data = file.read(count * row)
        if len(data) < count * row:
            raise tf.errors.DataLossError(
                None,
                None,
                f"checkpoint '{self.prefix}': its entry '{name}' is cut off in "
                f"{self.data_path(entry.shard_id)}. {_OTHER}",
            )
        return np.frombuffer(data, dtype).reshape((count, *shape[1:]))


_OTHER = "Restore another checkpoint, or copy this one again."


class Writer:
    """Writes entries into files of about 96 MB, each a bundle of its own; `merge` makes one of
    them.

    Args:
        stem: the bundles' prefixes are `<stem>-00000`, `<stem>-00001`, …
    """

    def __init__(self, stem: str):
        self._stem = stem
        self._names: list[str] = []
        self._specs: list[str] = []
        self._arrays: list[Any] = []
        self._bytes = 0
        self._written: list[str] = []

    def add(self, name: str, full_shape: Sequence[int], first_row: int, array: np.ndarray) -> None:
        """Rows [first_row, first_row + len(array)) of the entry `name`, of `full_shape` in all.

        `array` must not be changed before `close`. The same rows must not be added twice, and none
        be left out.
        """
        spec = ""
        if (first_row, len(array)) != (0, full_shape[0]):
            spec = (
                " ".join(map(str, full_shape))
                + " "
                + ":".join([f"{first_row},{len(array)}"] + ["-"] * (len(full_shape) - 1))
            )
        self._add(name, spec, array)

    def add_whole(self, name: str, array: Any) -> None:
        """A whole entry; `array` may also be a string or a number."""
        self._add(name, "", np.asarray(array))

    def _add(self, name: str, spec: str, array: np.ndarray) -> None:
        if self._bytes and self._bytes + array.nbytes > FILE:
            self._flush()
        self._names.append(name)
        self._specs.append(spec)
        self._arrays.append(array)
        self._bytes += array.nbytes

    def _flush(self) -> None:
        prefix = f"{self._stem}-{len(self._written):05d}"
        names, specs, arrays = self._names, self._specs, self._arrays
        self._names, self._specs, self._arrays, self._bytes = [], [], [], 0
        _ops().save(prefix, names, specs, arrays)
        self._written.append(prefix)

    def close(self) -> list[str]:
        """Writes what is left; the prefixes of all that was written."""
        if self._names:
            self._flush()
        return self._written


def merge(prefixes: Sequence[str], target: str) -> None:
    """Makes one bundle `target` of those of `prefixes`, whose files it takes away. Of the data only
    names change.
    """
    _ops().merge(list(prefixes), target)


class _Operations:
    """TensorFlow's operations on bundles, each made once, and a session for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device("/cpu:0"):
            self._prefix = tf.placeholder(tf.string, [])
            self._names = tf.placeholder(tf.string, [None])
            self._specs = tf.placeholder(tf.string, [None])
            self._merge = tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=self._names,
                destination_prefix=self._prefix,
                delete_old_dirs=False,
            )
        self._saves: dict[tuple[tf.DType, ...], tuple[Any, list[tf.Tensor]]] = {}
        self._restores: dict[tf.DType, tf.Tensor] = {}
        # Threads of its own: an initializer that reads from a checkpoint holds one of the shared
        # ones, maybe the last.
        self._session = tf.Session(
            graph=self._graph,
            config=tf.ConfigProto(
                device_count={"GPU": 0},
                use_per_session_threads=True,
                inter_op_parallelism_threads=2,
            ),
        )

    def _run(self, fetches: Any, feeds: dict[Any, Any]) -> Any:
        return run_unpatched(self._session, fetches, feeds)

    def restore(self, prefix: str, name: str, spec: str, dtype: tf.DType) -> np.ndarray:
        with self._lock:
            if dtype not in self._restores:
                with self._graph.as_default(), tf.device("/cpu:0"):
                    self._restores[dtype] = tf.raw_ops.RestoreV2(
                        prefix=self._prefix,
                        tensor_names=self._names,
                        shape_and_slices=self._specs,
                        dtypes=[dtype],
                    )[0]
        out = self._run(
            self._restores[dtype], {self._prefix: prefix, self._names: [name], self._specs: [spec]}
        )
        return np.asarray(out)

    def save(self, prefix: str, names: list[str], specs: list[str], arrays: list[Any]) -> None:
        dtypes = tuple(tf.string if a.dtype.kind in "OSU" else tf.as_dtype(a.dtype) for a in arrays)
        with self._lock:
            if dtypes not in self._saves:
                with self._graph.as_default(), tf.device("/cpu:0"):
                    given = [tf.placeholder(dtype) for dtype in dtypes]
                    self._saves[dtypes] = (
                        tf.raw_ops.SaveV2(
                            prefix=self._prefix,
                            tensor_names=self._names,
                            shape_and_slices=self._specs,
                            tensors=given,
                        ),
                        given,
                    )
        save, given = self._saves[dtypes]
        try:
            self._run(
                save,
                {
                    self._prefix: prefix,
                    self._names: names,
                    self._specs: specs,
                    **dict(zip(given, arrays)),
                },
            )
        # as the system says of a file that may not grow; no end of data
        except tf.errors.OutOfRangeError as error:
            raise OSError(f"'{prefix}' can't be written: {error.message}") from None

    def merge(self, prefixes: list[str], target: str) -> None:
        self._run(self._merge, {self._prefix: target, self._names: prefixes})


_made: list[_Operations] = []


def _ops() -> _Operations:
    if not _made:
        _made.append(_Operations())
    return _made[0]


MAGIC = 0xDB4775248B80FB57
# bytes; a trailer follows each block: its compression and its checksum
FOOTER, TRAILER = 48, 5

IndexEntries = dict[str, tensor_bundle_pb2.BundleEntryProto]


def index_path(prefix: str) -> str:
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
        self.entries: IndexEntries = {}
        self.ends: dict[int, int] = {}
        name = index_path(prefix)
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
