"""Times training steps on one GPU, and tells what the GPU does meanwhile.

    python benchmarks/gpu_step.py [--dim 128] [--batch 65536] [--ids 1-10] [--tables 26]
        [--rows N] [--network dlrm] [--optimizer adagrad] [--steps 30] [--json FILE] [--keras]

`step` is this library on one rank, `plain` is TensorFlow alone, the same model on the same GPU;
their data are in memory already (`training_step.workload`), their losses must be the same. Times
are medians, in milliseconds, of whole runs of a session, which ends when the GPU is done. With
--keras they are steps of Keras's `fit` (`training_step.fit`), which aren't traced: --network none
or dlrm.

A step is traced, too: by CUPTI, where TensorFlow finds it. `GPU` is how long the GPU is busy in
that step, with kernels and with copies. The longest of these follow, each with its number and time,
and the longest operations on the host by their type, which run in parallel.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import numpy as np
from argument_types import count, span
from training_step import workload as step_workload
from training_step.workload import SLOTS, Setting

PROGRAMS = ("step", "plain")
KERAS = {"step": "keras", "plain": "plain_keras"}
SHOWN = 18


class Event(NamedTuple):
    """Is something that ran in a step: `begin` and `end` in milliseconds."""

    name: str
    begin: float
    end: float


class Trace(NamedTuple):
    """Says what ran in a step: kernels and copies on the GPU, operations on the host's threads."""

    kernels: list[Event]
    copies: list[Event]
    operations: list[Event]


def read_trace(path: Path) -> Trace:
    """Reads a trace as TensorFlow made it."""
    import tensorflow.compat.v1 as tf

    trace = Trace([], [], [])
    for device in tf.RunMetadata.FromString(path.read_bytes()).step_stats.dev_stats:
        where = device.device
        if "stream:all" in where:
            events = trace.kernels
        elif "memcpy" in where:
            events = trace.copies
        elif "stream:" in where:
            continue  # what `all` has, too
        else:
            events = trace.operations
        for node in device.node_stats:
            begin = (node.all_start_nanos or 1000 * node.all_start_micros) / 1e6
            took = (node.all_end_rel_nanos or 1000 * node.all_end_rel_micros) / 1e6
            events.append(Event(f"{node.node_name} | {node.timeline_label}", begin, begin + took))
    return trace


def busy(events: Sequence[Event]) -> float:
    """Returns the milliseconds in which at least one of them runs."""
    total = end = 0.0
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0.0, event.end - max(event.begin, end))
        end = max(end, event.end)
    return total


def longest(events: Sequence[Event], name_of: Callable[[str], str]) -> list[tuple[str, int, float]]:
    """Returns (name, how many, ms) of events with the same name, those with most time first."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[name_of(event.name)].append(event.end - event.begin)
    named = [(name, len(taken), sum(taken)) for name, taken in times.items()]
    return sorted(named, key=lambda one: -one[2])


def kind(name: str) -> str:
    """Returns the type of an operation, by the label that TensorFlow gives it: name = Type(...)."""
    found = re.search(r"= (\w+)\(", name)
    return found[1] if found else name.partition(" | ")[0].rpartition("/")[2][:60]


def launched_by(name: str) -> str:
    """Returns the type of the operation that has launched a kernel: name:Type | kernel."""
    return name.partition(" | ")[0].rpartition(":")[2]


def whole(name: str) -> str:
    return name[:150]


def measured(setting: Setting, folder: Path, program: str, device: str) -> dict[str, Any]:
    """Runs a program of `step_program` on one rank; returns its measurements, and its trace."""
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    is_traced = program in PROGRAMS
    (rank,) = jobs.run(
        Path(__file__).resolve().with_name("step_program.py"),
        program,
        folder,
        ranks=1,
        arguments=["--trace", str(traces)] if is_traced else [],
        environment={
            "COLLECTIVE_STRATEGY": setting.backend,
            "TF_NUM_INTRAOP_THREADS": str(setting.intra_op),
        },
        device=device,
    )
    trace = read_trace(traces / f"{program}.0.trace") if is_traced else Trace([], [], [])
    return {**rank, "trace": trace}


def report(program: str, rank: dict[str, Any]) -> dict[str, Any]:
    """Prints what a program has taken; returns it for --json."""
    trace: Trace = rank["trace"]
    ms = {f"p{p}": float(np.percentile(rank["times"], p)) for p in (10, 50, 90)}
    times = {"program": program, **{f"ms_{name}": value for name, value in ms.items()}}
    line = f"{program:<11} {ms['p50']:.3f} ms a step ({ms['p10']:.3f} to {ms['p90']:.3f})"
    if program not in PROGRAMS:
        print(line)
        return times
    gpu = busy([*trace.kernels, *trace.copies])
    print(
        f"{line}, processor {rank['cpu_ms']:.3f}; GPU {gpu:.3f} ms: {len(trace.kernels)} kernels "
        f"{busy(trace.kernels):.3f}, {len(trace.copies)} copies {busy(trace.copies):.3f}"
    )
    for what, events, name_of in (
        ("kernels by the operations that launch them", trace.kernels, launched_by),
        ("kernels", trace.kernels, whole),
        ("copies", trace.copies, whole),
        ("operations on the host", trace.operations, kind),
    ):
        print(f"  {what}")
        for name, number, took in longest(events, name_of)[:SHOWN]:
            print(f"    {took:9.4f} ms {number:4d}  {name}")
    return {
        **times,
        "gpu_ms": gpu,
        "kernels": len(trace.kernels),
        "copies": len(trace.copies),
        "cpu_ms": rank["cpu_ms"],
        "peak_rss_mb": rank["peak_rss_mb"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=count, default=128)
    parser.add_argument("--batch", type=count, default=65536)
    parser.add_argument("--ids", type=span, default=(1, 1))
    parser.add_argument("--tables", type=count, default=26)
    parser.add_argument("--rows", type=count, help="of every table (Criteo's, up to 1,000,000)")
    parser.add_argument("--zipf", type=float, default=Setting.zipf)
    parser.add_argument("--network", choices=("none", "dlrm", "squares"), default="squares")
    parser.add_argument("--optimizer", choices=tuple(SLOTS), default="adagrad")
    parser.add_argument("--backend", choices=("hb", "sok"), default="hb")
    parser.add_argument("--prefetch-keys", action="store_true")
    parser.add_argument("--keras", action="store_true", help="time Keras's `fit` instead")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--threads", type=count, default=8, help="within an operation")
    parser.add_argument("--steps", type=count, default=30)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    given = parser.parse_args()
    if given.keras and (given.network == "squares" or given.ids != (1, 1) or given.prefetch_keys):
        parser.error("--keras takes --network none or dlrm, one id, and no --prefetch-keys")
    setting = Setting(
        ranks=1,
        tables=given.tables,
        dim=given.dim,
        ids=given.ids,
        batch=given.batch,
        backend=given.backend,
        optimizer=given.optimizer,
        network=given.network,
        input="memory",
        steps=given.steps,
        pool=3,
        inter_op=2,
        intra_op=given.threads,
        zipf=given.zipf,
        min_rows=given.rows or Setting.min_rows,
        max_rows=given.rows or Setting.max_rows,
        scope={"prefetch_keys": True} if given.prefetch_keys else {},
    )
    with tempfile.TemporaryDirectory(prefix="gpu-step-") as made:
        folder = Path(made)
        step_workload.write(setting, folder)
        losses, figures = [], []
        for program in (KERAS[name] if given.keras else name for name in given.only):
            rank = measured(setting, folder, program, given.device)
            losses.append(rank["losses"])
            figures.append(report(program, rank))
    if not np.allclose(losses[0], losses[-1], rtol=1e-4):
        sys.exit(f"the programs' losses differ: {losses[0][:5]}, {losses[-1][:5]}")
    if given.json:
        given.json.write_text(json.dumps({"setting": vars(given), "figures": figures}, default=str))


if __name__ == "__main__":
    main()
