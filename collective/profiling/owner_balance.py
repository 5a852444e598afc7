"""Warns of ranks that are asked for far more keys than others, of measured steps.

All ranks wait for the one that is asked for most. Keys of a sharded table are asked of key mod N,
which is even unless the ids themselves aren't: all of them even numbers, or packed from two fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from collective.plan.formatting import imbalance
from collective.tables.dynamic_table import DynamicTable
from collective.tables.table import Table

# A rank is asked for far more than others with more than so many times the mean.
FAR_MORE = 2.0
# Less than this part of all tables' keys is no cost: three keys of a table aren't worth a word.
WORTH_A_WORD = 0.05


def imbalances(keys_per_owner: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns how many times the mean the busiest rank is asked for.

    Args:
        keys_per_owner: [N] keys of a step by table.

    Returns:
        By table; tables that nobody looked up, and those of a single rank, are left out.
    """
    ratios = {table: imbalance(keys) for table, keys in keys_per_owner.items() if len(keys) > 1}
    return {table: ratio for table, ratio in ratios.items() if ratio is not None}


class BalanceWarning:
    """Warns once of each table whose owners aren't balanced."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def look(self, graph: tf.Graph, keys_per_owner: Mapping[str, Sequence[float]]) -> None:
        """Warns of what is new.

        Args:
            graph: that of the step.
            keys_per_owner: [N] keys of a step by table.
        """
        variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        tables = {v.op.name: v for v in variables if isinstance(v, Table)}
        is_dynamic = {name: isinstance(table, DynamicTable) for name, table in tables.items()}
        whole = {name for name, table in tables.items() if table.placement.holder is not None}
        for table, text in uneven(keys_per_owner, is_dynamic, whole).items():
            if table not in self._warned:
                self._warned.add(table)
                warnings.warn(text, UserWarning, stacklevel=2)


def uneven(
    keys_per_owner: Mapping[str, Sequence[float]],
    is_dynamic: Mapping[str, bool],
    whole: set[str],
) -> dict[str, str]:
    """Finds tables because of which a rank is asked for more than twice the mean.

    Args:
        keys_per_owner: [N] keys of a step by table.
        is_dynamic: by table.
        whole: the tables that are whole on one rank, by choice. One of them is found only if a rank
            is asked for more than twice the mean of all tables' keys.

    Returns:
        What to say, by table.
    """
    by_rank = [sum(keys) for keys in zip(*keys_per_owner.values())]
    if len(by_rank) < 2 or not sum(by_rank):
        return {}
    total, ranks = sum(by_rank), len(by_rank)
    found = {}
    for table, keys in keys_per_owner.items():
        most = max(keys)
        is_costly = most - sum(keys) / ranks > WORTH_A_WORD * total / ranks
        if table not in whole and is_costly and most * ranks > FAR_MORE * sum(keys):
            found[table] = _words(table, keys, is_dynamic.get(table, False))
    if not found and max(by_rank) * ranks > FAR_MORE * total:
        busiest = by_rank.index(max(by_rank))
        on_busiest = {table: keys_per_owner[table][busiest] for table in whole & {*keys_per_owner}}
        if any(on_busiest.values()):
            table = max(on_busiest, key=lambda name: on_busiest[name])
            found[table] = (
                f"rank {busiest} is asked for {max(by_rank) * ranks / total:.1f} times the keys of "
                f"the mean rank, {on_busiest[table] / max(by_rank):.0%} of them of the table "
                f"'{table}', which it has whole: all ranks wait for it. Shard the table by rows "
                "(placement='rows'), or keep its rows on another rank (placement='whole:RANK')."
            )
    return found


def _words(table: str, keys: Sequence[float], is_dynamic: bool) -> str:
    ranks, most = len(keys), max(keys)
    words = (
        f"table '{table}': {most / sum(keys):.0%} of the keys that a step asks for are on rank "
        f"{keys.index(most)} of {ranks} ({most * ranks / sum(keys):.1f} times the mean): all ranks "
        "wait for it. "
    )
    if is_dynamic:
        return words + "A step has few distinct keys of this table, or ids chosen to collide."
    return words + (
        f"Key k is on rank k mod {ranks}, and these ids favour a remainder. Number them "
        "consecutively, or make the table a dynamic one, which mixes its keys "
        "(collective.get_embedding_variable); embedding_scope(placement='replicated') needs no "
        "exchange at all if the table is small."
    )
