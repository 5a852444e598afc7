"""Times training steps on one GPU, and tells what the GPU does meanwhile.

    python benchmarks/gpu_step.py [--dim 128] [--batch 65536] [--ids 1-10] [--tables 26]
        [--rows N] [--network dlrm] [--optimizer adagrad] [--steps 30] [--json FILE]

`step` is this library on one rank, `plain` is TensorFlow alone, the same model on the same GPU;
their data come by tf.data (`step_workload`), their losses must be the same. Times are medians, in
milliseconds, of whole runs of a session, which ends when the GPU is done.

A step is traced, too: by CUPTI, where TensorFlow finds it. `GPU` is how long the GPU is busy in
that step, kernels and copies, `launches` how many kernels there are, `copies` how many copies
between host and GPU; the longest kernels follow, each with its number, its time and its share.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import step_workload
from argument_types import count, span
from step_workload import SLOTS, Setting

PROGRAMS = ("step", "plain")
SHOWN = 24
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


def events(trace: Path) -> list[dict[str, Any]]:
    """Returns what the GPU's streams have done in a trace, in order."""
    read = json.loads(trace.read_text())["traceEvents"]
    streams = {
        event["pid"]
        for event in read
        if event.get("name") == "process_name" and "stream:all" in event["args"]["name"]
    }
    found = [event for event in read if event["ph"] == "X" and event["pid"] in streams]
    return sorted(found, key=lambda event: event["ts"])


def busy(of: list[dict[str, Any]]) -> float:
    """Returns the milliseconds in which at least one of them runs."""
    total = end = 0.0
    for event in of:
        begin, until = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total / 1e3


def kernels(of: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Returns (name, how many, ms) of the operations of kernels, the longest first."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in of:
        times[_name(event)].append(event["dur"] / 1e3)
    named = [(name, len(taken), sum(taken)) for name, taken in times.items()]
    return sorted(named, key=lambda one: -one[2])


def _name(event: dict[str, Any]) -> str:
    """Names an event: its kernel, where the trace tells it, and the type of its operation."""
    arguments = event.get("args", {})
    label = str(arguments.get("label") or arguments.get("name") or event["name"])
    return f"{event['name']}: {label[:70]}" if label != event["name"] else label


def measured(setting: Setting, folder: Path, program: str, device: str) -> dict[str, Any]:
    """Runs a program of `step_program` on one rank; returns its measurements, and its trace."""
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    (rank,) = jobs.run(
        Path(__file__).resolve().with_name("step_program.py"),
        program,
        folder,
        ranks=1,
        arguments=["--trace", str(traces)],
        environment={"COLLECTIVE_STRATEGY": setting.backend},
        device=device,
    )
    return {**rank, "events": events(traces / f"{program}.0.json")}


def report(program: str, rank: dict[str, Any]) -> dict[str, Any]:
    """Prints what a program has taken; returns it for --json."""
    copies = [event for event in rank["events"] if _COPY.search(_name(event))]
    launches = [event for event in rank["events"] if not _COPY.search(_name(event))]
    ms = {f"p{p}": float(np.percentile(rank["times"], p)) for p in (10, 50, 90)}
    print(
        f"{program:<6} {ms['p50']:.3f} ms a step ({ms['p10']:.3f} to {ms['p90']:.3f}), processor "
        f"{rank['cpu_ms']:.3f}; GPU {busy(rank['events']):.3f} ms: {len(launches)} launches "
        f"{busy(launches):.3f}, {len(copies)} copies {busy(copies):.3f}"
    )
    for name, number, took in kernels(rank["events"])[:SHOWN]:
        print(f"       {took:9.4f} ms {number:4d}  {name}")
    return {
        "program": program,
        **{f"ms_{name}": value for name, value in ms.items()},
        "gpu_ms": busy(rank["events"]),
        "launches": len(launches),
        "copies": len(copies),
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
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--steps", type=count, default=30)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    given = parser.parse_args()
    setting = Setting(
        ranks=1,
        tables=given.tables,
        dim=given.dim,
        ids=given.ids,
        batch=given.batch,
        backend=given.backend,
        optimizer=given.optimizer,
        network=given.network,
        input="dataset",
        steps=given.steps,
        pool=3,
        inter_op=2,
        zipf=given.zipf,
        min_rows=given.rows or Setting.min_rows,
        max_rows=given.rows or Setting.max_rows,
        scope={"prefetch_keys": True} if given.prefetch_keys else {},
    )
    with tempfile.TemporaryDirectory(prefix="gpu-step-") as made:
        folder = Path(made)
        step_workload.write(setting, folder)
        losses, figures = [], []
        for program in given.only:
            rank = measured(setting, folder, program, given.device)
            losses.append(rank["losses"])
            figures.append(report(program, rank))
    if not np.allclose(losses[0], losses[-1], rtol=1e-4):
        sys.exit(f"the programs' losses differ: {losses[0][:5]}, {losses[-1][:5]}")
    if given.json:
        given.json.write_text(json.dumps({"setting": vars(given), "figures": figures}, default=str))


if __name__ == "__main__":
    main()
