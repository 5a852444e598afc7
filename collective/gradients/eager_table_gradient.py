"""Holds the gradient of a table in eager code, and computes with it on all ranks together.

Eager code gets it from a tape, or from a `tf.function` that returns it:

    tape, tf.function ──► EagerTableGradient ──► function ──► update
                                 │       ▲           │
                                 │       └── clipped ┘
                                 └── values, indices ──► the rows of all ranks

It has this rank's rows, which functions that all ranks call apply and clip (`called`). Where a
script reads them, it gets those of all ranks, the same on each.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination.functions import calls
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.scope import SCOPES
from collective.tables import eager_lookups
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import record


class EagerTableGradient(tf.IndexedSlices):
    """Holds this rank's part of the gradient of a table in eager code.

    In a function it stands for this, too, where it enters or leaves.

    Args:
        table: the table.
        values: [K, D].
        rows: [K] int64, the rows of this rank's shard, each once.
    """

    def __init__(self, table: Sharded, values: tf.Tensor, rows: tf.Tensor):
        shape = None if table.rows is None else tf.constant([table.rows, table.dim], tf.int64)
        super().__init__(values, rows, shape)
        self.table, self.moves = table, table.moves

    def __str__(self) -> str:
        return f"the gradient of table '{self.table.op.name}'"

    @property
    def dtype(self) -> tf.DType:
        return self._values.dtype

    @property
    def values(self) -> tf.Tensor:
        """Returns the rows of all ranks, [K, D]: all ranks ask for them."""
        return self._of_all_ranks[0]

    @property
    def indices(self) -> tf.Tensor:
        """Returns the ids of `values`, int64 [K]."""
        return self._of_all_ranks[1]

    @functools.cached_property
    def _of_all_ranks(self) -> list[tf.Tensor]:
        name = self.table.op.name
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"A gradient of table '{name}' from outside of the tf.function is used in it. Give "
                "the function the gradient as an argument."
            )
        refuse_sums(name)
        return computed("rows", lambda given: [given[0].values, given[0].indices], [self])

    @property
    def _type_spec(self) -> EagerTableGradientSpec:
        return EagerTableGradientSpec(self.table, self._values.dtype)


# Those of specs, by their ids: TensorFlow copies specs by numbers.
_tables: weakref.WeakValueDictionary[int, Sharded] = weakref.WeakValueDictionary()


class EagerTableGradientSpec(tf.TypeSpec):
    """Describes the gradient of a table to functions that get or return it.

    Args:
        table: the table.
        dtype: of the values.
    """

    value_type = property(lambda self: EagerTableGradient)

    def __init__(self, table: Sharded, dtype: tf.DType):
        self.table, self.dtype = table, dtype
        _tables[id(table)] = table

    def _serialize(self) -> tuple[int, tf.DType]:
        return id(self.table), self.dtype

    @classmethod
    def _deserialize(cls, serialization: tuple[int, tf.DType]) -> EagerTableGradientSpec:
        table, dtype = serialization
        return cls(_tables[table], dtype)

    @property
    def _component_specs(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        rows = tf.TensorSpec([None], tf.int64)
        return tf.TensorSpec([None, self.table.dim], self.dtype), rows

    def _to_components(self, value: EagerTableGradient) -> tuple[tf.Tensor, tf.Tensor]:
        refuse_moved(value.table, value.moves, "A gradient")
        return value._values, value._indices

    def _from_components(self, components: Sequence[tf.Tensor]) -> EagerTableGradient:
        return EagerTableGradient(self.table, *components)


def is_one(x: Any) -> bool:
    """Tells whether `x` is the gradient of a table in eager code."""
    return isinstance(x, EagerTableGradient)


def refuse_moved(table: Sharded, moves: int, what: str) -> None:
    """Refuses what knows rows by places where they aren't any more, on all ranks alike.

    Raises:
        NotImplementedError: rows of the table may have been evicted, removed or restored since.
    """
    if moves != table.moves:
        raise NotImplementedError(
            f"{what} of table '{table.op.name}' was made before rows were evicted or moved to a "
            "file, as the policy of the table says, removed or restored. Take and apply gradients "
            "before an update, a save or another function does so: make one update of them, or "
            "train in a tf.function."
        )


def refuse_sums(table: str) -> None:
    """Refuses to show the rows of all ranks where each rank would add them up once more.

    Raises:
        NotImplementedError: the gradients of tables are sums over ranks.
    """
    if collectives.size() > 1 and SCOPES.options.embedding_gradients == "sum":
        raise NotImplementedError(
            f"Rows of the gradient of table '{table}' become a part of eager code, with "
            "scope(embedding_gradients='sum'): an optimizer would add them up once more for each "
            "rank. Let the tf.function return the gradient itself, and pass it to an optimizer, "
            "tf.clip_by_global_norm, tf.clip_by_norm, tf.clip_by_value or tf.linalg.global_norm; "
            "or compute with it in the function."
        )


class Parcel(NamedTuple):
    """Describes a gradient as arguments of a function.

    Attributes:
        kind: tells gradients apart that need other functions.
        tensors: the arguments.
        specs: of these.
        unpack: makes the gradient of the arguments in a function.
    """

    kind: tuple[Any, ...]
    tensors: list[tf.Tensor]
    specs: list[tf.TensorSpec]
    unpack: Callable[..., Any]


def packed(gradient: Any) -> Parcel:
    if gradient is None:
        return Parcel(("none",), [], [], lambda: None)
    if isinstance(gradient, EagerTableGradient):
        refuse_moved(gradient.table, gradient.moves, "A gradient")
        kind = "table", id(gradient.table)
        return Parcel(kind, [gradient], [gradient._type_spec], lambda x: x)
    if isinstance(gradient, tf.IndexedSlices):
        tensors = [gradient.values, gradient.indices]
        if gradient.dense_shape is not None:
            tensors.append(tf.convert_to_tensor(gradient.dense_shape))
        specs = _of_any_length(tensors)
        return Parcel(("slices", *specs), tensors, specs, tf.IndexedSlices)
    tensor = tf.convert_to_tensor(gradient)
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    return Parcel(("tensor", spec), [tensor], [spec], lambda x: x)


def _of_any_length(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in tensors]


def called(
    functions: dict[Any, Any],
    key: tuple[Any, ...],
    name: str,
    work: Callable[[list[Any]], Sequence[Any]],
    parcels: Sequence[Parcel],
) -> list[Any]:
    """Has all ranks call the same function of gradients, and returns its results.

    Args:
        functions: those that are kept, by `key` and the kinds of gradients.
        key: tells functions of the same `functions` apart.
        name: says what it does.
        work: gets the gradients in the function; gradients of tables among its results are of the
            tables' kind here, too.
        parcels: the gradients.
    """
    eager_lookups.refuse_own_threads(name)
    key = (*key, *(parcel.kind for parcel in parcels), eager_lookups.options_in_force())
    if key not in functions:
        unpack = [(parcel.unpack, len(parcel.specs)) for parcel in parcels]  # and no tensors

        def in_function(*tensors: tf.Tensor) -> list[Any]:
            calls.note_part_of_step(tf.get_default_graph())
            if collectives.size() > 1:
                gates_of(tf.get_default_graph()).at(1)  # ranks agree, whatever it exchanges
            arguments, left = [], iter(tensors)
            for make, count in unpack:
                arguments.append(make(*(next(left) for _ in range(count))))
            return list(work(arguments))

        in_function.__name__ = re.sub(r"\W", "_", name)
        specs = [spec for parcel in parcels for spec in parcel.specs]
        made = tf2.function(in_function, input_signature=specs, autograph=False)
        # Where the tape of `work` can record. A function is itself called eagerly after
        # tf.config.run_functions_eagerly(True).
        functions[key] = made.get_concrete_function()
    with record.stop_recording():
        return list(functions[key](*(x for parcel in parcels for x in parcel.tensors)))


_KEPT = "_collective_eager_functions"


def functions_of(owner: Any) -> dict[Any, Any]:
    """Returns the functions that are kept for a variable or an optimizer."""
    kept: dict[Any, Any] = vars(owner).setdefault(_KEPT, {})
    return kept


def forget_functions(copied: Any) -> None:
    """Takes the functions that are kept for an optimizer from a copy of it: they update by it."""
    vars(copied).pop(_KEPT, None)


def computed(
    name: str, function: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Any]
) -> list[Any]:
    """Has all ranks compute something of gradients, of which one at least is a table's.

    Args:
        name: of what is computed, with the numbers that `function` has by itself.
        function: computes it in a function.
        gradients: its arguments.
    """
    table = next(x.table for x in gradients if is_one(x))
    parcels = [packed(gradient) for gradient in gradients]
    return called(functions_of(table), (name,), name, function, parcels)
