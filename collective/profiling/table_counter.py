"""Counts the keys that dynamic tables gain and lose between measured runs."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tables.dynamic_table import DynamicTable

# By table, then as `TableStatistics.counts` names them.
TableCounts = dict[str, dict[str, int]]
TableRates = dict[str, dict[str, float]]
SIZES = frozenset({"rows", "bytes"})


class TableCounter:
    """Counts after each measured run, and remembers the last counts."""

    def __init__(self) -> None:
        self._number = 0
        self._counts: TableCounts = {}

    def count(self, session: Any, number: int) -> tuple[TableCounts, TableRates]:
        """Counts what the dynamic tables of `session` have on this rank.

        Args:
            session: the session.
            number: the number of the run before.

        Returns:
            The counts since the session initialized or restored the tables; and, except for sizes,
            their increase per step since the previous counted run.
        """
        counts = _counts(session)
        steps = max(1, number - self._number)
        rates = {
            table: _rates(of_table, self._counts.get(table, {}), steps)
            for table, of_table in counts.items()
        }
        self._number, self._counts = number, counts
        return counts, rates


def _counts(session: Any) -> TableCounts:
    counts = {}
    for table in session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        if isinstance(table, DynamicTable):
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # It isn't initialized.
                counts[table.op.name] = table.statistics(session).counts()
    return counts


def _rates(counts: dict[str, int], before: dict[str, int], steps: int) -> dict[str, float]:
    """Returns the increase per step. Counts restart for a table that was restored meanwhile."""
    rates = {}
    for name, count in counts.items():
        if name not in SIZES:
            earlier = before.get(name, 0)
            rates[name] = (count - earlier if earlier <= count else count) / steps
    return rates
