"""What a table keeps: options are checked, and become a policy; those without effect are named."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import (
    CacheType,
    CBFFilter,
    CheckpointOption,
    CounterFilter,
    EmbeddingConfig,
    EmbeddingVariableOption,
    FirstRows,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
    StorageOption,
    StorageType,
    TablePolicy,
)
from collective.policy import policy_of
from collective.tables.policies.open_dimension import OpenDimension, policy_in
from collective.tables.updates import weight_bound

BLOOM = {"max_element_size": 2**30, "false_positive_probability": 0.01}
ONES = tf.ones_initializer()
SSD = StorageType.DRAM_SSDHASH

# DeepRec's (tensorflow/python/ops/variables.py) and PERSIA's (persia/embedding/__init__.py).
SIGNATURES: dict[type, dict[str, Any]] = {
    InitializerOption: {
        "initializer": None,
        "default_value_dim": 4096,
        "default_value_no_permission": 0.0,
    },
    CounterFilter: {"filter_freq": 0},
    CBFFilter: {
        "filter_freq": 0,
        "max_element_size": 0,
        "false_positive_probability": -1.0,
        "counter_type": tf.uint64,
    },
    GlobalStepEvict: {"steps_to_live": None},
    L2WeightEvict: {"l2_weight_threshold": -1.0},
    CheckpointOption: {
        "ckpt_to_load_from": None,
        "tensor_name_in_ckpt": None,
        "always_load_from_specific_ckpt": False,
        "init_data_source": None,
    },
    StorageOption: {
        "storage_type": None,
        "storage_path": None,
        "storage_size": (1024**3,),
        "cache_strategy": CacheType.LFU,
    },
    EmbeddingVariableOption: {
        "ht_type": "",
        "ht_partition_num": 1000,
        "evict_option": None,
        "ckpt": None,
        "filter_option": None,
        "storage_option": StorageOption(),
        "init_option": InitializerOption(),
    },
    EmbeddingConfig: {
        "emb_initialization": (-0.01, 0.01),
        "admit_probability": 1.0,
        "weight_bound": 10,
    },
}

GOOD: list[tuple[type, dict[str, Any]]] = [
    (TablePolicy, {"weight_bound": 10}),
    (TablePolicy, {"weight_bound": np.float32(0.5), "initializer": ONES}),
    (TablePolicy, {"initializer": tf.ones_initializer}),
    (TablePolicy, {"steps_to_live": np.int64(5), "l2_weight_threshold": 1}),
    (TablePolicy, {"steps_to_live": 5, "keep_at_least": 10, "capacity": np.int32(10)}),
    (TablePolicy, {"filter_freq": np.int64(3), "default_value_no_permission": -1}),
    (TablePolicy, {"filter_freq": 200, "counter_type": "uint8"} | BLOOM),
    (TablePolicy, {"admit_probability": 0}),
    (InitializerOption, {"initializer": ONES, "default_value_no_permission": -1}),
    (CounterFilter, {"filter_freq": 3}),
    (CBFFilter, {"filter_freq": 3, "max_element_size": 2**30, "false_positive_probability": 0.01}),
    (CBFFilter, {"counter_type": tf.uint8}),
    (CBFFilter, {"counter_type": tf.int64}),
    (GlobalStepEvict, {"steps_to_live": 4000}),
    (L2WeightEvict, {"l2_weight_threshold": 0.9}),
    (CheckpointOption, {"ckpt_to_load_from": "model.ckpt-5"}),
    (StorageOption, {"storage_type": StorageType.DRAM, "storage_path": "folder"}),
    (StorageOption, {"storage_type": SSD, "storage_path": "folder", "storage_size": [2**40]}),
    (TablePolicy, {"storage": "dram_ssd", "storage_path": "folder", "storage_size": 1}),
    (EmbeddingConfig, {"emb_initialization": [0.0, 0.0], "weight_bound": math.inf}),
    (EmbeddingConfig, {"admit_probability": 0}),
]

BAD: list[tuple[type, str, list[Any]]] = [
    (TablePolicy, "weight_bound", [0, -1, math.inf, math.nan, True, "10"]),
    (TablePolicy, "initializer", [0.5, "ones", [1.0, 2.0]]),
    (TablePolicy, "steps_to_live", [0, -1, 1.5, True, "5"]),
    (TablePolicy, "evict", ["never", 5, None, True]),
    (TablePolicy, "capacity", [0, -1, 1.5, True, "5"]),
    (TablePolicy, "keep_at_least", [0, -1, 1.5, True, "5"]),
    (TablePolicy, "l2_weight_threshold", [0, -1, math.inf, math.nan, True, "1"]),
    (TablePolicy, "filter_freq", [0, -1, 1.5, True, "3"]),
    (TablePolicy, "max_element_size", [0, 0.5, True]),
    (TablePolicy, "false_positive_probability", [0, 1, -1, math.nan, "0.1"]),
    (TablePolicy, "counter_type", ["int32", tf.uint8, None]),
    (TablePolicy, "admit_probability", [-0.1, 1.1, math.nan, True, "1"]),
    (TablePolicy, "default_value_no_permission", [math.nan, math.inf, None, "0"]),
    (TablePolicy, "storage", ["dram", "DRAM_SSDHASH", SSD, "", True]),
    (TablePolicy, "storage_path", ["folder"]),  # without a storage
    (TablePolicy, "storage_size", [1024]),
    (InitializerOption, "initializer", [0.5, "ones"]),
    (InitializerOption, "default_value_dim", [0, -1, 1.5, None]),
    (InitializerOption, "default_value_no_permission", ["0", math.nan, None]),
    (CounterFilter, "filter_freq", [-1, 1.5, True, None]),
    (CBFFilter, "filter_freq", [-1, "3"]),
    (CBFFilter, "max_element_size", [-1, 0.5]),
    (CBFFilter, "false_positive_probability", [0, 1, -0.5, "0.1"]),
    (CBFFilter, "counter_type", [tf.int32, tf.float32, int, None]),
    (GlobalStepEvict, "steps_to_live", [-1, 1.5, True]),
    (L2WeightEvict, "l2_weight_threshold", [-0.5, math.nan, None]),
    (CheckpointOption, "ckpt_to_load_from", [5]),
    (CheckpointOption, "always_load_from_specific_ckpt", [None]),
    (FirstRows, "checkpoint", ["", 5, None]),
    (TablePolicy, "first_rows", ["model.ckpt-5", True]),
    (StorageOption, "storage_type", [StorageType.HBM_DRAM, StorageType.INVALID, "DRAM"]),
    (StorageOption, "storage_size", [1024, [0], ["1G"], None]),
    (StorageOption, "cache_strategy", ["LRU", 2]),
    (EmbeddingVariableOption, "filter_option", [3, GlobalStepEvict(3), CounterFilter]),
    (EmbeddingVariableOption, "evict_option", [CounterFilter(3)]),
    (EmbeddingVariableOption, "ckpt", ["model.ckpt-5"]),
    (EmbeddingVariableOption, "storage_option", [None, SSD]),
    (EmbeddingVariableOption, "init_option", [None, ONES]),
    (EmbeddingConfig, "emb_initialization", [0.01, (0.5, -0.5), (0, math.inf), (1, 2, 3)]),
    (EmbeddingConfig, "admit_probability", [-0.1, 1.1, None, True]),
    (EmbeddingConfig, "weight_bound", [0, -1, math.nan, None]),
]


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_the_signature_is_that_of_the_other_system(kind: type):
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == list(SIGNATURES[kind])
    made = kind()
    for name, default in SIGNATURES[kind].items():
        assert getattr(made, name) == default and name in kind.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)


@pytest.mark.parametrize("kind, values", GOOD, ids=str)
def test_good_values_are_kept(kind: type, values: dict[str, Any]):
    made = kind(**values)
    for name, value in values.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "kind, name, value",
    [(kind, name, value) for kind, name, values in BAD for value in values],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_bad_values_are_named(kind: type, name: str, value: Any):
    with pytest.raises(ValueError) as raised:
        kind(**{name: value})
    assert f"{kind.__name__}({name}=…) is " in str(raised.value)
    assert repr(value) in str(raised.value)


def test_options_that_need_each_other():
    for missing in ({"max_element_size": 100}, {"false_positive_probability": 0.01}):
        with pytest.raises(ValueError, match="together or neither"):
            CBFFilter(3, **missing)
    for options in (BLOOM, {"filter_freq": 2, "max_element_size": 5}):
        with pytest.raises(ValueError, match="together, and with filter_freq"):
            TablePolicy(**options)
    with pytest.raises(ValueError, match="filter_freq=256.* counter_type='uint8' can hold"):
        TablePolicy(filter_freq=256, counter_type="uint8", **BLOOM)
    with pytest.raises(ValueError, match="without storage_type"):
        StorageOption(storage_path="folder")
    with pytest.raises(ValueError, match="no storage_path"):
        StorageOption(SSD)


def test_what_other_systems_call_it_becomes_a_policy():
    """By position, too: DeepRec's first options tune its hash tables."""
    option = EmbeddingVariableOption(
        "", 7, None, None, None, StorageOption(), InitializerOption(ONES)
    )
    policy = policy_of(option, "x")
    assert policy == TablePolicy() and policy.initializer is ONES and policy.options() == {}
    policy = policy_of(EmbeddingConfig((-0.5, 0.25)), "x")
    assert policy == TablePolicy(weight_bound=10) and policy.options() == {"weight_bound": 10.0}
    assert (policy.initializer.minval, policy.initializer.maxval) == (-0.5, 0.25)
    assert policy_of(EmbeddingConfig(weight_bound=math.inf), "x").weight_bound is None
    assert policy_of(None, "x") is None
    assert policy_of(TablePolicy(weight_bound=3), "x") == TablePolicy(None, 3.0)


@pytest.mark.parametrize(
    "options",
    [
        {"filter_option": CounterFilter()},
        {"filter_option": CBFFilter(0, 100, 0.01)},
        {"evict_option": GlobalStepEvict()},
        {"evict_option": GlobalStepEvict(0)},
        {"evict_option": L2WeightEvict()},
        {"evict_option": L2WeightEvict(0.0)},
        {"ckpt": CheckpointOption()},
        {"storage_option": StorageOption(StorageType.DRAM)},
        {"init_option": InitializerOption(ONES, 100)},
        {"ht_type": "dense_hash_map", "ht_partition_num": 10},
    ],
    ids=str,
)
def test_options_that_would_change_nothing_are_not_warned_of(options: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy_of(EmbeddingVariableOption(**options), "x") == TablePolicy()
        policy_of(EmbeddingConfig(), "x")


def test_times_of_eviction():
    assert TablePolicy(evict="at_save").options() == {}
    every = collective.every_steps(5)
    for option in ({"steps_to_live": 3}, {"l2_weight_threshold": 0.5}):
        assert TablePolicy(evict=every, **option).options() == {"evict": "every_steps(5)", **option}
    for option in ({}, {"capacity": 9}, {"weight_bound": 1.0}, {"filter_freq": 3}):
        with pytest.raises(
            ValueError, match=r"evict=every_steps\(5\)\) .*: add steps_to_live=… or"
        ):
            TablePolicy(evict=every, **option)
    for wrong in (0, -1, 1.5, True, "5"):
        with pytest.raises(ValueError, match="every_steps.* takes a whole number from 1, not"):
            collective.every_steps(wrong)


def test_limits_that_need_each_other():
    with pytest.raises(ValueError, match=r"keep_at_least=5\) keeps rows that steps_to_live"):
        TablePolicy(keep_at_least=5)
    with pytest.raises(ValueError, match=r"keep_at_least=5\) keeps more rows than capacity=4"):
        TablePolicy(steps_to_live=1, keep_at_least=5, capacity=4)


def test_eviction_becomes_a_policy():
    for evict, options in (
        (GlobalStepEvict(5), {"steps_to_live": 5}),
        (L2WeightEvict(0.5), {"l2_weight_threshold": 0.5}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy = policy_of(EmbeddingVariableOption(evict_option=evict), "x")
        assert policy.options() == options and policy == TablePolicy(**options)


def test_admission_becomes_a_policy():
    bloom = {"max_element_size": 100, "false_positive_probability": 0.01}
    for option, options in (
        ({"filter_option": CounterFilter(3)}, {"filter_freq": 3}),
        ({"filter_option": CBFFilter(3)}, {"filter_freq": 3}),
        ({"filter_option": CBFFilter(3, 100, 0.01)}, {"filter_freq": 3, **bloom}),
        (
            {"filter_option": CBFFilter(3, 100, 0.01, tf.uint16)},
            {"filter_freq": 3, **bloom, "counter_type": "uint16"},
        ),
        (
            {"init_option": InitializerOption(None, 4096, 1.5)},
            {"default_value_no_permission": 1.5},
        ),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy = policy_of(EmbeddingVariableOption(**option), "x")
            persias = policy_of(EmbeddingConfig(admit_probability=0.5), "x")
        assert policy.options() == options and policy == TablePolicy(**options)
        assert persias.options() == {"weight_bound": 10.0, "admit_probability": 0.5}
    for policy, counts, draws in (
        (TablePolicy(filter_freq=1, admit_probability=1), False, False),
        (TablePolicy(filter_freq=2, admit_probability=0), True, True),
    ):
        assert (policy.counts_keys, policy.draws_keys) == (counts, draws)


def test_a_checkpoint_becomes_a_policy():
    option = CheckpointOption("folder/model", "old/t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = policy_of(EmbeddingVariableOption(ckpt=option), "x")
    assert policy == TablePolicy(first_rows=FirstRows("folder/model", "old/t"))
    assert policy.options() == {"first_rows": "old/t of folder/model"}
    own_name = EmbeddingVariableOption(ckpt=CheckpointOption("folder")).to_policy()
    assert own_name.options() == {"first_rows": "the same of folder"}
    with pytest.raises(ValueError, match=r"FirstRows\(name=…\) is a table's name or None, not ''"):
        FirstRows("folder", "")
    with pytest.raises(ValueError, match="tensor_name_in_ckpt='t'.*: add ckpt_to_load_from="):
        CheckpointOption(tensor_name_in_ckpt="t")
    for refused, way in (
        ({"always_load_from_specific_ckpt": True}, "train in a new folder"),
        ({"init_data_source": "rows.csv"}, r"by table.import_\(session, keys, rows\)"),
    ):
        (name,) = refused
        with pytest.raises(NotImplementedError, match=rf"{name}=.* is not supported.*{way}"):
            CheckpointOption("folder", **refused)


def test_storage_becomes_a_policy():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage = StorageOption(SSD, "folder", [5, 2**40])
        policy = policy_of(EmbeddingVariableOption(storage_option=storage), "x")
        default = policy_of(EmbeddingVariableOption(storage_option=StorageOption(SSD, "f")), "x")
    options = {"storage": "dram_ssd", "storage_path": "folder", "storage_size": 5}
    assert policy.options() == options and policy == TablePolicy(**options)
    assert policy.memory_bytes == 5 and default.memory_bytes == 2**30
    assert TablePolicy(storage="dram_ssd", storage_path=Path("f")).storage_path == "f"
    for wrong, words in (
        ({}, "storage_path=… is their folder, not None"),
        ({"storage_path": ""}, "storage_path=… is their folder, not ''"),
        ({"storage_path": 5}, "storage_path=… is their folder, not 5"),
        ({"storage_path": "f", "storage_size": 0}, "whole number of bytes from 1"),
        ({"storage_path": "f", "storage_size": 0.5}, "whole number of bytes from 1"),
    ):
        with pytest.raises(ValueError, match=words):
            TablePolicy(storage="dram_ssd", **wrong)
    with pytest.raises(ValueError, match="StorageType.DRAM_SSDHASH, for the host's memory"):
        StorageOption(StorageType.HBM_DRAM, "folder")


IDLE = {
    "cache_strategy=CacheType.LFU": {
        "storage_option": StorageOption(SSD, "f", cache_strategy=CacheType.LFU)
    },
}


@pytest.mark.parametrize("named", IDLE)
def test_an_option_without_effect_is_warned_of_by_its_name(named: str):
    with pytest.warns(UserWarning) as record:
        policy_of(EmbeddingVariableOption(**IDLE[named]), "table 't': ev_option")
    (warning,) = record
    text = str(warning.message)
    assert text.startswith("table 't': ev_option: ") and named in text
    assert text.endswith("Leave it out to silence this.")
    others = {"filter_option", "evict_option", "ckpt=", "storage_option", "init_option"}
    assert not any(other in text for other in others)


@pytest.mark.parametrize(
    "storage",
    [
        StorageOption(SSD, "f"),
        StorageOption(SSD, "f", (5,), CacheType.LRU),
        StorageOption(StorageType.DRAM, cache_strategy=CacheType.LFU),  # there is nothing to move
    ],
    ids=str,
)
def test_a_cache_that_a_script_does_not_name_or_gets_is_not_warned_of(storage: StorageOption):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_of(EmbeddingVariableOption(storage_option=storage), "x")


class TwoIdleOptions:
    """Stands for the options of another system, of which two have no effect."""

    def to_policy(self) -> TablePolicy:
        return TablePolicy(initializer=ONES)

    def without_effect(self) -> dict[str, str]:
        return {"this=3": "every key comes", "that='m'": "nothing is read"}


def test_one_warning_names_all_options_without_effect():
    with pytest.warns(UserWarning) as record:
        assert policy_of(TwoIdleOptions(), "x").initializer is ONES
    (warning,) = record
    assert str(warning.message) == (
        "x: this=3 and that='m' have no effect yet: every key comes, nothing is read. Leave them "
        "out to silence this."
    )


@pytest.mark.parametrize("option", [object(), "policy", 3, EmbeddingVariableOption], ids=str)
def test_anything_else_is_no_policy(option: Any):
    with pytest.raises(TypeError, match="table 't': ev_option is a collective.TablePolicy, "):
        policy_of(option, "table 't': ev_option")


def test_warnings_point_at_the_script():
    """Also that of embedding_scope(), which a decorator wraps."""
    option = EmbeddingVariableOption(**IDLE["cache_strategy=CacheType.LFU"])
    column = collective.feature_column.categorical_column_with_embedding
    with pytest.warns(UserWarning, match=r"embedding\('k'\): ev_option: cache") as record:
        column("k", ev_option=option)
    assert record[0].filename == __file__
    strategy = object.__new__(collective.CollectiveStrategy)
    with pytest.warns(UserWarning, match=r"embedding_scope\(\): policy: cache") as record:
        strategy.embedding_scope(policy=option)
    assert record[0].filename == __file__


def test_a_shape_carries_a_policy_to_the_table():
    policy, same = TablePolicy(weight_bound=2), TablePolicy(tf.zeros_initializer(), 2)
    open_dimension = OpenDimension(policy)
    assert tf.TensorShape([open_dimension, 3]).as_list() == [None, 3]
    assert policy_in([open_dimension, 3]) is policy and policy_in((None, 3)) is None
    assert policy_in(None) is None and policy_in(5) is None and policy_in(()) is None
    assert open_dimension == OpenDimension(same) and open_dimension != OpenDimension(TablePolicy())
    assert open_dimension != None and None != open_dimension  # noqa: E711 (as TensorFlow asks)
    assert hash(open_dimension) == hash(OpenDimension(same))
    assert copy.deepcopy(open_dimension) == open_dimension


def test_a_column_is_made_again_from_its_configuration():
    column = collective.feature_column.categorical_column_with_embedding
    for made in (column("k"), column("k", tf.string, ev_option=TablePolicy(weight_bound=2))):
        assert type(made).from_config(made.get_config()) == made
    assert column("k") != column("k", ev_option=TablePolicy(weight_bound=2))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=str)
@pytest.mark.parametrize("bound", [0.1, 0.3, 1 / 3, 10.0, 1e-4, 1e6])
def test_a_bound_is_rounded_towards_0(dtype: tf.DType, bound: float):
    """A float32 nearest to 0.1 is larger than 0.1."""
    largest = weight_bound.largest_within(bound, dtype)
    assert largest.dtype == dtype.as_numpy_dtype and 0 < float(largest) <= bound
    with np.errstate(over="ignore"):
        above = np.nextafter(largest, np.asarray(np.inf, largest.dtype))
    assert float(above) > bound


def test_a_bound_that_leaves_0_only_is_refused():
    with pytest.raises(ValueError, match="table 't': weight_bound=1e-09 is too small for float16"):
        weight_bound.check(TablePolicy(weight_bound=1e-9), tf.float16, "t")
    weight_bound.check(TablePolicy(weight_bound=1e-9), tf.float32, "t")
    weight_bound.check(TablePolicy(), tf.float16, "t")
