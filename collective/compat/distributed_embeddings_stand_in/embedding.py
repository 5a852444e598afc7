"""Has distributed-embeddings' layers, which are ordinary ones outside of embedding_scope()."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.keras import layers
from collective.policy import is_whole
from collective.scope import SCOPES
from collective.tensorflow_internals.keras import Layer, package
from collective.wrappers.keras import get_table

COMBINERS = ("sum", "mean")


class Embedding(layers.Embedding):
    """Looks up rows of a matrix, for every kind of ids.

    Shapes of ids and rows are those of `collective.keras.layers.Embedding`. The matrix is a table
    in `DistributedEmbedding`, or if the layer is made or built in embedding_scope(); an ordinary
    weight, which is replicated, everywhere else.

    Args:
        input_dim: V: ids are from 0 to V - 1.
        output_dim: D, the values in a row.
        embeddings_initializer, embeddings_regularizer, activity_regularizer,
            embeddings_constraint: as in `tf.keras.layers.Embedding`.
        combiner: 'sum', 'mean' or None: how the rows of a sample become one.
        use_custom_kernel: no effect.
        **kwargs: Keras's `name`, `trainable` and `dtype`.

    Raises:
        ValueError: a dimension isn't a whole number from 1; or there is no such combiner; or it is
            called with ids [B], and has a combiner.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        activity_regularizer: Any = None,
        embeddings_constraint: Any = None,
        combiner: str | None = None,
        use_custom_kernel: bool = True,
        **kwargs: Any,
    ):
        for name, number in (("input_dim", input_dim), ("output_dim", output_dim)):
            if not (is_whole(number) and number >= 1):
                raise ValueError(f"Embedding({name}=…) is a whole number from 1, not {number!r}.")
        _check(combiner, "Embedding")
        super().__init__(
            int(output_dim), int(input_dim), combiner, embeddings_initializer, **kwargs
        )
        self.input_dim, self.output_dim = self.rows, self.dim
        self.embeddings_regularizer = package.regularizers.get(embeddings_regularizer)
        self.activity_regularizer = package.regularizers.get(activity_regularizer)
        self.embeddings_constraint = package.constraints.get(embeddings_constraint)
        self.use_custom_kernel = use_custom_kernel

    def build(self, input_shape: Any = None) -> None:
        """Makes the matrix: `embeddings`."""
        self.embeddings = self.add_weight(
            "embeddings",
            [self.input_dim, self.output_dim],
            initializer=self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            trainable=self.trainable,
            experimental_autocast=False,
            **_getter(self.name, self._options),
        )
        self.built = True

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any, weights: Any) -> Any:
        is_tensor = not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
        inputs = tf.convert_to_tensor(inputs) if is_tensor else inputs
        if self.combiner is not None and inputs.shape.rank == 1:
            raise ValueError(
                f"The layer '{self.name}' has combiner='{self.combiner}', and ids of the shape "
                f"{inputs.shape}: give it ids [batch, K]."
            )
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)
        return super()._look_up(inputs, weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which a layer like this one is made."""
        config = super().get_config()
        del config["dim"], config["rows"]
        regularizers, constraints = package.regularizers, package.constraints
        return {
            **config,
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_regularizer": regularizers.serialize(self.embeddings_regularizer),
            "activity_regularizer": regularizers.serialize(self.activity_regularizer),
            "embeddings_constraint": constraints.serialize(self.embeddings_constraint),
            "use_custom_kernel": self.use_custom_kernel,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a layer, also of the configuration of a `tf.keras.layers.Embedding`."""
        of_keras = ("mask_zero", "input_length", "sparse")
        return cls(**{name: value for name, value in config.items() if name not in of_keras})


class ConcatOneHotEmbedding(Layer):
    """Looks up a row for each of K features, which share one matrix, `params`.

    Args:
        feature_sizes: V of each feature: ids are from 0 to V - 1.
        embedding_width: D, the values in a row.
    """

    def __init__(self, feature_sizes: Sequence[int], embedding_width: int):
        super().__init__(dtype=tf.float32)
        self.embedding_width = embedding_width
        self._starts = np.cumsum([0, *feature_sizes])
        self.params = self.add_weight(
            "params",
            [int(self._starts[-1]), embedding_width],
            dtype=tf.float32,
            **_getter(self.name, None),
        )

    def call(self, inputs: Any) -> tf.Tensor:
        """Looks up ids [B, K]: [B, K, D].

        Raises:
            ValueError: there is an id for another number of features.
        """
        return self._look_up(inputs)

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any) -> tf.Tensor:
        ids = tf.convert_to_tensor(inputs)
        features = len(self._starts) - 1
        if ids.shape.rank != 2 or ids.shape[1] != features:
            raise ValueError(
                f"The layer '{self.name}' looks up ids [batch, {features}], not {ids.shape}."
            )
        return tf.nn.embedding_lookup(self.params, ids + tf.constant(self._starts[:-1], ids.dtype))


@tf.autograph.experimental.do_not_convert
def embedding_lookup(param: Any, ids: Any, combiner: str | None = None) -> Any:
    """Looks up rows, and combines those of a sample.

    Args:
        param: a matrix [V, D]: a variable, table or tensor.
        ids: [B, K]: a tensor, `tf.RaggedTensor` or `tf.SparseTensor`, of int32 or int64.
        combiner: 'sum', 'mean' or None.

    Returns:
        [B, D]; without a combiner [B, K, D], ragged for ragged ids.

    Raises:
        TypeError: `param` isn't a tensor or variable.
        ValueError: ids have another number of dimensions; or there is no such combiner, or none for
            sparse ids.
    """
    if not tf.is_tensor(param):
        raise TypeError(f"embedding_lookup looks up rows of a tensor, not of a {type(param)}.")
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        ids = tf.convert_to_tensor(ids)
    if ids.shape.rank != 2:
        raise ValueError(f"embedding_lookup takes ids [batch, K], not of the shape {ids.shape}.")
    _check(combiner, "embedding_lookup")
    return layers.looked_up(param, ids, None, combiner, "embedding_lookup")


def _check(combiner: Any, what: str) -> None:
    if combiner not in (None, *COMBINERS):
        raise ValueError(f"{what}(combiner=…) is 'sum', 'mean' or None, not {combiner!r}.")


def _getter(layer: str, given: Any) -> dict[str, Any]:
    """Returns the getter of a layer's weight in embedding_scope().

    Args:
        layer: its name.
        given: the options of the scope in which the layer was made.
    """
    options = SCOPES.embedding_options or given
    return {} if options is None else {"getter": functools.partial(get_table, options, layer)}
