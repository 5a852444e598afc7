"""Finds the least recently used rows of a dynamic table, a few of them in every step.

    last uses of all rows ──► the oldest ones, sorted ──► one after the other, after each step

A row's last use only gets later, and a new row is later than all others. So the rows that were
selected as the oldest stay the oldest, except for those that were used meanwhile, which are
skipped. All rows are checked again when no selected row is left, which is rare.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The fraction of rows that is selected at once, and the minimum number of rows.
SHARE_SORTED, FEWEST_SORTED = 16, 1 << 12


class LeastRecentRows:
    """Finds the least recently used rows of one store; rows of the same age are ordered by key."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._used = np.empty(0, np.int64)

    def forget(self) -> None:
        """Forgets which rows are the oldest, because rows that are as old may have been added."""
        self._keys, self._used = self._keys[:0], self._used[:0]

    def take(
        self, store: Any, column: Any, count: int, before: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Takes keys whose rows are to be removed now.

        Args:
            store: the `collective.tables.rows.row_store.Store`, in every call the same.
            column: holds the steps of all rows' last uses.
            count: how many.
            before: rows whose last use is this step, or later, aren't taken.

        Returns:
            (`count` distinct keys or fewer, their places as in `Store.locate`), both int64.
        """
        taken, taken_places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        missing = count
        while missing > 0:
            if not len(self._keys):
                self._sort(store, column, missing, before, np.concatenate(taken))
                if not len(self._keys):
                    break
            keys, noted = self._keys[:missing], self._used[:missing]
            self._keys, self._used = self._keys[missing:], self._used[missing:]
            places = store.locate(keys)
            is_there = places > 0  # Otherwise the key has been removed since.
            keys, noted, places = keys[is_there], noted[is_there], places[is_there]
            is_unused = store.last_uses(column, keys, places) == noted
            taken.append(keys[is_unused])
            taken_places.append(places[is_unused])
            missing -= len(taken[-1])
        return np.concatenate(taken), np.concatenate(taken_places)

    def _sort(self, store: Any, column: Any, missing: int, before: int, taken: np.ndarray) -> None:
        """Selects at least `missing` of the oldest rows, without those of the `taken` keys."""
        all_keys = store.all_keys()
        used = store.all_last_uses(column)
        wanted = max(missing + len(taken), len(used) // SHARE_SORTED, FEWEST_SORTED)
        wanted = min(wanted, int(np.count_nonzero(used < before)))
        if wanted <= len(taken):
            return
        last = np.partition(used, wanted - 1)[wanted - 1]
        rows = np.flatnonzero(used < last)
        of_same_age = np.flatnonzero(used == last)
        room = wanted - len(rows)
        if room < len(of_same_age):
            smallest = np.argpartition(all_keys[of_same_age], room - 1)[:room]
            of_same_age = of_same_age[smallest]
        rows = np.concatenate([rows, of_same_age])
        rows = rows[~np.isin(all_keys[rows], taken)]
        order = np.lexsort((all_keys[rows], used[rows]))
        self._keys, self._used = all_keys[rows][order], used[rows][order]
