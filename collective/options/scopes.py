"""Holds the options of scope() and embedding_scope(), each with all that is known of it."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, ClassVar, Literal, Protocol, Union, get_args

from collective.options.declaration import (
    Options,
    Rule,
    is_whole,
    one_of,
    option,
    options_class,
    whole_from,
)
from collective.policy import TablePolicy

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
HalfPrecision = Literal["float16", "bfloat16"]
# Or "whole:K", with a rank K, or "auto:FILE".
TablePlacement = Union[Literal["rows", "whole", "replicated", "auto"], str]
# The placement of tables whose embedding_scope() says nothing of it.
PLACEMENT_VARIABLE = "COLLECTIVE_PLACEMENT"

# After how many training runs scope(check=True) compares replicas.
USUAL_CHECK = 100


class DType(Protocol):
    """Stands for a `tf.DType`, which is equal to its name, in annotations.

    Type checkers can't read TensorFlow's types: an annotation with one of its classes would allow
    anything.
    """

    @property
    def as_datatype_enum(self) -> int: ...


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


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(map(is_whole, value)) and 1 <= value[0] <= value[1]


def _is_size(value: Any) -> bool:
    is_share = isinstance(value, float) and 0 < value <= 1
    return is_share or (is_whole(value) and value > 0)


def _are_sources(value: Any) -> bool:
    sources = _sources(value)
    return isinstance(sources, (list, tuple)) and all(
        isinstance(source, WarmStart) or _is_path(source) for source in sources
    )


def _sources(value: Any) -> Any:
    """Returns the value of warm_start as a sequence, if it has one that it can have."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (str, os.PathLike, WarmStart)) else value


@options_class
class UpdateOptions(Options):
    """Options of updates."""

    embedding_gradients: GradientReduction = option(
        "mean",
        one_of(*get_args(GradientReduction)),
        """How to combine the ranks' gradients of a table: 'mean' or 'sum'. Use 'sum' for settings
        that were tuned with HybridBackend or SparseOperationKit, which take the sum.
        """,
    )
    local_steps: int = option(
        1,
        whole_from(1, "a whole number from 1"),
        """k, the number of batches per update. With k > 1, a run of the train_op adds its gradients
        to those of previous runs, and every k-th run applies their mean. This is the update of one
        batch k times as large, for any optimizer of `tf.compat.v1.train`, if the k batches are of
        one size (else each of them counts alike). What a script does to gradients (such as
        clipping) applies to the mean. `global_step` counts updates, so `max_steps`, learning-rate
        schedules and hooks by steps behave as with the large batch.
        (TensorFlow's step counter may remark that it stands still in between.) Everything else in a
        run happens every time: batch normalisation uses one batch, moving averages are updated for
        each. A checkpoint holds the state after the last update, without incomplete sums: those of
        the last batches, before the data end or a session is left, are dropped. Saving changes
        nothing; restoring into the session restarts the sum. Optimizers that share gradients
        (clipped by one norm) are run together.
        """,
    )
    sync_batch_norm: bool = option(
        False,
        one_of(False, True),
        """Whether layers of batch normalisation (`tf.layers`, Keras) normalise by the mean and the
        variance of the batches of all ranks, like plain TensorFlow with the whole batch. By default
        each rank normalises by its own batch. It costs two small allreduces in each layer, and one
        or two for its gradients. Keras's `BatchNormalization(synchronized=True)` does it without
        this option. Layers with fused=True (by default those of images) or with a
        virtual_batch_size are refused, and what a script computes by itself isn't changed.
        """,
    )


@options_class
class ExchangeOptions(Options):
    """Options of exchanges."""

    grouping: bool = option(
        True,
        one_of(True, False),
        "Whether lookups share exchanges. With False each has its own. The numbers are the same.",
    )
    prefetch_keys: bool = option(
        False,
        one_of(False, True),
        """Whether to de-duplicate and exchange the keys of a batch while the previous batch
        computes; on one rank, to check and join them, and to copy them to the GPU. Keys don't
        depend on weights, so the numbers are the same. It is for models whose
        ids come from one tf.data iterator; the plan says whether it is on, and if not, why. The
        iterator then runs one batch ahead of training, and a session waits for that batch when it
        is left. It is off while an Estimator evaluates or predicts; other evaluations with the same
        iterator need equal numbers of batches on all ranks, or are an error on all ranks.
        """,
    )
    carrier: Carrier | None = option(
        None,
        one_of(None, *get_args(Carrier)),
        """What carries the exchanges that are built inside. 'horovod'; 'shared_memory', by which
        CPU ranks of one host exchange without sockets and without asking each other first, or
        Horovod if that isn't possible (the plan says why); 'nccl', between the GPUs of one host
        without Horovod, or a RuntimeError that says why it isn't possible; 'auto', shared memory if
        possible. None follows the environment variable COLLECTIVE_CARRIER, and is 'auto' without
        it. The ranks' agreement before a run always follows the variable; with 'horovod' there,
        everything does. The numbers are the same, except for the last bits of dense gradients of
        three or more ranks, which shared memory adds in the order of the ranks.
        """,
    )
    hierarchical: Hierarchical = option(
        "auto",
        one_of("auto", True, False),
        """Whether the ranks of each host merge the keys, rows and gradients that they exchange with
        other hosts: True (if possible), 'auto' (if memory was 8 times as fast as the network when
        the ranks started), or False. The plan says which, and why. The numbers are the same, except
        for the last bits of sums of gradients. With deterministic=True only rows are merged, and
        all bits are the same.
        """,
    )


@options_class
class PrecisionOptions(Options):
    """Options of precision and of equal bits."""

    wire_dtype: WireType | DType | None = option(
        None,
        one_of(None, *get_args(WireType)),
        """Type in which rows of float32 tables are sent: tf.float16 or tf.bfloat16, to which they
        are rounded, or None, which is exact. It needs grouped lookups.
        """,
    )
    gradient_wire_dtype: WireType | DType | None = option(
        None,
        one_of(None, *get_args(WireType)),
        "Type in which the gradients of these rows are sent, in the same way.",
    )
    dense_compression: DenseCompression = option(
        "none",
        one_of(*get_args(DenseCompression)),
        """16-bit type in which gradients of replicated variables are sent, rounded once on each way
        and added in float32: 'fp16' or 'bf16'; 'none' is exact. With 'fp16', a gradient beyond
        65504 becomes infinite.
        """,
    )
    mixed_precision: HalfPrecision | None = option(
        None,
        one_of(None, *get_args(HalfPrecision)),
        """Type in which sessions compute matrix products and what lies between them: 'float16',
        'bfloat16', or None for float32. Tables, variables, slots and exchanges stay in float32.
        TensorFlow's graph optimizer rewrites the operations (see
        `tf.train.experimental.enable_mixed_precision_graph_rewrite`). With 'float16' the gradients
        of a loss are multiplied by a dynamic scale while they are computed, so that small ones
        don't vanish; if one overflows on any rank, all ranks skip the step, which changes no
        variable, and halve the scale. The scale is in checkpoints. 'float16' is for GPUs: CPU ranks
        scale and skip alike, and compute in float32. 'bfloat16' is for CPU ranks whose processor
        computes it, and needs no scale.
        """,
    )
    deterministic: bool = option(
        False,
        one_of(False, True),
        """Whether two launches of a program, on one machine and number of ranks, give the same
        bits. It turns on `tf.config.experimental.enable_op_determinism`: kernels and tf.data have
        one order, and an operation without such a kernel is an error. Sums over three or more ranks
        are formed in the order of the ranks, by two exchanges instead of one. Set it before the
        graph is built. Random operations (dropout, `shuffle`, one-shot iterators) need a seed, or
        TensorFlow raises a RuntimeError: `tf.set_random_seed`, and `seed=… + strategy.rank()` if
        ranks should draw different numbers. Initial values of Keras's layers and of `tf.layers`,
        which TensorFlow draws by Python's `random`, also come from `tf.set_random_seed`, and need
        it. The program itself is responsible for random numbers of NumPy (which functions of
        `tf.keras.backend` also use for seeds) and of Python; its own threads and queues; variables
        that a run reads and writes without an order between the two, as TensorFlow warns about
        sessions; and its own reductions by Horovod, unless HOROVOD_FUSION_THRESHOLD is 0.
        """,
    )


@options_class
class MonitoringOptions(Options):
    """Options of monitoring."""

    plan: PlanOutput = option(
        "print",
        one_of(*get_args(PlanOutput)),
        """What rank 0 prints on stderr: what a slow start is doing and, on several ranks, the plan
        (see `plan()`) when the first training run of a graph starts. 'print' summarises a plan of
        many tables in 40 lines; 'full' lists everything; 'quiet' prints neither.
        """,
    )
    profile: str | os.PathLike[str] | None = option(
        None,
        Rule("a folder or None", lambda value: value is None or _is_path(value)),
        """Folder for measurements of where the time of training steps goes (see
        `collective.profiling`). None: nothing is measured. Every rank creates the folder when the
        first run is measured.
        """,
    )
    profile_steps: tuple[int, int] = option(
        (11, 20),
        Rule("(first, last), two numbers of training steps with 1 <= first <= last", _is_range),
        """(first, last), the training runs of this process to trace; the first run is 1. After the
        last one, rank 0 prints how the step's time splits up and writes it as a page, report.html;
        every rank writes its trace.
        """,
    )
    profile_every: int = option(
        0,
        whole_from(0, "a number of training steps, 0 for none"),
        """Also measures one training run in every so many, for TensorBoard's scalars and for the
        page's charts of the whole job: milliseconds per step, rows of dynamic tables. 0: none.
        """,
    )
    check: bool | int = option(
        False,
        Rule(
            "True, False or a number of training runs",
            lambda value: isinstance(value, int) and value >= 0,
        ),
        """k: after every k-th training run of a session, or call of a function that trains, the
        ranks compare checksums of the bits of all replicated variables. True means 100, False
        never. A difference is a `ReplicaError` on every rank, which names the variables. Variables
        are read one after another. Variables that belong to one rank are skipped: local variables,
        states of metrics, and those with `VariableSynchronization.ON_READ`.
        """,
    )


@options_class
class CheckpointOptions(Options):
    """Options of checkpoints."""

    missing_slots: MissingSlots = option(
        "error",
        one_of(*get_args(MissingSlots)),
        """What to do if a restored checkpoint lacks an optimizer's slots and scalars, because
        another optimizer wrote it: raise an error ('error'), or initialize them ('fresh').
        """,
    )
    warm_start: Sequence[WarmStartSource] | WarmStartSource | None = option(
        None,
        Rule(
            "a checkpoint's path, a collective.checkpoint.WarmStart, a list of them, or None",
            _are_sources,
        ),
        """Checkpoints from which variables start: paths, or `collective.checkpoint.WarmStart(path,
        names={there: here}, slots=True)`, one or a list. It takes effect when a
        `MonitoredTrainingSession`, an Estimator or anything else that uses TensorFlow's
        SessionManager starts without a checkpoint in its checkpoint_dir; such a checkpoint takes
        precedence. Each variable starts from the first checkpoint of the list that has it: static
        and dynamic tables, and ordinary variables, but not the global step. Optimizers' slots need
        `slots=True`. Rank 0 prints what was taken, what started fresh, and what was left over.
        """,
    )
    save_code: bool = option(
        False,
        one_of(False, True),
        """Whether to save the script, the code and configurations below its folder, versions, the
        command line and these options next to a job's first checkpoint: see
        `collective.checkpoint.load_code`.
        """,
    )
    checkpoint_blocking: bool = option(
        True,
        one_of(True, False),
        """Whether a save returns only when it is written (True), or as soon as the ranks have
        recorded what belongs to it (False). It is then written during training, and holds exactly
        its step. The next save, the end of the session and `collective.checkpoint.wait()` wait for
        it, and raise its error. Variables that can't be tracked are written at once: tables on a
        GPU or with rows in files, and all tables if the option was set after the graph's first run.
        """,
    )
    checkpoint_buffer: int | float = option(
        0.1,
        Rule(
            "a number of bytes, from 1, or a share of the shards' bytes, a float up to 1.0",
            _is_size,
        ),
        """Limit of a rank's memory for such a save: bytes or, as a float, a share of its tables and
        slots, but at least 64 MB. It holds rows on their way to a file, and rows that training
        changes before they are read; if it is full, training waits. Other variables and keys of
        dynamic tables are copied in addition to it.
        """,
    )
    checkpoint_on_error: CheckpointFailure = option(
        "continue",
        one_of(*get_args(CheckpointFailure)),
        """What happens to training when storage fails a save of a monitored session or Estimator
        (full, gone, read-only, unreachable): it continues with a warning ('continue'), or stops
        ('stop') with a `collective.checkpoint.CheckpointStorageError` on all ranks. The next save
        tries again. A session's last save, and the script's own `Saver.save`, always raise it.
        """,
    )


# Fields are in the order of the bases from the last to the first.
@options_class
class ScopeOptions(
    CheckpointOptions, MonitoringOptions, PrecisionOptions, ExchangeOptions, UpdateOptions
):
    """Holds the options of scope(); `CollectiveStrategy.scope` documents each.

    Raises:
        ValueError: an option has a value that it can't have.
    """

    METHOD: ClassVar[str] = "scope"

    @property
    def warm_starts(self) -> tuple[WarmStart, ...]:
        """The checkpoints from which variables start, in the order in which they are searched."""
        sources = _sources(self.warm_start)
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
        placement: where the rows of a table are: 'rows', dealt to all ranks; 'whole', all on one
            rank; 'whole:K', all on rank K mod N; 'replicated', all of a static table on every rank;
            'auto', as the planner says; or 'auto:FILE', as it says by an earlier run's file of
            tables.
        replicate_below: static tables whose weights take fewer bytes are replicated. Given as a
            number, or as a text with a unit: '1 MB' is 1,000,000 bytes, '1 MiB' 1,048,576.
        chosen: whether the launcher's --embedding-scope auto has opened the scope instead of the
            script: then only variables that are embeddings by their name or partitioner become
            tables.

    Raises:
        ValueError: an option has a value that it can't have.
    """

    min_rows: int = 0
    policy: TablePolicy | None = None
    placement: TablePlacement = "rows"
    replicate_below: int | str = 0
    chosen: bool = False

    @classmethod
    def by_default(cls, environment: Mapping[str, str]) -> EmbeddingOptions:
        """Returns the options of a scope that is given none.

        Args:
            environment: the process's variables.

        Raises:
            ValueError: COLLECTIVE_PLACEMENT has a value that `placement` can't have.
        """
        placement = environment.get(PLACEMENT_VARIABLE, "")
        try:
            return cls(placement=placement) if placement else cls()
        except ValueError as error:
            raise ValueError(f"{PLACEMENT_VARIABLE} in the environment: {error}") from None

    @property
    def is_automatic(self) -> bool:
        """Whether the planner chooses the placement."""
        return self.placement.partition(":")[0] == "auto"

    def __post_init__(self) -> None:
        if not (is_whole(self.min_rows) and self.min_rows >= 0):
            raise ValueError(
                f"embedding_scope(min_rows=…) is a whole number from 0, not {self.min_rows!r}."
            )
        if not (self.policy is None or isinstance(self.policy, TablePolicy)):
            raise ValueError(
                f"embedding_scope(policy=…) is a TablePolicy or None, not {self.policy!r}."
            )
        if not (isinstance(self.placement, str) and PLACEMENTS.fullmatch(self.placement)):
            raise ValueError(
                "embedding_scope(placement=…) is 'rows' (each row on one rank), 'whole' (all rows "
                "on one rank), 'whole:K' (on rank K), 'replicated' (all rows on every rank), "
                "'auto' (as the planner chooses) or 'auto:FILE' (by the tables of an earlier run), "
                f"not {self.placement!r}.{_instead_of(self.placement)}"
            )
        object.__setattr__(self, "replicate_below", _count_bytes(self.replicate_below))


def _instead_of(placement: Any) -> str:
    """Says what serves the purpose of a placement that other libraries have; '' for any other."""
    kind = placement.partition(":")[0] if isinstance(placement, str) else ""
    way = INSTEAD_OF_PLACEMENTS.get(kind)
    return "" if way is None else f" {way}"


PLACEMENTS = re.compile("rows|replicated|whole(:[0-9]{1,9})?|auto(:.+)?")
# What to use for the placements of other libraries.
INSTEAD_OF_PLACEMENTS = {
    "columns": "Rows aren't cut: 'rows' gives every rank an equal share also of few wide rows. To "
    "cut a table by columns, make several and join what they look up by tf.concat.",
}


def _count_bytes(size: Any) -> int:
    """Returns the bytes that a number, or a text like '1 MB', means.

    Raises:
        ValueError: it is neither.
    """
    problem = ValueError(
        "embedding_scope(replicate_below=…) is a whole number of bytes from 0, or a text with a "
        f"unit such as '1 MB', not {size!r}."
    )
    if is_whole(size) and size >= 0:
        return int(size)
    if not isinstance(size, str):
        raise problem
    import pydantic  # Importing it takes a quarter of a second, and most scripts don't need it.

    try:
        return int(pydantic.TypeAdapter(pydantic.ByteSize).validate_python(size))
    except pydantic.ValidationError:
        raise problem from None


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
