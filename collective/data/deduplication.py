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
        others = [name for name in blocks if name not in deduplicated and name not in records]
        # Each of these columns has an entry for each record.
        index, *alike = [*deduplicated, *others]
        checks = [_check_lengths(blocks, index, name) for name in alike]
        records.update({name: blocks[name].values for name in others})
        with tf.control_dependencies(checks):
            return {name: tf.identity(records[name]) for name in blocks if name in records}

    return restore


def restored_values(blocks: Elements, deduplicated: Mapping[str, Sequence[str]]) -> Elements:
    """Returns the columns of values, with an entry for each record.

    A number that its block's list of values doesn't have is an `InvalidArgumentError` at run time.

    Raises:
        ValueError: a column is missing, or isn't a column of lists; or one that numbers values
            isn't of whole numbers.
    """
    records = {}
    for index, names in deduplicated.items():
        numbers = _lists(blocks, index)
        if not numbers.dtype.is_integer or numbers.ragged_rank > 1:
            kind = "lists of " * numbers.ragged_rank + str(numbers.dtype.name)
            raise ValueError(
                f"deduplicate: column {index!r} is an index of values, but of {kind}. It must "
                "have a list of whole numbers for each block: name the column that has it, or "
                "write the files again."
            )
        block = numbers.value_rowids()
        for name in names:
            values = _lists(blocks, name)
            entry = tf.cast(numbers.values, tf.int64)
            check = _check_numbers(entry, tf.gather(values.row_lengths(), block), index, name)
            with tf.control_dependencies([check]):
                entry += tf.gather(values.row_starts(), block)
            records[name] = tf.gather(values.values, entry)
    return records


def _check_numbers(entry: tf.Tensor, length: tf.Tensor, index: str, name: str) -> tf.Operation:
    """Checks that each number [R] is from 0 to below the length [R] of its block's list."""
    return _refuse(
        (entry < 0) | (entry >= length),
        [
            f"deduplicate: column {index} has the number ",
            entry,
            f" in a block whose list in column {name} has length ",
            length,
            ". Numbers are counted from 0 within a block: write the files again, or name the "
            "column "
            f"that numbers {name}.",
        ],
    )


def _check_lengths(blocks: Elements, one: str, other: str) -> tf.Operation:
    """Checks that the lists of two columns have the same length in each block."""
    lengths = [_lists(blocks, name).row_lengths() for name in (one, other)]
    return _refuse(
        tf.not_equal(*lengths),
        [
            "deduplicate: a block has a list of length ",
            lengths[0],
            f" in column {one}, and of length ",
            lengths[1],
            f" in column {other}. Each has an entry for each record of the block: write the files "
            f"again, or leave {other} out of the columns that are read.",
        ],
    )


def _refuse(is_bad: tf.Tensor, message: Sequence[str | tf.Tensor]) -> tf.Operation:
    """Returns the operation that raises an `InvalidArgumentError` if any of `is_bad` [R] is true.

    Args:
        is_bad: bool.
        message: texts, and tensors [R], of which the first bad element is told.
    """
    first = tf.where(is_bad)[:1, 0]
    parts = [part if isinstance(part, str) else _text(tf.gather(part, first)) for part in message]
    return tf.Assert(tf.equal(tf.size(first), 0), [tf.strings.join(parts)])


def _text(number: tf.Tensor) -> tf.Tensor:
    """Returns a number [1] in words, or an empty string of none [0]."""
    return tf.strings.reduce_join(tf.strings.as_string(number))


def _lists(blocks: Elements, name: str) -> tf.RaggedTensor:
    if name not in blocks:
        raise ValueError(f"deduplicate: there is no column {name!r}: there are {list(blocks)}.")
    if not isinstance(blocks[name], tf.RaggedTensor):
        raise ValueError(
            f"deduplicate: column {name!r} isn't one of lists: each row of the file is a block of "
            "records, and has a list for each column (in the form 'ragged')."
        )
    return blocks[name]
