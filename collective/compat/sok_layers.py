"""Defines the layers of SparseOperationKit's first API as lookups in a table."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective import group_embedding
from collective.compat import sok_variables
from collective.ops.communication import collectives
from collective.tables.table import Table


class _Embedding(tf.keras.layers.Layer):
    """Holds a table for the keys of all slots.

    Args:
        max_vocabulary_size_per_gpu: V / N, for a table without `use_hashtable`.
        embedding_vec_size: D.
        use_hashtable: whether to make a dynamic table, for any keys; else keys are from 0 to V - 1.
        key_dtype: no effect: keys of any integer type are the same.
        embedding_initializer: fills rows: an initializer, or the name of a Keras initializer.
            Default: uniformly between -0.05 and 0.05.
        **kwargs: `name`, `dtype` and `trainable`.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        use_hashtable: bool,
        key_dtype: Any,
        embedding_initializer: Any,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        del key_dtype
        if isinstance(embedding_initializer, str):
            embedding_initializer = tf.keras.initializers.get(embedding_initializer)
        rows = None if use_hashtable else max_vocabulary_size_per_gpu * collectives.size()
        self.var = sok_variables.make_table(
            sok_variables.DynamicVariable if use_hashtable else Table,
            f"{self.name}/embedding",
            [rows, embedding_vec_size],
            embedding_initializer or tf.random_uniform_initializer(-0.05, 0.05),
            dtype=tf.float32,
            trainable=self.trainable,
        )

    @property
    def embedding_variable(self) -> Any:
        """Returns the table."""
        return self.var


class DistributedEmbedding(_Embedding):
    """Combines the rows of each slot of a sample.

    Args:
        combiner: 'mean' or 'sum', in any case.
        max_vocabulary_size_per_gpu, embedding_vec_size, use_hashtable, key_dtype,
            embedding_initializer, **kwargs: as for all layers of this module.
        slot_num: S.
        max_nnz, max_feature_num: no effect: a slot has any number of keys.
    """

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int = 1,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ):
        del max_nnz, max_feature_num
        super().__init__(
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            use_hashtable,
            key_dtype,
            embedding_initializer,
            **kwargs,
        )
        self.combiner, self.slot_num = combiner.lower(), slot_num

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: tf.SparseTensor, training: bool = True) -> tf.Tensor:
        """Looks up the keys [B · S, nnz] of B samples: [B, S, D].

        `training` has no effect: every run gives keys their rows.
        """
        del training
        (rows,) = group_embedding.group_embedding_lookup_sparse(
            [self.var], [inputs], [self.combiner]
        )
        return tf.reshape(rows, [-1, self.slot_num, self.var.dim])


class All2AllDenseEmbedding(_Embedding):
    """Looks up a row for each key.

    Args:
        max_vocabulary_size_per_gpu, embedding_vec_size, use_hashtable, key_dtype,
            embedding_initializer, **kwargs: as for all layers of this module.
        slot_num: S.
        nnz_per_slot: K.
        dynamic_input: whether the input is keys [B], of any number.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ):
        super().__init__(
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            use_hashtable,
            key_dtype,
            embedding_initializer,
            **kwargs,
        )
        self.slots = None if dynamic_input else [slot_num, nnz_per_slot]

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, training: bool = True) -> tf.Tensor:
        """Looks up the keys [B, S, K]: [B, S, K, D]; with `dynamic_input` [B]: [B, D].

        `training` has no effect: every run gives keys their rows.
        """
        del training
        if self.slots is not None:
            inputs = tf.reshape(inputs, [-1, *self.slots])
        (rows,) = group_embedding.group_embedding_lookup([self.var], [inputs])
        return rows
