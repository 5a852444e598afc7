"""Defines what a table keeps: which keys get rows, bounds, evictions, and where rows are."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import warnings
from typing import Any, Callable, Protocol

# Types of counters, and the largest number that each holds.
COUNTER_TYPES = {
    "uint8": 2**8 - 1,
    "uint16": 2**16 - 1,
    "uint32": 2**32 - 1,
    "uint64": 2**63 - 1,
    "int64": 2**63 - 1,
}

DEFAULT_STORAGE_SIZE = 1 << 30  # Bytes.


@dataclasses.dataclass(frozen=True)
class EverySteps:
    """Stands for "every n global steps"; `every_steps` makes one.

    Attributes:
        steps: from 1.
    """

    steps: int

    def __str__(self) -> str:
        return f"every_steps({self.steps})"


def every_steps(steps: int) -> EverySteps:
    """Evicts rows every n global steps: `TablePolicy(evict=every_steps(n))`.

    Args:
        steps: the number of global steps, from 1.

    Raises:
        ValueError: it isn't.
    """
    if not (is_whole(steps) and steps >= 1):
        raise ValueError(f"every_steps(…) takes a whole number from 1, not {steps!r}.")
    return EverySteps(int(steps))


@dataclasses.dataclass(frozen=True)
class FirstRows:
    """Names the rows of another checkpoint from which a table starts.

    Attributes:
        checkpoint: its prefix, or a folder, whose latest checkpoint is used.
        name: the table's name in the checkpoint. Default None: the same name as here.

    Raises:
        ValueError: an attribute isn't a string.
    """

    checkpoint: str | os.PathLike[str]
    name: str | None = None

    def __post_init__(self) -> None:
        path = self.checkpoint
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError(f"FirstRows(checkpoint=…) is a checkpoint or a folder, not {path!r}.")
        object.__setattr__(self, "checkpoint", os.fspath(path))
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise ValueError(f"FirstRows(name=…) is a table's name or None, not {self.name!r}.")

    def __str__(self) -> str:
        return f"{self.name or 'the same'} of {self.checkpoint}"


@dataclasses.dataclass(frozen=True)
class TablePolicy:
    """Says which keys get rows, their initial values and bounds, which are evicted, where rows are.

    Pass one to `get_embedding_variable(…, ev_option=)` or `categorical_column_with_embedding(…,
    ev_option=)` for their table, or to `strategy.embedding_scope(policy=)` for all tables made
    inside. DeepRec's `EmbeddingVariableOption` and PERSIA's `EmbeddingConfig` become a policy.

        policy = collective.TablePolicy(weight_bound=10.0)
        table = collective.get_embedding_variable('user', 16, ev_option=policy)

    A policy has no side effects: a table whose policy never acts equals a table without a policy,
    bit for bit.

    Attributes:
        initializer: Fills a new row, as `tf.get_variable`'s initializer does: an initializer of
            TensorFlow (a dynamic table takes those that fill single rows, see
            `collective.get_embedding_variable`). Default None: the table's own initializer. In an
            `ev_option` it takes precedence over any other; in `embedding_scope(policy=)` it is for
            tables that are made without one. Policies that differ only in it are equal.
            DeepRec: `InitializerOption(initializer)`; PERSIA: `emb_initialization=(lower, upper)`.
        weight_bound: Keeps weights small: after an update, every element of the updated rows is in
            [-b, b], rounded towards 0 in the type of the table. The updated rows are those with a
            gradient. Slots, and rows that Adam moves without a gradient, are left alone, and so are
            new, restored, imported and assigned rows until an update touches them. For static and
            dynamic tables. In units of a weight, above 0. Default None: no bound. PERSIA:
            `weight_bound`; DeepRec has no such option.
        steps_to_live: Evicts a row that training hasn't looked up for this many global steps. Every
            lookup of a run that updates something counts as use; evaluation, prediction and serving
            don't. A row that was imported, or restored from a checkpoint without this option,
            counts as used at that time, at step 1 at the earliest. Training needs a global step
            that the optimizer counts; in eager code it is the number of steps of the Keras
            optimizer. From 1. Default None: no row is evicted for its age. DeepRec:
            `GlobalStepEvict(steps_to_live)`, where 0 also means none.
        l2_weight_threshold: Evicts a row w with ½‖w‖² below it. Above 0. Default None: no row is
            evicted for its weights. DeepRec: `L2WeightEvict(l2_weight_threshold)`.
        evict: When to evict rows for their age or weights. 'at_save', the default, as in DeepRec:
            whenever a Saver saves the table, before it is written. `collective.every_steps(n)`:
            also after each training run that reaches or passes the next multiple of n global steps;
            this needs a global step, and steps_to_live or l2_weight_threshold.
        keep_at_least: Keeps this many rows in total, the most recently used ones, however old they
            are; it needs steps_to_live. Each rank keeps its share of the number, so which rows stay
            depends on the number of ranks. In rows, from 1. Default None: all rows can be evicted.
        capacity: Limits the table to this many rows in total, R / N on each rank: after each
            training run, and in a restore, a rank with more rows evicts the least recently used
            ones, and among rows of the same age those with the smallest keys. It never evicts a row
            of the run's own batch, so a rank can have more rows while a batch alone is larger.
            Which rows are evicted depends on the number of ranks. Training needs a global step, as
            for steps_to_live. In rows, from 1. Default None: no limit. PERSIA: the servers'
            `capacity`.
        filter_freq: Gives a key its row at this occurrence. Every occurrence in every lookup of a
            run that updates something counts, on all ranks. The run that reaches the number still
            reads `default_value_no_permission`, but updates the row; later runs see it. From 1,
            which admits every key at once. Default None: every key gets a row. DeepRec:
            `CounterFilter(filter_freq)`, where 0 also means none.
        max_element_size: Counts keys in a counting Bloom filter instead of one by one. Its memory
            is fixed, sized for this many keys in total, and each rank has a part of it. It needs
            filter_freq and false_positive_probability. A filter never misses an occurrence, nor
            forgets a key. One of more than 1 GiB that takes more than exact counts of as many keys
            isn't made: keys are counted exactly, as by default. From 1. Default None: keys are
            counted exactly, which takes about 21 bytes for each key without a row. DeepRec:
            `CBFFilter(max_element_size)`.
        false_positive_probability: The largest share of keys that never came which the Bloom filter
            mistakes for ones that did, after max_element_size different keys. Above 0 and below 1.
            Default None: no Bloom filter. DeepRec: `CBFFilter(false_positive_probability)`.
        counter_type: The type of the Bloom filter's counters, by name: 'uint8', 'uint16', 'uint32',
            'uint64' or 'int64'; it must hold filter_freq. Default 'uint64'. DeepRec:
            `CBFFilter(counter_type)`.
        admit_probability: Gives a key without a row its row with this probability, drawn from
            (seed, table, key, global step) once for each global step in which training looks it up,
            whatever the number of ranks. With filter_freq, only keys that have come often enough
            are drawn. The graph needs a global step. From 0 to 1. Default None: every key gets a
            row; so does 1. PERSIA: `admit_probability`.
        default_value_no_permission: The value of all elements that a key without a row reads: a key
            that wasn't admitted or, outside of training, an unknown key. Finite; default 0.
            DeepRec: `InitializerOption(default_value_no_permission)`.
        storage: Where to keep the rows of a dynamic table. Default None: in memory, the GPU's if
            tables are on a GPU, else the host's. 'dram_ssd': in the host's memory and, beyond
            `storage_size`, in a file of each rank: after each run the least recently used rows move
            there, with their slots, and come back when they are looked up. All numbers equal those
            of a table in memory. DeepRec: `StorageOption(storage_type= StorageType.DRAM_SSDHASH)`.
        storage_path: The folder of the files of storage='dram_ssd', on a disk of each machine; it
            is created if it doesn't exist. A file has no name in it, and is gone when its process
            ends, however it ends. Default None; required with 'dram_ssd'. DeepRec:
            `StorageOption(storage_path)`.
        storage_size: The memory that rows and slots of the table take on each rank with
            storage='dram_ssd', in bytes, from 1. The rows of one batch, and about 30 bytes for each
            key (38 with steps_to_live or capacity), come in addition. Default None: 1 GiB.
            DeepRec: the first of `StorageOption(storage_size)`.
        first_rows: A `collective.FirstRows`: the table starts from the rows of another checkpoint,
            as by `tf.train.init_from_checkpoint`, on any number of ranks. Slots start fresh, and so
            do keys that it lacks. The job's own checkpoint, which a session restores, takes
            precedence. Default None: every row starts by the initializer. DeepRec:
            `CheckpointOption(ckpt_to_load_from, tensor_name_in_ckpt)`.

    A key that isn't admitted gets no row, and its gradient is dropped. Only dynamic tables in the
    host's memory can refuse keys: static tables have all rows, and for a dynamic table in a GPU's
    memory these options are an error. Evaluation, prediction and serving count nothing.

    Rows of dynamic tables are evicted on all ranks, in the host's or a GPU's memory, but not while
    gradients of some batches wait for the update of scope(local_steps=…). A row is evicted with its
    slots and last use, and the memory is freed; a key that comes back starts as a new one. A row is
    evicted if any of the options says so. Static tables keep all rows and ignore `storage`, which
    is an error for a dynamic table in a GPU's memory.

    Raises:
        ValueError: an option has an invalid value.
    """

    initializer: Any = dataclasses.field(default=None, compare=False)
    weight_bound: float | None = None
    steps_to_live: int | None = None
    l2_weight_threshold: float | None = None
    evict: str | EverySteps = "at_save"
    keep_at_least: int | None = None
    capacity: int | None = None
    filter_freq: int | None = None
    max_element_size: int | None = None
    false_positive_probability: float | None = None
    counter_type: str = "uint64"
    admit_probability: float | None = None
    default_value_no_permission: float = 0.0
    storage: str | None = None
    storage_path: str | None = None
    storage_size: int | None = None
    first_rows: FirstRows | None = None

    def __post_init__(self) -> None:
        if self.initializer is not None and not callable(self.initializer):
            raise ValueError(
                "TablePolicy(initializer=…) is an initializer of TensorFlow, such as "
                f"tf.random_uniform_initializer(-0.01, 0.01), or None, not {self.initializer!r}."
            )
        self._check("weight_bound", "a number above 0, or None for no bound", _is_positive, float)
        count = "a whole number from 1, or None for no eviction"
        self._check("steps_to_live", count, _is_count, int)
        weight = "a number above 0, or None for no eviction"
        self._check("l2_weight_threshold", weight, _is_positive, float)
        for name in ("keep_at_least", "capacity"):
            self._check(name, "a whole number of rows from 1, or None", _is_count, int)
        if self.evict != "at_save" and not isinstance(self.evict, EverySteps):
            raise ValueError(
                "TablePolicy(evict=…) is 'at_save' or collective.every_steps(n), not "
                f"{self.evict!r}."
            )
        has_times = isinstance(self.evict, EverySteps)
        if has_times and self.steps_to_live is None and self.l2_weight_threshold is None:
            raise ValueError(
                f"TablePolicy(evict={self.evict}) says when rows are evicted, but "
                "no option says which: add steps_to_live=… or l2_weight_threshold=…, or leave "
                "evict out. (capacity acts after each training run.)"
            )
        if not isinstance(self.first_rows, (FirstRows, type(None))):
            raise ValueError(
                "TablePolicy(first_rows=…) is a collective.FirstRows or None, not "
                f"{self.first_rows!r}."
            )
        self._check_admission()
        self._check_storage()
        if self.keep_at_least is not None and self.steps_to_live is None:
            raise ValueError(
                f"TablePolicy(keep_at_least={self.keep_at_least}) keeps rows that steps_to_live "
                "would evict, but steps_to_live isn't set."
            )
        if self.capacity is not None and (self.keep_at_least or 0) > self.capacity:
            raise ValueError(
                f"TablePolicy(keep_at_least={self.keep_at_least}) keeps more rows than "
                f"capacity={self.capacity}."
            )

    def _check_admission(self) -> None:
        for name in ("filter_freq", "max_element_size"):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and 1 <= value < 2**63):
                raise ValueError(
                    f"TablePolicy({name}=…) is a whole number from 1, or None for no filter, not "
                    f"{value!r}."
                )
            object.__setattr__(self, name, None if value is None else int(value))
        for name, has_ends in (("false_positive_probability", False), ("admit_probability", True)):
            value = getattr(self, name)
            if value is None:
                continue
            if not (is_real(value) and (0 < value < 1 or has_ends and value in (0, 1))):
                bounds = "from 0 to 1" if has_ends else "above 0 and below 1"
                raise ValueError(
                    f"TablePolicy({name}=…) is a probability, {bounds}, or None, not {value!r}."
                )
            object.__setattr__(self, name, float(value))
        value = self.default_value_no_permission
        if not (is_real(value) and math.isfinite(value)):
            raise ValueError(
                f"TablePolicy(default_value_no_permission=…) is a finite number, not {value!r}."
            )
        object.__setattr__(self, "default_value_no_permission", float(value))
        if self.counter_type not in COUNTER_TYPES:
            raise ValueError(
                f"TablePolicy(counter_type=…) is one of {', '.join(map(repr, COUNTER_TYPES))}, not "
                f"{self.counter_type!r}."
            )
        of_filter = self.filter_freq, self.max_element_size, self.false_positive_probability
        has_filter = (
            self.max_element_size is not None or self.false_positive_probability is not None
        )
        if has_filter and None in of_filter:
            raise ValueError(
                "TablePolicy takes max_element_size and false_positive_probability together, and "
                "with filter_freq: they make a Bloom filter, not "
                f"{', '.join(map(repr, of_filter[1:]))} with filter_freq={self.filter_freq}."
            )
        if has_filter and (self.filter_freq or 0) > COUNTER_TYPES[self.counter_type]:
            raise ValueError(
                f"TablePolicy(filter_freq={self.filter_freq}) is more than a counter of "
                f"counter_type={self.counter_type!r} can hold."
            )

    @property
    def counts_keys(self) -> bool:
        """Tells whether a key gets its row by how often it came."""
        return self.filter_freq is not None and self.filter_freq > 1

    @property
    def draws_keys(self) -> bool:
        """Tells whether a key gets its row by chance."""
        return self.admit_probability is not None and self.admit_probability < 1

    def _check(
        self, name: str, expected: str, is_good: Callable[[Any], bool], kind: type[Any]
    ) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not is_good(value):
            raise ValueError(f"TablePolicy({name}=…) is {expected}, not {value!r}.")
        object.__setattr__(self, name, kind(value))

    def _check_storage(self) -> None:
        if self.storage not in (None, "dram_ssd"):
            raise ValueError(
                "TablePolicy(storage=…) is 'dram_ssd', or None for rows in memory (the GPU's where "
                f"there is one, else the host's), not {self.storage!r}."
            )
        if self.storage is None:
            for name in ("storage_path", "storage_size"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"TablePolicy({name}=…) is for storage='dram_ssd', and {value!r} is given "
                        "without."
                    )
            return
        path = self.storage_path
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError(
                "TablePolicy(storage='dram_ssd') keeps rows in files: storage_path=… is their "
                f"folder, not {path!r}."
            )
        object.__setattr__(self, "storage_path", os.fspath(path))
        if self.storage_size is not None:
            if not (is_whole(self.storage_size) and self.storage_size >= 1):
                raise ValueError(
                    "TablePolicy(storage_size=…) is a whole number of bytes from 1, or None for "
                    f"1 GiB, not {self.storage_size!r}."
                )
            object.__setattr__(self, "storage_size", int(self.storage_size))

    @property
    def memory_bytes(self) -> int:
        """Returns what rows and slots take in memory with storage='dram_ssd'."""
        return DEFAULT_STORAGE_SIZE if self.storage_size is None else self.storage_size

    def options(self) -> dict[str, float | str]:
        """Returns the options that aren't at their defaults, the initializer left out."""
        given: dict[str, float | str] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.compare and value != field.default:
                is_text = isinstance(value, (EverySteps, FirstRows))
                given[field.name] = str(value) if is_text else value
        return given


class PolicyOption(Protocol):
    """Stands for the options of another system, which become a policy."""

    def to_policy(self) -> TablePolicy:
        """Returns the policy that corresponds to the options, as far as possible."""

    def without_effect(self) -> dict[str, str]:
        """Returns the options that have no effect yet, as they were given, and what that means."""


def policy_of(
    option: TablePolicy | PolicyOption | None, what: str, stacklevel: int = 3
) -> TablePolicy | None:
    """Returns the policy that a script asks for; None if it asks for none.

    One warning names all options that have no effect yet.

    Args:
        option: what the script gave.
        what: names the argument, and where it was given, for messages.
        stacklevel: as for `warnings.warn`: by default the warning is in the caller's caller.

    Raises:
        TypeError: `option` is no policy, and can't become one.
    """
    if option is None or isinstance(option, TablePolicy):
        return option
    if isinstance(option, type) or not hasattr(option, "to_policy"):
        raise TypeError(
            f"{what} is a collective.TablePolicy, EmbeddingVariableOption or EmbeddingConfig, not "
            f"{option!r}."
        )
    policy, idle = option.to_policy(), option.without_effect()
    if idle:
        has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
        meanings = dict.fromkeys(idle.values())
        warnings.warn(
            f"{what}: {' and '.join(idle)} {has} no effect yet: {', '.join(meanings)}. Leave {it} "
            "out to silence this.",
            stacklevel=stacklevel,
        )
    return policy


def is_real(value: Any) -> bool:
    """Tells whether `value` is a number, which True and False aren't here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Tells whether `value` is a whole number, which True and False aren't here."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return is_real(value) and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1
