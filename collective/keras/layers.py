"""Defines Keras's embedding layer on a table: open keys, dense, ragged or sparse, and combiners."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow.compat.v1 as tf

from collective.options import EmbeddingOptions
from collective.policy import is_whole
from collective.scope import SCOPES
from collective.tables.lookups import for_all_samples
from collective.tensorflow_internals.keras import Layer, package
from collective.wrappers.keras import get_table

COMBINERS = ("sum", "mean", "sqrtn")


@package.utils.register_keras_serializable(package="collective")
class Embedding(Layer):
    """Looks up rows of a sharded table, for every kind of ids.

    The table is a dynamic one, which gets a row for each new key in training, or with `rows` a
    static one. It is a table wherever the layer is made and built in scope(); the options are those
    of the embedding_scope() in which the layer is made or, if that is none, built.

        item = collective.keras.layers.Embedding(16, combiner="mean", name="item")
        rows = item(tf.ragged.constant([[3, 5], [7]], dtype=tf.int64))  # [2, 16]

    | ids | without a combiner | with one |
    |---|---|---|
    | dense [B, …, K] | [B, …, K, D] | [B, …, D] |
    | ragged [B, None] | ragged [B, None, D] | [B, D] |
    | sparse [B, K] | refused | [B, D] |

    A sample without ids gets zeros.

    Args:
        dim: D, the values in a row.
        rows: V, for a static table; ids are from 0 to V - 1. Default None: a dynamic table, whose
            keys are any integers, or strings.
        combiner: How the rows of a sample become one: 'sum', 'mean' or 'sqrtn', as in
            `tf.nn.embedding_lookup_sparse`. Default None: they stay apart.
        embeddings_initializer: Fills a new row; a dynamic table takes those that fill single rows
            (see `collective.get_embedding_variable`). Default 'uniform', between -0.05 and 0.05, as
            in `tf.keras.layers.Embedding`.
        **kwargs: Keras's `name`, `trainable` and `dtype`.

    Raises:
        ValueError: an argument isn't one of these; or the layer is built outside of scope(), and
            its table is dynamic.
    """

    def __init__(
        self,
        dim: int,
        rows: int | None = None,
        combiner: str | None = None,
        embeddings_initializer: Any = "uniform",
        **kwargs: Any,
    ):
        for name, number in (("dim", dim), ("rows", 1 if rows is None else rows)):
            if not (is_whole(number) and number >= 1):
                raise ValueError(f"Embedding({name}=…) is a whole number from 1, not {number!r}.")
        if combiner not in (None, *COMBINERS):
            raise ValueError(
                f"Embedding(combiner=…) is 'sum', 'mean', 'sqrtn' or None, not {combiner!r}."
            )
        super().__init__(**kwargs)
        self.dim, self.rows, self.combiner = dim, rows, combiner
        self.embeddings_initializer = package.initializers.get(embeddings_initializer)
        self._options = SCOPES.embedding_options

    def build(self, input_shape: Any = None) -> None:
        """Makes the table: `embeddings`."""
        if self.rows is None and not SCOPES.is_open:
            raise ValueError(
                f"The layer '{self.name}' makes a dynamic table, which needs strategy.scope(): "
                "build the model inside of it, or give the layer a number of rows, Embedding("
                f"{self.dim}, rows=…)."
            )
        getter = {}
        if SCOPES.is_open:
            options = self._options or SCOPES.embedding_options or EmbeddingOptions()
            getter["getter"] = functools.partial(get_table, options, self.name)
        self.embeddings = self.add_weight(
            "embeddings",
            [self.rows, self.dim],
            initializer=self.embeddings_initializer,
            trainable=self.trainable,
            experimental_autocast=False,
            **getter,
        )
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Looks up `inputs`; see the class.

        Args:
            inputs: a tensor of ids, a `tf.RaggedTensor` or a `tf.SparseTensor`.
            weights: of the ids, in the same structure, for a combiner. Default None: 1 each.

        Raises:
            ValueError: sparse ids, or weights, and no combiner; or ragged ids of more than two
                dimensions and a combiner.
        """
        return self._look_up(inputs, weights)

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Any, weights: Any) -> Any:
        return looked_up(
            self.embeddings, inputs, weights, self.combiner, f"The layer '{self.name}'"
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which a layer like this one is made."""
        return {
            **super().get_config(),
            "dim": self.dim,
            "rows": self.rows,
            "combiner": self.combiner,
            "embeddings_initializer": package.initializers.serialize(self.embeddings_initializer),
        }


def looked_up(table: Any, inputs: Any, weights: Any, combiner: str | None, caller: str) -> Any:
    """Looks up rows of a table or a matrix; see `Embedding.call`.

    Args:
        table: [V, D].
        inputs: ids.
        weights: of the ids, or None.
        combiner: one of COMBINERS, or None.
        caller: begins messages.
    """
    is_sparse = isinstance(inputs, (tf.SparseTensor, tf.SparseTensorValue))
    if combiner is None:
        if is_sparse or weights is not None:
            what = "sparse ids" if is_sparse else "weights"
            raise ValueError(
                f"{caller} is called with {what}, and has no combiner: make it with "
                "combiner='sum', 'mean' or 'sqrtn'."
            )
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(tf.nn.embedding_lookup(table, inputs.flat_values))
        return tf.nn.embedding_lookup(table, inputs)
    if is_sparse:
        return _pooled(table, inputs, weights, combiner=combiner)
    if isinstance(inputs, tf.RaggedTensor):
        if inputs.shape.rank != 2:
            raise ValueError(
                f"{caller} combines the rows of ragged ids [B, None], and these have the shape "
                f"{inputs.shape}. Call inputs.merge_dims(…) first."
            )
        return _pooled(
            table,
            *(x if x is None else x.to_sparse() for x in (inputs, weights)),
            combiner=combiner,
        )
    ids = tf.convert_to_tensor(inputs)
    pooled = _pooled(
        table, *(x if x is None else _as_sparse(x) for x in (ids, weights)), combiner=combiner
    )
    if ids.shape.rank == 2:
        return pooled
    out = tf.reshape(pooled, tf.concat([tf.shape(ids)[:-1], [table.shape[-1]]], 0))
    out.set_shape(ids.shape[:-1].concatenate([table.shape[-1]]))
    return out


def _pooled(table: Any, ids: Any, weights: Any, *, combiner: str) -> tf.Tensor:
    rows = tf.nn.embedding_lookup_sparse(table, ids, weights, combiner=combiner)
    pooled = for_all_samples(rows, ids.dense_shape[0])
    pooled.set_shape([None, table.shape[-1]])
    return pooled


def _as_sparse(x: Any) -> tf.SparseTensor:
    """Returns the values of a tensor [..., K] as those of samples [B, K], zeros included."""
    x = tf.convert_to_tensor(x)
    return tf.RaggedTensor.from_tensor(tf.reshape(x, [-1, tf.shape(x)[-1]])).to_sparse()
