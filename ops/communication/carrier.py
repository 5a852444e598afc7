"""Defines a carrier: it builds TensorFlow's operations for each kind of collective."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from collective.ops.graph import control_flow, graph_state
from collective.ops.graph.device_scopes import on_host_like
from collective.ops.graph.graphs import is_function
from collective.tensorflow_internals.graphs import attr_value_pb2

Phase = Literal["other", "rows", "gradients"]


@dataclasses.dataclass
class OpenedGates:
    """Records for which gates the collectives of a graph wait.

    Attributes:
        zeros: the gates' int32 zeros as they are known in the graph, by the collectives' names.
    """

    zeros: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


class Carrier:
    """Carries collectives. Each kind of carrier is one object, in its own file.

    `collectives` describes the arguments and results of the methods. It also registers the
    gradients of the operations that they build, under the names `Collective` + kind.

    Attributes:
        name: the name by which COLLECTIVE_CARRIER and `scope(carrier=…)` ask for it.
        prefix: the beginning of its operations' types.
        is_of_library: whether this library defines its operations, and registers their gradients.
    """

    name: str
    prefix: str
    is_of_library = True

    def used_for(self, x: tf.Tensor) -> Carrier:
        """Returns the carrier that takes `x` if this one is chosen: by default this one."""
        return self

    def alltoall(
        self, x: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[k]` rows of `x` to rank k; returns the rows received, and their splits."""
        wire, back = as_wire(x)
        with self.scope("Alltoall", x, name, gate) as opened:
            out, received = self._alltoall(wire, splits + opened, name, phase)
        out.set_shape([None] + wire.shape[1:].as_list())
        return from_wire(out, back), received

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, gate: Any) -> list[tf.Tensor]:
        """Returns the sums over ranks of tensors of one type."""
        raise NotImplementedError

    def allgather(self, x: tf.Tensor, name: str, gate: Any) -> tf.Tensor:
        """Returns the ranks' `x`, one after another."""
        wire, back = as_wire(x)
        with self.scope("Allgather", x, name, gate) as opened:
            out = self._allgather(wire, opened, back is not None, name)
        out.set_shape([None] + x.shape[1:].as_list())
        return from_wire(out, back)

    def broadcast(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Returns rank 0's `x`."""
        wire, back = as_wire(x)
        with tf.name_scope("meeting"), on_host_like(x):
            out = self._broadcast(wire, name)
        out.set_shape(x.shape)
        return from_wire(out, back)

    @contextlib.contextmanager
    def scope(self, kind: str, x: tf.Tensor, name: str, gate: Any) -> Iterator[Any]:
        """Prepares the graph for an operation on `x`; yields the gate as it is known there.

        Nothing else there may have the operation's name, or TensorFlow would add a number to it.

        The name is also an attribute of the operation. TensorFlow treats two operations with the
        same inputs and attributes as one, and drops the second: for example, the keys of two tables
        that are looked up with the same ids. A rank that answers without data wouldn't drop it, and
        would wait for the peers forever.
        """
        graph = tf.get_default_graph()
        control_flow.one_at_a_time()
        if is_function(graph):
            # The gradient of a branch or a function takes the gate from here: it can't reach
            # further outside.
            gate = graph.capture(gate)
        graph_state.of(graph, OpenedGates).zeros[name] = gate
        name_attribute = {"_collective": attr_value_pb2.AttrValue(s=name.encode())}
        with (
            tf.name_scope("meeting"),
            on_host_like(x),
            graph._attr_scope(name_attribute),
            graph.gradient_override_map({f"{self.prefix}{kind}": f"Collective{kind}"}),
        ):
            yield gate

    def _alltoall(
        self, wire: tf.Tensor, splits: tf.Tensor, name: str, phase: Phase
    ) -> tuple[tf.Tensor, tf.Tensor]:
        raise NotImplementedError

    def _allgather(self, wire: tf.Tensor, opened: Any, is_bits: bool, name: str) -> tf.Tensor:
        raise NotImplementedError

    def _broadcast(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        raise NotImplementedError


def as_wire(x: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
    """Returns `x` in a type that Horovod moves by all-to-all, and the type to convert back to.

    Horovod doesn't move bfloat16; its bits travel as float16's, whatever they mean as such.
    """
    return (bits_as(x, tf.float16), tf.bfloat16) if x.dtype == tf.bfloat16 else (x, None)


def from_wire(out: tf.Tensor, back: tf.DType | None) -> tf.Tensor:
    """Converts what has travelled back to the type that `as_wire` returned."""
    return out if back is None else bits_as(out, back)


def bits_as(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts bits like `tf.bitcast`, but differentiably: the gradient's bits are cast back."""
    with tf.get_default_graph().gradient_override_map({"Bitcast": "CollectiveBitcast"}):
        return tf.bitcast(x, dtype)


@tf.RegisterGradient("CollectiveBitcast")
def _bitcast_gradient(op: tf.Operation, gradient: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.inputs[0])[0]
        )
    # The gradient travels in its own type (collective.ops.exchange.key_exchange).
    if gradient.dtype != op.outputs[0].dtype:
        return gradient
    return bits_as(gradient, op.inputs[0].dtype)


def gated(wire: tf.Tensor, opened: Any, is_bits: bool) -> tf.Tensor:
    """Makes `wire` depend on the gate. Nothing may be added to the bits of another type.

    Args:
        wire: the tensor that travels.
        opened: the gate's zero.
        is_bits: whether `wire` holds the bits of another type.
    """
    if is_bits:
        return tf.where(tf.equal(opened, 0), wire, tf.zeros_like(wire))
    return wire + tf.cast(opened, wire.dtype)


def elements(x: tf.Tensor) -> Any:
    """Returns the number of elements of `x`: a number, or a tensor if the graph doesn't tell."""
    return x.shape.num_elements() if x.shape.is_fully_defined() else tf.size(x)


def like(piece: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns the flat `piece` in the shape of `x`."""
    piece = tf.reshape(piece, tf.shape(x))
    piece.set_shape(x.shape)
    return piece
