"""Columns of tables in a session: this rank's rows of them to a checkpoint, and back from one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from collective.checkpoint.layout import CheckpointLayout, StoredTable
from collective.checkpoint.shards import Gather, Scatter, Shard, block_of, by_table, operations
from collective.checkpoint.tensor_bundle import Bundle, Writer
from collective.ops import collectives
from collective.ops import key_hashing as owning
from collective.ops.sessions import run_unpatched

SPARE = 100 << 20  # bytes of shards that may be there twice while they are restored


def write(session: Any, shards: Sequence[Shard], writer: Writer) -> dict[str, int]:
    """Writes this rank's rows of all columns; how many rows each has here."""
    layout, ranks, rank = (
        CheckpointLayout(collectives.size()),
        collectives.size(),
        collectives.rank(),
    )
    columns: dict[str, StoredTable] = {}
    operations(shards)

    def keep(shard: Shard, first: int, values: np.ndarray) -> None:
        column = columns[shard.name]
        writer.add(layout.entry(column, rank), (column.parts[rank], column.dim), first, values)

    gather = Gather(session, keep)
    for group in by_table(shards):
        block, table = block_of(group), group[0].table
        count, blocks = (
            _dynamic_rows(session, table, group, block)
            if group[0].dynamic
            else _static_rows(group[0].shape[0], block)
        )
        columns.update({shard.name: shard.column([count] * ranks, block) for shard in group})
        first = 0
        for keys, rows in blocks if count else [(np.zeros(0, np.int64), np.zeros(0, np.int64))]:
            if group[0].dynamic:
                writer.add(layout.keys_entry(columns[group[0].name], rank), (count,), first, keys)
            for shard in group:
                gather.ask(shard, first, rows)
            first += len(rows)
    gather.flush()
    return {name: column.parts[rank] for name, column in columns.items()}


def _static_rows(count: int, block: int) -> tuple[int, Iterator[Any]]:
    return count, (
        (None, np.arange(first, min(first + block, count))) for first in range(0, count, block)
    )


def _dynamic_rows(
    session: Any, table: Any, group: Sequence[Shard], block: int
) -> tuple[int, Iterator[Any]]:
    table.initialize_slot_rows(session, [s.variable for s in group if s.slot_of is not None])
    return table.local_count(session), table.ascending(session, block)


def layout_of(shards: Sequence[Shard], counts: Sequence[dict[str, int]]) -> CheckpointLayout:
    """The layout of what ranks 0, 1, … wrote, `counts` rows each."""
    columns = [
        shard.column([told[shard.name] for told in counts], block_of(group))
        for group in by_table(shards)
        for shard in group
    ]
    return CheckpointLayout(len(counts), {column.name: column for column in columns})


def own_rows(column: StoredTable, ranks: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """Which parts of a static column hold rows of `rank` of `ranks`: (part, its first such row,
    every how many).

    Part p of N' holds rows p, p + N', …; of these every N / gcd(N, N')th is the rank's, if any is.
    """
    saved = len(column.parts)
    step = ranks // math.gcd(ranks, saved)
    for part in range(saved):
        first = next((i for i in range(step) if (i * saved + part) % ranks == rank), None)
        if first is not None and first < column.parts[part]:
            yield part, first, step


def own_parts(saved: int, ranks: int, rank: int) -> range:
    """Which of `saved` parts of a dynamic column can hold keys of `rank` of `ranks`.

    A key is in part mix(key) mod `saved`, and its owner is mix(key) mod `ranks`: some number has
    both remainders only if they are the same modulo gcd(saved, ranks).
    """
    step = math.gcd(saved, ranks)
    return range(rank % step, saved, step)


def read_static(
    bundle: Bundle, column: StoredTable, keep: Callable[[np.ndarray, np.ndarray], None]
) -> None:
    """Calls keep(local rows [b], their values [b, D]) for all rows that this rank owns, a block at
    a time.
    """
    saved, ranks = len(column.parts), collectives.size()
    for part, offset, step in own_rows(column, ranks, collectives.rank()):
        entry = bundle.layout.entry(column, part)
        for first in range(0, column.parts[part], column.block):
            count = min(column.block, column.parts[part] - first)
            here = (offset - first) % step
            values = bundle.read(entry, first, count)[here::step]
            local = ((first + here + np.arange(len(values)) * step) * saved + part) // ranks
            keep(local, values)


def read_shard(bundle: Bundle, column: StoredTable, out: np.ndarray) -> np.ndarray:
    """Fills `out` with this rank's rows of a static table or slot, and returns it."""

    def keep(local: np.ndarray, values: np.ndarray) -> None:
        if len(local):
            out[
                int(local[0]) : int(local[-1]) + 1 : int(local[1] - local[0])
                if len(local) > 1
                else 1
            ] = values

    read_static(bundle, column, keep)
    return out


def read_dynamic(
    bundle: Bundle,
    columns: Sequence[StoredTable],
    keep: Callable[[np.ndarray, list[np.ndarray]], None],
) -> None:
    """Calls keep(keys [b], the values [b, D] of each of `columns`) for all keys that this rank
    owns, a block at a time.
    """
    layout, own, ranks, rank = bundle.layout, columns[0], collectives.size(), collectives.rank()
    for part in own_parts(len(own.parts), ranks, rank):
        for first in range(0, own.parts[part], own.block):
            count = min(own.block, own.parts[part] - first)
            keys = bundle.read(layout.keys_entry(own, part), first, count)
            mine = owning.owners_np(keys, ranks) == rank
            keep(
                keys[mine],
                [bundle.read(layout.entry(column, part), first, count)[mine] for column in columns],
            )


class Loaded:
    """This rank's rows of all columns that are being restored.

    Static shards that have no values yet are filled as they are read. What has values keeps them
    until all ranks have read all: new values wait in memory, or, if these are too many, are read
    once more.

    Args:
        pairs: each shard and the column of the checkpoint that it is restored from.
    """

    def __init__(self, session: Any, bundle: Bundle, pairs: Sequence[tuple[Shard, StoredTable]]):
        self._session, self._bundle = session, bundle
        self._columns = {shard.name: column for shard, column in pairs}
        self._groups = by_table([shard for shard, _ in pairs])
        self._static = [shard for shard, _ in pairs if not shard.dynamic]
        self._there: set[str] = set()
        self._waiting: list[tuple[Shard, np.ndarray]] = []
        self._dynamic: list[Any] = []
        self.twice = False

    def must_read_twice(self) -> bool:
        """Whether the old and the new values together are too much for this rank's memory."""
        shards = [shard for group in self._groups for shard in group]
        flags = run_unpatched(self._session, [made.initialized for made in operations(shards)])
        self._there = {shard.name for shard, there in zip(shards, flags) if there}
        ranks = collectives.size()
        return SPARE < sum(
            self._columns[shard.name].count // ranks * shard.dim * np.dtype(shard.dtype).itemsize
            for shard in shards
            if shard.name in self._there
        )

    def verify(self) -> None:
        """Reads all of it once, keeping nothing."""
        for group in self._groups:
            columns = [self._columns[shard.name] for shard in group]
            if group[0].dynamic:
                read_dynamic(self._bundle, columns, lambda *_: None)
            else:
                read_static(self._bundle, columns[0], lambda *_: None)

    def read(self) -> None:
        """Reads all that can be read before every rank has read without an error."""
        new = [shard for shard in self._static if shard.name not in self._there]
        run_unpatched(self._session, [made.allocate for made in operations(new)])
        self._fill(new)
        if not self.twice:
            self._waiting = [
                (
                    shard,
                    read_shard(
                        self._bundle, self._columns[shard.name], np.empty(shard.shape, shard.dtype)
                    ),
                )
                for shard in self._static
                if shard.name in self._there
            ]
        for group in self._groups:
            if group[0].dynamic:
                self._read_dynamic(group)

    def undo(self) -> None:
        """Takes back what `read` has done to the session."""
        run_unpatched(
            self._session,
            [
                made.destroy
                for made in operations([s for s in self._static if s.name not in self._there])
            ],
        )

    def assign(self) -> None:
        """Puts all that was read in force."""
        scatter = Scatter(self._session)
        while self._waiting:
            shard, values = self._waiting.pop()
            block = block_of([shard])
            for first in range(0, len(values), block):
                scatter.ask(
                    shard,
                    first,
                    np.arange(first, min(first + block, len(values))),
                    values[first : first + block],
                )
        scatter.flush()
        if self.twice:
            self._fill([shard for shard in self._static if shard.name in self._there])
        while self._dynamic:
            self._dynamic.pop().assign(self._session)

    def _fill(self, shards: Sequence[Shard]) -> None:
        """Reads static shards right into their variables."""
        scatter = Scatter(self._session)
        for shard in shards:

            def keep(local: np.ndarray, values: np.ndarray, shard: Shard = shard) -> None:
                scatter.ask(shard, 0, local, values)

            read_static(self._bundle, self._columns[shard.name], keep)
        scatter.flush()

    def _read_dynamic(self, group: Sequence[Shard]) -> None:
        table: Any = group[0].table
        slots = [shard.variable for shard in group if shard.slot_of is not None]
        # an empty one in its place: its memory belongs to more than the variable
        if self.twice:
            run_unpatched(
                self._session, [v.initializer for v in (table, *getattr(table, "slots", []))]
            )
        loading = table.loading(slots)

        def add(keys: np.ndarray, values: list[np.ndarray]) -> None:
            loading.add(keys, values[0], dict(zip([slot.op.name for slot in slots], values[1:])))

        read_dynamic(self._bundle, [self._columns[shard.name] for shard in group], add)
        self._dynamic.append(loading)
