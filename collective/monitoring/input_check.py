"""Notices a dataset that every rank reads whole, by mistake.

    a training run ──► checksums of its batches ──► a meeting ──► they differ: all is well
                              ▲                          │
                              └── the next batch, too ◄──┴──► they are the same on all ranks

Ranks that read the same records train on each of them N times, and no number looks wrong. So the
first batches that a graph's iterators give to training are compared. One is enough where ranks read
different records, which is how it should be: from any one of the iterators, since another one may
give all of them the same on purpose (numbers of steps, negatives that they share). A warning takes
several different batches that all ranks have alike: an input that is constant, or as short as a
batch or two, is no mistake. Nor is one of numbers by which each rank finds records of its own: the
ids that it looks up are compared, too.

Only what `tf.data` iterators give is compared, and only where a training run takes it from them
itself: not what is fed, nor what an Estimator has dealt to the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_analysis import RunFootprint
from collective.ops import collectives, graph_analysis
from collective.ops.graph_state import state_of
from collective.prefetch.enable import split_of
from collective.prefetch.graph_split import ITERATORS
from collective.tables.grouping import lookups_of

Original = Callable[..., Any]

MOST_RUNS = 8  # that are compared
SAME_BATCHES = 3  # different ones, of which a warning is made
MOST_ITERATORS = 8  # of a run
MOST_LOOKUPS = 64  # of a run
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
    """

    runs: int = 0
    same: dict[str, set[str]] | None = None
    is_over: bool = False

    def compare(self, session: Any, reading: Reading) -> None:
        """Compares the batches of a training run; every rank calls it.

        Args:
            session: the session.
            reading: of this rank's batches.
        """
        messages = barrier.exchange(
            session, "compares the first batches of the ranks", _payload(reading)
        )
        self.runs += 1
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
    """Returns `carry_out`, as long as need be with a comparison of the batches behind it.

    Args:
        session: the session.
        run: a training run.
        carry_out: carries it out by `Session.run`, or by what is given in its place.
    """
    check = _check_of(session.graph)
    if check.is_over or collectives.size() == 1:
        return carry_out

    def carry_out_and_compare(original: Original) -> Any:
        reading = _reading_of(session.graph, run.footprint)
        out = carry_out(reading.beside(original))
        check.compare(session, reading)
        return out

    return carry_out_and_compare


def _check_of(graph: tf.Graph) -> InputCheck:
    state = state_of(graph)
    state.input_check = state.input_check or InputCheck()
    check: InputCheck = state.input_check
    return check


@dataclasses.dataclass
class Reading:
    """Reads a run's batches, and the ids that it looks up, beside the run.

    Attributes:
        batches: the tensors that iterators give, by the names of their operations.
        ids: the ids of the run's lookups.
        values: those of `batches`, in their order, and of `ids`.
        is_put_off: whether nothing was read, and the next run is to be looked at in its place.
    """

    batches: dict[str, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    ids: list[tf.Tensor] = dataclasses.field(default_factory=list)
    values: list[Any] = dataclasses.field(default_factory=list)
    is_put_off: bool = False

    def beside(self, original: Original) -> Original:
        """Returns a `Session.run` that reads beside the script's run.

        Args:
            original: `Session.run`.
        """
        if not self.batches:
            return original

        def run(session: Any, fetches: Any, *feeds_options_metadata: Any) -> Any:
            if not feeds_options_metadata:  # It isn't the script's run.
                return original(session, fetches)
            if _traces(feeds_options_metadata[1]):
                # A trace is of what the script runs, and of nothing else.
                self.is_put_off = True
                return original(session, fetches, *feeds_options_metadata)
            self._leave_out(feeds_options_metadata[0])
            tensors = [*self.batches.values(), self.ids]
            out, self.values = original(session, [fetches, tensors], *feeds_options_metadata)
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
        return {name: _checksum(batch) for name, batch in zip(self.batches, self.values)}

    def ids_checksum(self) -> str:
        return _checksum(self.values[-1]) if self.values else ""


def _reading_of(graph: tf.Graph, footprint: RunFootprint) -> Reading:
    """Returns what is to be read beside a run; nothing if there is nothing to be compared."""
    if state_of(graph).input_is_dealt:
        return Reading()
    operations, staged = footprint.operations, {}
    split = split_of(graph)
    if split is not None and split.stage.take in operations:
        operations, staged = operations | split.prefetched, split.stage.tensors

    def fetchable(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        as_staged = [staged.get(x.name, x) for x in tensors if x.op in operations]
        # What only a run of keys has can't be fetched.
        return [x for x in as_staged if split is None or x.op not in split.prefetched]

    iterators = [op for op in operations if op.type in ITERATORS and _is_outside(op)]
    reading = Reading()
    for op in sorted(iterators, key=lambda op: str(op.name))[:MOST_ITERATORS]:
        batch = fetchable(_tensors(op))
        if batch:
            reading.batches[str(op.name)] = batch
    written = lookups_of(graph).written[:MOST_LOOKUPS]
    reading.ids = fetchable(x.lookup.ids for x in written if _is_outside(x.lookup.ids.op))
    return reading


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
    ranks = collectives.size()
    warnings.warn(
        f"every rank trains on the same records: the first batches of '{iterator}' are the same "
        f"on all {ranks} ranks. Training goes on, but each record counts {ranks} times in a pass "
        "over the data, and no step is of more records than one rank's. Let each rank read a part "
        "of its own: dataset = strategy.shard(dataset), in front of shuffle() and batch(). If the "
        "ranks are meant to read the same, warnings.filterwarnings('ignore', 'every rank trains') "
        "silences this.",
        UserWarning,
        stacklevel=2,
    )
