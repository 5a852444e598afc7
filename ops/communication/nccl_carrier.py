"""Carries collectives by NCCL between the GPUs of one host (`native/gpu/nccl_carrier.cc`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import carrier_choice, nccl
from collective.ops.communication.carrier import Carrier, Phase
from collective.ops.communication.shared_memory_carrier import SHARED_MEMORY


class NcclCarrier(Carrier):
    """Carries them on the operations' own stream; headers go through shared memory."""

    name, prefix = carrier_choice.NCCL, "CollectiveNccl"

    def used_for(self, x: tf.Tensor) -> Carrier:
        """See `Carrier`. Tensors in the host's memory don't go through a GPU."""
        is_on_host = tf.DeviceSpec.from_string(x.device).device_type == "CPU"
        return SHARED_MEMORY if is_on_host and not nccl.moves_host_memory() else self

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
        """See `Carrier`."""
        with self.scope("Allreduce", tensors[0], name, gate) as opened:
            sums: list[tf.Tensor] = native_library.library().collective_nccl_allreduce(
                list(tensors), opened, name=name
            )
        return sums

    def _alltoall(
        self, wire: tf.Tensor, splits: tf.Tensor, name: str, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        out, received = native_library.library().collective_nccl_alltoall(
            wire, splits, phase=phase, name=name
        )
        return out, received

    def _allgather(self, wire: tf.Tensor, opened: Any, is_bits: bool, name: str) -> tf.Tensor:
        return native_library.library().collective_nccl_allgather(wire, opened, name=name)

    def _broadcast(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        return native_library.library().collective_nccl_broadcast(wire, name=name)


NCCL = NcclCarrier()
