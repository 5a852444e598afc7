"""Keeps the rows of a dynamic table that haven't been used for long in a file: storage='dram_ssd'.

    a run ──► rows of its keys in memory, those from the file among them (compiled operations)
    after it ──► more rows than memory is for? ──► the least recently used ──► the file

A row comes back with its slots unchanged, bit for bit. An operation on a whole table, such as a
save, reads the rows in the file without moving them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import kernel_device, native_library
from collective.ops.graph import graph_state, graphs
from collective.ops.rows import rows_in_file
from collective.policy import TablePolicy
from collective.tables.rows import initializers, row_store
from collective.tables.rows.row_columns import RowColumn
from collective.tables.rows.row_store import CompiledStore

any_is_overfull = rows_in_file.any_is_overfull
IN_FILE = rows_in_file.IN_FILE


class TableWithFile(Protocol):
    """Is a table whose rows go to a file."""

    def store(self, session: Any) -> row_store.Store:
        """Returns its rows in `session`."""

    def columns_of_slots(self, session: Any) -> list[RowColumn]:
        """Returns its slots in `session`, row by row."""


@dataclasses.dataclass
class TablesWithFiles:
    """Records the tables of a graph whose rows go to files.

    Of a traced function's graph, these are the tables of eager code that it looks up or updates.
    """

    tables: list[TableWithFile] = dataclasses.field(default_factory=list)


def tables_of(graph: tf.Graph) -> list[TableWithFile]:
    """Returns the tables of `graph` whose rows go to files."""
    return graph_state.of(graph, TablesWithFiles).tables


class StoreWithFile(CompiledStore):
    """Holds keys and rows in the host's memory and, beyond a number of bytes, in a file.

    Arguments as for `CompiledStore`, and:

    Args:
        policy: the table's, with storage='dram_ssd'.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        dtype: Any,
        name: str,
        fill: initializers.Fill,
        policy: TablePolicy,
    ):
        super().__init__(capacity, dim, dtype, name, fill)
        folder = os.path.abspath(policy.storage_path or "")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"dynamic table '{name}': the folder of its file, storage_path='{folder}', can not "
                f"be made: {error.strerror}. It is a folder of this machine that can be written."
            ) from error
        rows_in_file.keep_in_file(self.number, folder, policy.memory_bytes)

    @property
    def count_in_memory(self) -> int:
        return rows_in_file.count_in_memory(self.number)

    @property
    def is_overfull(self) -> bool:
        """Tells whether too many rows are in memory."""
        return rows_in_file.is_overfull(self.number)

    @property
    def file_bytes(self) -> int:
        """Returns the size of the file."""
        return rows_in_file.file_bytes(self.number)

    def locate(self, keys: np.ndarray) -> np.ndarray:
        return rows_in_file.locate(self.number, keys)

    def read(
        self, columns: Sequence[Any], keys: np.ndarray, rows: np.ndarray | None = None
    ) -> list[np.ndarray]:
        out = [np.empty((len(keys), column.dim), column.dtype) for column in columns]
        rows_in_file.read(self.number, keys, [column.number for column in columns], out)
        return out

    def all_keys(self) -> np.ndarray:
        in_memory = self.keys.keys(1, self.count_in_memory + 1)
        return np.concatenate([in_memory, rows_in_file.keys(self.number)])

    def places(self, positions: np.ndarray) -> np.ndarray:
        return np.where(positions < self.count_in_memory, positions + 1, IN_FILE)

    def all_last_uses(self, column: Any) -> np.ndarray:
        in_memory = super().all_last_uses(column)
        in_file = rows_in_file.notes(self.number, rows_in_file.keys(self.number))
        return np.concatenate([in_memory, in_file])

    def last_uses(self, column: Any, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        in_file = places == IN_FILE
        if not in_file.any():
            return super().last_uses(column, keys, places)
        last_uses = np.empty(len(keys), np.int64)
        last_uses[~in_file] = super().last_uses(column, keys[~in_file], places[~in_file])
        last_uses[in_file] = rows_in_file.notes(self.number, keys[in_file])
        return last_uses

    def remove_at(self, keys: np.ndarray, places: np.ndarray, slots: Sequence[RowColumn]) -> int:
        in_file = places == IN_FILE
        self.remove(np.sort(places[~in_file]), slots)
        rows_in_file.remove(self.number, keys[in_file])
        self.tally.settle(self)
        return len(keys)

    def clear(self, slots: Sequence[RowColumn]) -> int:
        count = len(self)
        self.remove(np.arange(1, self.count_in_memory + 1), slots)
        rows_in_file.clear(self.number)
        self.tally.settle(self)
        return count

    def limit_memory(self, slots: Sequence[RowColumn]) -> None:
        noted = next((slot.number for slot in slots if slot.holds_last_uses), None)
        self.tally.count(self)
        try:
            rows_in_file.move_to_file(self.number, [slot.number for slot in slots], noted)
        finally:
            self.tally.settle(self)

    def ascending(self, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for keys, _ in row_store.in_ascending_order(self.all_keys(), block):
            yield keys, self.locate(keys)

    def keys_in_file(self, block: int) -> Iterator[np.ndarray]:
        keys = rows_in_file.keys(self.number)
        for first in range(0, len(keys), block):
            yield keys[first : first + block]


def prepare(table: Any) -> None:
    """Notes a new table whose rows may go to a file.

    Raises:
        TableError: the table is in memory where that isn't possible.
    """
    if table.policy.storage is None:
        return
    if table.bridge is not None:
        raise TableError(
            f"table '{table.op.name}' is to keep rows in a file (storage='dram_ssd'), but it is in "
            f"the GPU's memory. Set {kernel_device.DYNAMIC}=host, which has dynamic tables in the "
            "host's memory, or leave the storage out."
        )
    if not table.compiled:
        raise TableError(
            f"table '{table.op.name}' is to keep rows in a file (storage='dram_ssd'), which needs "
            f"the compiled operations: {native_library.missing()}."
        )
    if not table.is_eager:
        tables_of(graphs.outermost(tf.get_default_graph())).append(table)


def note_use(graph: tf.Graph, table: Any) -> None:
    """Notes that a traced function uses a table, whose rows may go to a file after a call."""
    if table.rows is not None or table.policy.storage is None:
        return
    tables = tables_of(graph)
    if all(table is not each for each in tables):  # Variables compare their values.
        tables.append(table)


def limit_memory(tables: Iterable[Any]) -> None:
    """Moves rows of tables of eager code to their files, where too many are in memory.

    Every rank calls it, between the same calls of functions; gradients that know rows by their
    places are refused from then on.

    Raises:
        OSError: a file can't be written.
    """
    overfull = any_is_overfull()
    for table in tables:
        table.moves += 1  # On this rank no row may have moved.
        if overfull and (store := table.store(None)).is_overfull:
            store.limit_memory(table.columns_of_slots(None))


def check_all_rows_are_not_updated(table: Any, optimizer: Any) -> None:
    """Raises TableError for an optimizer that moves rows without a gradient, if some are in a file.

    Args:
        table: a dynamic table.
        optimizer: an optimizer that goes over all rows.
    """
    if table.policy.storage is not None:
        raise TableError(
            f"{type(optimizer).__name__} moves all rows of table '{table.op.name}' in every step, "
            "those in its file too (storage='dram_ssd'). Use an optimizer that moves the rows of a "
            "batch, such as Adagrad or collective.train.LazyAdamOptimizer, or keep the table in "
            "memory."
        )


def check_rows_stay(variables: Iterable[Any], what: str) -> None:
    """Raises TableError if some of `variables` are tables with a file, because their rows move.

    Args:
        variables: variables, tables or not.
        what: the thing that keeps numbers of rows from one run to the next.
    """
    for table in variables:
        policy = getattr(table, "policy", None)
        if policy is not None and policy.storage is not None and table.rows is None:
            raise TableError(
                f"{what} sums gradients by rows from one run to the next, and rows of table "
                f"'{table.op.name}' move to its file between them (storage='dram_ssd'). Keep the "
                "table in memory, or apply every batch."
            )
