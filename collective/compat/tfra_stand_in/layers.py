"""Has the embedding layers of TensorFlow Recommenders Addons, on dynamic tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import say_once
from collective.compat.tfra_stand_in.options import HkvHashTableCreator, ModelMode
from collective.compat.tfra_stand_in.rows import Rows
from collective.keras import layers
from collective.ops.communication import collectives
from collective.scope import SCOPES
from collective.tensorflow_internals.keras import package

# They say where rows are, and how many there is room for: no numbers depend on them.
_WITHOUT_EFFECT = (
    *("bp_v2", "init_capacity", "partitioner", "keep_distribution", "checkpoint", "devices"),
    *("short_file_name", "with_unique", "restrict_policy", "kv_creator"),
)
_REFUSED = {
    "max_norm": "clip the rows that the layer returns by tf.clip_by_norm, or the gradients.",
    "distribute_strategy": "leave it out: scope() is open around the script.",
}


class Embedding(layers.Embedding):
    """Looks up rows of a dynamic table, whose keys are any integers.

    The table is made with the layer. Its rows are dealt to all ranks.

    Args:
        embedding_size: D, the values in a row.
        key_dtype: of the ids. Default int64.
        value_dtype: float32.
        combiner: no effect here; layers derived from this one have it.
        initializer: fills a new row: an initializer of Keras, or a number. Default RandomNormal().
        devices: no effect.
        name: the layer's, which its table has, too.
        with_unique, short_file_name: no effect.
        **kwargs: `trainable`; no effect have `bp_v2`, `init_capacity`, `partitioner`,
            `keep_distribution`, `checkpoint`, `restrict_policy` and `kv_creator`, of which rank 0
            says what differs.

    Attributes:
        params: the table's `Rows`.

    Raises:
        RuntimeError: no scope() is open.
        TypeError: there is no such argument, or embedding_size isn't a number.
        ValueError: an argument isn't one of these.
        NotImplementedError: max_norm or distribute_strategy is given, or another value_dtype.
    """

    def __init__(
        self,
        embedding_size: int,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: Any = None,
        name: str = "DynamicEmbeddingLayer",
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ):
        del devices, short_file_name
        if not SCOPES.is_open:
            raise RuntimeError(
                f"{type(self).__name__} makes a table, and needs scope(): start the script by "
                "`collective launch --as tfra`, or make the model in `with strategy.scope():`."
            )
        value_dtype = tf.as_dtype(value_dtype)
        if value_dtype != tf.float32:
            raise NotImplementedError(
                f"{type(self).__name__}(value_dtype={value_dtype.name}) is not supported: rows "
                "are of float32."
            )
        trainable = kwargs.pop("trainable", True)
        _take(type(self).__name__, kwargs)
        collectives.init()
        super().__init__(
            int(embedding_size),
            embeddings_initializer=_initializer(initializer),
            name=name,
            trainable=trainable,
            dtype=value_dtype,
        )
        self.embedding_size, self.pooling, self.with_unique = self.dim, combiner, with_unique
        self.key_dtype = tf.as_dtype(key_dtype)
        self.params = Rows(self, kwargs.get("restrict_policy"))
        self.build()

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any, weights: Any) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._rows_of(inputs.flat_values))
        if isinstance(inputs, tf.SparseTensor):
            raise ValueError(
                f"The layer '{self.name}' is called with sparse ids: give it dense or ragged ones."
            )
        return self._rows_of(tf.convert_to_tensor(inputs))

    def _rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        if ids.dtype != self.key_dtype:
            raise ValueError(
                f"The layer '{self.name}' has keys of {self.key_dtype.name}, and is called with "
                f"ids of {ids.dtype.name}: cast them, or give it key_dtype=."
            )
        rows = tf.nn.embedding_lookup(self.embeddings, ids)
        return rows if ModelMode.CURRENT_SETTING == ModelMode.TRAIN else tf.stop_gradient(rows)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which a layer like this one is made."""
        return {
            "name": self.name,
            "trainable": self.trainable,
            "embedding_size": self.embedding_size,
            "key_dtype": self.key_dtype.name,
            "value_dtype": "float32",
            "combiner": self.pooling,
            "initializer": package.initializers.serialize(self.embeddings_initializer),
            "with_unique": self.with_unique,
        }


BasicEmbedding = Embedding
LayerNormalization = package.layers.LayerNormalization


class SquashedEmbedding(Embedding):
    """Makes one row of a sample's: ids [B, …] give [B, D], and ids [K] of one sample give [D].

    Args:
        *args, **kwargs: as of `Embedding`; its `combiner` is the end of the name of one of
            TensorFlow's functions, tf.math.reduce_…: 'sum', 'mean', 'max' and so on. Without ids a
            sample has what that function makes of nothing: 'sum' zeros, 'mean' NaN.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _function(self, tf.math, "reduce_")

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any, weights: Any) -> Any:
        rows = super()._look_up(inputs, weights)
        reduce = _function(self, tf.math, "reduce_")
        if rows.shape.rank == 2:
            return reduce(rows, 0)
        for _ in range(rows.shape.rank - 2):
            rows = reduce(rows, 1)
        return rows


class FieldWiseEmbedding(Embedding):
    """Makes one row of a sample's ids of each field: ids [B, K] give [B, F, D].

    A field without ids has zeros.

    Args:
        embedding_size: D, the values in a row.
        nslots: F, how many fields there are.
        slot_map_fn: returns the fields of ids, from 0 to F - 1, of their shape and dtype.
        key_dtype, value_dtype, initializer, devices, name, with_unique, **kwargs: as of
            `Embedding`.
        combiner: 'sum', 'mean' or 'sqrt_n'.

    Raises:
        ValueError: there is no function, or no such combiner.
    """

    def __init__(
        self,
        embedding_size: int,
        nslots: int,
        slot_map_fn: Callable[[Any], Any] | None = None,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: Any = None,
        name: str = "SlotDynamicEmbeddingLayer",
        with_unique: bool = True,
        **kwargs: Any,
    ):
        if not callable(slot_map_fn):
            raise ValueError("slot_map_fn is not callable.")
        if combiner not in ("sum", "mean", "sqrt_n"):
            raise ValueError(
                f"FieldWiseEmbedding(combiner=…) is 'sum', 'mean' or 'sqrt_n', not {combiner!r}."
            )
        super().__init__(
            embedding_size,
            key_dtype,
            value_dtype,
            combiner,
            initializer,
            devices,
            name,
            with_unique,
            **kwargs,
        )
        self.nslots, self.slot_map_fn = int(nslots), slot_map_fn

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any, weights: Any) -> Any:
        ids = tf.convert_to_tensor(inputs)
        if ids.shape.rank != 2:
            raise NotImplementedError(
                f"The layer '{self.name}' looks up ids [batch, K], not {ids.shape}."
            )
        rows = self._rows_of(ids)
        samples = tf.shape(ids, out_type=tf.int64)[0]
        fields = tf.cast(self.slot_map_fn(ids), tf.int64)
        last = tf.constant(self.nslots - 1, tf.int64)
        message = (
            f"slot_map_fn of the layer '{self.name}' returns fields from 0 to {self.nslots - 1}"
        )
        with tf.control_dependencies(
            [
                tf.debugging.assert_non_negative(fields, message=message),
                tf.debugging.assert_less_equal(fields, last, message=message),
            ]
        ):
            segments = fields + self.nslots * tf.range(samples)[:, None]
        reduce = getattr(tf.math, f"unsorted_segment_{self.pooling}")
        combined = reduce(rows, segments, samples * self.nslots)
        return tf.reshape(combined, [-1, self.nslots, self.embedding_size])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which a layer like this one is made."""
        return {**super().get_config(), "nslots": self.nslots, "slot_map_fn": self.slot_map_fn}


class HvdAllToAllEmbedding(Embedding):
    """Looks up rows of a dynamic table, as `Embedding` does.

    Args:
        with_unique, with_secondary_unique: no effect.
        mpi_size: no effect: the table is of all ranks. Rank 0 says so if it is another number.
        batch_size: no effect.
        *args, **kwargs: as of `Embedding`.
    """

    def __init__(
        self,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        del with_secondary_unique, batch_size
        super().__init__(*args, **kwargs)
        self.with_unique = with_unique
        ranks = collectives.size()
        if mpi_size not in (None, ranks):
            say_once(
                f"HvdAllToAllEmbedding(mpi_size={mpi_size}) has no effect here: tables are of all "
                f"ranks, of which there are {ranks}."
            )
        self.mpi_size = mpi_size

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which a layer like this one is made."""
        return {**super().get_config(), "mpi_size": self.mpi_size}


def _take(layer: str, given: dict[str, Any]) -> None:
    """Checks the arguments of a layer that have no effect.

    Raises:
        TypeError: there is no such argument.
        NotImplementedError: it would change numbers.
    """
    for name, value in given.items():
        if name in _REFUSED and value is not None:
            raise NotImplementedError(f"{layer}({name}=…) is not supported: {_REFUSED[name]}")
        if name not in (*_WITHOUT_EFFECT, *_REFUSED):
            raise TypeError(f"{layer} has no argument {name!r}.")
    if isinstance(given.get("kv_creator"), HkvHashTableCreator):
        say_once(
            "HkvHashTableCreator has no effect here: a table gets as many rows as there are keys, "
            "and evicts none."
        )


def _initializer(given: Any) -> Any:
    if given is None:
        return package.initializers.RandomNormal()
    if isinstance(given, (int, float)):
        return package.initializers.Constant(given)
    if callable(given) or isinstance(given, (str, dict)):
        return given
    raise ValueError(f"initializer is an initializer of Keras or a number, not {given!r}.")


def _function(layer: Embedding, module: Any, start: str) -> Any:
    """Returns TensorFlow's function that a layer combines rows by."""
    found = getattr(module, f"{start}{layer.pooling}", None)
    if found is None:
        raise ValueError(
            f"The layer '{layer.name}' has combiner={layer.pooling!r}, and TensorFlow no function "
            f"tf.math.{start}{layer.pooling}."
        )
    return found
