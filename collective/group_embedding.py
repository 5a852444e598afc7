"""Looks up several tables in one call, like DeepRec.

Every lookup inside strategy.scope() is grouped anyway: these functions are another way to write
them.

Source: DeepRec's `tf.nn.group_embedding_lookup_sparse` and `tf.nn.group_embedding_lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tables import lookups
from collective.tables.table import Sharded


def group_embedding_lookup_sparse(
    params: Sequence[Any],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    sp_weights: Sequence[Any] | None = None,
    partition_strategy: str = "mod",
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up several tables, each with its own ids.

    Args:
        params: L tables or other embeddings.
        sp_ids: for each a `SparseTensor` or `RaggedTensor` of ids [B, T].
        combiners: for each 'sum', 'mean' or 'sqrtn'.
        sp_weights: for each the ids' weights, or None; by default none has weights.
        partition_strategy: 'mod' or 'div', of embeddings in several variables, as for
            `tf.nn.embedding_lookup`. No effect on tables.
        params_num_per_group: no effect.
        is_sequence: whether to return rows without combining them.
        name: the operations' name scope.

    Returns:
        L tensors [B, D]: the rows of `tf.nn.embedding_lookup_sparse`, which counts every weight, 0
        and less included, and takes no id below 0; zeros for samples without ids. For sequences
        [B, T, D], zeros where there is no id.

    Raises:
        ValueError: the lists have different lengths.
    """
    del params_num_per_group
    weights = [None] * len(params) if sp_weights is None else list(sp_weights)
    _check(params, sp_ids=sp_ids, combiners=combiners, sp_weights=weights)
    with tf.name_scope(name, "group_embedding_lookup_sparse"):
        outputs = []
        for table, ids, combiner, weight in zip(
            params, map(_sparse, sp_ids), combiners, map(_sparse, weights)
        ):
            if is_sequence:
                rows = _rows(table, ids.values, partition_strategy)
                shape = tf.concat([ids.dense_shape, tf.shape(rows, out_type=tf.int64)[1:]], 0)
                outputs.append(tf.scatter_nd(ids.indices, rows, shape))
            else:
                outputs.append(_pooled(table, ids, weight, combiner, partition_strategy))
        return outputs


def group_embedding_lookup(
    params: Sequence[Any],
    ids: Sequence[Any],
    partition_strategy: str = "mod",
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up several tables, each with its own dense ids of any shape.

    Args:
        params: L tables or other embeddings.
        ids: for each integers [...].
        partition_strategy: 'mod' or 'div', of embeddings in several variables, as for
            `tf.nn.embedding_lookup`. No effect on tables.
        name: the operations' name scope.

    Returns:
        L tensors [..., D].

    Raises:
        ValueError: the lists have different lengths.
    """
    _check(params, ids=ids)
    with tf.name_scope(name, "group_embedding_lookup"):
        return [_rows(table, one, partition_strategy) for table, one in zip(params, ids)]


def _rows(table: Any, ids: Any, partition_strategy: str) -> tf.Tensor:
    if isinstance(table, Sharded):
        return lookups.lookup_rows(table, ids, None, None)
    return tf.nn.embedding_lookup(table, ids, partition_strategy)


def _pooled(
    table: Any, ids: tf.SparseTensor, weights: Any, combiner: str, partition_strategy: str
) -> tf.Tensor:
    """Looks up as `tf.nn.embedding_lookup_sparse` does, with a row for every sample, [B, D]."""
    pooled = (
        lookups.lookup_pooled(table, ids, weights, combiner, None, None)
        if isinstance(table, Sharded)
        else tf.nn.embedding_lookup_sparse(table, ids, weights, partition_strategy, None, combiner)
    )
    return lookups.for_all_samples(pooled, ids.dense_shape[0])


def _sparse(ids: Any) -> Any:
    return ids.to_sparse() if isinstance(ids, tf.RaggedTensor) else ids


def _check(params: Sequence[Any], **others: Sequence[Any]) -> None:
    for name, values in others.items():
        if len(values) != len(params):
            raise ValueError(
                f"a grouped lookup needs one of {name} for each of params, but there are "
                f"{len(values)} and {len(params)}."
            )
