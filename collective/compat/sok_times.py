"""Records when the keys of a table were last looked up, for `sok.incremental_model_dump`."""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, gate
from collective.ops.counting import counted
from collective.ops.graph import device_scopes, graph_analysis
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows import row_store
from collective.tables.updates.slots import Slot


class TimeOfUse(Slot):
    """Holds for each row of this rank when a run last looked it up, in µs since 1970.

    Args:
        table: the table.
    """

    may_be_missing = True  # A checkpoint that lacks it is restored.

    def __init__(self, table: DynamicTable):
        with tf.init_scope():
            first = tf.zeros([1, 1], tf.int64)
            super().__init__(table, first, f"{table.op.name}/used_at/", None, False)

    def mark(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns local `rows` after an operation that records the time of their use."""
        with device_scopes.on_host():
            # It doesn't count as an update: a write after an IdentityN isn't recognized as one
            # (`collective.ops.graph.graph_analysis.holder`).
            with tf.init_scope():
                column = tf.raw_ops.IdentityN(input=[self.handle])[0]
            with tf.control_dependencies([rows]):
                now = tf.cast(tf.timestamp() * 1e6, tf.int64)
            marked = tf.raw_ops.ResourceScatterMax(resource=column, indices=rows, updates=now)
            graph_analysis.mark_note(marked)
            with tf.control_dependencies([marked]):
                return tf.identity(rows)

    def rows_since(self, since: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the keys [R] of all ranks looked up after `since`, and their rows [R, D].

        Args:
            since: the time in µs since 1970, int64 scalar.
        """
        table = self.table
        inputs = [tf.identity(table.number), tf.identity(self.number), since]
        with device_scopes.on_host():
            keys, rows = tf.numpy_function(
                _rows_since, inputs, [tf.int64, table.dtype], stateful=True
            )
        keys.set_shape([None])
        rows.set_shape([None, table.dim])
        if collectives.size() == 1:
            return keys, rows
        opened = gate.gates_of(tf.get_default_graph()).of_collective([keys, rows]).zero
        name = collectives.unique_name(f"{table.op.name}/dump")
        return (
            collectives.allgather(keys, f"{name}.keys", opened),
            collectives.allgather(rows, f"{name}.rows", opened),
        )


def _rows_since(
    number: np.ndarray, number_of_times: np.ndarray, since: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    store, times = (row_store.registered(int(n)) for n in (number, number_of_times))
    keys, local = next(store.ascending(max(1, len(store))), (np.zeros(0, np.int64),) * 2)
    rows, used_at = store.read([store.values, times], keys, local)
    is_newer = used_at[:, 0] > since
    return keys[is_newer], rows[is_newer]


def microseconds(time: datetime) -> int:
    """Returns a time as µs since 1970; a time without a zone is local time."""
    utc = time.astimezone(tz=None).utctimetuple()
    return calendar.timegm(utc) * 1_000_000 + time.microsecond


def incremental_model_dump(
    sok_vars: Any, time_threshold: Any, sess: Any = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the rows of all ranks that runs have looked up after a time. All ranks call it.

    Args:
        sok_vars: a dynamic variable, 'hybrid', or a list of them.
        time_threshold: one `datetime` for all variables, or a list of one for each.
        sess: the session; by default the default session.

    Returns:
        The keys [R] of each variable, and their rows [R, D].

    Raises:
        TypeError: a variable is of another kind.
        ValueError: the numbers of times and variables differ, or there is no session.
    """
    variables: Sequence[Any] = sok_vars if isinstance(sok_vars, (list, tuple)) else [sok_vars]
    times = time_threshold if isinstance(time_threshold, (list, tuple)) else [time_threshold]
    for variable in variables:
        if getattr(variable, "times", None) is None:
            raise TypeError(
                "sok.incremental_model_dump takes sok.DynamicVariable(var_type='hybrid') in the "
                f"host's memory, not '{getattr(variable, 'name', variable)}'."
            )
    if len(times) not in (1, len(variables)):
        raise ValueError(
            f"sok.incremental_model_dump(time_threshold=) is one time, or one for each of "
            f"{counted(len(variables), 'variable')}, not {len(times)}."
        )
    session = sess or tf.get_default_session()
    if session is None:
        raise ValueError("sok.incremental_model_dump needs a session: give it sess=.")
    times = list(times) * (len(variables) if len(times) == 1 else 1)
    with session.graph.as_default():
        dumps = [
            variable.times.rows_since(tf.constant(microseconds(time), tf.int64))
            for variable, time in zip(variables, times)
        ]
    dumped = session.run(dumps)
    return [keys for keys, _ in dumped], [rows for _, rows in dumped]
