"""Fills a table's initial rows, a shard at a time: row i is the same for every number of ranks.

A row depends only on (seed, the table's name, i), by a counter-based generator: element d of row i
is a hash of seed and i * D + d. The hash is the output function of SplitMix64 (Steele, Lea, Flood:
"Fast splittable pseudorandom number generators", OOPSLA 2014). The distributions are TensorFlow's;
the numbers are not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import math
import random
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.graph import device_scopes, graphs
from collective.ops.placement import RowPlacement
from collective.ops.rows import compiled_row_store
from collective.ops.rows.compiled_row_store import FirstValues
from collective.startup import STARTUP
from collective.tables.rows import whole_values
from collective.tensorflow_internals.graphs import context, random_seed
from collective.tensorflow_internals.keras import backend
from collective.tensorflow_internals.variables import variable_scope, variables

Fill = Callable[[np.ndarray, int], np.ndarray]  # (row numbers [R] uint64, D) -> values [R, D]
BLOCK = 1 << 16  # Elements drawn at once.

_GAMMA, _MIX1, _MIX2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_STREAMS = 0xD1B54A32D192ED03


def hashed(seed: int | np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Returns uint64 values for the uint64 `counter`."""
    with np.errstate(over="ignore"):
        x = counter * _GAMMA
        x += np.asarray(seed, np.uint64)
        shifted = np.empty_like(x)
        for shift, factor in ((30, _MIX1), (27, _MIX2)):
            np.right_shift(x, np.uint64(shift), out=shifted)
            x ^= shifted
            x *= factor
        return np.asarray(x ^ (x >> np.uint64(31)))


def uniform(bits: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), multiples of 2**-53."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(bits: np.ndarray) -> np.ndarray:
    """Returns standard normal float64, one per element (Box and Muller, 1958).

    The radius comes from an element's high 32 bits, the angle from its low ones.
    """
    radius = ((bits >> np.uint64(32)).astype(np.float64) + 1.0) * 2.0**-32
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0**-32 * 2.0 * math.pi)
    return np.asarray(np.sqrt(-2.0 * np.log(radius)) * np.cos(angle))


@functools.cache
def _truncated_quantiles() -> tuple[np.ndarray, ...]:
    """Returns cubics that approximate the quantiles of the standard normal truncated at 2.

    There are 2**12 pieces, c0 + c1 t + c2 t^2 + c3 t^3 with t in [0, 1). Each has the values and
    the slopes of the exact function at both ends of its piece; between them it is right to 1e-10.
    """
    normal_ = statistics.NormalDist()
    below = normal_.cdf(-2.0)
    step = (1.0 - 2.0 * below) / 4096
    ends = np.array([normal_.inv_cdf(below + step * i) for i in range(4097)])
    slopes = step * math.sqrt(2.0 * math.pi) * np.exp(0.5 * ends * ends)
    rise = ends[1:] - ends[:-1]
    return (
        ends[:-1],
        slopes[:-1],
        3.0 * rise - 2.0 * slopes[:-1] - slopes[1:],
        slopes[:-1] + slopes[1:] - 2.0 * rise,
    )


def truncated_normal(bits: np.ndarray) -> np.ndarray:
    """Returns standard normal float64 truncated at two standard deviations, as TensorFlow's.

    One draw is taken per element.
    """
    c0, c1, c2, c3 = _truncated_quantiles()
    piece = (bits >> np.uint64(52)).astype(np.intp)
    t = ((bits >> np.uint64(11)) & np.uint64(2**41 - 1)).astype(np.float64)
    t *= 2.0**-41
    out = c3[piece]
    for c in (c2, c1, c0):
        out *= t
        out += c[piece]
    return np.asarray(out)


def table_seed(name: str, seed: int | None) -> int:
    """Returns 64 bits from the table's name, its initializer's seed and the graph's.

    The graph's seed is set by `tf.set_random_seed`; eagerly it is the program's.

    Without any seed the values are still a function of the name, because ranks must agree on them.
    """
    text = f"{_seed_of_all()}/{seed}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _seed_of_all() -> int | None:
    """Returns the seed that the script has set for all that draws; None if it set none."""
    seed = context.global_seed() if tf.executing_eagerly() else tf.get_default_graph().seed
    return None if seed is None else int(seed)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Makes values from 64 random bits per element.

    Attributes:
        kind: its name in compiled code (`collective.ops.rows.compiled_row_store`).
        draw: f(bits uint64) -> float64.
        a, b: the numbers that compiled code takes.
    """

    kind: int
    draw: Callable[[np.ndarray], np.ndarray]
    a: Any = 0.0
    b: Any = 0.0

    def is_compiled(self) -> bool:
        """Tells whether compiled code draws the same values, bit for bit."""
        numbers = (int, float, np.floating, np.integer)
        return (
            self.kind != compiled_row_store.BY_PYTHON
            and all(isinstance(number, numbers) for number in (self.a, self.b))
            and not any(isinstance(number, np.longdouble) for number in (self.a, self.b))
        )


class RandomRows:
    """Draws rows that depend only on (seed, number of the row).

    Args:
        seed: 64 bits.
        distribution: of the elements.
    """

    def __init__(self, seed: int, distribution: Distribution):
        self._seed, self._distribution = seed, distribution

    def __call__(self, rows: np.ndarray, dim: int) -> np.ndarray:
        # Row numbers from 2**32 on are keys. Their upper half chooses a stream, as i * D + d would
        # overflow.
        low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32)
        streams = (
            np.where(high == 0, np.uint64(self._seed), hashed(self._seed ^ _STREAMS, high))[:, None]
            if high.any()
            else self._seed
        )
        return self._distribution.draw(
            hashed(streams, low[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64))
        )

    def compiled(self, dim: int, dtype: Any) -> FirstValues | None:
        """Returns how compiled code draws the same rows; None if it can't."""
        if not self._distribution.is_compiled():
            return None
        kind = self._distribution.kind
        is_truncated = kind in (
            compiled_row_store.TRUNCATED_NORMAL,
            compiled_row_store.SCALED_TRUNCATED_NORMAL,
        )
        return FirstValues(
            kind,
            self._seed,
            float(self._distribution.a),
            float(self._distribution.b),
            cubics=np.stack(_truncated_quantiles()) if is_truncated else None,
        )


class SameRows:
    """Gives all rows the values of an array: one number, or one row [D]."""

    def __init__(self, array: np.ndarray):
        self._row = array.reshape(1, -1)

    def __call__(self, rows: np.ndarray, dim: int) -> np.ndarray:
        return np.broadcast_to(self._row, (len(rows), dim))

    def compiled(self, dim: int, dtype: Any) -> FirstValues:
        """Returns how compiled code gives the same rows."""
        row = np.empty((1, dim), dtype)
        row[:] = self._row
        return FirstValues(compiled_row_store.SAME_ROW, row=row[0])


def first_values(fill: Fill, dim: int, dtype: Any) -> FirstValues:
    """Returns how compiled code draws what `fill` does, or has `fill` do it."""
    describe = getattr(fill, "compiled", None)
    described = None if describe is None else describe(dim, dtype)
    if described is None:
        return FirstValues(compiled_row_store.BY_PYTHON, draw=fill, block=BLOCK)
    return dataclasses.replace(described, block=BLOCK)


def _random(seed: int | None, name: str, distribution: Distribution) -> Fill:
    if _seed_of_all() is not None:
        # TensorFlow numbers unseeded operations, and the next operation must keep its number.
        random_seed.get_seed(seed)
    return RandomRows(table_seed(name, seed), distribution)


def of_rows(init: Any, rows: int) -> Any:
    """Returns an initializer for a dynamic table that scales as for a table with this many rows.

    Args:
        init: one of TensorFlow's; returned unchanged unless it is variance scaling by fan_in or
            fan_avg.
        rows: their number.
    """
    init = init() if isinstance(init, type) else init
    if getattr(init, "mode", None) not in ("fan_in", "fan_avg"):
        return init
    init = copy.copy(init)
    init.collective_rows = rows
    return init


def _scaled(init: Any, shape: tuple[int | None, int], name: str) -> Fill:
    rows, dim = shape
    rows = getattr(init, "collective_rows", None) if rows is None else rows
    if rows is None and init.mode != "fan_out":
        raise ValueError(
            f"dynamic table '{name}': an initializer that scales by {init.mode} needs the number "
            "of rows, which a dynamic table doesn't have. Use "
            "tf.variance_scaling_initializer(mode='fan_out'), or one with a standard deviation, "
            f"such as tf.truncated_normal_initializer(stddev={dim**-0.5:.4g})."
        )
    fan = {"fan_in": rows or 0, "fan_out": dim}.get(init.mode, ((rows or 0) + dim) / 2.0)
    variance = init.scale / max(1.0, fan)
    if init.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return _random(
            init.seed,
            name,
            Distribution(
                compiled_row_store.CENTERED_UNIFORM,
                lambda bits: (2.0 * uniform(bits) - 1.0) * limit,
                limit,
            ),
        )
    if init.distribution == "untruncated_normal":
        return _random(
            init.seed,
            name,
            Distribution(
                compiled_row_store.BY_PYTHON, lambda bits: normal(bits) * math.sqrt(variance)
            ),
        )
    # The standard deviation of a standard normal truncated at 2 is 0.8796….
    scale = math.sqrt(variance) / 0.87962566103423978
    return _random(
        init.seed,
        name,
        Distribution(
            compiled_row_store.SCALED_TRUNCATED_NORMAL,
            lambda bits: truncated_normal(bits) * scale,
            scale,
        ),
    )


def _constant(value: Any, shape: tuple[int | None, int]) -> Fill | None:
    array = np.asarray(value)
    if array.size == 1 or shape[0] is None and array.size == shape[1]:
        return SameRows(array)
    if shape[0] is not None and array.size == shape[0] * shape[1]:
        return lambda rows, dim: array.reshape(-1, dim)[rows.astype(np.int64)]
    return None


def is_constant(init: Any) -> bool:
    """Tells whether `init` is an initializer of TensorFlow that fills in one number."""
    names = {c.__name__ for c in (init if isinstance(init, type) else type(init)).__mro__}
    return bool(names & {"Zeros", "Ones", "Constant"}) and np.size(getattr(init, "value", 0)) == 1


def by_row(init: Any, shape: tuple[int | None, int], name: str) -> Fill | None:
    """Returns how `init` fills single rows; None if it isn't an initializer of TensorFlow that can.

    The class that defines `__call__` decides, since a subclass may draw differently.
    """
    kind = next((c for c in type(init).__mro__ if "__call__" in vars(c)), type(init))
    if kind.__module__.partition(".")[0] not in ("tensorflow", "keras", "tf_keras"):
        return None
    names = {c.__name__ for c in kind.__mro__}
    seed = getattr(init, "seed", None)
    if "Zeros" in names:
        return _constant(0.0, shape)
    if "Ones" in names:
        return _constant(1.0, shape)
    if "Constant" in names:
        return _constant(init.value, shape)
    if "VarianceScaling" in names:
        return _scaled(init, shape, name)
    if "RandomUniform" in names:
        low, high = init.minval, 1.0 if init.maxval is None else init.maxval
        return _random(
            seed,
            name,
            Distribution(
                compiled_row_store.UNIFORM,
                lambda bits: low + (high - low) * uniform(bits),
                low,
                high - low,
            ),
        )
    if "TruncatedNormal" in names:
        return _random(
            seed,
            name,
            Distribution(
                compiled_row_store.TRUNCATED_NORMAL,
                lambda bits: init.mean + init.stddev * truncated_normal(bits),
                init.mean,
                init.stddev,
            ),
        )
    if "RandomNormal" in names:
        return _random(
            seed,
            name,
            Distribution(
                compiled_row_store.BY_PYTHON,
                # No two libraries have the same logarithm and cosine, to the last bit.
                lambda bits: init.mean + init.stddev * normal(bits),
            ),
        )
    return None


def by_key(init: Any, dim: int, name: str) -> Fill:
    """Returns how `init` fills the row of any key of a dynamic table, given as uint64.

    The row of key k, 0 <= k < V, is row k of a static table.

    Args:
        init: TensorFlow's zeros, ones, constant (a number, or one row for all keys), uniform,
            normal, truncated normal or variance scaling by fan_out; or a number, or one row [D].

    Raises:
        ValueError: any other initializer.
    """
    if isinstance(init, type):
        init = init()
    is_value = not callable(init) and not isinstance(init, (tf.Tensor, variables.Variable))
    fill = _constant(init, (None, dim)) if is_value else by_row(init, (None, dim), name)
    if fill is None:
        raise ValueError(
            f"dynamic table '{name}': {init!r} doesn't fill single rows. Use TensorFlow's zeros, "
            f"ones, constant (one number, or one row of {dim}), random_uniform, random_normal, "
            "truncated_normal or variance_scaling(mode='fan_out') initializer."
        )
    return fill


def shard(
    init: Any,
    shape: tuple[int, int],
    dtype: tf.DType,
    name: str,
    placed: RowPlacement,
    rank: int,
) -> tf.Tensor:
    """Returns the initial value of a rank's shard of a static table [V, D], so `placed`.

    A rank holds no more than its shard and one block while it draws, if `init` is an array or one
    of TensorFlow's zeros, ones, constant, uniform, normal, truncated normal and variance scaling
    (Glorot, He, LeCun) initializers. Any other initializer, and a tensor, is evaluated for the
    whole table on every rank, which then keeps its rows.
    """
    if isinstance(init, type):
        init = init()
    value = None if callable(init) or isinstance(init, (tf.Tensor, variables.Variable)) else init
    fill = by_row(init, shape, name) if value is None else _constant(value, shape)
    shard_rows = placed.count(rank, shape[0])
    if fill is None:

        def all_rows() -> tf.Tensor:
            with same_on_all_ranks(init, name):
                # Like TensorFlow's conversion: from NumPy's and Python's numbers of any type.
                return tf.convert_to_tensor(
                    _call(init, shape, dtype) if callable(init) else init, dtype
                )

        def own_rows(value: tf.Tensor) -> tf.Tensor:
            if not value.shape.is_compatible_with(shape):
                raise ValueError(
                    f"table '{name}': the initializer's value has the shape {value.shape}, and the "
                    f"table {tf.TensorShape(shape)}. Return one row for each of the table's."
                )
            own = tf.ensure_shape(value, shape)[placed.rows_of(rank)]
            return tf.ensure_shape(own, [shard_rows, shape[1]])

        # A GPU may have no room for the whole table.
        with device_scopes.on_host():
            return whole_values.own_rows(all_rows, own_rows, math.prod(shape) * dtype.size)

    def draw(out: np.ndarray) -> None:
        step = max(1, BLOCK // max(1, shape[1]))
        for first in range(0, shard_rows, step):
            local = np.arange(first, min(shard_rows, first + step), dtype=np.uint64)
            out[first : first + step] = fill(placed.key(rank, local), shape[1])

    return filled((shard_rows, shape[1]), dtype, draw)


def _call(init: Any, shape: tuple[int, int], dtype: tf.DType) -> Any:
    """Calls an initializer of a whole table like TensorFlow.

    If it takes `partition_info`, it gets that of a variable with one part, even if TensorFlow
    passes None: it then works with and without a partitioner.
    """
    rows_and_dim = list(shape)
    if "partition_info" in _parameters(init):
        whole = variable_scope._PartitionInfo(full_shape=rows_and_dim, var_offset=[0, 0])
        return init(rows_and_dim, dtype=dtype, partition_info=whole)
    return init(rows_and_dim, dtype=dtype)


def _parameters(function: Any) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (
        TypeError,
        ValueError,
    ):  # Not a Python function: no visible signature.
        return ()


@contextlib.contextmanager
def same_on_all_ranks(init: Any, name: str) -> Iterator[None]:
    """Makes an initializer of a whole table draw the same on every rank, also without a seed.

    TensorFlow's initializers draw by the graph's seed, Keras's by Python's random numbers, or by a
    generator that `tf.keras.utils.set_random_seed` makes.
    """
    graph, keras_seeds = tf.get_default_graph(), vars(backend._SEED_GENERATOR)
    seed, generator = graph.seed, keras_seeds.get("generator")
    if getattr(init, "seed", 0) is None:
        own_seed = table_seed(name, None)
        graph.seed = own_seed % 2**31 if seed is None else seed
        keras_seeds["generator"] = generator or random.Random(own_seed)
    try:
        yield
    finally:
        graph.seed, keras_seeds["generator"] = seed, generator


def filled(
    shape: tuple[int, int],
    dtype: tf.DType,
    fill: Callable[..., Any],
    inputs: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Returns a tensor that `fill` writes in place when it is run. Assign it by `only_after`.

    The memory is TensorFlow's own. (What a `numpy_function` returns stays NumPy's, and the first
    sparse update of its variable copies all of it.)

    Args:
        shape, dtype: the tensor's.
        fill: called with the memory as an array, and the values of `inputs`.
        inputs: tensors.
    """

    def write(out: np.ndarray, *values: np.ndarray) -> np.int64:
        fill(out, *values)
        STARTUP.initialised()
        return np.int64(0)

    if tf.executing_eagerly():
        # A function of Python's would get a copy of the memory.
        array = np.empty(shape, dtype.as_numpy_dtype)
        fill(array, *(x.numpy() for x in inputs))
        with device_scopes.on_host():
            return tf.convert_to_tensor(array)
    STARTUP.will_initialise(graphs.outermost(tf.get_default_graph()))
    with device_scopes.on_host():
        # Both are stateful, because the graph optimizer would fold a constant and then keep the
        # whole shard with the graph.
        out = empty(shape, dtype)
        written = tf.numpy_function(write, [out, *inputs], tf.int64, stateful=True)
        with tf.control_dependencies([written]):
            return tf.identity(out)


def empty(shape: tuple[int, int], dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor with undefined content that TensorFlow owns and its graph optimizer leaves
    alone.

    The compiled operation takes no more memory than the rows need; TensorFlow's allocator takes up
    to a sixteenth more.
    """
    if native_library.missing() is None:
        return native_library.library().collective_empty_rows(dtype=dtype, shape=shape)
    if max(shape) < 2**31:
        return tf.raw_ops.Empty(shape=shape, dtype=dtype)
    # TensorFlow's Empty takes a shape of int32 only, and cuts off the upper bits of longer ones.
    unfolded = tf.numpy_function(lambda: np.array(shape, np.int64), [], tf.int64, stateful=True)
    zeros = tf.fill(tf.ensure_shape(unfolded, [2]), tf.zeros([], dtype))
    zeros.set_shape(shape)
    return zeros


def only_after(assignment: tf.Operation, value: tf.Tensor) -> None:
    """Makes `assignment` of `value` wait for the control inputs of `value`.

    The graph optimizer may take away the identity between them.
    """
    assignment._add_control_inputs(list(value.op.control_inputs))
