"""Initial rows of a table, a shard at a time: row i is the same for every number of ranks and either backend.

A row comes from (seed, the table's name, i) alone, by a counter-based generator: element d of row i is a hash of
seed and i * D + d. The hash is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014). The distributions are TensorFlow's, the numbers are not.
"""
from __future__ import annotations

import hashlib
import math
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import variables

Fill = Callable[[np.ndarray, int], np.ndarray]       # (row numbers [R] uint64, D) -> values [R, D]
BLOCK = 1 << 16                                     # elements drawn at once

_GAMMA, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hashed(seed: int, counter: np.ndarray, draw: int = 0) -> np.ndarray:
    """uint64 values for the uint64 `counter`; `draw` numbers independent values of one counter."""
    with np.errstate(over='ignore'):
        x = np.uint64(seed) + counter * _GAMMA + np.uint64(draw) * _MIX1
        for shift, factor in ((30, _MIX1), (27, _MIX2)):
            x = (x ^ (x >> np.uint64(shift))) * factor
        return np.asarray(x ^ (x >> np.uint64(31)))


def uniform(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), multiples of 2**-53."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0 ** -53


def normal(bits: np.ndarray) -> np.ndarray:
    """Standard normal float64, one per element (Box and Muller, 1958), from its high and its low 32 bits."""
    radius = ((bits >> np.uint64(32)).astype(np.float64) + 1.0) * 2.0 ** -32
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0 ** -32 * 2.0 * math.pi)
    return np.asarray(np.sqrt(-2.0 * np.log(radius)) * np.cos(angle))


def truncated_normal(seed: int, counter: np.ndarray) -> np.ndarray:
    """Standard normal, values beyond two standard deviations drawn again, as TensorFlow's."""
    values = normal(hashed(seed, counter))
    draw = 1
    while True:
        beyond = np.abs(values) >= 2.0
        if not beyond.any():
            return values
        values[beyond] = normal(hashed(seed, counter[beyond], draw))
        draw += 1


def table_seed(name: str, seed: int | None) -> int:
    """64 bits from the table's name, its initializer's seed and the graph's (`tf.set_random_seed`).

    Without any seed the values are still a function of the name: ranks must agree on them.
    """
    text = f'{tf.get_default_graph().seed}/{seed}/{name}'
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little')


def _random(seed: int | None, name: str, draw: Callable[[int, np.ndarray], np.ndarray]) -> Fill:
    random_seed.get_seed(seed)      # TensorFlow numbers unseeded operations: whatever comes next keeps its number
    base = table_seed(name, seed)

    def fill(rows: np.ndarray, dim: int) -> np.ndarray:
        return draw(base, rows[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64))
    return fill


def _scaled(init: Any, shape: tuple[int, int], name: str) -> Fill:
    fan = {'fan_in': shape[0], 'fan_out': shape[1]}.get(init.mode, sum(shape) / 2.0)
    variance = init.scale / max(1.0, fan)
    if init.distribution == 'uniform':
        limit = math.sqrt(3.0 * variance)
        return _random(init.seed, name, lambda s, c: (2.0 * uniform(hashed(s, c)) - 1.0) * limit)
    if init.distribution == 'untruncated_normal':
        return _random(init.seed, name, lambda s, c: normal(hashed(s, c)) * math.sqrt(variance))
    # .8796… is the standard deviation of a standard normal truncated at 2
    return _random(init.seed, name, lambda s, c: truncated_normal(s, c) * (math.sqrt(variance) / .87962566103423978))


def _constant(value: Any, shape: tuple[int, int]) -> Fill | None:
    array = np.asarray(value)
    if array.size == 1:
        return lambda rows, dim: np.broadcast_to(array.reshape(1, 1), (len(rows), dim))
    if array.size == shape[0] * shape[1]:
        return lambda rows, dim: array.reshape(shape)[rows.astype(np.int64)]
    return None


def by_row(init: Any, shape: tuple[int, int], name: str) -> Fill | None:
    """How `init` fills single rows, or None if it isn't one of TensorFlow's initializers that can.

    An initializer counts by the class that defines its `__call__`, so that a subclass which draws otherwise is not mistaken.
    """
    kind = next((c for c in type(init).__mro__ if '__call__' in vars(c)), type(init))
    if kind.__module__.partition('.')[0] not in ('tensorflow', 'keras'):
        return None
    names = {c.__name__ for c in kind.__mro__}
    seed = getattr(init, 'seed', None)
    if 'Zeros' in names:
        return _constant(0.0, shape)
    if 'Ones' in names:
        return _constant(1.0, shape)
    if 'Constant' in names:
        return _constant(init.value, shape)
    if 'VarianceScaling' in names:
        return _scaled(init, shape, name)
    if 'RandomUniform' in names:
        low, high = init.minval, 1.0 if init.maxval is None else init.maxval
        return _random(seed, name, lambda s, c: low + (high - low) * uniform(hashed(s, c)))
    if 'TruncatedNormal' in names:
        return _random(seed, name, lambda s, c: init.mean + init.stddev * truncated_normal(s, c))
    if 'RandomNormal' in names:
        return _random(seed, name, lambda s, c: init.mean + init.stddev * normal(hashed(s, c)))
    return None


def _aligned(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """An empty array that TensorFlow takes over as it is: it copies what doesn't lie on 64 bytes."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first:first + size].view(dtype).reshape(shape)


def shard(init: Any, shape: tuple[int, int], dtype: tf.DType, name: str, rank: int, ranks: int) -> tf.Tensor:
    """The initial value of rank's shard: rows rank, rank + N, rank + 2N, … of [V, D], in `dtype`.

    A rank holds no more than its shard and one block while it draws, if `init` is an array or one of TensorFlow's zeros,
    ones, constant, uniform, normal, truncated normal and variance scaling (Glorot, He, LeCun) initializers. Any other
    initializer, and a tensor, is evaluated for the whole table on every rank, which then keeps its rows.
    """
    if isinstance(init, type):
        init = init()
    value = None if callable(init) or isinstance(init, (tf.Tensor, variables.Variable)) else init
    fill = by_row(init, shape, name) if value is None else _constant(value, shape)
    mine = len(range(rank, shape[0], ranks))
    if fill is None:
        whole = init(list(shape), dtype=dtype) if callable(init) else tf.convert_to_tensor(init, dtype)
        return tf.reshape(whole[rank::ranks], [mine, shape[1]]) if ranks > 1 else tf.reshape(whole, shape)

    draw_dtype = np.float64 if dtype == tf.float64 else np.float32

    def draw() -> np.ndarray:
        out = _aligned((mine, shape[1]), draw_dtype)
        step = max(1, BLOCK // max(1, shape[1]))
        for first in range(0, mine, step):
            local = np.arange(first, min(mine, first + step), dtype=np.uint64)
            out[first:first + step] = fill(local * np.uint64(ranks) + np.uint64(rank), shape[1])
        return out

    # A stateful function: the graph optimizer would fold a constant and then keep the whole shard with the graph.
    drawn = tf.numpy_function(draw, [], tf.as_dtype(draw_dtype), stateful=True)
    drawn.set_shape([mine, shape[1]])
    return tf.cast(drawn, dtype)
