"""Saves a model that eager code made: every rank its shards, in a checkpoint like a session's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit, tensor_bundle
from collective.checkpoint.functions.entries import Entry, shards_of
from collective.checkpoint.rows import key_counts, table_io
from collective.checkpoint.rows.shards import RowRequest, Shard, dynamic_tables
from collective.checkpoint.saving.retention import Retention
from collective.checkpoint.saving.saver import SaverState, common_prefix
from collective.checkpoint.saving.saves import ShardedSave
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.ops.rows import file_systems
from collective.tables.policies import call_evictions, eviction
from collective.tables.updates import row_writes
from collective.tensorflow_internals.checkpoints import saver_pb2

STATE = "checkpoint"


class MarkHolder:
    """Holds the marks of a Saver's checkpoints, as a session holds those of its Savers."""


class ModelSaver:
    """Keeps what a Saver keeps of its checkpoints, for a model that eager code made.

    Args:
        base: the path of its checkpoints, without the step.
        max_to_keep: how many are kept, as of `tf.train.Saver`; None or 0: all.
        keep_checkpoint_every_n_hours: as of `tf.train.Saver`.
    """

    def __init__(
        self,
        base: str,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
    ):
        self.base = base
        self.owner = MarkHolder()
        # It keeps the list of checkpoints. It has no operations: it saves nothing itself.
        no_operations = dict.fromkeys(
            ("filename_tensor_name", "save_tensor_name", "restore_op_name"), "none"
        )
        saver_def = saver_pb2.SaverDef(
            version=saver_pb2.SaverDef.V2,
            max_to_keep=max_to_keep or 0,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            **no_operations,
        )
        with tf.Graph().as_default():  # It would warn of eager code.
            self.saver = tf.train.Saver({}, save_relative_paths=True, saver_def=saver_def)

    def recover(self, checkpoints: Sequence[tuple[str, float]]) -> None:
        """Takes over the checkpoints, (path, seconds), that an earlier program left."""
        self.saver.set_last_checkpoints_with_time(list(checkpoints))

    def release(self) -> None:
        """Lets other jobs save under its name."""
        ends = state_of_session(self.owner).at_close
        while ends:
            ends.popitem()[1]()

    def save(
        self,
        entries: Sequence[Entry],
        step: int | None,
        notes: Mapping[str, Any],
        evicts: bool = True,
    ) -> str:
        """Saves a checkpoint, on all ranks; returns its path when it is the latest.

        Args:
            entries: the model's variables.
            step: the global step, which is part of the name; None: the name has none.
            notes: more that the checkpoint has, by name: numbers and strings, the same on all
                ranks.
            evicts: whether rows go first that the policies of tables don't keep.

        Raises:
            CheckpointStorageError: the storage failed, on whichever rank.
            RankError: another rank does something else.
        """
        file_systems.check(self.base)
        doing = "saving a checkpoint during training"
        prefix = common_prefix(None, doing, self.base if step is None else f"{self.base}-{step}")
        base = os.path.join(os.path.dirname(prefix), os.path.basename(self.base))
        shards = shards_of(entries)
        evicting = [t for t in dynamic_tables(shards) if evicts and eviction.evicts(t.policy)]
        if evicting:
            barrier.run_on_all_ranks(
                None,
                f"evicting rows before checkpoint '{prefix}'",
                lambda: call_evictions.at_save(evicting),
            )
        replicated = {entry.name: entry.variable for entry in entries if not entry.is_sharded}
        saver = self.saver
        saver._var_list, saver._collective_state = replicated, SaverState(shards, None)
        retention = Retention.after(saver, prefix)
        state = os.path.join(os.path.dirname(base), STATE)
        publication = commit.Publication(None, state, retention.superseded)
        try:
            FunctionSave(
                saver,
                None,
                shards,
                base,
                prefix,
                STATE,
                retention,
                publication,
                {},
                notes=notes,
                holder=self.owner,
            ).run()
        finally:
            # A model that is gone needs no memory.
            saver._var_list, saver._collective_state = {}, None
        return prefix


@dataclasses.dataclass
class FunctionSave(ShardedSave):
    """Makes a checkpoint of variables that eager code made.

    Attributes:
        notes: what else it has, by name.
        holder: holds the mark of this job.
    """

    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    holder: MarkHolder = dataclasses.field(default_factory=MarkHolder)

    @property
    def owner(self) -> Any:
        return self.holder

    def write_tables(self, writer: tensor_bundle.BundleWriter) -> dict[str, Any]:
        return dict(table_io.write(None, self.shards, writer, EagerRows()))

    def write_unsharded(self, prefix: str) -> list[str]:
        with tensor_bundle.BundleWriter(prefix) as writer:
            for name, variable in self.saver._var_list.items():
                writer.add_whole(name, variable.numpy())
            for name, value in self.notes.items():
                writer.add_whole(name, value)
            return writer.close()


class EagerRows:
    """Provides rows of tables and slots that were made eagerly, like `table_io.SessionRows`."""

    def blocks(self, group: Sequence[Shard], block: int) -> tuple[int, table_io.Blocks]:
        table: Any = group[0].table
        if not group[0].dynamic:
            return group[0].shape[0], table_io.static_blocks(group[0].shape[0], block)
        table.initialize_slot_rows(None, [s.variable for s in group if s.slot_of is not None])
        return table.local_count(), table.ascending(None, block)

    def reads(self, receive: Any) -> EagerReads:
        return EagerReads(receive)

    def reader_by_key(self, group: Sequence[Shard]) -> table_io.ReaderByKey | None:
        if not group[0].dynamic:
            return None
        table: Any = group[0].table
        store = table.store(None)
        columns = [store.values if s.slot_of is None else s.variable.column(None) for s in group]
        return lambda keys, rows: store.read(columns, keys, rows)

    def key_counts(self, shard: Shard) -> key_counts.KeyCounts | None:
        return key_counts.in_session(None, shard)


class EagerReads:
    """Reads rows, like `shards.RowReads`."""

    def __init__(self, receive: Any):
        self._receive = receive

    def add(self, request: RowRequest) -> None:
        rows = tf.constant(request.local_rows, tf.int64)
        values = row_writes.read(request.shard.variable, rows)
        self._receive(request.shard, request.first, np.asarray(values))

    def flush(self) -> None:
        pass
