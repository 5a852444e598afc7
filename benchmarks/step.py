"""Times a training step beside its limits: what plain TensorFlow takes for one rank's part, and
what the bare exchange takes.

    python benchmarks/step.py [--dim 128] [--ids 1-10] [--network dlrm] [--backend sok] [--repeat 3]
    [--json] …

Four programs run one after the other on the same data (`step_workload`), each on as many processes
as there are ranks, started by the launcher, with one intra-op thread each:

    step         this library, tables sharded over the ranks
    plain        plain TensorFlow: each process does one rank's part of the work with whole tables,
        without communication
    wire         the collectives of a step alone, with the bytes that these ids need: distinct keys
                 of a rank, their rows and gradients (or what --backend sok needs), dense gradients,
                 and the ranks' agreement on the run
    replicated   Horovod data parallelism with every table on every rank, sparse gradients by
    allgather

The ratio is step ÷ (plain + wire); with --repeat it is the median of each round's ratio. A step's
time is that of its slowest rank; of `plain`, whose copies don't wait for each other, that of the
slower copy. `plain` and `replicated` hold whole tables: 5.7 GB a rank at dimension 128. The losses
of `step` and `replicated` must be the same, or the figures are not printed.

With --json the last line is a JSON object. Besides what its names say: *_ms are medians, in ms;
bytes_per_step is what a rank receives by collectives (its own part included), the mean over ranks,
counted in the trace of one step, as is collectives_per_step; peak_rss_mb is the largest of a rank,
data_mb of it the batches; ratio_to is each program's step over plain's; cpu_ms is processor time of
a rank, all its threads together; shard_mb is a rank's shards with slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import step_workload
from step_workload import SLOTS, Setting

HERE = Path(__file__).resolve().parent
PROGRAMS = ("step", "plain", "wire", "replicated")
# glibc gives large blocks back to the system after each step, and the next one faults their pages
# in again. With these it keeps them.
MALLOC: dict[str, dict[str, str]] = {
    "default": {},
    "retain": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    },
}
MEDIANS = ("ms", "p90_ms", "cpu_ms", "bytes", "peak_rss_mb", "base_rss_mb")
SAME = 1e-4  # relative: losses are means of sums of float32, formed in another order


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Setting()
    add("--ranks", type=_count, default=default.ranks)
    add(
        "--tables",
        type=_count,
        default=default.tables,
        help="with more than 26 the same number of ids is spread over them, in fewer samples",
    )
    add("--dim", type=_count, default=default.dim)
    add(
        "--ids",
        type=_span,
        default=default.ids,
        help="of a sample and feature: 1, or a range such as 1-10, sum-pooled",
    )
    add("--batch", type=_count, default=default.batch, help="of all ranks together")
    add("--backend", choices=["hb", "sok"], default=default.backend)
    add("--optimizer", choices=list(SLOTS), default=default.optimizer)
    add("--network", choices=["dlrm", "none"], default=default.network)
    add(
        "--input",
        choices=["feed", "dataset"],
        help="how batches come in (feed; dataset with --prefetch-keys)",
    )
    add("--steps", type=_count, default=default.steps)
    add("--warmup", type=int, default=default.warmup)
    add(
        "--zipf",
        type=float,
        default=default.zipf,
        help="exponent of the distribution of ids; 0: all alike",
    )
    for name, rows in (("--min-rows", default.min_rows), ("--max-rows", default.max_rows)):
        add(name, type=_count, default=rows, help="of a table")
    add("--seed", type=int, default=default.seed)
    add(
        "--inter-op",
        type=_count,
        default=default.inter_op,
        help="threads of each rank that run operations",
    )
    add("--repeat", type=_count, default=1, help="rounds of all programs")
    add("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    add(
        "--malloc",
        choices=list(MALLOC),
        default="default",
        help="retain: freed memory stays in the process",
    )
    add("--trace", type=Path, help="folder for Chrome traces of one step of each rank")
    add("--timeout", type=float, default=600, help="seconds for one program")
    add("--json", action="store_true", help="one last line for programs")
    scope = parser.add_argument_group(
        "options of the library's scope(), of `step` alone; not given, they are scope()'s own"
    )
    scope.add_argument("--grouping", choices=["on", "off"])
    for name in ("--wire-dtype", "--gradient-wire-dtype"):
        scope.add_argument(name, choices=["float16", "bfloat16", "float32"])
    scope.add_argument("--dense-compression", choices=["none", "fp16", "bf16"])
    scope.add_argument("--local-steps", type=_count)
    scope.add_argument("--prefetch-keys", action="store_true", default=None)
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(
            f"must be a number from 1, or two such as 1-10, not {text}"
        )
    return span


def setting_of(given: argparse.Namespace) -> Setting:
    options = {
        name: getattr(given, name)
        for name in (
            "wire_dtype",
            "gradient_wire_dtype",
            "dense_compression",
            "local_steps",
            "prefetch_keys",
        )
        if getattr(given, name) is not None
    }
    if given.grouping:
        options["grouping"] = given.grouping == "on"
    named = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(Setting)
        if hasattr(given, field.name)
    }
    return Setting(
        **{
            **named,
            "input": given.input or ("dataset" if given.prefetch_keys else "feed"),
            "scope": options,
        }
    )


def run(program: str, setting: Setting, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One program on all ranks, as `summary` puts it."""
    for mark in [*folder.glob("start.*"), *folder.glob("end.*"), *folder.glob(f"{program}.*.json")]:
        mark.unlink()
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = dict(
        os.environ,
        PYTHONPATH=path,
        COLLECTIVE_STRATEGY=setting.backend,
        OMP_NUM_THREADS="1",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS=str(setting.inter_op),
        **MALLOC[given.malloc],
    )
    command = [
        sys.executable,
        "-m",
        "collective.launch",
        "-np",
        str(setting.ranks),
        "--device",
        "cpu",
        str(HERE / "step_program.py"),
        program,
        str(folder),
    ]
    if given.trace:
        given.trace.mkdir(parents=True, exist_ok=True)
        command += ["--trace", str(given.trace.resolve())]
    with open(folder / f"{program}.log", "w+") as log:
        launcher = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            ended = str(launcher.wait(given.timeout))
        # also Ctrl-C: the launcher ends its ranks, if it is told to
        except BaseException as error:
            stop(launcher)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            ended = f"nothing after {given.timeout:.0f} s (--timeout)"
        log.seek(0)
        if ended != "0":
            sys.exit(f"{log.read()[-6000:]}\nstep.py: {program} ended with {ended}")
    return summary(
        program,
        [json.loads((folder / f"{program}.{r}.json").read_text()) for r in range(setting.ranks)],
    )


def stop(launcher: subprocess.Popen) -> None:
    """Ends a job, gently if that helps: a launcher that is killed takes its ranks with it, too."""
    launcher.terminate()
    try:
        launcher.wait(30)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def summary(program: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' measurements as one."""
    times = np.array([rank["times"] for rank in ranks])
    if program != "plain":
        times = times.max(0, keepdims=True)
    return {
        "ms": float(np.median(times, 1).max()),
        "p90_ms": float(np.percentile(times, 90, axis=1).max()),
        "cpu_ms": statistics.mean(rank["cpu_ms"] for rank in ranks),
        "losses": np.mean([rank["losses"] for rank in ranks], 0).tolist(),
        "bytes": round(statistics.mean(rank["bytes"] for rank in ranks)),
        "collectives": ranks[0]["collectives"],
        "peak_rss_mb": max(rank["peak_rss_mb"] for rank in ranks),
        "base_rss_mb": ranks[0]["base_rss_mb"],
    }


def check_losses(setting: Setting, round_: dict[str, dict[str, Any]]) -> None:
    """`step` must have done what `replicated` did.

    Raises:
        SystemExit: it hasn't.
    """
    exact = not {"wire_dtype", "gradient_wire_dtype", "dense_compression", "local_steps"} & set(
        setting.scope
    )
    if exact and {"step", "replicated"} <= set(round_):
        ours, theirs = round_["step"]["losses"], round_["replicated"]["losses"]
        worst = int(np.argmax(np.abs(np.subtract(ours, theirs))))
        if not np.allclose(ours, theirs, rtol=SAME, atol=0):
            sys.exit(
                f"step.py: the loss of step {worst} is {ours[worst]:.6f} in `step`, but "
                f"{theirs[worst]:.6f} in "
                "`replicated`: they must take the same steps on the same data."
            )


def figures(
    setting: Setting, rounds: list[dict[str, dict[str, Any]]], data_mb: float
) -> dict[str, Any]:
    """What --json prints: medians over the rounds."""

    def median(program: str, what: str) -> float | None:
        return (
            round(statistics.median(r[program][what] for r in rounds), 3)
            if program in rounds[0]
            else None
        )

    def ratio(what: str, above: str, *below: str) -> float | None:
        if not {above, *below} <= set(rounds[0]):
            return None
        return round(
            statistics.median(r[above][what] / sum(r[b][what] for b in below) for r in rounds), 3
        )

    first, step_ms = rounds[0], median("step", "ms")
    ratios = [ratio_of(r) for r in rounds]
    counted = first.get("step", {}).get("collectives")
    return {
        "step_ms": step_ms,
        "step_p90_ms": median("step", "p90_ms"),
        "plain_ms": median("plain", "ms"),
        "wire_ms": median("wire", "ms"),
        "replicated_ms": median("replicated", "ms"),
        "ratio": ratio("ms", "step", "plain", "wire"),
        "ratios": ratios,
        "cpu_ratio": ratio("cpu_ms", "step", "plain", "wire"),
        "samples_per_s": step_ms and round(setting.samples * setting.ranks / step_ms * 1e3, 1),
        "bytes_per_step": first.get("step", {}).get("bytes"),
        "wire_bytes_per_step": first.get("wire", {}).get("bytes"),
        "collectives_per_step": counted and sum(counted.values()),
        "collectives": counted,
        "peak_rss_mb": median("step", "peak_rss_mb"),
        "shard_mb": round(setting.shard_bytes() / 2**20, 1),
        "data_mb": data_mb,
        "ratio_to": {p: ratio("ms", p, "plain") for p in first},
        "programs": {
            p: {
                **{what: median(p, what) for what in MEDIANS},
                "collectives": first[p]["collectives"],
                "losses": [first[p]["losses"][0], first[p]["losses"][-1]],
            }
            for p in first
        },
        "setting": dataclasses.asdict(setting),
        "load_average": os.getloadavg()[0],
    }


def ratio_of(round_: dict[str, dict[str, Any]]) -> float | None:
    if not {"step", "plain", "wire"} <= set(round_):
        return None
    return round(round_["step"]["ms"] / (round_["plain"]["ms"] + round_["wire"]["ms"]), 3)


def table(setting: Setting, out: dict[str, Any]) -> str:
    ids = "-".join(map(str, sorted(set(setting.ids))))
    lines = [
        f"{setting.ranks} ranks, {setting.backend}, {setting.tables} tables of dimension "
        f"{setting.dim} "
        f"({sum(setting.rows()):,} rows), {ids} id{'s' * setting.pooled} a feature, "
        f"{setting.samples} samples a rank, "
        f"{setting.optimizer}, "
        f"network {setting.network}"
        + "".join(f", {name}={value}" for name, value in setting.scope.items()),
        f"{'':12}{'step ms':>9}{'p90':>9}{'÷ plain':>9}{'cpu ms':>9}{'samples/s':>11}{'MB a step':>11}{'collectives':>13}"
        f"{'peak RSS MB':>13}",
    ]
    for name, p in out["programs"].items():
        ratio = out["ratio_to"][name]
        rate = "" if name == "wire" else f"{setting.samples * setting.ranks / p['ms'] * 1e3:,.0f}"
        lines.append(
            f"{name:12}{p['ms']:9.2f}{p['p90_ms']:9.2f}{ratio or float('nan'):9.2f}{p['cpu_ms']:9.2f}{rate:>11}"
            f"{p['bytes'] / 1e6:11.2f}{sum(p['collectives'].values()):13}{p['peak_rss_mb']:13.0f}"
        )
    if out["ratio"] is not None:
        each = f" (rounds: {', '.join(map(str, out['ratios']))})" if len(out["ratios"]) > 1 else ""
        lines.append(
            f"step ÷ (plain + wire) = {out['ratio']:.2f}{each}; of processor time "
            f"{out['cpu_ratio']:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    given = parse()
    setting = setting_of(given)
    # so that no rank and no file is left
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="step-") as made:
        folder = Path(made)
        step_workload.write(setting, folder)
        data_mb = round(sum(f.stat().st_size for f in folder.glob("*.0.*.npy")) / 2**20, 1)
        rounds = []
        for _ in range(given.repeat):
            rounds.append(
                {
                    program: run(program, setting, folder, given)
                    for program in PROGRAMS
                    if program in given.only
                }
            )
            check_losses(setting, rounds[-1])
    out = {**figures(setting, rounds, data_mb), "malloc": given.malloc}
    print(table(setting, out))
    if given.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
