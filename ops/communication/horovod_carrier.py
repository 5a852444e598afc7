"""Carries collectives by Horovod, which asks before each whether all ranks are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import carrier_choice
from collective.ops.communication.carrier import Carrier, Phase, elements, gated, like
from collective.ops.communication.horovod_library import hvd


class HorovodCarrier(Carrier):
    """Carries them by `horovod.tensorflow` 0.28: between hosts, and on GPUs."""

    name, prefix, is_of_library = carrier_choice.HOROVOD, "Horovod", False

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
        """See `Carrier`. The gate travels as one more element: it costs no pass over the data."""
        with self.scope("Allreduce", tensors[0], name, gate) as opened:
            gate_element = tf.cast(opened, tensors[0].dtype)[None]
            flat = tf.concat([tf.reshape(x, [-1]) for x in tensors] + [gate_element], 0)
            out = hvd.allreduce(flat, op=hvd.Sum, name=name, ignore_name_scope=True)
        pieces = tf.split(out, [elements(x) for x in tensors] + [1])[:-1]
        return [like(piece, x) for piece, x in zip(pieces, tensors)]

    def _alltoall(
        self, wire: tf.Tensor, splits: tf.Tensor, name: str, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        out, received = hvd.alltoall(wire, splits=splits, name=name, ignore_name_scope=True)
        return out, received

    def _allgather(self, wire: tf.Tensor, opened: Any, is_bits: bool, name: str) -> tf.Tensor:
        return hvd.allgather(gated(wire, opened, is_bits), name=name, ignore_name_scope=True)

    def _broadcast(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.broadcast(wire, 0, name=name, ignore_name_scope=True)


HOROVOD = HorovodCarrier()
