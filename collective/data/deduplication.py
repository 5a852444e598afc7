"""Restores the records of blocks in which repeated values are stored once, as HybridBackend does.

A row of the file is a block of records. It has a column with the block's distinct values, and one
that says for each record which of them it has:

    user      index              user, restored
    [7, 9]    [0, 1, 0, 0]       7 9 7 7
    [4]       [0, 0]             4 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

Elements = dict[str, Any]


def restoring(deduplicated: Mapping[str, Sequence[str]]) -> Callable[[Elements], Elements]:
    """Returns a function from blocks to records: of each column's lists the entries.

    Args:
        deduplicated: columns of values by the columns that number them.
    """

    def restore(blocks: Elements) -> Elements:
        records = restored_values(blocks, deduplicated)
        for name in blocks.keys() - deduplicated.keys() - records.keys():
            records[name] = _lists(blocks, name).values
        return {name: records[name] for name in blocks if name in records}

    return restore


def restored_values(blocks: Elements, deduplicated: Mapping[str, Sequence[str]]) -> Elements:
    """Returns the columns of values, with an entry for each record.

    Raises:
        ValueError: a column isn't there, or isn't one of lists.
    """
    records = {}
    for index, names in deduplicated.items():
        numbers = _lists(blocks, index)
        for name in names:
            values = _lists(blocks, name)
            first = tf.repeat(values.row_starts(), numbers.row_lengths())
            records[name] = tf.gather(values.values, first + tf.cast(numbers.values, tf.int64))
    return records


def _lists(blocks: Elements, name: str) -> tf.RaggedTensor:
    if name not in blocks:
        raise ValueError(f"deduplicate: there is no column {name!r}: there are {list(blocks)}.")
    if not isinstance(blocks[name], tf.RaggedTensor):
        raise ValueError(
            f"deduplicate: column {name!r} isn't one of lists: each row of the file is a block of "
            "records, and has a list for each column (in the form 'ragged')."
        )
    return blocks[name]
