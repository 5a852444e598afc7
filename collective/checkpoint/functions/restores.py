"""Restores a session's checkpoint into a model that eager code made, at any number of ranks.

Every rank reads everything once before anything changes on any rank: a checkpoint that is damaged,
or of another model, leaves all as it was. Then each rank reads its own rows again, block by block,
into its tables and slots, so that no shard is in memory twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, storage
from collective.checkpoint.files.layout import StoredTable
from collective.checkpoint.functions.entries import Entry, is_counter, shards_of
from collective.checkpoint.reading import compatibility, merged_reader
from collective.checkpoint.restoring.restores import finish_tables
from collective.checkpoint.rows import increment_io, key_counts, table_io
from collective.checkpoint.rows.shards import Shard, by_table
from collective.checkpoint.saving.saver import latest_state, note_last_checkpoint
from collective.coordination import barrier, common_folder
from collective.ops.communication import collectives
from collective.scope import SCOPES
from collective.tables.policies import call_evictions
from collective.tables.updates import row_writes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Latest:
    """Describes the newest checkpoint of a folder, as rank 0 finds it.

    Attributes:
        prefix: its path.
        increments: how many increments follow it.
        checkpoints: all that are kept, (path, seconds), the newest last.
    """

    prefix: str
    increments: int
    checkpoints: list[tuple[str, float]]


def find_latest(folder: str) -> Latest | None:
    """Finds a folder's newest checkpoint, on rank 0 for all; None if it has none.

    Raises:
        StorageFailure: the file that names it can't be read.
        RankError: that, on the other ranks.
    """

    def find() -> dict[str, Any] | None:
        if collectives.rank() > 0:
            return None
        state = latest_state(folder)
        if state is None:
            return None
        prefix = str(state.model_checkpoint_path)
        kept = [str(path) for path in state.all_model_checkpoint_paths]
        times = [*state.all_model_checkpoint_timestamps]
        times += [0.0] * (len(kept) - len(times))
        with storage.reading():
            number = chain.newest(prefix)
        return {"prefix": prefix, "increments": number, "kept": list(zip(kept, times))}

    doing = "finding the latest checkpoint"
    by_rank = barrier.run_on_all_ranks(None, doing, lambda: (folder, find()))
    folders = [each for each, _ in by_rank]
    common_folder.rank_0s(doing, "Checkpoint(directory)", folders, folder, stacklevel=2)
    found = by_rank[0][1]
    if found is None:
        return None
    kept = [(str(path), float(seconds)) for path, seconds in found["kept"]]
    return Latest(found["prefix"], found["increments"], kept)


def restore(latest: Latest, entries: Sequence[Entry], notes: Sequence[str]) -> dict[str, Any]:
    """Gives a model's variables their values of a checkpoint, on all ranks or on none.

    Args:
        latest: the checkpoint.
        entries: the model's variables.
        notes: names of what else the checkpoint may have.

    Returns:
        The values of `notes` that it has, by name.

    Raises:
        tf.errors.NotFoundError: the checkpoint lacks variables.
        tf.errors.InvalidArgumentError: some have another shape, dtype or kind there.
        tf.errors.DataLossError: a file is missing, cut off or damaged.
        RankError: it failed on another rank.
    """

    def on_all_ranks(doing: str, function: Callable[[], T]) -> list[T]:
        def read() -> T:
            with storage.reading():
                return function()

        name = f"restoring checkpoint '{latest.prefix}': {doing}"
        return barrier.run_on_all_ranks(None, name, read)

    made: list[_Restore] = []
    on_all_ranks("comparing", lambda: made.append(_Restore(latest, entries)))
    restored = made[0]
    on_all_ranks("reading", restored.read)
    on_all_ranks("tables", restored.assign)
    finish_tables(on_all_ranks, None, latest.prefix, restored.tables)
    note_last_checkpoint(restored.links.last.prefix, chain.step_of(restored.links.last))
    return restored.notes(notes)


class _Restore:
    """Restores one checkpoint, in steps that all ranks take together.

    Attributes:
        links: the checkpoint, with its increments.
    """

    def __init__(self, latest: Latest, entries: Sequence[Entry]):
        self.links = chain.open_links(latest.prefix, latest.increments)
        fresh = SCOPES.options.missing_slots == "fresh"
        found = {entry.name: entry.found_in(self.links) for entry in entries}
        names = {name: there or name for name, there in found.items()}
        there = [
            entry
            for entry in entries
            if found[entry.name] is not None
            or not entry.is_optional
            and not (entry.is_optimizers and fresh)
        ]
        self._shards = shards_of(there, names)
        # Two optimizers may have their steps from one number.
        self._replicated = [(names[e.name], e.variable) for e in there if not e.is_sharded]
        # A counter of steps may be of another type there.
        compared = {n: v for n, v in self._replicated if not is_counter(v)}
        for name, variable in self._replicated:
            if is_counter(variable) and name not in self.links.base.entries:
                compared[name] = variable
        self._plan = compatibility.plan(self.links.base, self._shards, compared, fresh, False)
        self._values: dict[str, np.ndarray] = {}

    @property
    def tables(self) -> list[Any]:
        """Returns the dynamic tables that it restores."""
        return [group[0].table for group, _ in self._dynamic()]

    def read(self) -> None:
        """Reads everything once, and keeps what isn't a table's."""
        for name in dict(self._replicated):
            stored = self._plan.whole.get(name)
            self._values[name] = (
                self.links.last.read_whole(name)
                if stored is None
                else merged_reader.read_whole(self.links, stored)
            )
        for shard, stored in self._static():
            self._read_rows(shard, stored, lambda *_: None)
        for group, stored_tables in self._dynamic():
            table: Any = group[0].table
            self._read_keys(table, stored_tables, lambda *_: None, lambda *_: None)
            if table.counts_keys:
                self._read_counts(group[0], stored_tables[0], table.new_store())

    def assign(self) -> None:
        """Puts everything into effect."""
        for shard, stored in self._static():
            self._read_rows(shard, stored, _writer(shard))
        for group, stored_tables in self._dynamic():
            rows = _RowsInPlace(group)
            self._read_keys(group[0].table, stored_tables, rows.add, rows.remove)
            self._read_counts(group[0], stored_tables[0], rows.store)
        for name, variable in self._replicated:
            variable.assign(np.asarray(self._values[name], variable.dtype.as_numpy_dtype))
        call_evictions.begin_again(self.tables)

    def notes(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns what else the checkpoint has."""
        bundle = self.links.last
        return {name: bundle.read_whole(name) for name in names if name in bundle.entries}

    def _static(self) -> list[tuple[Shard, StoredTable]]:
        return [(shard, stored) for shard, stored in self._plan.pairs if not shard.dynamic]

    def _dynamic(self) -> Iterator[tuple[list[Shard], list[StoredTable]]]:
        """Yields each dynamic table with its slots, and what the checkpoint has of them."""
        stored = {shard.name: stored for shard, stored in self._plan.pairs}
        for group in by_table([shard for shard, _ in self._plan.pairs]):
            if group[0].dynamic:
                yield group, [stored[shard.name] for shard in group]

    def _read_keys(
        self,
        table: Any,
        stored_tables: Sequence[StoredTable],
        receive: Callable[[np.ndarray, list[np.ndarray]], None],
        remove: Callable[[Callable[[np.ndarray], np.ndarray]], None],
    ) -> None:
        now = table.placement
        table_io.read_dynamic(self.links.base, stored_tables, now, receive)
        increment_io.read_dynamic(self.links, stored_tables, now, receive, remove)

    def _read_counts(self, shard: Shard, stored: StoredTable, store: Any) -> None:
        key_counts.read(self.links.last, shard, stored.name, store)

    def _read_rows(
        self, shard: Shard, stored: StoredTable, receive: Callable[[np.ndarray, np.ndarray], None]
    ) -> None:
        now = shard.table.row_placement
        table_io.read_static(self.links.rows_of(stored), stored, now, receive)
        increment_io.read_static(self.links, stored, now, receive)


class _RowsInPlace:
    """Takes a dynamic table's keys, rows and slots, after removing all that it has.

    A slot that isn't among the group starts fresh.

    Args:
        group: the table and its slots.

    Attributes:
        store: the table's.
    """

    def __init__(self, group: Sequence[Shard]):
        self._table: Any = group[0].table
        table, slots = self._table, [shard.variable for shard in group[1:]]
        self.store, self._all_slots = table.store(None), table.columns_of_slots(None)
        self._slots = [slot.column(None) for slot in slots]
        # Those that a row has to have before it goes to a file.
        self._others: list[Any] | None = None
        if table.policy.storage is not None:
            self._others = [s for s in table.slots if all(s is not slot for slot in slots)]
        self.store.clear(self._all_slots)
        if table.counts_keys:
            self.store.keys.forget(None)

    def add(self, keys: np.ndarray, values: list[np.ndarray]) -> None:
        local = self.store.put(keys, values[0])
        count = self.store.count_in_memory
        for column, rows in zip(self._slots, values[1:]):
            column.ensure_capacity(count)
            column.write(local, rows)
            column.filled = count
        if self._others is not None:
            self._table.initialize_slot_rows(None, self._others)
            self.store.limit_memory(self._all_slots)

    def remove(self, choose: Callable[[np.ndarray], np.ndarray]) -> None:
        self.store.remove_keys(choose(self.store.all_keys().copy()), self._all_slots)


def _writer(shard: Shard) -> Callable[[np.ndarray, np.ndarray], None]:
    def write(rows: np.ndarray, values: np.ndarray) -> None:
        if len(rows):
            row_writes.write(shard.variable, tf.constant(rows, tf.int64), tf.constant(values))

    return write
