"""Defines the first dimension of a dynamic table's shape if the table has its own policy.

The shape is the only thing that a feature column can pass through TensorFlow's columns and layers
to the place where the table is made.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.policy import TablePolicy


class OpenDimension(tf.Dimension):
    """Stands for None in the shape [None, D] of a dynamic table.

    Two of them are equal if their policies are: TensorFlow refuses feature columns that share a
    table and differ in their numbers of buckets.

    Attributes:
        policy: the table's.
    """

    __slots__ = ("policy",)

    def __init__(self, policy: TablePolicy):
        super().__init__(None)
        self.policy = policy

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, OpenDimension) and self.policy == other.policy

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.policy)

    def __reduce__(self) -> Any:
        return OpenDimension, (self.policy,)

    def __repr__(self) -> str:
        return f"None with {self.policy}"

    __str__ = __repr__


def policy_in(shape: Any) -> TablePolicy | None:
    """Returns the policy that a shape has with its first dimension; None if it has none."""
    first = shape[0] if isinstance(shape, (tuple, list)) and shape else None
    return first.policy if isinstance(first, OpenDimension) else None
