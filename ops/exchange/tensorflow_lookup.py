"""Computes a rank's side of an exchange with TensorFlow's own operations.

Symbols: K keys of one lookup, U of them distinct, N ranks, D the dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.exchange import shard_gradients
from collective.ops.graph import device_scopes
from collective.tensorflow_internals.graphs import record
from collective.tensorflow_internals.variables import resource_variable_ops

Gradient = Callable[[tf.Operation, Any], Sequence[Any]]
_STATIC_GATHER = "CollectiveStaticGather"


class Distinct(NamedTuple):
    """Holds distinct keys in the order in which they are sent.

    Attributes:
        keys: [U] int64, rank 0's keys first, then rank 1's, …
        splits: [N] int32, how many keys belong to each rank.
        positions: [K] int32, the position of each of the K keys among the U.
    """

    keys: tf.Tensor
    splits: tf.Tensor
    positions: tf.Tensor


def distinct_by_owner(
    keys: tf.Tensor, owners: Callable[[tf.Tensor], tf.Tensor], ranks: int
) -> Distinct:
    """De-duplicates `keys` [K] int64 and orders them by owner.

    Args:
        keys: the keys.
        owners: returns the owners of distinct keys.
        ranks: N.
    """
    unique, inverse = tf.unique(keys)
    if ranks == 1:
        return Distinct(unique, tf.size(unique)[None], inverse)
    owner = owners(unique)
    parts = tf.dynamic_partition(unique, owner, ranks)
    places = tf.concat(tf.dynamic_partition(tf.range(tf.size(unique)), owner, ranks), 0)
    return Distinct(
        keys=tf.concat(parts, 0),
        splits=tf.stack([tf.size(part) for part in parts]),
        positions=tf.gather(tf.math.invert_permutation(places), inverse),
    )


def occurrences(distinct: Distinct) -> tf.Tensor:
    """Returns how often each distinct key occurs among the keys, [U] int64."""
    ones = tf.ones_like(distinct.positions, tf.int64)
    return tf.math.unsorted_segment_sum(ones, distinct.positions, tf.size(distinct.keys))


def gather_rows(table: Any, local_rows: tf.Tensor, row_shape: Any) -> tf.Tensor:
    """Returns rows of a shard, read in place: [R, D] for `local_rows` [R] int64.

    The gradient is `IndexedSlices` of the shard.

    Args:
        table: the shard's resource handle.
        local_rows: indices into the shard.
        row_shape: [D].
    """
    rows = gather_with(_STATIC_GATHER, _gather_gradient, table, local_rows)
    rows.set_shape(tf.TensorShape([None]).concatenate(row_shape))
    return rows


def gather_with(name: str, gradient: Gradient, table: Any, local_rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of a shard, read in place, that have a gradient of their own.

    A tape gets it, too: it wouldn't find it by name.

    Args:
        name: under which the gradient is registered.
        gradient: the gradient's function.
        table: the shard's variable.
        local_rows: indices into the shard.
    """
    # Not tf.gather: a resource variable that was updated sparsely copies itself on every other kind
    # of read.
    with record.stop_recording():
        with tf.get_default_graph().gradient_override_map({"ResourceGather": name}):
            rows = tf.raw_ops.ResourceGather(
                resource=table.handle, indices=local_rows, dtype=table.dtype
            )
    record.record_operation(
        name, [rows], [table.handle, local_rows], lambda given: gradient(rows.op, given)
    )
    return rows


@tf.RegisterGradient(_STATIC_GATHER)
def _gather_gradient(op: tf.Operation, gradient: Any) -> tuple[tf.IndexedSlices, None]:
    return shard_gradients.of_shard(resource_variable_ops._GatherGrad(op, gradient)[0]), None


def bounds(ids: tf.Tensor) -> tf.Tensor:
    """Returns the smallest and the largest of `ids`, [2] int64.

    Without ids these are int64's largest and smallest.
    """
    # TensorFlow has no GPU kernel for the minimum.
    with device_scopes.on_host():
        flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
        return tf.stack([tf.reduce_min(flat), tf.reduce_max(flat)])


def mismatches(ids: tf.Tensor, samples: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Returns the mismatches in a combined lookup's inputs: [2] int64, with weights [3].

    All numbers are 0 if nothing is wrong. They are: the number of samples minus the number of ids;
    the number of samples that are smaller than the one before (the first: than 0); and the number
    of weights minus the number of ids.
    """
    count = tf.size(ids, out_type=tf.int64)
    differences = [
        tf.size(samples, out_type=tf.int64) - count,
        tf.math.count_nonzero(samples < tf.concat([tf.zeros_like(samples[:1]), samples[:-1]], 0)),
    ]
    return tf.stack(
        differences
        if weights is None
        else [*differences, tf.size(weights, out_type=tf.int64) - count]
    )


def pool(
    rows: tf.Tensor,
    positions: tf.Tensor,
    sparse_ids: tf.SparseTensor,
    sparse_weights: tf.SparseTensor | None,
    combiner: str,
    max_norm: float | None,
) -> tf.Tensor:
    """Combines rows per sample, exactly as TensorFlow combines the rows of a whole table.

    Args:
        rows: [U, D], the distinct rows.
        positions: [K] int32, the row of each id.
        sparse_ids: the K ids; only their indices [K, 2] (sample, place in the sample) matter.
        sparse_weights: K weights at the same indices, or None.
        combiner: 'sum', 'mean' or 'sqrtn'.
        max_norm: each row is clipped to this L2 norm first, unless None.

    Returns:
        [samples, D]: one more row than the last sample that has an id.
    """
    moved = tf.SparseTensor(sparse_ids.indices, positions, sparse_ids.dense_shape)
    return tf.nn.embedding_lookup_sparse(
        rows, moved, sparse_weights, combiner=combiner, max_norm=max_norm
    )
