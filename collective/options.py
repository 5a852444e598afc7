"""Holds the options of scope(), embedding_scope() and estimator(): types, defaults and checks.

An options object is checked when it is made. `INHERIT` stands for an option that wasn't given: it
then has its value in the enclosing scope.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Literal, Protocol, TypeVar, Union, cast, get_args

from collective.policy import TablePolicy

__all__ = ["EmbeddingOptions", "ScopeOptions"]

# The default of every parameter of scope() and embedding_scope().
INHERIT: Any = type("Inherit", (), {"__repr__": lambda self: "<inherited>"})()

# Options of scope() that a Saver and an Estimator take, too.
OF_SAVES = ("save_code", "checkpoint_blocking", "checkpoint_buffer", "checkpoint_on_error")

GradientReduction = Literal["mean", "sum"]
MissingSlots = Literal["error", "fresh"]
PlanOutput = Literal["print", "quiet", "full"]
DenseCompression = Literal["none", "fp16", "bf16"]
Carrier = Literal["auto", "horovod", "shared_memory", "nccl"]
Hierarchical = Union[Literal["auto"], bool]
CheckpointFailure = Literal["continue", "stop"]
WireType = Literal["float32", "float16", "bfloat16"]


class DType(Protocol):
    """Stands for a `tf.DType`, which is equal to its name, in annotations.

    Type checkers can't read TensorFlow's types: an annotation with one of its classes would allow
    anything.
    """

    @property
    def as_datatype_enum(self) -> int: ...


Method = TypeVar("Method", bound=Callable[..., Any])

# After how many training runs scope(check=True) compares replicas.
USUAL_CHECK = 100

# Tuning that scripts pass to other libraries. HybridBackend registers emb_backend, emb_num_groups,
# comm_…, grad_lazy_sync and so on with its context; SparseOperationKit takes the rest in its
# layers.
FOREIGN_PREFIXES = ("emb_", "comm_", "grad_", "data_")
FOREIGN = frozenset(
    {
        "sharding",
        "use_hierarchical_embedding_lookup",
        "batch_size",
        "model_dir",
        "keep_checkpoint_max",
        "keep_checkpoint_every_n_hours",
        "mode",
        "global_batch_size",
        "max_vocabulary_size_per_gpu",
        "slot_num",
        "max_nnz",
        "max_feature_num",
        "nnz_per_slot",
        "use_hashtable",
        "dynamic_input",
        "var_type",
        "key_type",
        "init_capacity",
        "max_capacity",
        "hotness",
    }
)


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Names a checkpoint from which variables start, and what they are called there.

    Attributes:
        path: the checkpoint's prefix, or a folder, whose latest checkpoint is used.
        names: {name in the checkpoint: name in the model}. One `*` in the former stands for any
            text, and for the same text in the latter. None as a name in the model leaves the
            variable out. Variables that aren't named keep their names. Or a function from a name in
            the checkpoint to a name in the model, or None. Slots follow their variable.
        slots: whether optimizers' slots, and their scalars, also start from it; else they start
            fresh.

    Raises:
        ValueError: an attribute has a value that it can't have.
    """

    path: str | os.PathLike[str]
    names: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    slots: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.path, (str, os.PathLike)) and os.fspath(self.path)):
            raise ValueError(f"WarmStart(path=…) is a checkpoint or a folder, not {self.path!r}.")
        if not (self.names is None or isinstance(self.names, Mapping) or callable(self.names)):
            raise ValueError(
                "WarmStart(names=…) is a mapping of names there to names here, a function or None, "
                f"not {self.names!r}."
            )
        if not isinstance(self.slots, bool):
            raise ValueError(f"WarmStart(slots=…) is True or False, not {self.slots!r}.")


WarmStartSource = Union[str, "os.PathLike[str]", WarmStart]


@dataclasses.dataclass(frozen=True)
class ScopeOptions:
    """Holds the options of scope(); `CollectiveStrategy.scope` documents each.

    Raises:
        ValueError: an option has a value that it can't have.
    """

    embedding_gradients: GradientReduction = "mean"
    missing_slots: MissingSlots = "error"
    grouping: bool = True
    wire_dtype: WireType | None = None
    gradient_wire_dtype: WireType | None = None
    plan: PlanOutput = "print"
    profile: str | os.PathLike[str] | None = None
    profile_steps: tuple[int, int] = (11, 20)
    profile_every: int = 0
    local_steps: int = 1
    dense_compression: DenseCompression = "none"
    prefetch_keys: bool = False
    check: bool | int = False
    deterministic: bool = False
    carrier: Carrier | None = None
    hierarchical: Hierarchical = "auto"
    warm_start: Sequence[WarmStartSource] | WarmStartSource | None = None
    save_code: bool = False
    checkpoint_blocking: bool = True
    checkpoint_buffer: int | float = 0.1
    checkpoint_on_error: CheckpointFailure = "continue"

    def __post_init__(self) -> None:
        self._is_one_of("embedding_gradients", *get_args(GradientReduction))
        self._is_one_of("missing_slots", *get_args(MissingSlots))
        self._is_one_of("grouping", True, False)
        self._is_one_of("wire_dtype", None, *get_args(WireType))
        self._is_one_of("gradient_wire_dtype", None, *get_args(WireType))
        self._is_one_of("plan", *get_args(PlanOutput))
        self._is_one_of("dense_compression", *get_args(DenseCompression))
        self._is_one_of("prefetch_keys", False, True)
        self._is_one_of("deterministic", False, True)
        self._is_one_of("save_code", False, True)
        self._is_one_of("carrier", None, *get_args(Carrier))
        self._is_one_of("hierarchical", "auto", True, False)
        self.warm_starts  # noqa: B018 (raises an error of its own)
        self._is_one_of("checkpoint_blocking", True, False)
        self._is_one_of("checkpoint_on_error", *get_args(CheckpointFailure))
        buffer = self.checkpoint_buffer
        is_share = isinstance(buffer, float) and 0 < buffer <= 1
        if not (is_share or _is_whole(buffer) and buffer > 0):
            raise ValueError(
                "scope(checkpoint_buffer=…) is a number of bytes, from 1, or a share of the "
                f"shards' bytes, a float up to 1.0, not {buffer!r}."
            )
        folder, steps = self.profile, self.profile_steps
        if folder is not None and not (
            isinstance(folder, (str, os.PathLike)) and os.fspath(folder)
        ):
            raise ValueError(f"scope(profile=…) is a folder or None, not {folder!r}.")
        is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2
        if not (is_pair and all(map(_is_whole, steps)) and 1 <= steps[0] <= steps[1]):
            raise ValueError(
                "scope(profile_steps=…) is (first, last), two numbers of training steps with "
                f"1 <= first <= last, not {steps!r}."
            )
        if not (_is_whole(self.profile_every) and self.profile_every >= 0):
            raise ValueError(
                "scope(profile_every=…) is a number of training steps, 0 for none, not "
                f"{self.profile_every!r}."
            )
        if not (_is_whole(self.local_steps) and self.local_steps >= 1):
            raise ValueError(
                f"scope(local_steps=…) is a whole number from 1, not {self.local_steps!r}."
            )
        if not isinstance(self.check, int) or self.check < 0:
            raise ValueError(
                f"scope(check=…) is True, False or a number of training runs, not {self.check!r}."
            )

    def _is_one_of(self, name: str, *values: Any) -> None:
        given = getattr(self, name)
        if given not in values:
            listed = " or ".join(map(repr, values))
            raise ValueError(f"scope({name}=…) is {listed}, not {given!r}.")

    @property
    def warm_starts(self) -> tuple[WarmStart, ...]:
        """The checkpoints from which variables start, in the order in which they are searched."""
        given = () if self.warm_start is None else self.warm_start
        sources = (given,) if isinstance(given, (str, os.PathLike, WarmStart)) else given
        if not isinstance(sources, (list, tuple)) or not all(
            isinstance(source, (str, os.PathLike, WarmStart)) and source for source in sources
        ):
            raise ValueError(
                "scope(warm_start=…) is a checkpoint's path, a collective.checkpoint.WarmStart, a "
                f"list of them, or None, not {given!r}."
            )
        return tuple(s if isinstance(s, WarmStart) else WarmStart(s) for s in sources)

    @property
    def runs_between_checks(self) -> int:
        """After how many training runs replicas are compared; 0 for never."""
        return USUAL_CHECK if self.check is True else int(self.check)


@dataclasses.dataclass(frozen=True)
class EmbeddingOptions:
    """Holds the options of embedding_scope().

    Attributes:
        min_rows: variables with fewer rows don't become tables.
        policy: the policy of tables without one of their own; None for no policy.
        chosen: whether the launcher's --embedding-scope auto has opened the scope instead of the
            script: then only variables that are embeddings by their name or partitioner become
            tables.

    Raises:
        ValueError: an option has a value that it can't have.
    """

    min_rows: int = 0
    policy: TablePolicy | None = None
    chosen: bool = False

    def __post_init__(self) -> None:
        if not (_is_whole(self.min_rows) and self.min_rows >= 0):
            raise ValueError(
                f"embedding_scope(min_rows=…) is a whole number from 0, not {self.min_rows!r}."
            )
        if not (self.policy is None or isinstance(self.policy, TablePolicy)):
            raise ValueError(
                f"embedding_scope(policy=…) is a TablePolicy or None, not {self.policy!r}."
            )


def given(**options: Any) -> dict[str, Any]:
    """Returns the options that were given, without those that are inherited."""
    return {name: value for name, value in options.items() if value is not INHERIT}


def check_given(owner: str, given_options: Mapping[str, Any]) -> None:
    """Checks options of scope() that were given to something else.

    Args:
        owner: what it is, for messages.
        given_options: the options.

    Raises:
        ValueError: an option has a value that it can't have.
    """
    try:
        ScopeOptions(**given_options)
    except ValueError as error:
        raise ValueError(str(error).replace("scope(", f"{owner}(", 1)) from None


def tolerate_foreign(method: str, known: list[str], others: dict[str, Any]) -> None:
    """Warns of options that tune other libraries, and refuses unknown ones.

    Args:
        method: the method's name, for messages.
        known: its own options.
        others: the other options it was given.

    Raises:
        TypeError: an option is neither the method's nor known to be another library's.
    """
    foreign = sorted(o for o in others if o in FOREIGN or o.startswith(FOREIGN_PREFIXES))
    unknown = sorted(set(others) - set(foreign))
    if unknown:
        raise TypeError(
            f"{method}() has no option {', '.join(unknown)}. Its options: {', '.join(known)}."
        )
    if foreign:
        if len(foreign) == 1:
            words = "tunes another library and has no effect here; leave it out to silence this."
        else:
            words = "tune another library and have no effect here; leave them out to silence this."
        warnings.warn(f"{method}(): {', '.join(foreign)} {words}", stacklevel=3)


def warn_of_idle(scope_options: dict[str, Any], profile_around: Any) -> None:
    """Warns of options of a profile without a profile.

    Args:
        scope_options: those that scope() was given. A `profile=None` among them is meant.
        profile_around: the folder that is in force where scope() is called.
    """
    idle = [name for name in ("profile_steps", "profile_every") if name in scope_options]
    if idle and "profile" not in scope_options and profile_around is None:
        warnings.warn(
            f"scope({', '.join(f'{name}=…' for name in idle)}) has no effect without a folder: "
            "give scope(profile='folder'), too, or leave it out.",
            stacklevel=4,
        )


def takes_foreign(*known: str) -> Callable[[Method], Method]:
    """Lets a method take options that tune other libraries, which have no effect: a decorator.

    Neither its signature nor a type checker knows of them: an option that is misspelt is found.

    Args:
        known: the method's own options, for the message of an unknown one.
    """

    def decorate(method: Method) -> Method:
        parameters = inspect.signature(method).parameters

        @functools.wraps(method)
        def with_others(*args: Any, **kwargs: Any) -> Any:
            others = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameters}
            tolerate_foreign(method.__name__, list(known), others)
            return method(*args, **kwargs)

        return cast(Method, with_others)

    return decorate


def names(options: type) -> list[str]:
    """Returns the names of the options that an options class has."""
    return [field.name for field in dataclasses.fields(options)]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
