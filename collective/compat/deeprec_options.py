"""Defines the options of DeepRec's embedding variables, with DeepRec's names and signatures.

They are checked when they are created. `collective.get_embedding_variable(…, ev_option=)`,
`collective.feature_column.categorical_column_with_embedding(…, ev_option=)` and
`strategy.embedding_scope(policy=)` turn them into a `collective.TablePolicy`, and warn about those
that have no effect.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.policy import COUNTER_TYPES, FirstRows, TablePolicy, is_real, is_whole


def _check(option: Any, name: str, expected: str, is_good: Callable[[Any], bool]) -> None:
    value = getattr(option, name)
    if not is_good(value):
        raise ValueError(f"{type(option).__name__}({name}=…) is {expected}, not {value!r}.")


def _is_initializer(value: Any) -> bool:
    return value is None or callable(value)


def _is_count(value: Any, least: int = 0) -> bool:
    return is_whole(value) and value >= least


def _is_finite(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)


class StorageType(enum.IntEnum):
    """Names the places where DeepRec stores rows, as its `config_pb2.StorageType` does.

    DRAM is where tables are stored here: in the memory of the GPU if there is one, else the host's.
    """

    INVALID = 0
    DRAM = 1
    PMEM_MEMKIND = 2
    PMEM_LIBPMEM = 3
    SSDHASH = 4
    LEVELDB = 5
    DRAM_PMEM = 11
    DRAM_SSDHASH = 12
    HBM_DRAM = 13
    DRAM_LEVELDB = 14
    DRAM_PMEM_SSDHASH = 101
    HBM_DRAM_SSDHASH = 102


class CacheType(enum.IntEnum):
    """Names which rows DeepRec moves out first, as its `config_pb2.CacheType` does."""

    LRU = 0
    LFU = 1


# DeepRec's default, as a number, so that it differs from a CacheType.LFU that a script names.
_DEFAULT_CACHE = int(CacheType.LFU)


@dataclasses.dataclass(frozen=True)
class InitializerOption:
    """Sets the initial values of a key's row.

    Args:
        initializer: fills rows; it overrides the `initializer` of the table. Default None: the
            table's.
        default_value_dim: DeepRec draws this many rows in advance, which keys share as initial
            values. No effect: here every key has its own initial values. From 1; default 4096.
        default_value_no_permission: the value of all elements that a lookup returns for a key that
            isn't admitted or, outside training, isn't known. Default 0.
            (`TablePolicy.default_value_no_permission`)

    Raises:
        ValueError: an option has an invalid value.
    """

    initializer: Any = None
    default_value_dim: int = 4096
    default_value_no_permission: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "initializer", "an initializer of TensorFlow or None", _is_initializer)
        _check(self, "default_value_dim", "a whole number from 1", lambda x: _is_count(x, 1))
        _check(self, "default_value_no_permission", "a finite number", _is_finite)


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """Admits a key after a number of occurrences.

    Args:
        filter_freq: the number of occurrences, counted exactly. Default 0: every key is admitted;
            so does 1. (`TablePolicy.filter_freq`)

    Raises:
        ValueError: an option has an invalid value.
    """

    filter_freq: int = 0

    def __post_init__(self) -> None:
        _check(self, "filter_freq", "a whole number from 0", _is_count)


@dataclasses.dataclass(frozen=True)
class CBFFilter:
    """Admits a key after a number of occurrences, counted by a counting Bloom filter.

    Args:
        filter_freq: the number of occurrences. Default 0: every key is admitted; so does 1.
            (`TablePolicy.filter_freq`)
        max_element_size: the number of keys that the filter has room for. Default 0: there is no
            filter, and occurrences are counted exactly. (`TablePolicy.max_element_size`)
        false_positive_probability: the largest share of keys that may be admitted too early: above
            0 and below 1. Default -1: there is no filter.
            (`TablePolicy.false_positive_probability`)
        counter_type: the type of a counter: tf.uint8, uint16, uint32, int64, or uint64, the
            default. (`TablePolicy.counter_type`)

    Raises:
        ValueError: an option has an invalid value, or one of max_element_size and
            false_positive_probability is given without the other.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: Any = tf.uint64

    def __post_init__(self) -> None:
        _check(self, "filter_freq", "a whole number from 0", _is_count)
        _check(self, "max_element_size", "a whole number from 0", _is_count)
        _check(
            self,
            "false_positive_probability",
            "above 0 and below 1, or -1 for no filter",
            lambda x: is_real(x) and (0 < x < 1 or x == -1),
        )
        _check(
            self,
            "counter_type",
            "tf.uint8, tf.uint16, tf.uint32, tf.uint64 or tf.int64",
            lambda x: any(x == name for name in COUNTER_TYPES),
        )
        if (self.max_element_size == 0) != (self.false_positive_probability == -1):
            raise ValueError(
                "CBFFilter takes max_element_size and false_positive_probability together or "
                f"neither, not {self.max_element_size!r} and {self.false_positive_probability!r}."
            )


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """Evicts rows that training hasn't looked up for some time, whenever the table is saved.

    Args:
        steps_to_live: that time, in global steps. Default None: no row is evicted; so does 0.
            (`TablePolicy.steps_to_live`)

    Raises:
        ValueError: an option has an invalid value.
    """

    steps_to_live: int | None = None

    def __post_init__(self) -> None:
        _check(
            self,
            "steps_to_live",
            "a whole number from 0, or None",
            lambda x: x is None or _is_count(x),
        )


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """Evicts rows w whose half squared norm, ½‖w‖², is small, whenever the table is saved.

    Args:
        l2_weight_threshold: rows below it are evicted. Default -1: no row is; so does 0.
            (`TablePolicy.l2_weight_threshold`)

    Raises:
        ValueError: an option has an invalid value.
    """

    l2_weight_threshold: float = -1.0

    def __post_init__(self) -> None:
        _check(
            self,
            "l2_weight_threshold",
            "a finite number from 0, or -1 for no eviction",
            lambda x: _is_finite(x) and (x >= 0 or x == -1),
        )


@dataclasses.dataclass(frozen=True)
class CheckpointOption:
    """Names the checkpoint with whose rows a table starts: `TablePolicy.first_rows`.

    Args:
        ckpt_to_load_from: the checkpoint, or a folder, whose latest checkpoint is used. Default
            None: the table starts with its initializer.
        tensor_name_in_ckpt: the table's name in the checkpoint. Default None: its name here.
        always_load_from_specific_ckpt: must be false: if a session restores a checkpoint of the
            job, its rows are used.
        init_data_source: must be None: rows come from checkpoints, or from `table.import_()`.

    Raises:
        ValueError: an option has an invalid value.
        NotImplementedError: one of the two options that are not supported is set.
    """

    ckpt_to_load_from: str | None = None
    tensor_name_in_ckpt: str | None = None
    always_load_from_specific_ckpt: bool = False
    init_data_source: str | None = None

    @property
    def first_rows(self) -> FirstRows | None:
        """Returns where the rows are, in the form of a policy."""
        if self.ckpt_to_load_from is None:
            return None
        return FirstRows(self.ckpt_to_load_from, self.tensor_name_in_ckpt)

    def __post_init__(self) -> None:
        for name in ("ckpt_to_load_from", "tensor_name_in_ckpt", "init_data_source"):
            _check(self, name, "a string or None", lambda x: x is None or isinstance(x, str))
        _check(
            self,
            "always_load_from_specific_ckpt",
            "True or False",
            lambda x: isinstance(x, bool),
        )
        if self.tensor_name_in_ckpt is not None and self.ckpt_to_load_from is None:
            raise ValueError(
                f"CheckpointOption(tensor_name_in_ckpt={self.tensor_name_in_ckpt!r}) names a table "
                "of a checkpoint: add ckpt_to_load_from=…, or leave it out."
            )
        if self.always_load_from_specific_ckpt:
            raise NotImplementedError(
                "CheckpointOption(always_load_from_specific_ckpt=True) is not supported: a "
                "checkpoint of the job itself takes precedence over the named one. Leave it out, "
                "and train in a new folder (checkpoint_dir, model_dir) to start from it again."
            )
        if self.init_data_source is not None:
            raise NotImplementedError(
                f"CheckpointOption(init_data_source={self.init_data_source!r}) is not supported: "
                "leave it out, and give the table its rows by table.import_(session, keys, rows)."
            )


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """Sets where rows are stored.

    Args:
        storage_type: a `StorageType`. Default None, which is DRAM: the usual memory of tables.
            DRAM_SSDHASH moves rows that haven't been used for long to files: the policy's
            `storage='dram_ssd'`. Others are not supported.
        storage_path: the folder of those files. Default None.
        storage_size: bytes of each tier, from the fastest. Default 1 GiB each. With DRAM_SSDHASH
            the first is the memory on each rank; files take what they need.
        cache_strategy: which rows are moved first. Default `CacheType.LFU`, as in DeepRec. It has
            no effect: the least recently used rows are moved first, as with `CacheType.LRU`. If a
            script names LFU, the table warns about it.

    Raises:
        ValueError: an option has an invalid value, or files have no folder.
    """

    storage_type: StorageType | None = None
    storage_path: str | None = None
    storage_size: Sequence[int] = (1024**3,)
    cache_strategy: CacheType | int = _DEFAULT_CACHE

    @property
    def moves_the_least_frequent(self) -> bool:
        """Tells whether a script asks for files, and for LFU by its name."""
        in_files = self.storage_type == StorageType.DRAM_SSDHASH
        return in_files and self.cache_strategy is CacheType.LFU

    def __post_init__(self) -> None:
        works = (None, StorageType.DRAM, StorageType.DRAM_SSDHASH)
        _check(
            self,
            "storage_type",
            "None or StorageType.DRAM, for memory (the GPU's where there is one, else the host's), "
            "or StorageType.DRAM_SSDHASH, for the host's memory and files",
            lambda x: x in works,
        )
        _check(
            self,
            "storage_size",
            "a list of bytes",
            lambda x: isinstance(x, (list, tuple)) and all(_is_count(size, 1) for size in x),
        )
        _check(self, "cache_strategy", "CacheType.LRU or CacheType.LFU", lambda x: x in (0, 1))
        object.__setattr__(self, "storage_size", tuple(self.storage_size))
        if self.storage_type is None and self.storage_path is not None:
            raise ValueError("StorageOption(storage_path=…) is given without storage_type.")
        if self.storage_type == StorageType.DRAM_SSDHASH and self.storage_path is None:
            raise ValueError("StorageOption(storage_type=…) keeps files, but has no storage_path.")


@dataclasses.dataclass(frozen=True)
class EmbeddingVariableOption:
    """Holds the options of an embedding variable.

    All except the first two take effect. A table warns about `CacheType.LFU`.

    Args:
        ht_type, ht_partition_num: tune DeepRec's hash tables. No effect.
        evict_option: when a row is evicted, a `GlobalStepEvict` or an `L2WeightEvict`. Default
            None: never.
        ckpt: the checkpoint with whose rows the table starts, a `CheckpointOption`. Default None:
            the initializer is used.
        filter_option: when a key gets a row, a `CounterFilter` or a `CBFFilter`. Default None: when
            it is first looked up.
        storage_option: where rows are stored, a `StorageOption`. Default: in memory.
        init_option: the initial values of rows, an `InitializerOption`.

    Raises:
        ValueError: an option has an invalid value.
    """

    ht_type: str = ""
    ht_partition_num: int = 1000
    evict_option: GlobalStepEvict | L2WeightEvict | None = None
    ckpt: CheckpointOption | None = None
    filter_option: CounterFilter | CBFFilter | None = None
    storage_option: StorageOption = StorageOption()
    init_option: InitializerOption = InitializerOption()

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[type, ...]] = {
            "evict_option": (GlobalStepEvict, L2WeightEvict, type(None)),
            "ckpt": (CheckpointOption, type(None)),
            "filter_option": (CounterFilter, CBFFilter, type(None)),
            "storage_option": (StorageOption,),
            "init_option": (InitializerOption,),
        }
        for name, classes in kinds.items():
            listed = " or ".join(
                "None" if kind is type(None) else f"a {kind.__name__}" for kind in classes
            )
            if not isinstance(getattr(self, name), classes):
                raise ValueError(
                    f"EmbeddingVariableOption({name}=…) is {listed}, not {getattr(self, name)!r}."
                )

    def to_policy(self) -> TablePolicy:
        """Returns the policy for the options that have an equivalent."""
        evict = self.evict_option
        steps = evict.steps_to_live if isinstance(evict, GlobalStepEvict) else None
        threshold = evict.l2_weight_threshold if isinstance(evict, L2WeightEvict) else 0.0
        storage = self.storage_option
        in_files = storage.storage_type == StorageType.DRAM_SSDHASH
        return TablePolicy(
            initializer=self.init_option.initializer,
            steps_to_live=steps or None,
            l2_weight_threshold=threshold if threshold > 0 else None,
            default_value_no_permission=self.init_option.default_value_no_permission,
            **_admission(self.filter_option),
            storage="dram_ssd" if in_files else None,
            storage_path=storage.storage_path if in_files else None,
            storage_size=next(iter(storage.storage_size), None) if in_files else None,
            first_rows=None if self.ckpt is None else self.ckpt.first_rows,
        )

    def without_effect(self) -> dict[str, str]:
        """Returns the given options that have no effect yet, and what that means."""
        if not self.storage_option.moves_the_least_frequent:
            return {}
        return {"cache_strategy=CacheType.LFU": "rows go to files by their last use (LRU)"}


def _admission(filter_option: CounterFilter | CBFFilter | None) -> dict[str, Any]:
    """Returns the fields of a policy that correspond to a filter."""
    if filter_option is None or filter_option.filter_freq == 0:
        return {}
    fields: dict[str, Any] = {"filter_freq": filter_option.filter_freq}
    if isinstance(filter_option, CBFFilter) and filter_option.max_element_size > 0:
        fields["max_element_size"] = filter_option.max_element_size
        fields["false_positive_probability"] = filter_option.false_positive_probability
        fields["counter_type"] = tf.as_dtype(filter_option.counter_type).name
    return fields
