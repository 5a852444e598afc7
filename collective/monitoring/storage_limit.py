"""Moves rows to the files of tables between runs, where more are in memory than are to be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import coordinator
from collective.ops.communication import collectives
from collective.tables.rows import rows_in_file


class _RunsInProgress:
    """Counts the runs of this process that know rows by their numbers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # Held while rows move: no run begins meanwhile.
        self.count = 0


_runs = _RunsInProgress()


@contextlib.contextmanager
def between_runs(session: Any, tables: Sequence[rows_in_file.TableWithFile]) -> Iterator[None]:
    """Carries out a run of `session` inside, and moves rows after it if no other is in progress.

    Args:
        session: the session.
        tables: those of its graph whose rows go to files.

    Raises:
        OSError: a file can't be written. The peers are told when they next wait for this rank.
    """
    with _runs.lock:
        _runs.count += 1
    well = False
    try:
        yield
        well = True
    finally:
        with _runs.lock:
            _runs.count -= 1
            if well and _runs.count == 0 and rows_in_file.any_is_overfull():
                _move_rows(session, tables)


def _move_rows(session: Any, tables: Sequence[rows_in_file.TableWithFile]) -> None:
    try:
        for table in tables:
            try:
                store: Any = table.store(session)
            except tf.errors.FailedPreconditionError:
                continue  # It isn't initialized.
            if store.is_overfull:
                store.limit_memory(table.columns_of_slots(session))
    except (OSError, MemoryError) as error:
        if collectives.size() > 1:
            words = f"{type(error).__name__}: {error}".rstrip(".")
            coordinator.instance().fail(session, f"failed after a run with {words}")
        raise
