"""A graph's tables and their slots, as a Saver names them, and the operations that read and replace
a rank's rows of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint import tensor_bundle
from collective.checkpoint.layout import DYNAMIC, STATIC, StoredTable, part_rows
from collective.checkpoint.tensor_bundle import slice_rows
from collective.ops import collectives, graphs
from collective.ops.sessions import run_unpatched
from collective.tables import initializers
from collective.tables.table import Table, shard_of


@dataclasses.dataclass(frozen=True)
class Shard:
    """A table or a slot of one in a graph, which a Saver calls `name`.

    Attributes:
        name: of its column.
        variable: the table, or the slot's variable.
        table: the table itself, or whose slot it is.
        slot_of: the name of the table's column; None for a table.
    """

    name: str
    variable: Any
    table: Table
    slot_of: str | None

    @property
    def dynamic(self) -> bool:
        return not hasattr(self.table, "rows") or self.table.rows is None

    @property
    def dim(self) -> int:
        """D: a table's, or of the slot's own rows."""
        return self.table.dim if self.slot_of is None else int(self.variable.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Of this rank's rows, if it is static; a dynamic one's grows, and counts as [0, D]."""
        rows = (
            0
            if self.dynamic
            else part_rows(self.table.rows, collectives.size(), collectives.rank())
        )
        return rows, self.dim

    @property
    def dtype(self) -> Any:
        return self.variable.dtype.base_dtype.as_numpy_dtype

    @property
    def keys(self) -> str | None:
        return f"{self.slot_of or self.name}/keys" if self.dynamic else None

    def column(self, parts: Sequence[int], block: int) -> StoredTable:
        return StoredTable(
            name=self.name,
            kind=DYNAMIC if self.dynamic else STATIC,
            rows=None if self.dynamic else self.table.rows,
            dim=self.dim,
            dtype=self.variable.dtype.base_dtype.name,
            block=block,
            parts=tuple(parts),
            slot_of=self.slot_of,
            keys=self.keys,
        )


def shards_of(named: dict[str, Any]) -> list[Shard]:
    """The tables and slots among variables, {name for the Saver: variable}.

    Raises:
        ValueError: a slot of a dynamic table without the table, whose keys say which rows are
            whose.
    """
    tables = {id(v): name for name, v in named.items() if isinstance(v, Table)}
    out: list[Shard] = []
    for name, variable in sorted(named.items()):
        table = shard_of(variable)
        if table is None:
            continue
        own = isinstance(variable, Table)
        shard = Shard(name, variable, table, None if own else tables.get(id(table), table.op.name))
        if any(variable is other.variable for other in out):
            raise ValueError(f"var_list has the variable '{variable.op.name}' under two names.")
        if shard.dynamic and id(table) not in tables:
            raise ValueError(
                f"var_list has '{name}', a slot of the dynamic table "
                f"'{table.op.name}', but not the table: "
                "add it."
            )
        out.append(shard)
    return out


def by_table(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards of the same dynamic table together, static ones each by itself."""
    groups: dict[Any, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(id(shard.table) if shard.dynamic else shard.name, []).append(shard)
    return [sorted(group, key=lambda s: s.slot_of is not None) for group in groups.values()]


def block_of(group: Sequence[Shard]) -> int:
    """Rows in a slice: the same for a dynamic table, its slots and its keys."""
    return min(slice_rows(shard.dim, shard.dtype) for shard in group)


class Operations:
    """Of one variable: what reads rows of it in place, and what gives it other values.

    Attributes:
        rows: the placeholder for the rows that `gathered` reads and `update` sets to the
            placeholder `values`.
        allocate: gives a static shard memory, of any content. (NumPy's would be copied by the first
            lookup, all of it.)
        destroy: makes the variable uninitialized.
        initialized: whether it isn't.
    """

    def __init__(self, variable: Any, shape: tuple[int, int]):
        graph = variable.graph
        with (
            graphs.open_for_changes(graph),
            graph.as_default(),
            tf.init_scope(),
            tf.name_scope("collective/checkpoint"),
        ):
            self.rows = tf.placeholder(tf.int64, [None])
            self.gathered = tf.raw_ops.ResourceGather(
                resource=variable.handle, indices=self.rows, dtype=variable.dtype.base_dtype
            )
            self.values = tf.placeholder(variable.dtype.base_dtype, [None, shape[1]])
            self.update = tf.raw_ops.ResourceScatterUpdate(
                resource=variable.handle, indices=self.rows, updates=self.values
            )
            self.allocate = tf.raw_ops.AssignVariableOp(
                resource=variable.handle, value=initializers.empty(shape, variable.dtype.base_dtype)
            )
            self.destroy = tf.raw_ops.DestroyResourceOp(
                resource=variable.handle, ignore_lookup_error=True
            )
            self.initialized = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)


def operations(shards: Sequence[Shard]) -> list[Operations]:
    """Those of each shard; all are made before any runs, since a session takes in a graph anew
    whenever it has grown.
    """
    for shard in shards:
        if not hasattr(shard.variable, "_collective_checkpoint"):
            shard.variable._collective_checkpoint = Operations(shard.variable, shard.shape)
    return [shard.variable._collective_checkpoint for shard in shards]


class Batch:
    """Runs an operation on many small shards in one run, and on a large one block by block."""

    def __init__(self, session: Any):
        self._session = session
        self._asked: dict[str, tuple[Shard, int, np.ndarray, np.ndarray | None]] = {}
        self._bytes = 0

    def ask(
        self, shard: Shard, first: int, local_rows: np.ndarray, values: np.ndarray | None = None
    ) -> None:
        """For `local_rows` of a shard, the first of which stands at `first` of whatever is read or
        written.
        """
        size = len(local_rows) * shard.dim * np.dtype(shard.dtype).itemsize
        if shard.name in self._asked or self._bytes + size > tensor_bundle.SLICE:
            self.flush()
        self._asked[shard.name] = shard, first, local_rows, values
        self._bytes += size

    def flush(self) -> None:
        asked, self._asked, self._bytes = list(self._asked.values()), {}, 0
        if asked:
            self._run(asked, operations([shard for shard, *_ in asked]))

    def _run(self, asked: list[Any], made: list[Operations]) -> None:
        raise NotImplementedError


class Gather(Batch):
    """Reads rows.

    Args:
        keep: called with a shard, the place of the first row and the rows.
    """

    def __init__(self, session: Any, keep: Callable[[Shard, int, np.ndarray], None]):
        super().__init__(session)
        self._keep = keep

    def _run(self, asked: list[Any], made: list[Operations]) -> None:
        found = run_unpatched(
            self._session, [m.gathered for m in made], {m.rows: a[2] for m, a in zip(made, asked)}
        )
        for shard, first, _, _ in reversed(asked):
            self._keep(shard, first, found.pop())


class Scatter(Batch):
    """Writes rows."""

    def _run(self, asked: list[Any], made: list[Operations]) -> None:
        feeds = {m.rows: a[2] for m, a in zip(made, asked)}
        run_unpatched(
            self._session,
            [m.update for m in made],
            {**feeds, **{m.values: a[3] for m, a in zip(made, asked)}},
        )
