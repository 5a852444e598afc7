"""The mean of dense tensors over ranks, in fewer bytes: they travel in a type of 16 bits and are
added in float32.

    rank r                                        rank k
    1. cast; cut into N parts
    2. part k                 ── all-to-all ──►
                                                  3. the mean of everyone's part k
    4. all means              ◄── allgather ──

As many elements travel as in an allreduce. (Horovod's own reduces no bfloat16, and adds float16 in
float16.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import communication


def compressed_mean(
    tensors: Sequence[tf.Tensor], wire: tf.DType, name: str, gate: Any
) -> list[tf.Tensor]:
    """The element-wise means over ranks of `tensors`, each in its own type again; with one rank,
    what they are.

    A value is rounded twice, before each of its ways. What is too large for `wire` becomes
    infinite.

    Args:
        tensors: of any floating types, of the same shapes on every rank.
        wire: tf.float16 or tf.bfloat16.
        name: the explicit name.
        gate: the gate's zero.
    """
    if communication.size() == 1:
        return [tf.identity(x) for x in tensors]
    shapes = [tf.shape(x) for x in tensors]
    flat = tf.concat([tf.reshape(tf.cast(x, tf.float32), [-1]) for x in tensors], 0)
    pieces = tf.split(
        _mean(flat, wire, name, gate), [tf.reduce_prod(shape) for shape in shapes], num=len(tensors)
    )
    out = [
        tf.cast(tf.reshape(piece, shape), x.dtype)
        for piece, shape, x in zip(pieces, shapes, tensors)
    ]
    for mean, x in zip(out, tensors):
        mean.set_shape(x.shape)
    return out


def _mean(x: tf.Tensor, wire: tf.DType, name: str, gate: Any) -> tf.Tensor:
    """[E] float32, the mean of the ranks' `x` [E] float32."""
    ranks = communication.size()

    @tf.custom_gradient
    def mean(x: tf.Tensor) -> Any:
        size = tf.size(x)
        part = (size + ranks - 1) // ranks
        # 1
        sent = tf.cast(tf.pad(x, [[0, part * ranks - size]]), wire)
        # 2
        received, _ = communication.alltoall(sent, tf.fill([ranks], part), f"{name}.parts", gate)
        # 3
        mine = tf.reduce_mean(tf.cast(tf.reshape(received, [ranks, part]), tf.float32), 0)
        # As integers: the gate is added to what is gathered, and no float but its own keeps the
        # bits of infinity.
        # 4
        bits = communication.allgather(
            tf.bitcast(tf.cast(mine, wire), tf.int16), f"{name}.means", gate
        )
        # Linear, and its own transpose: the gradient of the sum of all ranks' outputs is the mean
        # of theirs.
        return tf.cast(tf.bitcast(bits[:size], wire), tf.float32), lambda gradient: _mean(
            gradient,
            wire,
            communication.unique_name(name[len(communication.PREFIX) :] + ".gradient"),
            gate,
        )

    return mean(x)
