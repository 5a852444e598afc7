"""Defines functions that DeepRec scripts call, with DeepRec's names and signatures."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import types
from typing import Any

import tensorflow.compat.v1 as tf

from collective import embedding_variable, feature_column, strategy
from collective.compat import hybridbackend_evaluation
from collective.compat.deeprec_options import (
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
)
from collective.compat.framework import say_once
from collective.compat.sok_functions import open_scope
from collective.data import work_queue
from collective.policy import TablePolicy, policy_of
from collective.tables import lookups
from collective.tables.rows import initializers

# The collections of DeepRec's operations that initialise embedding variables and their slots.
EV_INIT_VAR_OPS, EV_INIT_SLOT_OPS = "ev_init_var_ops", "ev_init_slot_ops"


def get_distribution(name: str) -> Any:
    """Returns what is installed under a name, with its `version`; TensorFlow's is like DeepRec's.

    Scripts look for 'deeprec' in the version before they use anything from DeepRec.
    """
    if name.lower() == "tensorflow":
        return types.SimpleNamespace(project_name=name, version="1.15.5+deeprec")
    return importlib.metadata.distribution(name)


def enable_distributed_strategy(strategy: str = "collective") -> None:
    """Opens scope(embedding_gradients='sum') until the process ends, as `sok.init` does.

    Raises:
        NotImplementedError: the strategy isn't 'collective'.
    """
    if strategy != "collective":
        raise NotImplementedError(
            f"tf.config.experimental.enable_distributed_strategy({strategy!r}) is not supported, "
            "as there are no parameter servers: use strategy='collective'."
        )
    open_scope()


class CollectiveStrategy(strategy.CollectiveStrategy):
    """`collective.CollectiveStrategy`, whose Estimators evaluate when DeepRec's do."""

    def estimator(self, *args: Any, **kwargs: Any) -> Any:
        """Makes an Estimator; `train_and_evaluate` evaluates every `eval_every_n_iter` steps."""
        return hybridbackend_evaluation.evaluating_where_asked(super().estimator(*args, **kwargs))


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: Any = tf.int64,
    value_dtype: Any = None,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    collections: Any = None,
    caching_device: Any = None,
    partitioner: Any = None,
    validate_shape: bool = True,
    custom_getter: Any = None,
    constraint: Any = None,
    steps_to_live: int | None = None,
    init_data_source: Any = None,
    ev_option: Any = None,
) -> Any:
    """Makes a dynamic table: see `collective.get_embedding_variable`.

    Without an initializer, rows are drawn from a truncated normal distribution of deviation 1, as
    DeepRec draws them. Glorot's and other initializers that need a number of rows use
    `default_value_dim`, 4096 by default. An `ev_option` with a `GlobalStepEvict` overrides
    `steps_to_live`.

    Raises:
        NotImplementedError: a regularizer, a getter, a constraint or a source of data is given.
            They would change results, and are not supported.
        ValueError: both `steps_to_live` and an `L2WeightEvict` are given.
    """
    del caching_device, validate_shape
    refused = {
        "regularizer": regularizer,
        "custom_getter": custom_getter,
        "constraint": constraint,
        "init_data_source": init_data_source,
    }
    for argument, value in refused.items():
        if value is not None:
            raise NotImplementedError(
                f"tf.get_embedding_variable('{name}', {argument}=…) is not supported: "
                "add a regularizer's loss of the rows that are looked up, bound weights by "
                "collective.TablePolicy(weight_bound=…), start from rows by table.import_()."
            )
    ev_option = _with_steps_to_live(
        ev_option, steps_to_live, f"tf.get_embedding_variable('{name}')"
    )
    is_theirs = isinstance(ev_option, EmbeddingVariableOption)
    drawn = ev_option.init_option if is_theirs else InitializerOption()
    return embedding_variable.get_embedding_variable(
        name,
        embedding_dim,
        key_dtype,
        value_dtype or tf.float32,
        initializers.of_rows(
            tf.truncated_normal_initializer() if initializer is None else initializer,
            drawn.default_value_dim,
        ),
        trainable,
        collections,
        partitioner,
        _scaled_by_its_rows(ev_option),
    )


def _with_steps_to_live(ev_option: Any, steps_to_live: int | None, what: str) -> Any:
    """Returns an option that also has the eviction of `steps_to_live`, combined as in DeepRec."""
    option = EmbeddingVariableOption() if ev_option is None else ev_option
    if not steps_to_live:
        return ev_option
    if not isinstance(option, EmbeddingVariableOption):
        policy = policy_of(option, f"{what}: ev_option", stacklevel=4) or TablePolicy()
        return dataclasses.replace(policy, steps_to_live=policy.steps_to_live or steps_to_live)
    evict = option.evict_option
    if isinstance(evict, L2WeightEvict) and evict.l2_weight_threshold > 0:
        raise ValueError(
            f"{what} has steps_to_live={steps_to_live} and {evict}, of which DeepRec takes one: "
            "leave one out, or give ev_option=collective.TablePolicy(steps_to_live=…, "
            "l2_weight_threshold=…), which evicts by either."
        )
    if isinstance(evict, GlobalStepEvict):
        return option
    return dataclasses.replace(option, evict_option=GlobalStepEvict(steps_to_live))


def _scaled_by_its_rows(ev_option: Any) -> Any:
    """Returns an option whose initializer scales by the number of rows that DeepRec predraws."""
    is_theirs = isinstance(ev_option, EmbeddingVariableOption)
    if not is_theirs or ev_option.init_option.initializer is None:
        return ev_option
    option = ev_option.init_option
    scaled = initializers.of_rows(option.initializer, option.default_value_dim)
    return dataclasses.replace(
        ev_option, init_option=dataclasses.replace(option, initializer=scaled)
    )


def categorical_column_with_embedding(
    key: str, dtype: Any = tf.string, partition_num: int | None = None, ev_option: Any = None
) -> Any:
    """Makes a column of keys: see `collective.feature_column`. The default type is DeepRec's."""
    return feature_column.categorical_column_with_embedding(
        key, dtype, partition_num, _scaled_by_its_rows(ev_option)
    )


def sequence_categorical_column_with_embedding(
    key: str, dtype: Any = tf.string, partition_num: int | None = None, ev_option: Any = None
) -> Any:
    """Makes a column of sequences of keys, for sequence input."""
    from collective.tensorflow_internals.feature_columns import feature_column_v2 as columns

    return columns.SequenceCategoricalColumn(
        categorical_column_with_embedding(key, dtype, partition_num, ev_option)
    )


def fused_embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sparse_weights: Any = None,
    partition_strategy: str | None = None,
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    default_id: int | None = None,
    prune_invalid_ids: bool = False,
    fill_empty_row: bool = True,
    blocknums: Any = None,
) -> tf.Tensor:
    """Calls TensorFlow's lookup; the safe one if ids are pruned or empty samples filled.

    Every sample has a row.

    Raises:
        NotImplementedError: blocknums is given, or fill_empty_row is False.
    """
    if not fill_empty_row:
        raise NotImplementedError(
            "tf.nn.fused_embedding_lookup_sparse(fill_empty_row=False) is not supported: call "
            "tf.nn.embedding_lookup_sparse, whose empty samples are zeros."
        )
    if blocknums is not None:
        raise NotImplementedError(
            "tf.nn.fused_embedding_lookup_sparse(blocknums=…) is not supported: rows of "
            "a table have one dimension; leave it out."
        )
    strategy = partition_strategy or "div"
    if prune_invalid_ids or default_id is not None:
        return tf.nn.safe_embedding_lookup_sparse(
            params, sp_ids, sparse_weights, combiner or "mean", default_id, name, strategy, max_norm
        )
    pooled = tf.nn.embedding_lookup_sparse(
        params, sp_ids, sparse_weights, strategy, name, combiner, max_norm
    )
    return lookups.for_all_samples(pooled, sp_ids.dense_shape[0])


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: float | None = None,
    prune: bool = True,
    blocknums: Any = None,
    fusion_version: Any = None,
) -> tf.Tensor:
    """Calls `tf.nn.safe_embedding_lookup_sparse`, which prunes ids anyway.

    Raises:
        NotImplementedError: prune is False, or blocknums is given.
    """
    del fusion_version
    if blocknums is not None:
        raise NotImplementedError(
            "tf.nn.fused_safe_embedding_lookup_sparse(blocknums=…) is not supported: rows of a "
            "table have one dimension; leave it out."
        )
    if not prune:
        raise NotImplementedError(
            "tf.nn.fused_safe_embedding_lookup_sparse(prune=False) is not supported: "
            "leave it out where no id is negative and no weight 0, else call "
            "tf.nn.embedding_lookup_sparse."
        )
    return tf.nn.safe_embedding_lookup_sparse(
        embedding_weights,
        sparse_ids,
        sparse_weights,
        combiner,
        default_id,
        name,
        partition_strategy,
        max_norm,
    )


def sparse_column_with_embedding(
    column_name: str,
    dtype: Any = tf.string,
    partition_num: int | None = None,
    steps_to_live: int | None = None,
    init_data_source: Any = None,
    ht_partition_num: int = 1000,
    evconfig: Any = None,
    ev_option: Any = None,
) -> Any:
    """Makes a column of keys, as tf.contrib.layers has it.

    Raises:
        NotImplementedError: a source of data is given.
        ValueError: both `steps_to_live` and an `L2WeightEvict` are given.
    """
    del ht_partition_num
    if init_data_source is not None:
        raise NotImplementedError(
            "sparse_column_with_embedding(init_data_source=…) is not supported: start "
            "from rows by table.import_()."
        )
    option = _with_steps_to_live(
        ev_option or evconfig, steps_to_live, f"sparse_column_with_embedding('{column_name}')"
    )
    return categorical_column_with_embedding(column_name, dtype, partition_num, option)


class WorkQueue(work_queue.WorkQueue):
    """`collective.data.WorkQueue`, which also says how it deals items."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        say_once(
            "WorkQueue deals item i to rank i mod N, where DeepRec deals to the rank that asks "
            "first"
        )


class variable_scope(tf.variable_scope):  # noqa: N801 (TensorFlow's name)
    """TensorFlow's `variable_scope`, with DeepRec's `keep_weights`."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._given = args, kwargs
        super().__init__(*args, **kwargs)

    def keep_weights(self, dtype: Any = tf.float32) -> variable_scope:
        """Returns the scope, where variables of shorter floats are stored as `dtype`, and cast."""
        args, kwargs = self._given
        outer = kwargs.get("custom_getter")

        def kept(getter: Any, name: str, *rest: Any, **options: Any) -> Any:
            wanted = tf.as_dtype(options.get("dtype") or tf.float32)
            get = getter if outer is None else functools.partial(outer, getter)
            if not wanted.is_floating or wanted.size >= tf.as_dtype(dtype).size:
                return get(name, *rest, **options)
            return tf.cast(get(name, *rest, **{**options, "dtype": dtype}), wanted)

        return variable_scope(*args, **{**kwargs, "custom_getter": kept})


def staged(
    features: Any = None,
    feed_dict: Any = None,
    capacity: int = 1,
    num_threads: int = 1,
    num_clients: int = 1,
    timeout_millis: int = 300000,
    closed_exception_types: Any = (tf.errors.OutOfRangeError,),
    ignored_exception_types: Any = (),
    feed_generator: Any = None,
    items: Any = None,
    **tuning: Any,
) -> Any:
    """Returns the features unchanged: each run takes the next ones.

    Args:
        features: a structure of tensors; `items` in older scripts.
        feed_dict, feed_generator: must be empty: features have their values.
        capacity, num_threads, num_clients, timeout_millis, tuning: no effect.
        closed_exception_types: must be OutOfRangeError, the default.
        ignored_exception_types: must be empty: no batch is skipped after an error.

    Raises:
        NotImplementedError: one of these would change which values are returned.
    """
    del capacity, num_threads, num_clients, timeout_millis, tuning
    ends = {tf.errors.OutOfRangeError, tf.errors.OUT_OF_RANGE, StopIteration}
    refused = {
        "feed_dict": (feed_dict, "build the features of the tensors that it feeds"),
        "feed_generator": (feed_generator, "read by tf.data.Dataset.from_generator"),
        "ignored_exception_types": (
            ignored_exception_types,
            "leave broken records out by dataset.apply(tf.data.experimental.ignore_errors())",
        ),
        "closed_exception_types": (
            [kind for kind in closed_exception_types or () if kind not in ends],
            "leave it out: data end by tf.errors.OutOfRangeError",
        ),
    }
    for argument, (value, way) in refused.items():
        if value:
            raise NotImplementedError(f"tf.staged({argument}=…) is not supported: {way}.")
    return features if items is None else items
