"""Exchanges keys and rows: keys go to their owners, and rows come back.

The gradients travel back as the derivative of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.communication.gate import KeyRequest, gates_of
from collective.ops.graph import graph_state


@dataclasses.dataclass
class GradientTypes:
    """Records the types in which gradients of a graph's rows travel, by the casts' names."""

    by_cast: dict[str, tf.DType] = dataclasses.field(default_factory=dict)


class ReceivedKeys(NamedTuple):
    """Holds the keys that peers request from this rank.

    Attributes:
        keys: int64, in the order of the asking ranks.
        splits: [N] int32, how much of `keys` comes from each rank.
    """

    keys: tf.Tensor
    splits: tf.Tensor


class Wire(NamedTuple):
    """Names the types in which rows and their gradients travel."""

    rows: tf.DType
    gradients: tf.DType


def keys_to_owners(
    keys: tf.Tensor,
    splits: tf.Tensor,
    name: str,
    gate: Any,
    empty_words: int = 0,
    description: str = "",
) -> ReceivedKeys:
    """Sends every key to its owner. For `empty_words` and `description` see `KeyRequest`."""
    requests = gates_of(tf.get_default_graph()).key_requests
    requests[name] = KeyRequest(keys, splits, empty_words, description)
    return ReceivedKeys(*collectives.alltoall(keys, splits, name, gate))


def rows_back(
    rows: tf.Tensor,
    splits: tf.Tensor,
    name: str,
    gate: Any,
    wire: Wire | None = None,
    alltoall: Callable[..., tuple[tf.Tensor, tf.Tensor]] = collectives.alltoall,
) -> tf.Tensor:
    """Returns the rows that this rank requested, from what every owner found.

    Args:
        rows: the rows that peers requested from this rank.
        splits: [N] int32, how many elements of `rows`' first dimension go to each rank.
        name: the collective's name.
        gate: the gate's zero.
        wire: the types in which rows and gradients travel; by default their own types.
        alltoall: the collective.
    """
    if wire is None or wire == Wire(rows.dtype, rows.dtype):
        return alltoall(rows, splits, name, gate, "rows")[0]
    rows_sent = _cast(rows, wire.rows, rows.dtype)
    received = alltoall(rows_sent, splits, name, gate, "rows")[0]
    return _cast(received, rows.dtype, wire.gradients)


def gradients_to_owners(
    gradients: tf.Tensor, splits: tf.Tensor, name: str, gate: Any, wire: Wire
) -> tf.Tensor:
    """Returns the gradients of rows that peers send, as the derivative of `rows_back` does.

    Args:
        gradients: the gradients of the rows that this rank requested.
        splits: [N] int32, how many elements of the first dimension go to each rank.
        name, gate: the collective's name and the gate's zero.
        wire: the types in which rows and gradients travel.
    """
    if wire == Wire(gradients.dtype, gradients.dtype):
        return collectives.alltoall(gradients, splits, name, gate, "gradients")[0]
    sent = _cast(gradients, wire.gradients, gradients.dtype)
    received = collectives.alltoall(sent, splits, name, gate, "gradients")[0]
    return _cast(received, gradients.dtype, wire.rows)


def _cast(x: tf.Tensor, dtype: tf.DType, gradient: tf.DType) -> tf.Tensor:
    """Casts like `tf.cast`, but casts the gradient to `gradient` instead of the type of `x`."""
    graph = tf.get_default_graph()
    with graph.gradient_override_map({"Cast": "CollectiveWire", "Identity": "CollectiveWire"}):
        out = tf.identity(x) if x.dtype == dtype else tf.cast(x, dtype)
    graph_state.of(graph, GradientTypes).by_cast[out.op.name] = gradient
    return out


@tf.RegisterGradient("CollectiveWire")
def _wire_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    return _cast(
        tf.convert_to_tensor(gradient),
        graph_state.of(op.graph, GradientTypes).by_cast[op.name],
        op.outputs[0].dtype,
    )
