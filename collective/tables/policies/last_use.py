"""Records when each row of a dynamic table was last used.

    training ──► rows of the batch ──► last_used[rows] = step

The step of a row's last use is kept in a separate column, which is saved and restored like an
optimizer's slot. Evaluation, prediction and serving don't change it. On a GPU it is next to the key
in the hash table, and the column holds it only while it is saved, restored or exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes, graph_analysis, graphs
from collective.ops.graph.sessions import run_unpatched
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import eager_steps, next_step
from collective.tables.rows.row_columns import HostColumn, RowColumn
from collective.tables.rows.row_store import Store
from collective.tables.updates import write_announcements
from collective.tables.updates.slots import Slot

BLOCK = 1 << 14  # Rows in a file that are checked at once.


class LastUse(Slot):
    """Holds, for each row, the global step of the run that used it last.

    0 means that no training has used the row yet.

    Args:
        table: the table.
        collections: those of the table.
    """

    may_be_missing = True  # A checkpoint that lacks it is restored.

    def __init__(self, table: DynamicTable, collections: Sequence[str] | None):
        with tf.init_scope():
            first = tf.zeros([1, 1], tf.int64)
            # A name with this ending is always this variable's, wherever the table is made.
            super().__init__(table, first, f"{table.op.name}/last_used/", collections, False)

    def mark(self, rows: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        """Returns local `rows`, after the operation that notes their use in a run that trains."""
        step = next_step.of_table(self.table)
        with device_scopes.on_host():
            # Evaluation doesn't count as an update: after an IdentityN a write isn't seen as one
            # (`collective.ops.graph.graph_analysis.holder`); a branch takes it from outside. It
            # writes 0, which is no later use.
            with graphs.outside():
                column = tf.raw_ops.IdentityN(input=[self.handle])[0]
            marked = tf.raw_ops.ResourceScatterMax(
                resource=column,
                indices=rows,
                updates=tf.where_v2(training, step, tf.zeros([], tf.int64)),
            )
            graph_analysis.mark_note(marked)
            with tf.control_dependencies([marked]):
                return tf.identity(rows)

    def new_column(self, first: np.ndarray | None = None) -> RowColumn:
        column = super().new_column(first)
        column.holds_last_uses = True
        return column

    def used(self, session: Any) -> np.ndarray:
        """Returns its values in `session` for all keys of the store, int64 [R].

        From then on, rows that no training has used count as used now.
        """
        self.begin(session, in_file=True)
        return self.table.store(session).all_last_uses(self.column(session))

    def begin(self, session: Any, in_file: bool = False) -> None:
        """Makes rows that no training has used, such as imported ones, count as used now.

        Args:
            session: the session.
            in_file: whether to include rows in the table's file.
        """
        store, step = self.table.store(session), _first_use(session, self.table)
        self._begin_in_memory(session, store, step)
        for keys in store.keys_in_file(BLOCK) if in_file else ():
            used = store.last_uses(self.column(session), keys, store.locate(keys))
            if (used == 0).any():
                store.rows(keys[used == 0], False)  # They come into memory.
                self._begin_in_memory(session, store, step)
                store.limit_memory(self.table.columns_of_slots(session))

    def _begin_in_memory(self, session: Any, store: Store, step: int) -> None:
        column: Any = self.column(session)
        used: np.ndarray = column.view_of(store.count_in_memory)
        unused = np.flatnonzero(used[:, 0] == 0)
        if len(unused):
            if session is not None:
                write_announcements.announce_rows(session, self, unused + 1)
            used[unused] = step


class DeviceLastUse(LastUse):
    """Is the `LastUse` of a table on a GPU, where the hash table notes the steps with the keys."""

    def new_column(self, first: np.ndarray | None = None) -> RowColumn:
        return _SavedColumn(self.table.capacity + 1, self.dim, self._numpy, first)

    def noted_step(self) -> tf.Tensor:
        """Returns the step that is noted when training finds rows, int64 scalar."""
        return next_step.of_table(self.table)

    def mark(self, rows: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        return rows

    def used(self, session: Any) -> np.ndarray:
        """Returns the hash table's values in `session`, see `LastUse.used`."""
        store: Any = self.table.store(session)
        used: np.ndarray = store.all_last_uses(None)
        unused = np.flatnonzero(used == 0)
        used[unused] = _first_use(session, self.table)
        store.set_last_used(unused + 1, used[unused])
        return used

    def settle(self, session: Any, count: int) -> None:
        """Copies the hash table's values in `session` before they are read."""
        store: Any = self.table.store(session)
        column: Any = self.column(session)
        column.view_of(count)[:, 0] = store.all_last_uses(None)[:count]

    def begin(self, session: Any, in_file: bool = False) -> None:
        """Copies restored values to the hash table, and makes other rows count as used now."""
        store: Any = self.table.store(session)
        column: Any = self.column(session)
        restored, column.filled = column.filled, 0
        store.set_last_used(np.arange(1, restored + 1), column.view_of(restored)[:, 0])
        self.used(session)


class _SavedColumn(HostColumn):
    """Keeps the saved or restored values of a column that is kept elsewhere."""

    def close_gaps(self, from_: np.ndarray, to: np.ndarray, before: int, after: int) -> None:
        pass


def _first_use(session: Any, table: DynamicTable) -> int:
    """Returns the step of use for rows that no training has used: 1 at the earliest.

    0 would still mean no use, and the rows would count as used whenever they are checked.
    """
    return max(step_of(session, table), 1)


def step_of(session: Any, table: DynamicTable) -> int:
    """Returns the global step of `session`; None: how many steps have trained an eager table."""
    return eager_steps.trained(table) if session is None else global_step(session)


def global_step(session: Any) -> int:
    """Returns the global step of `session`, 0 if it has none or isn't initialized."""
    step = tf.train.get_global_step(session.graph)
    if step is None:
        return 0
    try:
        return int(run_unpatched(session, step))
    except tf.errors.FailedPreconditionError:
        return 0
