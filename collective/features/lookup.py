"""Makes the tables of slots, and looks up the embeddings of their features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.embedding_variable import get_embedding_variable
from collective.features.slots import HashStack, Slot, Slots
from collective.ops import key_hashing
from collective.ops.graph import device_scopes
from collective.policy import PolicyOption, TablePolicy
from collective.tables.dynamic_table import DynamicTable
from collective.yaml_file import nearest

# SplitMix64's increment (see `key_hashing`): 2**64 divided by the golden ratio, and odd.
_GAMMA = 0x9E3779B97F4A7C15


class RawEmbedding(NamedTuple):
    """Holds the embeddings of the single ids of samples.

    Attributes:
        rows: [B, L, D], zeros where a sample has no id.
        mask: bool [B, L], where a sample has one.
    """

    rows: tf.Tensor
    mask: tf.Tensor


def tables(
    slots: Slots, policy: TablePolicy | PolicyOption | None = None
) -> dict[str, DynamicTable]:
    """Makes the tables of slots in the current variable scope, or returns those that are there.

    A table is named like its group, or like its slot if that has no group. The order of the file
    makes no difference. Any 64-bit id is a key.

    Args:
        slots: of `load`.
        policy: of all tables, a `collective.TablePolicy` or `EmbeddingConfig`. Default: that of the
            current embedding_scope(), if any.

    Returns:
        The tables by their names, in the order of names.

    Raises:
        ValueError: it is called outside of strategy.scope(), or the tables are there with another
            policy.
    """
    scope = tf.get_variable_scope()
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
        return {
            name: get_embedding_variable(name, dim, ev_option=policy)
            for name, dim in slots.dimensions().items()
        }


def embeddings(
    slots: Slots, features: Mapping[str, Any], policy: TablePolicy | PolicyOption | None = None
) -> dict[str, tf.Tensor | RawEmbedding]:
    """Looks up the embeddings of all slots.

        slots = collective.features.load('embedding_config.yml')
        embedded = collective.features.embeddings(slots, {'user': ids, 'history': ragged_ids})
        network_input = tf.concat([embedded['user'], embedded['history']], axis=1)

    A slot with `embedding_summation: true` has the sum of the embeddings of a sample's ids, [B, D];
    an id counts as often as it occurs, and a sample without ids has zeros. `sqrt_scaling` divides
    by the square root of the number of rows in the sum, n ids times r rounds of hashing. It equals
    `tf.nn.embedding_lookup_sparse` with the combiners 'sum' and 'sqrtn'.

    Any other slot has a `RawEmbedding` of the first L ids, L = `sample_fixed_size`. Each row is the
    sum over the rounds of hashing, which `sqrt_scaling` divides by √r.

    An unsigned id u of 2⁶³ or more is the key u - 2⁶⁴: the same 64 bits.

    Args:
        slots: of `load`.
        features: the ids of each slot, by its name: a tensor [B] of one id a sample, a tensor
            [B, n] of n ids, or a `tf.RaggedTensor` or `tf.SparseTensor` of any number, of integers.
        policy: as in `tables`.

    Returns:
        The embeddings by the slots' names, in the order of names, whatever the order of the file
        and of `features` is.

    Raises:
        KeyError: a feature has no slot, or a slot no feature.
        TypeError: ids aren't integers.
        ValueError: ids have another shape, or as in `tables`.
    """
    _check_names(slots, features)
    made = tables(slots, policy)
    found: dict[str, tf.Tensor | RawEmbedding] = {}
    for name, slot in sorted(slots.slots_config.items()):
        table = made[slots.table_of(name)]
        with tf.name_scope(f"{name}_embedding"):
            if slot.embedding_summation:
                found[name] = _summed(table, slot, _keys(name, features[name]))
            else:
                found[name] = _raw(table, slot, _keys(name, features[name]))
    return found


def _check_names(slots: Slots, features: Mapping[str, Any]) -> None:
    for name in features:
        if name not in slots.slots_config:
            raise KeyError(
                f"feature {name!r} has no slot.{nearest(name, slots.slots_config)} The slots are "
                f"{', '.join(sorted(slots.slots_config))}."
            )
    missing = sorted(set(slots.slots_config) - set(features))
    if missing:
        raise KeyError(
            f"no feature is given for slot {', '.join(map(repr, missing))}. A sample without ids "
            "has an empty row; a slot that isn't used has no place in the file."
        )


def _keys(name: str, ids: Any) -> Any:
    """Returns ids as int64 keys: a tensor [B], or a RaggedTensor [B, None]."""
    with device_scopes.on_host():
        if isinstance(ids, (tf.SparseTensor, tf.SparseTensorValue)):
            ids = tf.SparseTensor.from_value(ids)
            if ids.shape.rank not in (None, 2):
                raise ValueError(_shape_error(name, ids.shape))
            keys = _as_int64(name, ids.values)
            rows, count = ids.indices[:, 0], ids.dense_shape[0]
            return tf.RaggedTensor.from_value_rowids(keys, rows, count, validate=False)
        if isinstance(ids, tf.ragged.RaggedTensorValue):
            ids = tf.RaggedTensor.from_nested_row_splits(ids.flat_values, ids.nested_row_splits)
        if isinstance(ids, tf.RaggedTensor):
            if ids.ragged_rank != 1 or ids.values.shape.rank not in (None, 1):
                raise ValueError(_shape_error(name, ids.shape))
            splits = tf.cast(ids.row_splits, tf.int64)
            keys = _as_int64(name, ids.values)
            return tf.RaggedTensor.from_row_splits(keys, splits, validate=False)
        keys = _as_int64(name, tf.convert_to_tensor(ids))
        if keys.shape.rank == 2:
            return tf.RaggedTensor.from_tensor(keys, row_splits_dtype=tf.int64)
        if keys.shape.rank != 1:
            raise ValueError(_shape_error(name, keys.shape))
        return keys


def _shape_error(name: str, shape: Any) -> str:
    return f"slot '{name}': ids are [B], or [B, n] for any n in each sample, not {shape}."


def _as_int64(name: str, ids: tf.Tensor) -> tf.Tensor:
    if ids.dtype == tf.uint64:
        return tf.bitcast(ids, tf.int64)
    if not ids.dtype.is_integer:
        raise TypeError(f"slot '{name}': ids are integers, not {ids.dtype.name}.")
    return tf.cast(ids, tf.int64)


def hashed(keys: tf.Tensor, stack: HashStack) -> tf.Tensor:
    """Returns the row of each id in each round of hashing.

    The row of key k in round i, from 0, is i S + (m(k + (i + 1) γ) div 2) mod S, where S is
    `embedding_size`, and m(k + (i + 1) γ) the (i + 1)th number that SplitMix64 draws from the seed
    k: see `collective.ops.key_hashing`.

    Args:
        keys: int64 [n].
        stack: the rounds, r.

    Returns:
        int64 [n, r], from 0 to r S - 1.
    """
    salts = [_GAMMA * (i + 1) % 2**64 for i in range(stack.hash_stack_rounds)]
    first = stack.embedding_size * np.arange(stack.hash_stack_rounds, dtype=np.int64)
    with device_scopes.on_host():
        salted = tf.bitcast(keys, tf.uint64)[:, None] + np.array(salts, np.uint64)
        mixed = key_hashing.mix(tf.bitcast(salted, tf.int64))
        positive = tf.cast(tf.bitwise.right_shift(mixed, tf.constant(1, tf.uint64)), tf.int64)
        return positive % tf.constant(stack.embedding_size, tf.int64) + first


def _summed(table: DynamicTable, slot: Slot, keys: Any) -> tf.Tensor:
    """Returns [B, D]."""
    if not isinstance(keys, tf.RaggedTensor):
        if not slot.rounds:
            return tf.nn.embedding_lookup(table, keys)
        keys = tf.RaggedTensor.from_tensor(keys[:, None], row_splits_dtype=tf.int64)
    with device_scopes.on_host():
        if slot.rounds:
            rows = tf.reshape(hashed(keys.values, slot.hash_stack_config), [-1])
            keys = tf.RaggedTensor.from_row_splits(
                rows, keys.row_splits * slot.rounds, validate=False
            )
        sparse = keys.to_sparse()
    combiner = "sqrtn" if slot.sqrt_scaling else "sum"
    return tf.nn.safe_embedding_lookup_sparse(table, sparse, combiner=combiner)


def _raw(table: DynamicTable, slot: Slot, keys: Any) -> RawEmbedding:
    """Returns [B, L, D] and its mask."""
    length = slot.sample_fixed_size
    with device_scopes.on_host():
        if not isinstance(keys, tf.RaggedTensor):
            keys = tf.RaggedTensor.from_tensor(keys[:, None], row_splits_dtype=tf.int64)
        keys = keys[:, :length]
        samples = keys.value_rowids()
        columns = tf.range(tf.size(samples, out_type=tf.int64)) - tf.gather(
            keys.row_starts(), samples
        )
        places = tf.stack([samples, columns], axis=1)
        shape = tf.stack([keys.nrows(), length, slot.dim])
        mask = tf.sequence_mask(keys.row_lengths(), length)
    if slot.rounds:
        of_rounds = tf.nn.embedding_lookup(table, hashed(keys.values, slot.hash_stack_config))
        rows = tf.reduce_sum(of_rounds, axis=1)
        if slot.sqrt_scaling:
            rows = rows / tf.sqrt(tf.cast(slot.rounds, rows.dtype))
    else:
        rows = tf.nn.embedding_lookup(table, keys.values)
    padded = tf.scatter_nd(places, rows, shape)
    padded.set_shape([None, length, slot.dim])
    return RawEmbedding(padded, mask)
