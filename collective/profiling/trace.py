"""Reads TensorFlow's trace of a run, and writes files for chrome://tracing or Perfetto."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis
from collective.profiling.phases import is_wait


class Span(NamedTuple):
    """Records when an operation ran.

    Attributes:
        name, kind: the operation's name and type.
        phase: see `collective.profiling.phases`.
        start, end: nanoseconds since 1970.
        waits: it needed no processor meanwhile.
        received: the bytes that came out of a collective; 0 for others.
    """

    name: str
    kind: str
    phase: str
    start: int
    end: int
    waits: bool
    received: int


def spans(stats: Any, phase_of: Callable[[str, str], str | None]) -> list[Span]:
    """Returns the spans of a run, in the order of their starts.

    Args:
        stats: `StepStats` of the run.
        phase_of: (name, type) -> phase; None for operations to leave out.
    """
    out = []
    for node in _nodes(stats):
        kind = _kind(node)
        phase = phase_of(node.node_name, kind)
        if phase is None or node.all_end_rel_nanos <= 0:
            continue
        received = 0
        if graph_analysis.is_of_carrier(kind):
            # The other output of an all-to-all has the splits.
            outputs = [
                o
                for o in node.output
                if graph_analysis.collective_kind(kind) != "Alltoall" or o.slot == 0
            ]
            received = sum(_bytes(output) for output in outputs)
        end = node.all_start_nanos + node.all_end_rel_nanos
        out.append(
            Span(node.node_name, kind, phase, node.all_start_nanos, end, is_wait(kind), received)
        )
    return sorted(out, key=lambda span: span.start)


def shapes(stats: Any) -> dict[str, list[int]]:
    """Returns the shapes of all tensors that a run computed or was fed, by name."""
    return {
        _tensor_name(node.node_name, o.slot): [d.size for d in o.tensor_description.shape.dim]
        for node in _nodes(stats)
        for o in node.output
    }


# TensorFlow puts such an operation in the place of a tensor that is fed, x:0 say: _arg_x_0_3.
_FED = re.compile(r"_arg_(.+)_(\d+)_\d+")


def _tensor_name(operation: str, slot: int) -> str:
    fed = _FED.fullmatch(operation)
    return f"{fed[1]}:{fed[2]}" if fed else f"{operation}:{slot}"


def _nodes(stats: Any) -> Iterable[Any]:
    for device in stats.dev_stats:
        # A GPU's stream has its operations once more.
        if "/stream:" not in device.device:
            yield from device.node_stats


def _kind(node: Any) -> str:
    """Returns the type of a node, which a trace labels 'name = Type(inputs)'."""
    return str(node.timeline_label).partition(" = ")[2].partition("(")[0]


def _bytes(output: Any) -> int:
    size = int(tf.as_dtype(output.tensor_description.dtype).size or 0)
    for d in output.tensor_description.shape.dim:
        size *= d.size
    return size


def time_by_phase(ran: Sequence[Span]) -> dict[str, float]:
    """Returns the milliseconds of each phase. They add up to the time in which anything ran.

    At every moment the time belongs to the operations that compute, in equal parts; while none
    does, to the operations that wait.
    """
    changes = [(span.start, 1, span) for span in ran] + [(span.end, -1, span) for span in ran]
    changes.sort(key=lambda change: change[:2])
    computing: collections.Counter[str] = collections.Counter()
    waiting: collections.Counter[str] = collections.Counter()
    out: dict[str, float] = collections.defaultdict(float)
    before = 0
    for now, change, span in changes:
        running = computing or waiting
        total = sum(running.values())
        for phase, count in running.items():
            out[phase] += (now - before) * count / total / 1e6
        before = now
        counts = waiting if span.waits else computing
        counts[span.phase] += change
        if not counts[span.phase]:
            del counts[span.phase]
    return dict(out)


def events(ran: Iterable[Span], rank: int, step: int) -> list[dict[str, Any]]:
    """Returns the spans as events of Chrome's trace format, in rows that keep them apart."""
    row_ends: dict[tuple[bool, int], int] = {}
    out = []
    for span in ran:
        row = 0
        while row_ends.get((span.waits, row), 0) > span.start:
            row += 1
        row_ends[span.waits, row] = span.end
        is_collective = graph_analysis.is_of_carrier(span.kind)
        out.append(
            {
                "name": span.name.rpartition("/")[2] if is_collective else span.kind,
                "cat": span.phase,
                "ph": "X",
                "pid": rank,
                "tid": row + 100 * span.waits,
                "ts": span.start / 1e3,
                "dur": (span.end - span.start) / 1e3,
                "args": {
                    "name": span.name,
                    "phase": span.phase,
                    "step": step,
                    "received": span.received,
                },
            }
        )
    return out


def write(path: str, recorded: Sequence[dict[str, Any]], rank: int) -> None:
    """Writes events to a file of Chrome's trace format.

    The files of several ranks can be joined, since each rank is a separate process.
    """
    titles = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for tid in sorted({event["tid"] for event in recorded}):
        label = {"name": "waits" if tid >= 100 else "computes"}
        titles.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": label})
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*titles, *recorded]}, file)
