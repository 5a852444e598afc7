"""Makes categorical columns without a vocabulary, for embedding columns of TensorFlow."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.embedding_variable import check_scope
from collective.ops import key_hashing
from collective.policy import PolicyOption, TablePolicy, policy_of
from collective.tables.policies.open_dimension import OpenDimension
from collective.tensorflow_internals.feature_columns import feature_column as v1
from collective.tensorflow_internals.feature_columns import feature_column_v2 as v2

__all__ = ["categorical_column_with_embedding", "group_embedding_column_scope"]


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[None]:
    """Does nothing, because all embedding columns are looked up together anyway. The name is
    DeepRec's.

    Args:
        name: no effect.
    """
    del name
    yield


def categorical_column_with_embedding(
    key: str,
    dtype: tf.DType = tf.int64,
    partition_num: int | None = None,
    ev_option: TablePolicy | PolicyOption | None = None,
) -> EmbeddingCategoricalColumn:
    """Makes a column of keys that are looked up directly, without hash buckets or a vocabulary.

    The signature is DeepRec's.

        user = collective.feature_column.categorical_column_with_embedding('user')
        columns = [tf.feature_column.embedding_column(user, dimension=16)]

    Inside strategy.scope() the embedding is a dynamic table, inside or outside embedding_scope().
    Any int64 is a key, also -1 in a dense tensor, which other columns treat as a missing value.
    Strings become keys by `collective.ops.key_hashing.of_strings`; '' is missing, as in
    TensorFlow's columns. `tf.feature_column.weighted_categorical_column` accepts the column;
    indicator and crossed columns don't, because they need a number of buckets.

    Args:
        key: the feature's name.
        dtype: the feature's type, tf.int64, tf.int32 or tf.string. (DeepRec's default is
            tf.string.)
        partition_num: no effect: the table is sharded over all ranks anyway.
        ev_option: the policy of the column's tables: a `collective.TablePolicy`, DeepRec's
            `EmbeddingVariableOption` or PERSIA's `EmbeddingConfig`. A warning names the options
            that have no effect yet. Its initializer takes precedence over the embedding column's.
            Columns that share a table need the same policy.

    Raises:
        TypeError: `ev_option` has none of these types.
        ValueError: another dtype.
    """
    del partition_num
    policy = policy_of(ev_option, f"categorical_column_with_embedding('{key}'): ev_option")
    dtype = tf.as_dtype(dtype)
    if dtype not in (tf.int64, tf.int32, tf.string):
        raise ValueError(
            f"categorical_column_with_embedding('{key}'): dtype is tf.int64, tf.int32 or "
            f"tf.string, not {dtype.name}."
        )
    return EmbeddingCategoricalColumn(key, dtype, policy)


class EmbeddingCategoricalColumn(
    v2.CategoricalColumn,
    v1._CategoricalColumn,
    collections.namedtuple(
        "EmbeddingCategoricalColumn", ("key", "dtype", "policy"), defaults=(None,)
    ),
):
    """Implements `categorical_column_with_embedding`."""

    @property
    def _is_v2_column(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def num_buckets(self) -> OpenDimension | None:
        """Returns None, or a stand-in for it with the column's policy: there is no such number.

        An embedding of the column has [None, D] weights, a dynamic table.
        """
        return None if self.policy is None else OpenDimension(self.policy)

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        return {self.key: tf.io.VarLenFeature(tf.string if self.dtype == tf.string else tf.int64)}

    def _keys(self, feature: Any) -> tf.SparseTensor:
        check_scope(f"categorical_column_with_embedding('{self.key}')")
        feature = (
            tf.convert_to_tensor_or_sparse_tensor(feature)
            if not hasattr(feature, "to_sparse")
            else feature.to_sparse()
        )
        if (feature.dtype == tf.string) != (self.dtype == tf.string) or not (
            feature.dtype.is_integer or feature.dtype == tf.string
        ):
            raise ValueError(
                f"feature '{self.key}' is {feature.dtype.name}, but "
                f"categorical_column_with_embedding('{self.key}') has dtype {self.dtype.name}."
            )
        if not isinstance(feature, tf.SparseTensor):
            is_present = (
                tf.not_equal(feature, "")
                if feature.dtype == tf.string
                else tf.fill(tf.shape(feature), True)
            )
            indices = tf.where(is_present)
            feature = tf.SparseTensor(
                indices, tf.gather_nd(feature, indices), tf.shape(feature, out_type=tf.int64)
            )
        values = (
            key_hashing.of_strings(feature.values)
            if feature.dtype == tf.string
            else tf.cast(feature.values, tf.int64)
        )
        return tf.SparseTensor(feature.indices, values, feature.dense_shape)

    def transform_feature(self, transformation_cache: Any, state_manager: Any) -> tf.SparseTensor:
        return self._keys(transformation_cache.get(self.key, state_manager))

    def get_sparse_tensors(self, transformation_cache: Any, state_manager: Any) -> Any:
        return v2.CategoricalColumn.IdWeightPair(
            transformation_cache.get(self, state_manager), None
        )

    @property
    def parents(self) -> list[str]:
        return [self.key]

    def get_config(self) -> dict[str, Any]:
        config = {"key": self.key, "dtype": self.dtype.name}
        return config if self.policy is None else {**config, "policy": self.policy}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None, columns_by_name: Any = None
    ) -> Any:
        return cls(config["key"], tf.as_dtype(config["dtype"]), config.get("policy"))

    # -- The first version of feature columns, tf.feature_column.input_layer

    @property
    def _parse_example_spec(self) -> dict[str, Any]:
        return self.parse_example_spec

    @property
    def _num_buckets(self) -> OpenDimension | None:
        return self.num_buckets

    def _transform_feature(self, inputs: Any) -> tf.SparseTensor:
        return self._keys(inputs.get(self.key))

    def _get_sparse_tensors(
        self, inputs: Any, weight_collections: Any = None, trainable: Any = None
    ) -> Any:
        return v2.CategoricalColumn.IdWeightPair(inputs.get(self), None)


def indicator_column(original: Any, categorical_column: Any) -> Any:
    """Refuses columns without a vocabulary, for `tf.feature_column.indicator_column`."""
    inner = categorical_column
    while hasattr(inner, "categorical_column"):
        inner = inner.categorical_column
    if isinstance(inner, EmbeddingCategoricalColumn):
        raise ValueError(
            f"indicator_column of categorical_column_with_embedding('{inner.key}'): a column "
            "without a vocabulary has no number of buckets. Use embedding_column, or a column with "
            "a vocabulary or hash buckets."
        )
    return original(categorical_column)
