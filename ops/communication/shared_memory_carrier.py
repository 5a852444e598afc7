"""Carries collectives through memory that the CPU ranks of one host share (`native/carrier.cc`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import carrier_choice
from collective.ops.communication.carrier import Carrier, Phase, gated


class SharedMemoryCarrier(Carrier):
    """Carries them by compiled operations; an all-to-all has one split per rank of the host."""

    name, prefix = carrier_choice.SHARED_MEMORY, "CollectiveShared"

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
        """See `Carrier`. The gate travels as one more element: it costs no pass over the data."""
        with self.scope("Allreduce", tensors[0], name, gate) as opened:
            gate_element = tf.cast(opened, tensors[0].dtype)[None]
            *sums, _ = native_library.on_host().collective_shared_allreduce(
                [*tensors, gate_element], name=name
            )
        return sums

    def _alltoall(
        self, wire: tf.Tensor, splits: tf.Tensor, name: str, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        out, received = native_library.on_host().collective_shared_alltoall(
            wire, splits, phase=phase, name=name
        )
        return out, received

    def _allgather(self, wire: tf.Tensor, opened: Any, is_bits: bool, name: str) -> tf.Tensor:
        return native_library.on_host().collective_shared_allgather(
            gated(wire, opened, is_bits), name=name
        )

    def _broadcast(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        return native_library.on_host().collective_shared_broadcast(wire, name=name)


SHARED_MEMORY = SharedMemoryCarrier()
