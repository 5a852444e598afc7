"""Lets named consumers follow the changes of tables, each with its own cursor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.rows.shards import Shard, find_shards, operations_of
from collective.checkpoint.rows.table_changes import Follower, TableChanges
from collective.coordination.session_state import state_of_session
from collective.ops.graph.sessions import raw_session, run_unpatched
from collective.tables.table import Table, shard_of
from collective.tables.updates import write_announcements
from collective.tensorflow_internals.variables import variables as variables_lib


@dataclasses.dataclass(frozen=True)
class TableUpdate:
    """Describes the changes of this rank's rows of a table, or of a slot of one.

    Attributes:
        name: the name of the table or slot.
        whole: whether all rows of this rank count as changed; rows that aren't included were
            removed. It is so at a consumer's first look, and after a restore.
        removed: [R] int64 removed keys of a dynamic table, ascending. A key that came back is only
            among the changed ones.
    """

    name: str
    whole: bool
    removed: np.ndarray
    _changes: TableChanges
    _shard: Shard

    def __len__(self) -> int:
        """Returns how many rows have changed on this rank."""
        return self._changes.count

    def blocks(self, block: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields changed keys, ascending, and their rows: int64 [b], [b, D], b <= block.

        Keys of a static table are the numbers of its rows. Finish it before the next run.
        """
        changes, shard = self._changes, self._shard
        (operations,) = operations_of([shard])
        for keys, rows in changes.blocks(block):
            of_group = changes.read(keys, rows)
            if of_group is not None:
                yield keys, of_group[list(changes.group).index(shard)]
            else:
                gathered = run_unpatched(
                    changes.session, operations.gathered, {operations.rows: rows}
                )
                yield keys, gathered


class Consumer:
    """Follows the tables of a graph under a name; made by `collective.checkpoint.changes`.

    Args:
        name: the consumer's name.
        graph: the graph.
        slots: whether to follow the optimizers' slots, too.
    """

    def __init__(self, name: str, graph: tf.Graph, slots: bool):
        write_announcements.want(graph)
        self.name, self._graph, self._slots = name, graph, slots

    @contextlib.contextmanager
    def take(self, session: Any) -> Iterator[dict[str, TableUpdate]]:
        """Yields the changes in `session` since this consumer's last take, by tables' names.

        This is only this rank's part: every rank may take its own part or not. After an error
        inside, the cursor stays where it was; else the changes are taken when the `with` statement
        ends.

        Args:
            session: a session of the graph, also a `MonitoredSession`, between two runs.

        Raises:
            tf.errors.FailedPreconditionError: a table isn't initialized.
            ValueError: the session belongs to another graph.
        """
        session = raw_session(session)
        if session.graph is not self._graph:
            raise ValueError(f"consumer '{self.name}' follows the tables of another graph.")
        followers, shards = state_of_session(session).followers, self._shards()
        follower = followers.get(self.name)
        if follower is None or not follower.follows(shards):
            follower = followers[self.name] = Follower(session, shards)
        operations_of(shards)
        follower.begin()
        try:
            yield {
                shard.name: TableUpdate(shard.name, changes.whole, changes.removed, changes, shard)
                for changes in follower.changes().values()
                for shard in changes.group
            }
        except BaseException:
            follower.undo()
            raise
        follower.done()

    def _shards(self) -> list[Shard]:
        found = {
            variable.op.name: variable
            for variable in self._graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            if isinstance(variable, variables_lib.Variable)
            and (isinstance(variable, Table) or self._slots and shard_of(variable) is not None)
        }
        return find_shards(found)
