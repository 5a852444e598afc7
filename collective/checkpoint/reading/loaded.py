"""Shows a checkpoint as a mapping: tables that are read row by row, variables as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.chain import Chain
from collective.checkpoint.files.layout import DYNAMIC, StoredTable
from collective.checkpoint.reading import (
    consolidate,
    merged_reader,
    opening,
    table_reader,
)
from collective.checkpoint.reading.compatibility import find_stored_table
from collective.ops import key_hashing
from collective.ops.counting import counted
from collective.ops.graph.sessions import run_unpatched

BLOCK = 1 << 16


class UnknownName(KeyError):
    """Says that a checkpoint lacks a key or name; a KeyError would show the text as code."""

    def __str__(self) -> str:
        return str(self.args[0])


class LoadedTable:
    """Reads a table of a checkpoint, or a slot of one, only as far as it is asked for.

    If increments follow the checkpoint, `lookup` goes through the whole table.

    Attributes:
        name: its name.
        dynamic: whether its keys are any int64; else they are 0 … V - 1.
        shape: (rows, D); rows is V, or the number of keys.
        dim: D.
        dtype: the NumPy type of a value.
        slots: {name: slot} of a table: `table.slots['user/Adagrad']`.
    """

    def __init__(self, chain: Chain, stored: StoredTable):
        self._chain, self._stored = chain, stored
        self._finder = table_reader.RowFinder(chain.rows_of(stored), stored)
        self.name = stored.name
        self.dynamic = stored.kind == DYNAMIC
        count = merged_reader.count_dynamic(chain, stored) if self.dynamic else stored.count
        self.shape = count, stored.dim
        self.dim = stored.dim
        self.dtype = np.dtype(tf.as_dtype(stored.dtype).as_numpy_dtype)
        slots = chain.base.layout.slots_of(stored.name)
        self.slots = {slot.name: LoadedTable(chain, slot) for slot in slots}

    def __len__(self) -> int:
        return self.shape[0]

    def keys(self) -> np.ndarray:
        """Returns all keys, ascending: int64 [rows]."""
        if not self.dynamic:
            return np.arange(self.shape[0])
        if self._chain.increments:
            return np.concatenate([np.zeros(0, np.int64), *(keys for keys, _ in self.blocks())])
        parts = [self._finder.keys_of_part(part) for part in range(len(self._stored.parts))]
        return np.sort(np.concatenate(parts))

    def lookup(self, keys: Any, default: float | None = None) -> np.ndarray:
        """Returns the rows of keys.

        Args:
            keys: a number, or any array of integers; strings for a table of string keys.
            default: the value of every element for a missing key. None (default): a missing key is
                an error. (In evaluation and serving a dynamic table uses 0, or its policy's
                `default_value_no_permission`.)

        Returns:
            [*, D], `*` being the shape of `keys`.

        Raises:
            KeyError: one of the keys is missing.
            TypeError: keys are neither integers nor strings.
        """
        array = np.asarray(keys)
        if array.dtype.kind in "OSU" and array.size:
            with tf.Graph().as_default(), tf.Session() as session:
                hashes = key_hashing.of_strings(tf.constant(array.astype(np.bytes_)))
                array = run_unpatched(session, hashes)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"keys of table '{self.name}' are integers, not {array.dtype}.")
        flat = array.reshape(-1).astype(np.int64)
        is_there, rows = self._find(flat)
        if not is_there.all():
            if default is None:
                missing = flat[~is_there]
                all_keys = "" if self.dynamic else f" (keys 0 … {self.shape[0] - 1:,})"
                others = counted(len(missing) - 1, "other")
                raise UnknownName(
                    f"table '{self.name}'{all_keys} has no key {missing[0]}"
                    + (f", nor {others} of the {len(flat):,}" if len(missing) > 1 else "")
                    + "; lookup(keys, default=0.0) gives such keys zeros"
                )
            rows[~is_there] = default
        return rows.reshape(*array.shape, self.dim)

    def __getitem__(self, keys: Any) -> np.ndarray:
        """Returns `lookup(keys)`; a slice names keys of a static table."""
        if isinstance(keys, slice):
            if self.dynamic:
                raise TypeError(
                    f"table '{self.name}' is dynamic: name keys, or go through blocks()."
                )
            keys = np.arange(*keys.indices(self.shape[0]))
        return self.lookup(keys)

    def __contains__(self, key: Any) -> bool:
        return bool(self._find(np.array([key], np.int64))[0][0])

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys().tolist())

    def blocks(self, block: int = BLOCK) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (keys [b] int64, rows [b, D]) by ascending keys, `block` at a time."""
        for first, rows in opening.read_table_of(self._chain, self.name, block):
            yield (first if self.dynamic else np.arange(first, first + len(rows))), rows

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of `keys` [n] exist, and rows [n, D] (see `RowFinder.find`)."""
        if not self._chain.increments:
            return self._finder.find(keys)
        is_there, found = np.zeros(len(keys), bool), np.zeros((len(keys), self.dim), self.dtype)
        for block_keys, rows in self.blocks():
            places = np.minimum(np.searchsorted(block_keys, keys), len(block_keys) - 1)
            is_here = block_keys[places] == keys
            found[is_here] = rows[places[is_here]]
            is_there |= is_here
        return is_there, found

    def __array__(self, dtype: Any = None) -> np.ndarray:
        """Returns all rows, by ascending keys."""
        rows = [rows for _, rows in self.blocks()]
        whole = np.concatenate(rows) if rows else np.zeros(self.shape, self.dtype)
        return whole if dtype is None else whole.astype(dtype)

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        return (
            f"<{kind} table '{self.name}': {counted(self.shape[0], 'row')} of {self.dim} "
            f"{self._stored.dtype}>"
        )


class LoadedCheckpoint(Mapping[str, Union[LoadedTable, np.ndarray]]):
    """Maps the names of a checkpoint to tables and slots, and to arrays, read at each access.

    Attributes:
        path: the checkpoint's prefix.
    """

    def __init__(self, path: str):
        self._chain = opening.open_checkpoint(path)
        self._chain.base.check_files()
        self.path = self._chain.last.prefix
        self._layout = self._chain.base.layout
        self._tables: dict[str, LoadedTable] = {}
        self._variables = consolidate.other_entries(self._chain.base)

    @property
    def tables(self) -> list[str]:
        """Returns the names of the tables, without slots."""
        stored_tables = self._layout.tables.values()
        return sorted(stored.name for stored in stored_tables if stored.slot_of is None)

    @property
    def variables(self) -> list[str]:
        """Returns the names of everything that is neither a table nor a slot of one."""
        return list(self._variables)

    def table(self, name: str) -> LoadedTable:
        """Returns a table or slot; also a matrix of plain TensorFlow, read row by row.

        Raises:
            KeyError: there is no such table.
        """
        if name not in self._tables:
            stored = find_stored_table(self._chain.base, name)
            if stored is None:
                raise UnknownName(
                    f"checkpoint '{self.path}' has no table '{name}' (it has: "
                    f"{', '.join(self.tables) or 'none'})"
                )
            self._tables[name] = LoadedTable(self._chain, stored)
        return self._tables[name]

    def __getitem__(self, name: str) -> LoadedTable | np.ndarray:
        if name in self._layout.tables:
            return self.table(name)
        if name in self._variables:
            return self._chain.last.read_whole(name)
        raise UnknownName(f"checkpoint '{self.path}' has no '{name}'; list(…) has its names")

    def __contains__(self, name: object) -> bool:
        return name in self._layout.tables or name in self._variables

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._layout.tables, *self._variables]))

    def __len__(self) -> int:
        return len(self._layout.tables) + len(self._variables)

    def __repr__(self) -> str:
        return consolidate.description(self.path)
