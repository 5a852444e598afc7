"""Carries collectives of several hosts: within a host through its memory, the rest by Horovod."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import carrier_choice
from collective.ops.communication.carrier import Phase
from collective.ops.communication.collective_names import near
from collective.ops.communication.horovod_carrier import HOROVOD, HorovodCarrier
from collective.ops.communication.shared_memory_carrier import SHARED_MEMORY


class MixedCarrier(HorovodCarrier):
    """Splits an all-to-all in two parts; all other collectives go through Horovod."""

    name = carrier_choice.MIXED

    def alltoall(
        self, x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Carrier`.

        The ranks of a host are consecutive, so what they send and receive is in one piece.
        """
        host = carrier_choice.ranks_of_host()
        lower, near_splits, upper = _by_host(splits, host)
        x_lower, x_near, x_upper = tf.split(
            x, [tf.reduce_sum(part) for part in (lower, near_splits, upper)], num=3
        )
        from_near, near_received = SHARED_MEMORY.alltoall(
            x_near, near_splits, near(name), gate, phase
        )
        far_splits = tf.concat([lower, tf.zeros_like(near_splits), upper], 0)
        far, far_received = HOROVOD.alltoall(
            tf.concat([x_lower, x_upper], 0), far_splits, name, gate, phase
        )
        lower, _, upper = _by_host(far_received, host)
        sizes = [tf.reduce_sum(part) for part in (lower, upper)]
        far_lower, far_upper = tf.split(far, sizes, num=2)
        received = tf.concat([lower, near_received, upper], 0)
        return tf.concat([far_lower, from_near, far_upper], 0), received


def _by_host(splits: tf.Tensor, host: range) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Cuts `splits` [N] in three: of lower ranks, of the ranks of this host, of higher ranks."""
    return splits[: host.start], splits[host.start : host.stop], splits[host.stop :]


MIXED = MixedCarrier()
