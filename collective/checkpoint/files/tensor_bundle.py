"""Reads and writes TensorFlow's checkpoint files (tensor bundles), a block of rows at a time.

    <prefix>.index                    names, types, shapes and places of all entries
    <prefix>.data-00000-of-00002 …    their values

`collective.ops.rows.data_files` writes and reads numbers in local files. TensorFlow's own
operations do everything else, and all files elsewhere, in a session of this module on the CPU. No
user's graph and no ranks are involved.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.bundle_writer import BundleFile
from collective.checkpoint.files.index_reader import BundleIndex, RowSlice, data_path, index_path
from collective.checkpoint.files.layout import LAYOUT_ENTRY, STATIC, CheckpointLayout, StoredTable
from collective.checkpoint.files.storage import failures
from collective.ops.counting import counted
from collective.ops.graph.sessions import errors_without_stacks, run_unpatched
from collective.ops.rows import data_files

# The largest slice that is written. Reading some rows holds one slice in memory.
SLICE_BYTES = 16 << 20
# How much a writer holds before it writes a file.
FILE_BYTES = 96 << 20
# A slice, or an entry without slices, that is larger isn't read completely for some of its rows.
WHOLE_READ_BYTES = 64 << 20

_STRINGS = "OSU"  # kinds of NumPy types
_ADVICE = "Restore another checkpoint, or copy this one again."


def slice_rows(dim: int, dtype: Any) -> int:
    """Returns how many rows of `dim` values of `dtype` are in a slice."""
    return max(1, SLICE_BYTES // max(1, dim * np.dtype(dtype).itemsize))


def stored_matrix(
    name: str, shape: Sequence[int], dtype: Any, slot_of: str | None = None
) -> StoredTable:
    """Describes a static table, or a slot of one, that is a single entry of a checkpoint."""
    return StoredTable(
        name=name,
        kind=STATIC,
        rows=shape[0],
        dim=shape[1],
        dtype=tf.as_dtype(dtype).name,
        block=slice_rows(shape[1], dtype),
        parts=(shape[0],),
        slot_of=slot_of,
    )


class Bundle:
    """Reads a checkpoint.

    Attributes:
        prefix: the checkpoint's path without `.index`.
        entries: {name: (dtype, shape)}.
        layout: describes its tables; an empty layout if plain TensorFlow wrote it.

    Raises:
        ValueError: there is no checkpoint at `prefix`.
        tf.errors.DataLossError: its index is damaged.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        if not tf.io.gfile.exists(index_path(prefix)):
            raise ValueError(
                f"There is no checkpoint '{prefix}': neither a folder of this name nor a file "
                f"{index_path(prefix)}."
            )
        self._index = BundleIndex(prefix)
        self.entries: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        try:
            for name, entry in self._index.entries.items():
                shape = tuple(d.size for d in entry.shape.dim)
                self.entries[name] = tf.as_dtype(entry.dtype).as_numpy_dtype, shape
        except TypeError as error:
            message = f"the index of checkpoint '{prefix}' is damaged: {error}"
            raise tf.errors.DataLossError(None, None, message) from None
        self.layout = CheckpointLayout()
        if LAYOUT_ENTRY in self.entries:
            self.layout = CheckpointLayout.from_json(self.read_whole(LAYOUT_ENTRY).item().decode())

    def read(self, name: str, first: int, count: int, in_place: bool = False) -> np.ndarray:
        """Reads rows [first, first + count) of an entry.

        Memory beyond the result is at most 64 MB. Checksums are verified, except for slices of more
        than 64 MB, and for entries of that size without slices (as plain TensorFlow saves them). Of
        these, and with `in_place` of all, only the requested rows are read, from their place in the
        file.
        """
        dtype, shape = self.entries[name]
        if count == 0:
            return np.zeros((0, *shape[1:]), dtype)
        if (first, count) == (0, shape[0]) and not in_place:
            return self.read_whole(name)
        slices = [
            part
            for part in self.row_slices(name)
            if part.first < first + count and first < part.first + part.count
        ]
        if slices and in_place or any(part.size > WHOLE_READ_BYTES for part in slices):
            return self._read_in_place(name, slices, first, count)
        is_one = len(slices) == 1 and (slices[0].first, slices[0].count) == (first, count)
        if is_one and data_files.are_possible(self.prefix):
            out = np.empty((count, *shape[1:]), dtype)
            self._read_slice(name, slices[0], out)
            return out
        return self._restore(name, _slice_spec(shape, first, count))

    def row_slices(self, name: str) -> list[RowSlice]:
        """Returns the slices of an entry by ascending rows; one slice if it was saved whole.

        A scalar has none, nor has an entry whose slices aren't whole rows.
        """
        shape = self.entries[name][1]
        return self._index.row_slices(name, shape) if shape else []

    def read_whole(self, name: str) -> np.ndarray:
        """Reads an entry as one array (an array of objects for strings)."""
        return self._restore(name, "")

    def check_files(self) -> None:
        """Checks that every data file exists in its full length, without reading it.

        Raises:
            tf.errors.DataLossError: a file is missing or cut off.
        """
        for shard, least_size in sorted(self._index.least_sizes.items()):
            path = self.data_path(shard)
            try:
                size = tf.io.gfile.stat(path).length
            except tf.errors.NotFoundError:
                raise self._data_loss(f"its data file {path} is missing") from None
            if size < least_size:
                raise self._data_loss(
                    f"its data file {path} has {counted(size, 'byte')}, not {least_size:,}"
                )

    def data_path(self, shard: int) -> str:
        return data_path(self.prefix, shard, self._index.shards)

    def data_paths(self) -> list[str]:
        return [self.data_path(shard) for shard in range(self._index.shards)]

    def stored_bytes(self, name: str) -> int:
        """Returns the size of an entry."""
        dtype, shape = self.entries[name]
        entry = self._index.entries[name]
        if not entry.slices:
            return int(entry.size)
        return int(np.prod(shape)) * np.dtype(dtype).itemsize

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Adds the checkpoint, an entry's name, and what to do to TensorFlow's errors."""
        try:
            yield
        except tf.errors.OutOfRangeError as error:
            # A file is too short. A session would take "out of range" for the end of its data.
            raise self._data_loss(f"its entry '{name}' can't be read, {error.message}") from None
        except tf.errors.OpError as error:
            message = f"its entry '{name}' can't be read, {error.message}"
            raise type(error)(None, None, self._damaged(message)) from None

    def _restore(self, name: str, spec: str) -> np.ndarray:
        with self.naming(name):
            dtype = tf.as_dtype(self.entries[name][0])
            return _operations().restore(self.prefix, name, spec, dtype)

    def _read_slice(self, name: str, part: RowSlice, out: np.ndarray) -> None:
        """Reads a slice into `out`, which has the shape of its rows, and checks it."""
        path = self.data_path(part.shard)
        if part.size != out.nbytes:
            raise self._data_loss(
                f"its entry '{name}' has {counted(part.size, 'byte')} in {path}, not {out.nbytes:,}"
            )
        try:
            checksum = data_files.read(path, part.offset, part.size, out)
        except FileNotFoundError:
            raise self._data_loss(f"its data file {path} is missing") from None
        if checksum is None:
            raise self._data_loss(f"its entry '{name}' is cut off in {path}")
        if checksum != part.checksum:
            raise self._data_loss(f"its entry '{name}' is damaged: the checksum in {path} differs")

    def _read_in_place(
        self, name: str, slices: Sequence[RowSlice], first: int, count: int
    ) -> np.ndarray:
        dtype, shape = self.entries[name]
        row_bytes = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
        pieces = []
        for part in slices:
            start = max(first, part.first)
            size = (min(first + count, part.first + part.count) - start) * row_bytes
            path = self.data_path(part.shard)
            with tf.io.gfile.GFile(path, "rb") as file:
                file.seek(part.offset + (start - part.first) * row_bytes)
                data = file.read(size)
            if len(data) < size:
                raise self._data_loss(f"its entry '{name}' is cut off in {path}")
            pieces.append(np.frombuffer(data, dtype).reshape((-1, *shape[1:])))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _data_loss(self, problem: str) -> Exception:
        error: Exception = tf.errors.DataLossError(None, None, self._damaged(problem))
        return error

    def _damaged(self, problem: str) -> str:
        return f"checkpoint '{self.prefix}': {problem}. {_ADVICE}"


class BundleWriter:
    """Writes entries into files of about 96 MB, each of which is a bundle, for `merge` to join.

    If possible, numbers are written as they are added (`data_files.are_possible`). The others are
    held, and TensorFlow writes them once they fill a file. As a context manager it leaves no file
    open after an error, whose traceback may keep the writer alive for long.

    Args:
        stem: the bundles' prefixes are `<stem>-00000`, `<stem>-00001`, …
        file_bytes: the size of a file; by default `FILE_BYTES`.
        when_written: called after each file.
    """

    def __init__(
        self,
        stem: str,
        file_bytes: int | None = None,
        when_written: Callable[[], None] = lambda: None,
    ):
        self._stem, self._when_written = stem, when_written
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._bytes, self._written = 0, list[str]()
        self._file = BundleFile() if data_files.are_possible(stem) else None
        # What TensorFlow is to write.
        self._names: list[str] = []
        self._specs: list[str] = []
        self._arrays: list[Any] = []

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._file is not None:
            self._file.give_up()

    def add(self, name: str, full_shape: Sequence[int], first_row: int, rows: Any) -> None:
        """Adds rows [first_row, first_row + len(rows)) of the entry `name`.

        No rows may be added twice or left out.

        Args:
            name: the entry's name.
            full_shape: the shape of the whole entry.
            first_row: the number of the first row of `rows`.
            rows: an array, which must not be changed before `close`, or a
                `row_snapshots.SnapshotSlice`.
        """
        is_whole = (first_row, len(rows)) == (0, full_shape[0])
        self._add(name, "" if is_whole else _slice_spec(full_shape, first_row, len(rows)), rows)

    def add_whole(self, name: str, array: Any) -> None:
        """Adds a whole entry; `array` may also be a string or a number."""
        self._add(name, "", np.asarray(array))

    def add_slice(self, name: str, spec: str, array: np.ndarray) -> None:
        """Adds a part of an entry, or the whole entry; `spec` names it in the form of `SaveV2`."""
        self._add(name, spec, array)

    def _add(self, name: str, spec: str, values: Any) -> None:
        if self._bytes and self._bytes + values.nbytes > self._file_bytes:
            self._flush()
        self._bytes += values.nbytes
        if self._file is not None and values.dtype.kind not in _STRINGS:
            if not self._file.is_open:
                self._file.open(self._next_prefix())
            self._file.add(name, spec, values)
            return
        self._names.append(name)
        self._specs.append(spec)
        self._arrays.append(values if isinstance(values, np.ndarray) else values.read())

    def _next_prefix(self) -> str:
        self._written.append(f"{self._stem}-{len(self._written):05d}")
        return self._written[-1]

    def _flush(self) -> None:
        """Completes what has been started."""
        self._bytes = 0
        if self._file is not None and self._file.is_open:
            self._file.finish()
        if self._names:
            names, specs, arrays = self._names, self._specs, self._arrays
            self._names, self._specs, self._arrays = [], [], []
            with failures():
                _operations().save(self._next_prefix(), names, specs, arrays)
        self._when_written()

    def close(self) -> list[str]:
        """Writes the remaining entries, and returns the prefixes of all written bundles."""
        if self._names or self._file is not None and self._file.is_open:
            self._flush()
        return self._written


def merge(prefixes: Sequence[str], target: str) -> None:
    """Makes one bundle `target` from the bundles `prefixes`, by renaming their data files."""
    with failures():
        _operations().merge(list(prefixes), target)


def _slice_spec(shape: Sequence[int], first: int, count: int) -> str:
    """Names some rows of an entry in the form of `SaveV2` and `RestoreV2`: '50 2 10,5:-'."""
    extents = [f"{first},{count}"] + ["-"] * (len(shape) - 1)
    return " ".join(map(str, shape)) + " " + ":".join(extents)


class _BundleOperations:
    """Holds TensorFlow's operations on bundles, each made once, and their session."""

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
        # The session has its own threads: an initializer that reads from a checkpoint occupies a
        # thread of the shared pool, maybe the last one.
        config = tf.ConfigProto(
            device_count={"GPU": 0},
            use_per_session_threads=True,
            inter_op_parallelism_threads=2,
        )
        self._session = tf.Session(graph=self._graph, config=config)

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
        feeds = {self._prefix: prefix, self._names: [name], self._specs: [spec]}
        with errors_without_stacks():
            return np.asarray(self._run(self._restores[dtype], feeds))

    def save(self, prefix: str, names: list[str], specs: list[str], arrays: list[Any]) -> None:
        dtypes = tuple(
            tf.string if a.dtype.kind in _STRINGS else tf.as_dtype(a.dtype) for a in arrays
        )
        with self._lock:
            if dtypes not in self._saves:
                with self._graph.as_default(), tf.device("/cpu:0"):
                    tensors = [tf.placeholder(dtype) for dtype in dtypes]
                    save = tf.raw_ops.SaveV2(
                        prefix=self._prefix,
                        tensor_names=self._names,
                        shape_and_slices=self._specs,
                        tensors=tensors,
                    )
                self._saves[dtypes] = save, tensors
        save, tensors = self._saves[dtypes]
        feeds = {self._prefix: prefix, self._names: names, self._specs: specs}
        with errors_without_stacks():
            self._run(save, {**feeds, **dict(zip(tensors, arrays))})

    def merge(self, prefixes: list[str], target: str) -> None:
        with errors_without_stacks():
            self._run(self._merge, {self._prefix: target, self._names: prefixes})

    def _run(self, fetches: Any, feeds: dict[Any, Any]) -> Any:
        # Runs in the calling thread, which may be the only one that isn't blocked.
        options = tf.RunOptions(inter_op_thread_pool=-1)
        return run_unpatched(self._session, fetches, feeds, options)


def _dtype(array: np.ndarray) -> tf.DType:
    return tf.string if array.dtype.kind in _STRINGS else tf.as_dtype(array.dtype)


_made: list[_BundleOperations] = []


def _operations() -> _BundleOperations:
    if not _made:
        _made.append(_BundleOperations())
    return _made[0]
