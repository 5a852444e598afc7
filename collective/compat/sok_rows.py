"""Reads and assigns rows of dynamic variables by their keys, for `sok.export` and `sok.assign`.

It also records when keys were last looked up, for `sok.incremental_model_dump`.
"""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination.functions import eager_values
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
        return of_all_ranks(f"{table.op.name}/dump", keys, rows)


def _rows_since(
    number: np.ndarray, number_of_times: np.ndarray, since: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    keys, rows, used_at = _read(number, number, number_of_times)
    is_newer = used_at[:, 0] > since
    return keys[is_newer], rows[is_newer]


def exported(table: DynamicTable, holder: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this rank's keys of a table, ascending, [R], and their rows [R, d].

    Args:
        table: the table.
        holder: whose rows: the table, or a slot of it.
    """
    inputs = [tf.identity(table.number), tf.identity(holder.number)]
    with device_scopes.on_host():
        keys, rows = tf.numpy_function(_read, inputs, [tf.int64, holder.dtype], stateful=True)
    keys.set_shape([None])
    rows.set_shape([None, holder.dim])
    return keys, rows


def _read(number: np.ndarray, *numbers_of_holders: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the keys of a store, and the rows of the memories with these numbers."""
    store = row_store.registered(int(number))
    columns = [_column(store, number_of_holder) for number_of_holder in numbers_of_holders]
    keys, local = next(store.ascending(max(1, len(store))), (np.zeros(0, np.int64),) * 2)
    return (keys, *store.read(columns, keys, local))


def _column(store: Any, number: np.ndarray) -> Any:
    """Returns the memory of a table's or a slot's rows, each of which has a value."""
    memory = row_store.registered(int(number))
    if memory is store:
        return store.values
    memory.initialize_rows(store.count_in_memory)
    return memory


def imported(table: DynamicTable, holder: Any, keys: Any, rows: Any) -> tf.Operation | None:
    """Returns an operation that gives keys [b] of all ranks the rows [b, d].

    Eagerly it does so, and returns None. If several ranks give the same key, the last rank's row
    stays. A slot takes rows of the keys that its table has, and no others.

    Args:
        table: the table.
        holder: whose rows: the table, or a slot of it.
        keys, rows: this rank's.
    """
    keys, rows = tf.cast(keys, tf.int64), tf.convert_to_tensor(rows, holder.dtype)
    keys, rows = of_all_ranks(f"{holder.op.name}/assign", keys, rows)

    def put(
        number: np.ndarray, number_of_holder: np.ndarray, keys: np.ndarray, rows: np.ndarray
    ) -> np.int64:
        store = row_store.registered(int(number))
        is_taken = table._is_owned(keys)
        if holder is not table:
            is_taken &= store.locate(keys) > 0
        keys, rows = keys[is_taken], rows[is_taken]
        # If a key is given twice, the last row counts.
        keys, places = np.unique(keys[::-1], return_index=True)
        rows = rows[::-1][places]
        if holder is table:
            store.put(keys, rows)
        else:
            _column(store, number_of_holder).write(store.locate(keys), rows)
        return np.int64(len(keys))

    with device_scopes.on_host():
        inputs = [tf.identity(table.number), tf.identity(holder.number), keys, rows]
        done = tf.numpy_function(put, inputs, tf.int64, stateful=True)
    return None if tf.executing_eagerly() else done.op


def of_all_ranks(name: str, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns the ranks' tensors one after another; their first dimensions may differ.

    Args:
        name: of the exchange.
        *tensors: this rank's.

    Raises:
        RankError: eagerly, if another rank does something else.
    """
    if collectives.size() == 1:
        return tensors
    if tf.executing_eagerly():
        of_ranks = eager_values.parts(name, [x.numpy() for x in tensors], other_lengths=True)
        return tuple(tf.constant(np.concatenate(parts)) for parts in zip(*of_ranks))
    opened = gate.gates_of(tf.get_default_graph()).of_collective(tensors).zero
    name = collectives.unique_name(name)
    return tuple(
        collectives.allgather(x, f"{name}.{place}", opened) for place, x in enumerate(tensors)
    )


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
        sess: the session; by default the default session. Eager code has none.

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
    times = list(times) * (len(variables) if len(times) == 1 else 1)

    def rows_since() -> list[tuple[tf.Tensor, tf.Tensor]]:
        return [
            variable.times.rows_since(tf.constant(microseconds(time), tf.int64))
            for variable, time in zip(variables, times)
        ]

    if tf.executing_eagerly():
        dumped = [(keys.numpy(), rows.numpy()) for keys, rows in rows_since()]
    else:
        session = sess or tf.get_default_session()
        if session is None:
            raise ValueError("sok.incremental_model_dump needs a session: give it sess=.")
        with session.graph.as_default():
            dumps = rows_since()
        dumped = session.run(dumps)
    return [keys for keys, _ in dumped], [rows for _, rows in dumped]
