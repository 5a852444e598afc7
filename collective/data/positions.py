"""Counts how many global batches of a dataset the runs of a session have used: its position.

    dataset ──► iterator ──► get_next ──► the run that takes the batch ──► position + 1
       ▲                                                                       │
       └── first batch: skips as many ◄── checkpoint, restored at any N ◄──────┘

The position is a variable of the session, which a Saver saves and restores with all others, so that
it matches the weights. The run that takes a batch from the iterator counts it, after everything
that the run fetches is computed: batches that TensorFlow or `scope(prefetch_keys=True)` reads ahead
don't count, and neither does a step that no rank has taken. The dataset reads the position when its
first batch is requested, which is after the restore.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Set
from typing import Literal

import tensorflow.compat.v1 as tf

from collective.coordination import batch_counter
from collective.coordination.batch_counter import STARTS
from collective.coordination.prepared_run import CountedRun
from collective.data.batch_iterators import positions_read
from collective.ops.communication import collectives
from collective.ops.graph import graph_state
from collective.ops.graph.optional_variables import let_be_missing

OnChange = Literal["error", "restart", "continue"]
ON_CHANGE = ("error", "restart", "continue")
_ITERATORS = frozenset({"IteratorGetNext", "IteratorGetNextSync"})
# Operations on an iterator that return no batch.
_OTHERS = STARTS | {"IteratorToStringHandle", "SerializeIterator"}
_UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Describes data as far as a position depends on it.

    Attributes:
        batch_size: records of a global batch; None: unknown.
        records: of an epoch; None: unknown.
        seed: of their order; None: unknown, or they aren't shuffled.
        digest: 63 bits of the rest; of streams how many there are.
    """

    batch_size: int | None
    records: int | None
    seed: int | None
    digest: int

    def values(self) -> list[int]:
        """Returns the fields, in order, as integers."""
        return [
            _UNKNOWN if value is None else int(value)
            for value in (self.batch_size, self.records, self.seed, self.digest)
        ]


class DataPosition:
    """Counts the global batches of one dataset that were used.

    Attributes:
        name: of the dataset.
        batch_size: the records of a global batch; None: unknown.
        handle: the name by which functions find the variable.

    Args:
        name: of the dataset; the variables are '<name>/position' and '<name>/source'.
        source: describes the data.
        on_change: what to do with the position of other data.
        first: the position if none is restored.
    """

    def __init__(self, name: str, source: DataSource, on_change: OnChange, first: int):
        self.name, self._source, self._on_change, self._first = name, source, on_change, first
        self.batch_size = source.batch_size
        with tf.init_scope(), tf.device("/cpu:0"), tf.name_scope(f"{name}/"):
            self._batches = tf.Variable(
                tf.constant(first, tf.int64), trainable=False, use_resource=True, name="position"
            )
            self._used = tf.Variable(
                tf.constant(source.values(), tf.int64),
                trainable=False,
                use_resource=True,
                name="source",
            )
        if on_change != "error":
            for variable in (self._batches, self._used):
                let_be_missing(variable)
        self.handle = _handle_name(self._batches)

    def start(self) -> tf.Tensor:
        """Returns the position, int64 scalar, in a dataset's function.

        Raises:
            tf.errors.InvalidArgumentError: in a session, where it is that of other data.
        """
        batches, used = _read_by_name(self._batches), _read_by_name(self._used)
        checks = []
        if self._on_change == "error":
            checks.append(
                tf.raw_ops.Assert(
                    condition=self._is_own(used), data=[self._complaint(batches, used)]
                )
            )
        if self._on_change == "restart":
            if collectives.rank() == 0:
                checks.append(self._warning(batches, used))
            batches = self._or_first(used, batches)
        with tf.control_dependencies(checks):
            return tf.identity(batches)

    def count(self, batches: int, after: list[tf.Operation]) -> tf.Operation:
        """Makes the operation that counts batches.

        Args:
            batches: how many.
            after: operations that come first.
        """
        with (
            tf.control_dependencies(after),
            tf.device("/cpu:0"),
            tf.name_scope("collective/data/position"),
        ):
            if self._on_change == "error":
                counted: tf.Operation = self._batches.assign_add(batches, read_value=False)
                return counted
            before, used = self._batches.read_value(), self._used.read_value()
            if self._on_change == "restart":
                before = self._or_first(used, before)
            with tf.control_dependencies([before, used]):
                return tf.group(
                    self._batches.assign(before + batches, read_value=False),
                    self._used.assign(self._source.values(), read_value=False),
                )

    def _is_own(self, used: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(tf.equal(used, tf.constant(self._source.values(), tf.int64)))

    def _or_first(self, used: tf.Tensor, batches: tf.Tensor) -> tf.Tensor:
        first = tf.constant(self._first, tf.int64)
        chosen: tf.Tensor = tf.where(self._is_own(used), batches, first)
        return chosen

    def _complaint(self, batches: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
        # TensorFlow escapes quotes in it.
        return tf.strings.join(
            [
                f"resumable dataset {self.name}: the position in the checkpoint, after global "
                "batch ",
                tf.as_string(batches),
                ", is of other data (",
                _text(used),
                ") than those of this job (",
                _text(tf.constant(self._source.values(), tf.int64)),
                "). The digest is of files or, for a tf.data pipeline, its operations and their "
                "constants; for a stream, the number of its loaders. Give the data as they were; "
                "or let resumable(..., on_change=restart) begin them again, or on_change=continue "
                "go on after as many batches of the new data.",
            ]
        )

    def _warning(self, batches: tf.Tensor, used: tf.Tensor) -> tf.Operation:
        says = tf.strings.join(
            [
                f"resumable dataset '{self.name}': the position in the checkpoint, after global "
                "batch ",
                tf.as_string(batches),
                ", is of other data; those of this job begin again.",
            ]
        )

        def warn() -> tf.Tensor:
            with tf.control_dependencies([tf.print(says)]):
                return tf.constant(False)

        warned: tf.Tensor = tf.cond(self._is_own(used), lambda: tf.constant(True), warn)
        return warned.op


@dataclasses.dataclass
class DataPositions:
    """Records and counts the batches of a graph's resumable datasets (a `BatchCounter`).

    Attributes:
        by_handle: the positions, by the names of their variables.
    """

    by_handle: dict[str, DataPosition] = dataclasses.field(default_factory=dict)

    @property
    def batch_sizes(self) -> list[int | None]:
        """Returns how many records a global batch of each dataset has; None: unknown."""
        return [position.batch_size for position in self.by_handle.values()]

    def counted_run(
        self, operations: Set[tf.Operation], after: list[tf.Operation]
    ) -> CountedRun | None:
        taken: dict[tf.Operation, int] = {}
        started = set()
        for op in sorted(operations, key=lambda op: op._id):
            for iterator in [x.op for x in op.inputs if x.dtype == tf.resource]:
                if "Iterator" not in iterator.type and iterator.type not in ("Enter", "Switch"):
                    continue
                if op.type in STARTS:
                    started.add(iterator.name)
                elif op.type not in _OTHERS and self._takes(op, iterator):
                    taken[iterator] = taken.get(iterator, 0) + 1
        counts: dict[str, int] = {}
        for iterator, times in taken.items():
            for handle in positions_read(iterator, self.by_handle.keys()):
                counts[handle] = counts.get(handle, 0) + times
        if not counts and not started:
            return None
        return CountedRun(
            frozenset(iterator.name for iterator in taken),
            frozenset(started),
            tuple(self.by_handle[handle].count(n, after) for handle, n in sorted(counts.items())),
            tuple(self.by_handle[handle].count(n, []) for handle, n in sorted(counts.items())),
        )

    def _takes(self, op: tf.Operation, iterator: tf.Operation) -> bool:
        """Tells whether `op` takes a batch to be counted.

        Raises:
            NotImplementedError: it may take batches to be counted, but in a way that can't be
                counted.
        """
        source = iterator
        while source.type in ("Enter", "Switch", "RefEnter", "RefSwitch", "Identity"):
            source = source.inputs[0].op
        if "Iterator" not in source.type:
            return False
        names = ", ".join(f"'{position.name}'" for position in self.by_handle.values())
        if source.type.startswith("IteratorFromStringHandle"):
            raise NotImplementedError(
                f"'{op.name}' takes a batch by a string handle, so it isn't known whether it is "
                f"one of the resumable dataset {names}: call get_next() of its own iterator "
                "(tf.data.make_one_shot_iterator or make_initializable_iterator)."
            )
        if not positions_read(source, self.by_handle.keys()):
            return False
        if op.type not in _ITERATORS or op._get_control_flow_context() is not None:
            raise NotImplementedError(
                f"'{op.name}' ({op.type}) takes batches of the resumable dataset {names} in a "
                "branch, a loop, a function or as an optional: how many isn't known. Call "
                "get_next() of its iterator outside."
            )
        return True


def position_of(
    name: str, source: DataSource, on_change: OnChange, first: int
) -> DataPosition | None:
    """Makes the position of a dataset in the current graph.

    Returns:
        None inside `without_positions`.

    Raises:
        ValueError: the graph has a resumable dataset of this name.
    """
    if _without:
        return None
    with tf.init_scope():
        graph = tf.get_default_graph()
    positions = graph_state.of(graph, DataPositions)
    if any(position.name == name for position in positions.by_handle.values()):
        raise ValueError(
            f"resumable(name='{name}'): the graph has a resumable dataset of this name. Give each "
            "a name of its own, which stays the same from job to job."
        )
    position = DataPosition(name, source, on_change, first)
    positions.by_handle[position.handle] = position
    batch_counter.count(graph, positions)
    return position


@contextlib.contextmanager
def without_positions() -> Iterator[None]:
    """Makes resumable datasets inside begin at their start and count nothing, for evaluation."""
    _without.append(True)
    try:
        yield
    finally:
        _without.pop()


_without: list[bool] = []


def _handle_name(variable: tf.Variable) -> str:
    shared_name: bytes = variable.handle.op.get_attr("shared_name")
    return shared_name.decode()


def _read_by_name(variable: tf.Variable) -> tf.Tensor:
    """Reads a variable in a function that can't capture any: that of a one-shot iterator."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype, shape=variable.shape, shared_name=_handle_name(variable)
    )
    return tf.ensure_shape(
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype.base_dtype), variable.shape
    )


def _text(values: tf.Tensor) -> tf.Tensor:
    """Returns the text of the fields of a `DataSource`."""
    texts = tf.where(
        tf.equal(values, _UNKNOWN), tf.fill(tf.shape(values), "unknown"), tf.as_string(values)
    )
    names = [field.name for field in dataclasses.fields(DataSource)]
    return tf.strings.join(
        [part for i, name in enumerate(names) for part in (f"{', ' * (i > 0)}{name} ", texts[i])]
    )
