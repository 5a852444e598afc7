"""What TensorFlow's trace of a run tells: what ran when, what came out, and a file of it for
chrome://tracing or Perfetto.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import graph_analysis
from collective.profiling.phases import is_wait


class Span(NamedTuple):
    """An operation that ran.

    Attributes:
        name, kind: the operation's name and type.
        phase: see `collective.profiling.phases`.
        start, end: nanoseconds since 1970.
        waits: whether it needs no processor meanwhile.
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
    """What ran in a run, in the order of its beginning.

    Args:
        stats: `StepStats` of the run.
        phase_of: (name, type) -> phase; None for what is to be left out.
    """
    found = []
    for node in _nodes(stats):
        kind = _kind(node)
        phase = phase_of(node.node_name, kind)
        if phase is not None and node.all_end_rel_nanos > 0:
            received = sum(
                _bytes(o) for o in node.output if kind != "HorovodAlltoall" or o.slot == 0
            )
            found.append(
                Span(
                    node.node_name,
                    kind,
                    phase,
                    node.all_start_nanos,
                    node.all_start_nanos + node.all_end_rel_nanos,
                    is_wait(kind),
                    received if graph_analysis.is_horovod(kind) else 0,
                )
            )
    return sorted(found, key=lambda span: span.start)


def shapes(stats: Any) -> dict[str, list[int]]:
    """The shapes of all tensors that a run computed, by their names."""
    return {
        f"{node.node_name}:{o.slot}": [d.size for d in o.tensor_description.shape.dim]
        for node in _nodes(stats)
        for o in node.output
    }


def _nodes(stats: Any) -> Iterable[Any]:
    for device in stats.dev_stats:
        if "/stream:" not in device.device:  # which has what a GPU was told to do once more
            yield from device.node_stats


def _kind(node: Any) -> str:
    """A trace calls a node 'name = Type(inputs)'."""
    return str(node.timeline_label).partition(" = ")[2].partition("(")[0]


def _bytes(output: Any) -> int:
    size = int(tf.as_dtype(output.tensor_description.dtype).size or 0)
    for d in output.tensor_description.shape.dim:
        size *= d.size
    return size


def split(ran: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of each phase. They add up to the time in which anything ran.

    At every moment the time belongs to what computes, in equal parts; while nothing does, to what
    is waited for.
    """
    changes = sorted(
        [(span.start, 1, span) for span in ran] + [(span.end, -1, span) for span in ran],
        key=lambda c: c[:2],
    )
    # computing, waiting
    running: tuple[collections.Counter[str], ...] = (collections.Counter(), collections.Counter())
    out: dict[str, float] = collections.defaultdict(float)
    before = 0
    for now, change, span in changes:
        for active in running:
            total = sum(active.values())
            if total:
                for phase, count in active.items():
                    out[phase] += (now - before) * count / total / 1e6
                break
        before = now
        running[span.waits][span.phase] += change
        if not running[span.waits][span.phase]:
            del running[span.waits][span.phase]
    return dict(out)


def events(ran: Iterable[Span], rank: int, step: int) -> list[dict[str, Any]]:
    """The spans as events of Chrome's trace format, in as many rows as it takes to keep them apart."""
    ends: dict[tuple[bool, int], int] = {}
    found = []
    for span in ran:
        row = next(i for i in range(len(ends) + 1) if ends.get((span.waits, i), 0) <= span.start)
        ends[span.waits, row] = span.end
        found.append(
            {
                "name": span.name.rpartition("/")[2]
                if graph_analysis.is_horovod(span.kind)
                else span.kind,
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
    return found


def write(path: str, recorded: Sequence[dict[str, Any]], rank: int) -> None:
    """A file of Chrome's trace format; those of several ranks can be joined, since each is a
    process of its own.
    """
    titles = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}]
    titles += [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": tid,
            "args": {"name": "waits" if tid >= 100 else "computes"},
        }
        for tid in sorted({e["tid"] for e in recorded})
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*titles, *recorded]}, file)
