"""Finds rows of dynamic tables in host memory, with operations of the compiled library.

`ops/native/row_store.h` has the keys, and what is known about the memory of rows and slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from collective.ops.native_library import on_host

for _name in (
    "CollectiveFindRows",
    "CollectiveAdmitRows",
    "CollectiveCountRows",
    "CollectiveSettleSlots",
):
    tf.no_gradient(_name)


def find(
    numbers: Sequence[tf.Tensor],
    handles: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    insert: tf.Tensor,
) -> list[tf.Tensor]:
    """Returns the local rows of keys of T tables, int64 in the shapes of the keys.

    Args:
        numbers: the stores' numbers, T int64 scalars.
        handles: the variables with the rows, which stay as long as they are written.
        keys: T times int64.
        insert: bool scalar: True gives new keys rows with initial values, else they have row 0.

    Raises:
        tf.errors.ResourceExhaustedError: in a run; there is no room for a table's new rows. The
            tables before and after it have got theirs.
    """
    rows: list[tf.Tensor] = on_host().collective_find_rows(numbers, handles, keys, insert, steps=[])
    return rows


def admit(
    numbers: Sequence[tf.Tensor],
    handles: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    counts: Sequence[tf.Tensor],
    training: tf.Tensor,
    step: tf.Tensor,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the local rows of keys of T tables with admission, int64 in the shapes of the keys.

    A key without a row gets 0 outside of training, and -1 in a training run. For a row r >= 1 that
    only later runs see, it is -1 - r: the lookup reads row 0, and an update changes row r.

    Args:
        numbers, handles: as for `find`.
        keys: T times int64.
        counts: T times int64, how often each key was asked for.
        training: bool scalar: True counts keys, and gives rows to those that are admitted.
        step: int64 scalar, the global step to which the run leads.

    Returns:
        (the rows, by how much the count of each row grows: 0 if there is no row).

    Raises:
        tf.errors.ResourceExhaustedError: in a run; there is no room for new rows or counts.
    """
    admitted = on_host().collective_admit_rows(numbers, handles, keys, counts, training, step)
    return list(admitted.rows), list(admitted.added)


def seen(rows: tf.Tensor) -> tf.Tensor:
    """Returns the rows that a lookup reads, given the result of `admit`."""
    return tf.maximum(rows, 0)


def updated(rows: tf.Tensor) -> tf.Tensor:
    """Returns the rows that an update changes, given the result of `admit`; 0 if there is none."""
    return tf.where_v2(rows < 0, -1 - rows, rows)


def count(number: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows of a table, int64 scalar, after the control dependencies."""
    rows: tf.Tensor = on_host().collective_count_rows(number)
    return rows


def settle_slots(
    training: tf.Tensor,
    rows: tf.Tensor,
    number: tf.Tensor,
    slots: Sequence[tf.Tensor],
    handles: Sequence[tf.Tensor],
    refusal: str,
) -> tf.Tensor:
    """Gives slots of a table their initial values for all of its rows, before they are updated.

    Args:
        training: bool scalar; a run where it is False fails.
        rows: the rows of the update. They are not read: the operation waits for their keys.
        number: the store's number, int64 scalar.
        slots: the columns' numbers, int64 scalars.
        handles: the handles of the slots' variables.
        refusal: the text of the error.

    Returns:
        The number of rows for which slots have values, int64 scalar.
    """
    count: tf.Tensor = on_host().collective_settle_slots(
        training, rows, number, slots, handles, refusal=refusal
    )
    return count
