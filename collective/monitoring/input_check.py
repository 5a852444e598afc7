"""Detects a dataset that every rank reads whole by mistake.

    a training run ──► checksums of its batches ──► a meeting ──► they differ: all is well
                              ▲                          │
                              └── the next batch, too ◄──┴──► they are the same on all ranks

If ranks read the same records, they train on each record N times, and no number looks wrong. So
ranks compare the first batches that a graph's iterators give to training. If ranks read different
records, as they should, one different batch from any iterator is enough, because other iterators
may give all ranks the same on purpose (numbers of steps, shared negatives). The warning requires
several different batches that are the same on all ranks: an input that is constant, or as short as
a batch or two, isn't a mistake. Neither are numbers with which each rank finds its own records: the
looked-up ids are compared, too.

Only elements of `tf.data` iterators are compared, and only if a training run takes them itself: not
feeds, and not what an Estimator has dealt to the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.dealt_input import GraphInput
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_analysis import RunFootprint
from collective.data import same_records
from collective.data.dealt_input import input_of
from collective.ops.communication import collectives
from collective.ops.graph import device_scopes, graph_analysis, graph_state
from collective.ops.graph.graphs import open_for_changes
from collective.prefetch.enable import split_of
from collective.prefetch.graph_split import ITERATORS
from collective.tables.grouping import lookups_of

Original = Callable[..., Any]

MOST_RUNS = 8  # that are compared
SAME_BATCHES = 3  # different ones, of which a warning is made
MOST_ITERATORS = 8  # of a run
MOST_TENSORS = 8  # of an iterator's batch, from all over it
MOST_LOOKUPS = 8  # of a run, from all over it
MOST_BYTES = 1 << 24  # of a tensor that count for a checksum
MOST_STRINGS = 1 << 17
# Operations that make tensors of what an iterator gives for a sparse or a ragged one.
DECODERS = frozenset({"DeserializeSparse", "RaggedTensorFromVariant"})


@dataclasses.dataclass
class InputCheck:
    """Compares the first batches of a graph's training runs with the other ranks'.

    Attributes:
        runs: how many runs were compared.
        same: the checksums of the batches that all ranks had alike, by the iterators that have
            given some in every run; None before the first run.
        is_over: whether nothing remains to be compared. It is so on all ranks at one time.
        all_deal: whether the input of every rank's graph is dealt by the library, which is compared
            otherwise (`collective.monitoring.dealing_check`).
    """

    runs: int = 0
    same: dict[str, set[str]] | None = None
    is_over: bool = False
    all_deal: bool = False

    def compare(self, session: Any, reading: Reading) -> None:
        """Compares the batches of a training run; every rank calls it.

        Args:
            session: the session.
            reading: of this rank's batches.
        """
        messages = barrier.exchange(
            session,
            "compares the first batches of the ranks",
            {**_payload(reading), "deals": input_of(session.graph) is not None},
        )
        self.runs += 1
        self.all_deal = all([message.pop("deals") for message in messages])
        if any(message["is_put_off"] for message in messages):
            self.is_over = self.runs >= MOST_RUNS
            return
        is_alike = all(message == messages[0] for message in messages)
        alike = messages[0]["checksums"] if is_alike else {}
        known = {name: set() for name in alike} if self.same is None else self.same
        self.same = {name: seen | {alike[name]} for name, seen in known.items() if name in alike}
        found = [name for name, seen in self.same.items() if len(seen) >= SAME_BATCHES]
        self.is_over = bool(found) or not self.same or self.runs >= MOST_RUNS
        if found and collectives.rank() == 0:
            _warn(found[0])


def _payload(reading: Reading) -> dict[str, Any]:
    """Returns what the other ranks learn of this one's batches."""
    try:
        checksums, ids = reading.checksums(), reading.ids_checksum()
    except Exception:
        # The step has been made, and the others wait for a message: this one ends the check.
        checksums, ids = {}, ""
    return {"checksums": checksums, "ids": ids, "is_put_off": reading.is_put_off}


def watched(
    session: Any, run: PreparedRun, carry_out: Callable[[Original], Any]
) -> Callable[[Original], Any]:
    """Returns `carry_out`, followed by a comparison of the batches as long as needed.

    Args:
        session: the session.
        run: a training run.
        carry_out: carries it out by `Session.run`, or by what is given in its place.
    """
    check = check_of(session.graph)
    is_over = check.is_over and (run.recorder is None or not run.recorder.holds_copies)
    if is_over or collectives.size() == 1:
        return carry_out
    recorder: Recorder = run.recorder or _recorder_of(session.graph, run)

    def carry_out_and_compare(original: Original) -> Any:
        reading = recorder.reading()
        out = carry_out(reading.added_to(original))
        if not check.is_over:
            check.compare(session, reading)
            if not check.is_over:
                recorder.restart(original, session)
        return out

    return carry_out_and_compare


def check_of(graph: tf.Graph) -> InputCheck:
    """Returns the state of the comparison, which begins at the first call."""
    return graph_state.of(graph, InputCheck)


class Recorder:
    """Keeps copies of tensors during a training run, until they are taken.

    The copies are variables, not fetches: a run with other fetches is another one to TensorFlow,
    which would prepare the whole graph again for the runs after the comparison.

    Attributes:
        record: is carried out with the run. It is None if there is nothing to keep.
    """

    def __init__(self, batches: dict[str, list[tf.Tensor]], ids: list[tf.Tensor]):
        """Makes the operations.

        Args:
            batches: the tensors that iterators give, by the names of their operations.
            ids: the ids of the run's lookups.
        """
        self._batches, self._ids = batches, ids
        self._is_on = bool(batches)
        self._copies: list[tf.Tensor] = []
        self.record: tf.Operation | None = None
        if not batches:
            return
        with tf.name_scope("collective/input_check/"), device_scopes.on_host():
            # Nothing is kept once this variable has a value: a new session need not be told.
            off = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=_own_name("off"))
            is_off = tf.raw_ops.VarIsInitializedOp(resource=off)
            copies = []
            records = []
            for x in [*(x for batch in batches.values() for x in batch), *ids]:
                dtype = x.dtype.base_dtype
                with tf.get_default_graph().colocate_with(x.op, ignore_existing=True):
                    kept = tf.raw_ops.Switch(data=x, pred=is_off).output_false
                copy = tf.raw_ops.VarHandleOp(
                    dtype=dtype, shape=None, shared_name=_own_name("copy")
                )
                records.append(tf.raw_ops.AssignVariableOp(resource=copy, value=kept))
                self._copies.append(tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype))
                copies.append(copy)
            self.record = tf.group(*records)
            with tf.control_dependencies(self._copies):
                self._stop = tf.group(
                    tf.raw_ops.AssignVariableOp(resource=off, value=tf.constant(True)),
                    *(tf.raw_ops.DestroyResourceOp(resource=copy) for copy in copies),
                )
            self._restart = tf.raw_ops.DestroyResourceOp(resource=off)

    def take(self, original: Original, session: Any) -> list[Any]:
        """Returns the copies, frees them, and keeps no others."""
        self._is_on = False
        return original(session, [self._copies, self._stop])[0]

    def restart(self, original: Original, session: Any) -> None:
        """Keeps copies again."""
        if self.record is not None and not self._is_on:
            original(session, self._restart)
            self._is_on = True

    @property
    def holds_copies(self) -> bool:
        """Tells whether there are copies after a run of the session."""
        return self._is_on

    def reading(self) -> Reading:
        return Reading(self, dict(self._batches), list(self._ids))


def _own_name(name: str) -> str:
    return tf.get_default_graph().unique_name(f"collective/input_check/{name}")


def _recorder_of(graph: tf.Graph, run: PreparedRun) -> Recorder:
    """Adds a recorder to a run."""
    # A session may run another graph than the default one.
    with open_for_changes(graph), graph.as_default(), tf.init_scope():
        recorder = Recorder(*_tensors_to_compare(graph, run.footprint))
    run.recorder = recorder
    if recorder.record is not None:
        run.targets.append(recorder.record)
    return recorder


@dataclasses.dataclass
class Reading:
    """Takes a run's batches, and the ids that it looks up, from a recorder.

    Attributes:
        recorder: keeps them.
        batches: the tensors that iterators give, by the names of their operations.
        ids: the ids of the run's lookups.
        values: of `batches` and `ids`, by their names.
        is_put_off: whether nothing was read, and the next run is to be looked at in its place.
    """

    recorder: Recorder
    batches: dict[str, list[tf.Tensor]]
    ids: list[tf.Tensor]
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_put_off: bool = False

    def added_to(self, original: Original) -> Original:
        """Returns a `Session.run` that reads after the script's run.

        Args:
            original: `Session.run`.
        """
        if not self.batches:
            return original

        def run(session: Any, fetches: Any, *feeds_options_metadata: Any) -> Any:
            out = original(session, fetches, *feeds_options_metadata)
            if not feeds_options_metadata:  # It isn't the script's run.
                return out
            # A trace is of what the script runs, and of nothing else.
            self.is_put_off = _traces(feeds_options_metadata[1])
            if not self.is_put_off:
                read = [x for batch in self.batches.values() for x in batch] + self.ids
                names = [x.name for x in read]
                self.values = dict(zip(names, self.recorder.take(original, session)))
                self._leave_out(feeds_options_metadata[0])
            return out

        return run

    def _leave_out(self, feeds: Any) -> None:
        """Leaves out of the batches what is fed in their place."""
        fed = {name for leaf in feeds or {} for name in graph_analysis.tensor_names(leaf)}
        if fed:
            left = {
                name: [x for x in batch if x.name not in fed]
                for name, batch in self.batches.items()
            }
            self.batches = {name: batch for name, batch in left.items() if batch}

    def checksums(self) -> dict[str, str]:
        if not self.values:
            return {}
        return {
            name: _checksum([self.values[x.name] for x in batch])
            for name, batch in self.batches.items()
        }

    def ids_checksum(self) -> str:
        return _checksum([self.values[x.name] for x in self.ids]) if self.values else ""


def _tensors_to_compare(
    graph: tf.Graph, footprint: RunFootprint
) -> tuple[dict[str, list[tf.Tensor]], list[tf.Tensor]]:
    """Returns a run's batches by their iterators, and the ids that it looks up.

    There are none if nothing is to be compared.
    """
    if graph_state.of(graph, GraphInput).has_global_batches:
        return {}, []
    operations, staged = footprint.operations, {}
    split = split_of(graph)
    if split is not None and split.stage.take in operations:
        operations, staged = operations | split.prefetched, split.stage.tensors

    def fetchable(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        as_staged = [staged.get(x.name, x) for x in tensors if x.op in operations]
        # What only a run of keys has can't be fetched.
        return [x for x in as_staged if split is None or x.op not in split.prefetched]

    iterators = [op for op in operations if op.type in ITERATORS and _is_outside(op)]
    batches = {}
    for op in sorted(iterators, key=lambda op: str(op.name))[:MOST_ITERATORS]:
        batch = _some(fetchable(_tensors(op)), MOST_TENSORS)
        if batch:
            batches[str(op.name)] = batch
    written = [x.lookup.ids for x in lookups_of(graph).written if _is_outside(x.lookup.ids.op)]
    return batches, _some(fetchable(written), MOST_LOOKUPS)


def _some(tensors: list[tf.Tensor], most: int) -> list[tf.Tensor]:
    """Returns at most so many of `tensors`, at equal distances."""
    count = min(most, len(tensors))
    return [tensors[len(tensors) * i // count] for i in range(count)]


def _traces(options: Any) -> bool:
    return options is not None and options.trace_level > tf.RunOptions.NO_TRACE


def _is_outside(op: tf.Operation) -> bool:
    """Tells whether `op` is in no branch and no loop, from which nothing can be fetched."""
    return op._get_control_flow_context() is None


def _tensors(iterator: tf.Operation) -> list[tf.Tensor]:
    """Returns what an iterator gives, as tensors whose values Python can have."""
    given = []
    for x in iterator.outputs:
        if x.dtype not in (tf.variant, tf.resource):
            given.append(x)
            continue
        decoders = [op for op in x.consumers() if op.type in DECODERS and _is_outside(op)]
        for op in sorted(decoders, key=lambda op: str(op.name)):
            given += [y for y in op.outputs if y.dtype != tf.variant]
    return given


def _checksum(batch: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for value in batch:
        array = np.asarray(value)
        digest.update(f"{array.dtype} {array.shape}".encode())
        if array.dtype == object:
            for text in array.ravel()[:MOST_STRINGS]:
                text = tf.compat.as_bytes(text)  # what is fed may be str
                digest.update(f"{len(text)} ".encode() + text)
        else:
            flat = np.ascontiguousarray(array).reshape(-1)
            digest.update(flat.view(np.uint8)[:MOST_BYTES].data)
    return digest.hexdigest()


def _warn(iterator: str) -> None:
    same_records.warn(f"the first batches of '{iterator}' are")
