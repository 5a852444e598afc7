"""Defines functions of TensorFlow 1's tf.contrib with what TensorFlow 2.15 still has."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tensorflow_internals.feature_columns import feature_column_v2
from collective.tensorflow_internals.metrics import lookup_ops

index_table_from_file = lookup_ops.index_table_from_file
index_table_from_tensor = lookup_ops.index_table_from_tensor


def xavier_initializer(
    uniform: bool = True, seed: int | None = None, dtype: Any = tf.float32
) -> Any:
    """Makes Glorot's initializer."""
    kind = tf.glorot_uniform_initializer if uniform else tf.glorot_normal_initializer
    return kind(seed=seed, dtype=dtype)


xavier_initializer_conv2d = xavier_initializer


def variance_scaling_initializer(
    factor: float = 2.0,
    mode: str = "FAN_IN",
    uniform: bool = False,
    seed: int | None = None,
    dtype: Any = tf.float32,
) -> Any:
    """Makes an initializer whose variance is `factor` divided by the fan."""
    distribution = "uniform" if uniform else "truncated_normal"
    return tf.variance_scaling_initializer(factor, mode.lower(), distribution, seed, dtype)


def l1_regularizer(scale: float, scope: str | None = None) -> Any:
    """Returns a function: scale · Σ|w|, or None if scale is 0."""
    if scale == 0:
        return lambda weights: None

    def l1(weights: Any, name: str | None = None) -> tf.Tensor:
        with tf.name_scope(scope or name, "l1_regularizer"):
            return scale * tf.reduce_sum(tf.abs(weights))

    return l1


def l2_regularizer(scale: float, scope: str | None = None) -> Any:
    """Returns a function: scale · ½Σw², or None if scale is 0."""
    if scale == 0:
        return lambda weights: None

    def l2(weights: Any, name: str | None = None) -> tf.Tensor:
        with tf.name_scope(scope or name, "l2_regularizer"):
            return scale * tf.nn.l2_loss(weights)

    return l2


def fully_connected(
    inputs: Any,
    num_outputs: int,
    activation_fn: Any = tf.nn.relu,
    weights_initializer: Any = None,
    weights_regularizer: Any = None,
    biases_initializer: Any = tf.zeros_initializer,
    biases_regularizer: Any = None,
    reuse: Any = None,
    trainable: bool = True,
    scope: Any = None,
) -> tf.Tensor:
    """Makes a dense layer whose variables are called weights and biases."""
    with tf.variable_scope(scope, "fully_connected", [inputs], reuse=reuse):
        weights = tf.get_variable(
            "weights",
            [int(inputs.shape[-1]), num_outputs],
            initializer=weights_initializer or xavier_initializer(),
            regularizer=weights_regularizer,
            trainable=trainable,
        )
        outputs = tf.tensordot(inputs, weights, 1)
        if biases_initializer is not None:
            outputs += tf.get_variable(
                "biases",
                [num_outputs],
                initializer=biases_initializer,
                regularizer=biases_regularizer,
                trainable=trainable,
            )
        return outputs if activation_fn is None else activation_fn(outputs)


def flatten(inputs: Any, scope: str | None = None) -> tf.Tensor:
    """Flattens all dimensions except the first into one."""
    return tf.layers.flatten(inputs, name=scope)


def dropout(
    inputs: Any, keep_prob: float = 0.5, noise_shape: Any = None, is_training: Any = True
) -> tf.Tensor:
    """Drops elements while training; those that stay are scaled."""
    return tf.layers.dropout(inputs, 1 - keep_prob, noise_shape, training=is_training)


class IntegerColumn(feature_column_v2.IdentityCategoricalColumn):
    """Is a column of the keys 0 … V - 1, which takes other keys modulo V, as tf.contrib does."""

    def _transform_input_tensor(self, input_tensor: Any) -> tf.SparseTensor:
        keys = super()._transform_input_tensor(input_tensor)
        buckets = tf.cast(self.number_buckets, keys.dtype)
        return tf.SparseTensor(keys.indices, keys.values % buckets, keys.dense_shape)


def sparse_column_with_integerized_feature(
    column_name: str, bucket_size: int, combiner: str = "sum", dtype: Any = tf.int64
) -> Any:
    """Makes a column of keys modulo bucket_size.

    Args:
        column_name: the feature.
        bucket_size: V, the number of keys.
        combiner, dtype: no effect; an embedding column has a combiner of its own.
    """
    del combiner, dtype
    return IntegerColumn(column_name, bucket_size, None)


def embedding_column(
    sparse_id_column: Any,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    do_fusion: bool = False,
) -> Any:
    """Makes `tf.feature_column.embedding_column`: lookups are fused anyway.

    By default rows are drawn as in tf.contrib: from a truncated normal distribution of the
    deviation 1 / √V for V buckets, and 1 for open-ended keys.
    """
    del do_fusion
    if initializer is None:
        buckets = sparse_id_column.num_buckets
        deviation = buckets**-0.5 if isinstance(buckets, int) else 1.0
        initializer = tf.truncated_normal_initializer(stddev=deviation)
    return tf.feature_column.embedding_column(
        sparse_id_column,
        dimension,
        combiner,
        initializer,
        ckpt_to_load_from,
        tensor_name_in_ckpt,
        max_norm,
        trainable,
    )


def input_from_feature_columns(
    columns_to_tensors: Any,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    scope: Any = None,
    cols_to_outs: dict[Any, Any] | None = None,
) -> tf.Tensor:
    """Calls `tf.feature_column.input_layer`, in a variable scope if one is named.

    Args:
        columns_to_tensors: features by name.
        feature_columns: the columns.
        weight_collections, trainable: those of the weights that are created.
        scope: the variable scope; None for none.
        cols_to_outs: a dict that receives the output of each column; or None.
    """
    with tf.variable_scope(scope) if scope else contextlib.nullcontext():
        return tf.feature_column.input_layer(
            columns_to_tensors,
            feature_columns,
            weight_collections,
            trainable,
            cols_to_output_tensors=cols_to_outs,
        )


def sequence_input_layer(
    features: Any,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
) -> Any:
    """Returns (layer [B, T, D], lengths [B]) for sequence columns.

    Raises:
        NotImplementedError: `weight_collections` is given.
    """
    if weight_collections:
        raise NotImplementedError(
            "tf.contrib.feature_column.sequence_input_layer(weight_collections=…) is not "
            "supported: add the variables to the collections by tf.add_to_collection."
        )
    return tf.keras.experimental.SequenceFeatures(feature_columns, trainable)(features)


class Linear:
    """Multiplies arrays, joined side by side, by one matrix, as RNN cells do.

    Args:
        args: a tensor [B, D] or several, whose widths determine the matrix.
        output_size: the result's width.
        build_bias: whether a bias is added.
        bias_initializer: the bias's initializer; zeros by default.
        kernel_initializer: the matrix's initializer; by default the variable scope's.
    """

    def __init__(
        self,
        args: Any,
        output_size: int,
        build_bias: bool,
        bias_initializer: Any = None,
        kernel_initializer: Any = None,
    ):
        tensors = args if isinstance(args, (list, tuple)) else [args]
        width, dtype = sum(int(tensor.shape[1]) for tensor in tensors), tensors[0].dtype
        with tf.variable_scope(tf.get_variable_scope()):
            self._kernel = tf.get_variable(
                "kernel", [width, output_size], dtype, initializer=kernel_initializer
            )
            self._bias = None
            if build_bias:
                self._bias = tf.get_variable(
                    "bias",
                    [output_size],
                    dtype,
                    initializer=bias_initializer or tf.zeros_initializer(),
                )

    def __call__(self, args: Any) -> tf.Tensor:
        tensors = list(args) if isinstance(args, (list, tuple)) else [args]
        found = tf.matmul(tf.concat(tensors, 1), self._kernel)
        return found if self._bias is None else found + self._bias


class HParams:
    """Holds hyperparameters as attributes."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def add_hparam(self, name: str, value: Any) -> None:
        """Adds a hyperparameter."""
        if name in self.__dict__:
            raise ValueError(f"hyperparameter {name} is there already")
        self.__dict__[name] = value

    def set_hparam(self, name: str, value: Any) -> None:
        """Sets an existing hyperparameter."""
        self.__dict__[name] = value

    def values(self) -> dict[str, Any]:
        """Returns all hyperparameters."""
        return dict(self.__dict__)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__
