"""Keeps keys, rows and initial values of dynamic tables in host memory, with compiled code.

Operations of the compiled library (`ops/native/row_store.h`) and Python work on the same objects,
each of which has a number. Every call releases the interpreter before it waits for a store's lock:
an operation may hold the lock while Python draws initial values for it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.counting import counted
from collective.ops.rows import keymap, memory

# Kinds of initial values: `RowKind` in ops/native/row_generator.h.
BY_PYTHON, SAME_ROW, UNIFORM, CENTERED_UNIFORM, TRUNCATED_NORMAL, SCALED_TRUNCATED_NORMAL = range(6)

_NO_MEMORY = int(tf.errors.RESOURCE_EXHAUSTED)
_MESSAGE_BYTES = 4096
_DRAWN, _LACKS_MEMORY, _FAILED = range(3)  # results of the function that draws
_ROW_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
)


class _Description(ctypes.Structure):
    """Describes a store: `RowStoreDescription` in ops/native/row_store.cc."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("advice", ctypes.c_char_p),
        ("values", ctypes.c_int64),
        ("capacity", ctypes.c_uint64),
        ("dtype", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("row", ctypes.c_char_p),
        ("cubics", ctypes.c_void_p),
        ("function", _ROW_FUNCTION),
        ("block", ctypes.c_int64),
    ]


class _BloomShape(ctypes.Structure):
    """Describes a counting Bloom filter: `BloomShape` in ops/native/admission.h."""

    _fields_ = [
        ("hashes", ctypes.c_int64),
        ("cells", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("partitions", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("most", ctypes.c_uint64),
    ]


class _AdmissionDescription(ctypes.Structure):
    """Describes which keys get rows: `AdmissionDescription` in ops/native/row_store.cc."""

    _fields_ = [
        ("frequency", ctypes.c_int64),
        ("probability", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("bloom", _BloomShape),
    ]


@functools.cache
def _library_functions() -> Any:
    functions = native_library.functions()
    number, size, pointer = ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("column_new", None, [number, size]),
        ("column_free", None, [number]),
        ("column_move_to", None, [number, pointer]),
        ("column_set_first", None, [number, ctypes.c_char_p]),
        ("column_filled", size, [number]),
        ("column_set_filled", None, [number, size]),
        ("column_initialize", None, [number, size]),
        ("store_new", ctypes.c_int, [number, ctypes.POINTER(_Description)]),
        ("store_free", None, [number]),
        ("store_count", size, [number]),
        ("store_key_count", size, [number]),
        ("store_keys", pointer, [number]),
        ("store_find", ctypes.c_int, [number, pointer, size, ctypes.c_int, pointer, pointer, size]),
        ("store_put", ctypes.c_int, [number, pointer, size, pointer, pointer, pointer, size]),
        (
            "store_remove",
            ctypes.c_int,
            [number, pointer, size, pointer, size, pointer, pointer, size],
        ),
        ("store_admit_by", ctypes.c_int, [number, ctypes.POINTER(_AdmissionDescription)]),
        ("store_counted", size, [number]),
        ("store_refused", size, [number]),
        ("store_counts", size, [number, size, pointer, pointer]),
        ("store_add_counts", ctypes.c_int, [number, pointer, pointer, size, pointer, size]),
        ("store_forget", None, [number, pointer, size]),
        ("store_cells", pointer, [number]),
    ):
        function = getattr(functions, f"row_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


@dataclasses.dataclass(frozen=True)
class FirstValues:
    """Says how the initial values of rows are drawn.

    Attributes:
        kind: one of the kinds above.
        seed: 64 bits, for kinds that are random.
        a, b: the kind's numbers.
        row: the row of `SAME_ROW`, [D] of the table's type.
        cubics: [4, 4096] float64, for the truncated normal.
        draw: f(keys uint64 [R], D) -> [R, D], for `BY_PYTHON`.
        block: the number of elements for one call of `draw`.
    """

    kind: int
    seed: int = 0
    a: float = 0.0
    b: float = 0.0
    row: np.ndarray | None = None
    cubics: np.ndarray | None = None
    draw: Callable[[np.ndarray, int], np.ndarray] | None = None
    block: int = 1 << 16


@dataclasses.dataclass(frozen=True)
class FilterShape:
    """Describes a rank's part of a counting Bloom filter.

    Attributes:
        hashes: how many counters a key has.
        cells: how many counters a partition has.
        dtype: a counter's type, an unsigned integer.
        partitions: how many there are in all; key k is counted in partition mix(k) mod partitions.
        step: this rank has every step-th partition.
    """

    hashes: int
    cells: int
    dtype: np.dtype[Any]
    partitions: int
    step: int


class CompiledColumn:
    """Knows the memory that holds one row for each row of a table; it doesn't own the memory.

    Args:
        number: the number by which operations find it.
        row_bytes: the bytes of a row.
    """

    def __init__(self, number: int, row_bytes: int):
        self._number = number
        self._library = _library_functions()
        self._library.row_column_new(number, row_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self._library.row_column_free(self._number)

    def move_to(self, address: int) -> None:
        """Notes the new address of the memory."""
        self._library.row_column_move_to(self._number, address)

    def set_first(self, row: np.ndarray | None) -> None:
        """Sets the row [D] with which rows start; None if they start with zeros."""
        raw = None if row is None else row.tobytes()
        self._library.row_column_set_first(self._number, raw)

    @property
    def filled(self) -> int:
        """Returns the last row that has values."""
        return int(self._library.row_column_filled(self._number))

    @filled.setter
    def filled(self, filled: int) -> None:
        self._library.row_column_set_filled(self._number, filled)

    def initialize_rows(self, count: int) -> None:
        """Gives rows up to `count` their initial values, unless they have them."""
        self._library.row_column_initialize(self._number, count)


class CompiledRowStore:
    """Maps a table's keys to rows, and draws the initial values of new ones.

    Args:
        number: the number by which operations find it.
        name: the table's name, for errors.
        advice: what to do if there is no room, for errors.
        capacity: the most rows.
        dim: D.
        dtype: NumPy's type of the rows.
        values: the number of the `CompiledColumn` of the rows.
        first_values: how initial values are drawn.

    Raises:
        MemoryError: there isn't enough address space.
    """

    def __init__(
        self,
        number: int,
        name: str,
        advice: str,
        capacity: int,
        dim: int,
        dtype: Any,
        values: int,
        first_values: FirstValues,
    ):
        self._number, self._dim, self._dtype = number, dim, np.dtype(dtype)
        self._draw = first_values.draw
        self._filter: FilterShape | None = None
        row, cubics = first_values.row, first_values.cubics
        description = _Description(
            name=name.encode(),
            advice=advice.encode(),
            values=values,
            capacity=capacity,
            dtype=tf.as_dtype(dtype).as_datatype_enum,
            dim=dim,
            kind=first_values.kind,
            seed=first_values.seed,
            a=first_values.a,
            b=first_values.b,
            row=None if row is None else row.tobytes(),
            cubics=None if cubics is None else cubics.ctypes.data,
            function=_draw_rows,
            block=first_values.block,
        )
        functions = _library_functions()
        failed = functions.row_store_new(number, ctypes.byref(description))
        if failed == _NO_MEMORY:
            raise MemoryError(f"a key map for {counted(capacity, 'row')} can not be reserved")
        if failed:
            raise ValueError(f"dynamic table '{name}': its rows can't be drawn: {first_values}")
        self._library = functions
        if self._draw is not None:
            _drawing[number] = self

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self._library.row_store_free(self._number)

    @property
    def count(self) -> int:
        """Returns the number of rows that have values."""
        return int(self._library.row_store_count(self._number))

    def __len__(self) -> int:
        """Returns the number of keys."""
        return int(self._library.row_store_key_count(self._number))

    def keys(self, first: int, last: int) -> np.ndarray:
        """Returns the keys of the rows from `first` to before `last`: a view, int64."""
        if not 1 <= first <= last <= len(self) + 1:
            raise IndexError(f"rows [{first}, {last}) of 1 … {len(self)}")
        address = self._library.row_store_keys(self._number) + 8 * first
        return memory.array_at(address, (last - first,), np.int64, self)

    def find(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        """Returns the local rows of `keys`, int64; new keys are inserted, or have row 0.

        Raises:
            MemoryError: there is no room for them.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(keys.shape, np.int64)
        self._call(
            self._library.row_store_find, keys.ctypes.data, keys.size, insert, rows.ctypes.data
        )
        return rows

    def put(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Gives `keys` [K], whether new or not, the values [K, D]. Returns their local rows.

        Raises:
            MemoryError: there is no room for them.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        values = np.ascontiguousarray(np.broadcast_to(values, (len(keys), self._dim)), self._dtype)
        rows = np.empty(keys.shape, np.int64)
        self._call(
            self._library.row_store_put,
            keys.ctypes.data,
            keys.size,
            values.ctypes.data,
            rows.ctypes.data,
        )
        return rows

    def remove(self, rows: np.ndarray, slots: Sequence[int]) -> None:
        """Removes rows, and moves the last rows to their places.

        Args:
            rows: [K] int64, ascending and each once.
            slots: the numbers of all `CompiledColumn`s that the table has in addition to its rows.

        Raises:
            MemoryError: there is no room for the rows before.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        keymap.check_ascending(rows, len(self))
        columns, moves = np.array(slots, np.int64), np.empty((2, len(rows)), np.int64)
        self._call(
            self._library.row_store_remove,
            rows.ctypes.data,
            rows.size,
            columns.ctypes.data,
            columns.size,
            moves.ctypes.data,
        )

    def admit_by(
        self,
        frequency: int | None,
        bloom: FilterShape | None,
        most: int,
        probability: float,
        seed: int,
        capacity: int,
    ) -> None:
        """Sets which keys get rows. Call it once, before any key is looked up.

        Args:
            frequency: how often a key must have occurred; None: keys aren't counted.
            bloom: the filter that counts them; None: they are counted exactly.
            most: the value at which a counter of the filter stays.
            probability: the probability with which a key that has occurred often enough gets a row.
            seed: 64 bits for that.
            capacity: the most keys that are counted exactly.

        Raises:
            MemoryError: there isn't enough address space for counters.
        """
        shape = _BloomShape()
        if bloom is not None:
            width = bloom.dtype.itemsize
            shape = _BloomShape(
                bloom.hashes, bloom.cells, width, bloom.partitions, bloom.step, most
            )
        self._filter = bloom
        description = _AdmissionDescription(frequency or 0, probability, seed, capacity, shape)
        if self._library.row_store_admit_by(self._number, ctypes.byref(description)):
            raise MemoryError("memory for the counts of its keys without rows can not be reserved")

    @property
    def refused(self) -> int:
        """Returns how often a key was refused a row."""
        return int(self._library.row_store_refused(self._number))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the counted keys without rows, and how often they occurred, both int64.

        A Bloom filter doesn't know its keys: none are returned.
        """
        while True:
            keys = np.empty(self._library.row_store_counted(self._number), np.int64)
            counts = np.empty_like(keys)
            copied = self._library.row_store_counts(
                self._number, len(keys), keys.ctypes.data, counts.ctypes.data
            )
            if copied == len(keys):
                return keys, counts

    def add_counts(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Adds to the counts of `keys` without rows; both are [K] int64.

        Raises:
            MemoryError: there is no room for them.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        counts = np.ascontiguousarray(counts, np.int64)
        self._call(
            self._library.row_store_add_counts, keys.ctypes.data, counts.ctypes.data, keys.size
        )

    def forget(self, keys: np.ndarray | None) -> None:
        """Forgets the counts of `keys` [K] int64 without rows; of all keys if it is None.

        A Bloom filter can only forget all keys.
        """
        if keys is None:
            self._library.row_store_forget(self._number, None, 0)
            return
        keys = np.ascontiguousarray(keys, np.int64)
        self._library.row_store_forget(self._number, keys.ctypes.data, keys.size)

    def cells(self) -> np.ndarray:
        """Returns the counters of the Bloom filter: a view, [partitions on this rank, cells]."""
        shape = self._filter
        assert shape is not None
        address = self._library.row_store_cells(self._number)
        partitions = shape.partitions // shape.step
        return memory.array_at(address, (partitions, shape.cells), shape.dtype, self)

    def _call(self, function: Any, *arguments: Any) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = function(self._number, *arguments, message, _MESSAGE_BYTES)
        if failed:
            error = MemoryError if failed == _NO_MEMORY else RuntimeError
            raise error(message.value.decode(errors="replace"))

    def draw(self, keys: int, count: int, out: int) -> None:
        """Draws the initial values of `count` keys at the address `keys` into the address `out`."""
        assert self._draw is not None
        key_array = memory.array_at(keys, (count,), np.uint64, self)
        rows = memory.array_at(out, (count, self._dim), self._dtype, self)
        rows[:] = self._draw(key_array, self._dim)


# The stores that let Python draw initial values, by number.
_drawing: weakref.WeakValueDictionary[int, CompiledRowStore] = weakref.WeakValueDictionary()


@_ROW_FUNCTION
def _draw_rows(number: int, keys: int, count: int, out: int, message: int, size: int) -> int:
    """Draws initial values for a store. There is only one such function, which is never freed.

    An operation may still need it after the store's Python object has gone.
    """
    try:
        store = _drawing.get(number)
        if store is None:
            raise RuntimeError("its session was closed or initialized again")
        store.draw(keys, count, out)
        return _DRAWN
    except BaseException as error:  # No exception can pass through compiled code.
        lacks_memory = isinstance(error, MemoryError)
        words = str(error) if lacks_memory else f"{type(error).__name__}: {error}"
        raw = words.encode()[: size - 1] + b"\0"
        ctypes.memmove(message, raw, len(raw))
        return _LACKS_MEMORY if lacks_memory else _FAILED
