"""Merges what the ranks of a host request of owners on other hosts, and shares out what comes back.

The messages and rows are those of `collective.ops.embedding_bag`; words and symbols, too. A *proxy*
is a rank that asks for the A ranks of its host, the *askers*. It merges their messages to each of O
owners into one:

* in an unpooled section a key that several askers want travels once, and so does its row; its
  gradient is the askers' sum. Counts of keys are added.
* in a pooled section the askers' bags travel one behind the other.

    messages ──merge──► message ══keys══► … ══rows══► rows ──spread──► rows of each asker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import embedding_bag, native_library
from collective.ops.op_attributes import attribute

tf.no_gradient("CollectiveMergeRequests")


class MergedRequests(NamedTuple):
    """Holds what a proxy requests of the owners.

    Attributes:
        message: [X] int64, the words for owner 0, then owner 1, …
        splits: [O] int32, how many words are for each owner.
        row_splits: [A] int32, how many elements of rows each asker gets.
        positions: [B] int32, for each bag of the askers, in the order of their messages, the
            position of its row among what comes back.
        bags: [A · O · S] int64, how many bags each asker has for each owner and section.
    """

    message: tf.Tensor
    splits: tf.Tensor
    row_splits: tf.Tensor
    positions: tf.Tensor
    bags: tf.Tensor


def merge(
    messages: tf.Tensor,
    sections: Sequence[embedding_bag.Section],
    kinds: Sequence[int],
    askers: int,
    owners: int,
    counted: Sequence[bool] = (),
) -> MergedRequests:
    """Merges `messages` [Y] int64: those of asker 0 to all owners, then those of asker 1, …

    A malformed message is an `InvalidArgumentError` of the run.
    """
    return MergedRequests(
        *native_library.library().collective_merge_requests(
            messages,
            T=len(kinds),
            owners=owners,
            ranks=askers * owners,
            section_tables=[s.table for s in sections],
            kinds=list(kinds),
            dims=[s.dim for s in sections],
            pooled=[s.pooled for s in sections],
            weighted=[s.weighted for s in sections],
            counted=list(counted) if any(counted) else [],
        )
    )


def spread(
    rows: tf.Tensor, merged: MergedRequests, sections: Sequence[embedding_bag.Section], owners: int
) -> tf.Tensor:
    """Returns each asker's rows, in the order of its messages, from those that travelled.

    Args:
        rows: [E] float32, for each owner and section one row a bag of the merged message.
        merged: the requests.
        sections: S of them.
        owners: O.
    """
    return native_library.library().collective_spread_merged(
        rows, merged.positions, merged.bags, owners=owners, dims=[s.dim for s in sections]
    )


@tf.RegisterGradient("CollectiveSpreadMerged")
def _spread_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    rows, positions, bags = op.inputs
    summed = native_library.library().collective_sum_merged(
        tf.convert_to_tensor(gradient), positions, bags, rows, **_attributes(op)
    )
    return [summed, None, None]


@tf.RegisterGradient("CollectiveSumMerged")
def _sum_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    _, positions, bags, _ = op.inputs
    spread_again = native_library.library().collective_spread_merged(
        tf.convert_to_tensor(gradient), positions, bags, **_attributes(op)
    )
    return [spread_again, None, None, None]


def _attributes(op: tf.Operation) -> dict[str, Any]:
    return {name: attribute(op, name) for name in ("owners", "dims")}
