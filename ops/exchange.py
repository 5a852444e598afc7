"""The two ways of an exchange: keys to their owners, rows back. The way back of the gradients is its derivative."""
from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import communication, kernels
from collective.ops.gate import Asking, gates_of


class Asked(NamedTuple):
    """What the peers want of this rank.

    Attributes:
        keys: [R] int64, in the order of the ranks that ask.
        splits: [N] int32, how many each of them asks for.
    """
    keys: tf.Tensor
    splits: tf.Tensor


def keys_to_owners(distinct: kernels.Distinct, name: str, gate: Any) -> Asked:
    """Every key travels to its owner."""
    gates_of(tf.get_default_graph()).asked[name] = Asking(distinct.keys, distinct.splits)
    return Asked(*communication.alltoall(distinct.keys, distinct.splits, name, gate))


def rows_back(rows: tf.Tensor, asked: Asked, name: str, gate: Any) -> tf.Tensor:
    """[U, D]: the rows of this rank's distinct keys, from `rows` [R, D] that every owner found for `asked`."""
    return communication.alltoall(rows, asked.splits, name, gate)[0]
