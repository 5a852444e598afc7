"""Merges what a host's ranks request from owners on other hosts, and shares out what comes back.

Messages, rows, words and symbols are those of `collective.ops.exchange.embedding_bag`. A *proxy* is
a rank that asks for the A ranks of its host, the *askers*. It merges their messages to each of O
owners into one:

* in an unpooled section, a key that several askers want travels once, and so does its row; its
  gradient is the sum of the askers' gradients. Counts of keys are added.
* in a pooled section, the askers' bags travel one after the other.

    messages ──merge──► message ══keys══► … ══rows══► rows ──spread──► rows of each asker

If gradients must not be added on the way, owners get the messages of all askers unchanged. They
merge them like the proxies do, so that both sides know which rows travel:

    flat ──first──► one row for each key of a host ══rows══► rows ──spread──► rows of each asker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.exchange import embedding_bag

tf.no_gradient("CollectiveMergeRequests")
tf.no_gradient("CollectiveFirstMerged")


class MergedRequests(NamedTuple):
    """Holds what a proxy requests from the owners.

    Attributes:
        message: [X] int64, the words for owner 0, then owner 1, …
        splits: [O] int32, the number of words for each owner.
        row_splits: [A] int32, the number of elements of rows for each asker.
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
    by_owner: bool = False,
) -> MergedRequests:
    """Merges `messages` [Y] int64: those of asker 0 to all owners, then those of asker 1, …

    With `by_owner` they are those of all askers to owner 0, then those to owner 1, …, and the
    positions and numbers of bags follow that order, too. A malformed message makes the run fail
    with `InvalidArgumentError`.
    """
    return MergedRequests(
        *native_library.on_host().collective_merge_requests(
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
            by_owner=by_owner,
        )
    )


def first(
    rows: tf.Tensor, merged: MergedRequests, sections: Sequence[embedding_bag.Section], owners: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns one row of each merged bag, in the order of the merged message.

    Args:
        rows: [R] float32, for each message and section one row per bag; the rows of a key are
            equal.
        merged: the requests, merged by owner.
        sections: S of them.
        owners: O.

    Returns:
        (the rows, flat; [O] int32, the number of elements for each owner).
    """
    flat, splits = native_library.on_host().collective_first_merged(
        rows, merged.positions, merged.bags, owners=owners, dims=[s.dim for s in sections]
    )
    return flat, splits


def row_splits(
    message: tf.Tensor, splits: tf.Tensor, sections: Sequence[embedding_bag.Section]
) -> tf.Tensor:
    """Returns [K] int32: how many elements of rows the requests in each of K messages come to.

    Args:
        message: [X] int64, the K messages.
        splits: [K] int32, how many words each has.
        sections: S of them.
    """
    dims = tf.constant([section.dim for section in sections], tf.int64)
    bags = 2 * tf.range(len(sections))  # where their numbers are in a message
    numbers = tf.gather(message, tf.cumsum(splits, exclusive=True)[:, None] + bags)
    return tf.cast(tf.reduce_sum(numbers * dims, 1), tf.int32)


def spread(
    rows: tf.Tensor, merged: MergedRequests, sections: Sequence[embedding_bag.Section], owners: int
) -> tf.Tensor:
    """Returns each asker's rows, in the order of its messages, from the rows that travelled.

    Args:
        rows: [E] float32, for each owner and section one row per bag of the merged message.
        merged: the requests.
        sections: S of them.
        owners: O.
    """
    return native_library.on_host().collective_spread_merged(
        rows, merged.positions, merged.bags, owners=owners, dims=[s.dim for s in sections]
    )


@tf.RegisterGradient("CollectiveSpreadMerged")
def _spread_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    rows, positions, bags = op.inputs
    summed = native_library.on_host().collective_sum_merged(
        tf.convert_to_tensor(gradient), positions, bags, rows, **_attributes(op)
    )
    return [summed, None, None]


@tf.RegisterGradient("CollectiveSumMerged")
def _sum_gradient(op: tf.Operation, gradient: Any) -> list[Any]:
    _, positions, bags, _ = op.inputs
    spread_again = native_library.on_host().collective_spread_merged(
        tf.convert_to_tensor(gradient), positions, bags, **_attributes(op)
    )
    return [spread_again, None, None, None]


def _attributes(op: tf.Operation) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in ("owners", "dims")}
