"""Finds a Saver's tables and their slots, and reads and replaces this rank's rows of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.layout import DYNAMIC, STATIC, StoredTable
from collective.checkpoint.files.tensor_bundle import slice_rows
from collective.ops import kernel_device, native_library
from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows import data_files
from collective.tables.rows import initializers
from collective.tables.table import Table, shard_of
from collective.tables.updates import row_writes

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Describes a table of a graph, or a slot of one, as a Saver sees it.

    Attributes:
        name: the Saver's name for it.
        variable: the table, or the slot's variable.
        table: the table itself, or the table whose slot it is.
        slot_of: the Saver's name for the slot's table; None for a table.
    """

    name: str
    variable: Any
    table: Table
    slot_of: str | None

    @property
    def dynamic(self) -> bool:
        return not hasattr(self.table, "rows") or self.table.rows is None

    @property
    def may_be_missing(self) -> bool:
        """Tells whether a checkpoint may lack it: it belongs to a policy, not to training."""
        return getattr(self.variable, "may_be_missing", False)

    @property
    def dim(self) -> int:
        """Returns D; a slot may have its own."""
        return self.table.dim if self.slot_of is None else int(self.variable.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of this rank's rows: [0, D] for a dynamic shard, since it grows."""
        if self.dynamic:
            return 0, self.dim
        return self.table.row_placement.count(collectives.rank(), self.table.rows), self.dim

    @property
    def part(self) -> int | None:
        """Returns which part of a checkpoint this rank's rows are; None if it has none."""
        return self.table.placement.part(collectives.rank())

    @property
    def dtype(self) -> Any:
        return self.variable.dtype.base_dtype.as_numpy_dtype

    @property
    def keys(self) -> str | None:
        return f"{self.slot_of or self.name}/keys" if self.dynamic else None

    def of_parts(self, of_ranks: Sequence[Item]) -> list[Item]:
        """Returns those items of all ranks whose ranks write a part, in the order of parts."""
        placed = self.table.placement
        return [item for rank, item in enumerate(of_ranks) if placed.part(rank) is not None]

    def stored(self, rows: Sequence[int], block: int) -> StoredTable:
        """Describes the shards of all ranks in a checkpoint.

        Args:
            rows: how many rows each rank has written.
            block: how many rows a slice has.
        """
        return StoredTable(
            name=self.name,
            kind=DYNAMIC if self.dynamic else STATIC,
            rows=None if self.dynamic else self.table.rows,
            dim=self.dim,
            dtype=self.variable.dtype.base_dtype.name,
            block=block,
            parts=tuple(self.of_parts(rows)),
            slot_of=self.slot_of,
            keys=self.keys,
        )


def find_shards(variables: dict[str, Any]) -> list[Shard]:
    """Finds the tables and slots among variables, {name for the Saver: variable}.

    Raises:
        ValueError: a variable has two names; or a slot of a dynamic table comes without the
            table, whose keys tell which key each row of the slot belongs to.
    """
    table_names = {id(v): name for name, v in variables.items() if isinstance(v, Table)}
    shards: list[Shard] = []
    for name, variable in sorted(variables.items()):
        table = shard_of(variable)
        if table is None:
            continue
        is_slot = not isinstance(variable, Table)
        slot_of = table_names.get(id(table), table.op.name) if is_slot else None
        shard = Shard(name, variable, table, slot_of)
        if any(variable is other.variable for other in shards):
            raise ValueError(f"var_list has the variable '{variable.op.name}' under two names.")
        if shard.dynamic and id(table) not in table_names:
            raise ValueError(
                f"var_list has '{name}', a slot of the dynamic table '{table.op.name}', but not "
                "the table: add it."
            )
        shards.append(shard)
    return shards


def dynamic_tables(shards: Sequence[Shard]) -> list[Any]:
    """Returns the dynamic tables among `shards`, without slots."""
    return [shard.variable for shard in shards if shard.dynamic and shard.slot_of is None]


def by_table(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Puts shards of the same dynamic table together, the table first; static ones stay alone."""
    groups: dict[Any, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(id(shard.table) if shard.dynamic else shard.name, []).append(shard)
    return [sorted(group, key=lambda s: s.slot_of is not None) for group in groups.values()]


def block_of(group: Sequence[Shard]) -> int:
    """Returns the number of rows in a slice, equal for a dynamic table, its slots and its keys."""
    return min(slice_rows(shard.dim, shard.dtype) for shard in group)


class ShardOperations:
    """Makes the operations that read and replace rows of a variable in place.

    Attributes:
        rows: the placeholder for the rows that `gathered` reads and `update` sets to the
            placeholder `values`.
        allocate: gives a static shard memory with any content. (Otherwise the first lookup would
            copy all of the memory, if it is NumPy's.)
        destroy: makes the variable uninitialized.
        initialized: bool scalar.
        restore: reads rows of files directly into a shard in host memory; None for other shards.
    """

    def __init__(self, variable: Any, shape: tuple[int, int], dynamic: bool):
        graph = variable.graph
        dtype = variable.dtype.base_dtype
        with (
            graphs.open_for_changes(graph),
            graph.as_default(),
            tf.init_scope(),
            tf.name_scope("collective/checkpoint"),
        ):
            self.rows = tf.placeholder(tf.int64, [None])
            self.gathered = row_writes.read(variable, self.rows)
            self.values = tf.placeholder(dtype, [None, shape[1]])
            self.update = row_writes.write(variable, self.rows, self.values)
            self.allocate = tf.raw_ops.AssignVariableOp(
                resource=variable.handle, value=initializers.empty(shape, dtype)
            )
            self.destroy = tf.raw_ops.DestroyResourceOp(
                resource=variable.handle, ignore_lookup_error=True
            )
            self.initialized = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
            self.restore: data_files.RestoreOperation | None = None
            if not (dynamic or native_library.missing() or kernel_device.on_device(dynamic)):
                self.restore = data_files.RestoreOperation(variable.handle, dtype)


def operations_of(shards: Sequence[Shard]) -> list[ShardOperations]:
    """Returns the operations of each shard.

    All are made before any runs, since a session reads a graph again whenever it has grown.
    """
    for shard in shards:
        if not hasattr(shard.variable, "_collective_checkpoint"):
            shard.variable._collective_checkpoint = ShardOperations(
                shard.variable, shard.shape, shard.dynamic
            )
    return [shard.variable._collective_checkpoint for shard in shards]


@dataclasses.dataclass(frozen=True)
class RowRequest:
    """Requests reading or writing some rows of a shard.

    Attributes:
        shard: the shard.
        first: the place of the first row in the shard's part of the checkpoint.
        local_rows: [b] the numbers of the rows on this rank.
        values: [b, D] the values to write.
    """

    shard: Shard
    first: int
    local_rows: np.ndarray
    values: np.ndarray | None = None


class RowBatch:
    """Collects rows of many small shards for one run; a large shard runs block by block."""

    def __init__(self, session: Any):
        self._session = session
        self._requests: dict[str, RowRequest] = {}
        self._bytes = 0

    def add(self, request: RowRequest) -> None:
        shard = request.shard
        size = len(request.local_rows) * shard.dim * np.dtype(shard.dtype).itemsize
        if shard.name in self._requests or self._bytes + size > tensor_bundle.SLICE_BYTES:
            self.flush()
        self._requests[shard.name] = request
        self._bytes += size

    def flush(self) -> None:
        requests, self._requests, self._bytes = list(self._requests.values()), {}, 0
        if requests:
            self._run(requests, operations_of([request.shard for request in requests]))

    def _run(self, requests: list[RowRequest], operations: list[ShardOperations]) -> None:
        raise NotImplementedError


class RowReads(RowBatch):
    """Reads rows.

    Args:
        receive: called with a shard, the place of the first row and the rows.
    """

    def __init__(self, session: Any, receive: Callable[[Shard, int, np.ndarray], None]):
        super().__init__(session)
        self._receive = receive

    def _run(self, requests: list[RowRequest], operations: list[ShardOperations]) -> None:
        feeds = {op.rows: request.local_rows for op, request in zip(operations, requests)}
        values = run_unpatched(self._session, [op.gathered for op in operations], feeds)
        # Each array is released as soon as it has been received.
        for request in reversed(requests):
            self._receive(request.shard, request.first, values.pop())


class RowWrites(RowBatch):
    """Writes rows."""

    def _run(self, requests: list[RowRequest], operations: list[ShardOperations]) -> None:
        feeds = {op.rows: request.local_rows for op, request in zip(operations, requests)}
        feeds.update({op.values: request.values for op, request in zip(operations, requests)})
        run_unpatched(self._session, [op.update for op in operations], feeds)
