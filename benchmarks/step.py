"""Compares the time of a training step with its limits: plain TensorFlow doing one rank's part, and
the bare exchange.

    python benchmarks/step.py [--dim 128] [--ids 1-10] [--network dlrm] [--backend sok] [--repeat 3]
    python benchmarks/step.py --against CHECKOUT [--dim 16] [--repeat 3] …

Four programs run one after the other on the same data (`training_step.workload`), each on as many
processes as there are ranks, started by the launcher, with one intra-op thread each:

    step         this library, tables sharded over the ranks
    plain        plain TensorFlow: each process does one rank's part of the work with whole tables,
                 without communication
    wire         the collectives of a step alone, with the bytes that these ids need: distinct keys
                 of a rank, their rows and gradients (or what --backend sok needs), dense gradients,
                 and the ranks' agreement on the run; for comparison, what copying these bytes once
                 takes
    replicated   Horovod data parallelism with every table on every rank, sparse gradients by
                 allgather

The ratio is step ÷ (plain + wire); with --repeat it is the median of each round's ratio. A step's
time is that of its slowest rank; of `plain`, whose copies don't wait for each other, that of the
slower copy. `plain` and `replicated` hold whole tables: 5.7 GB a rank at dimension 128. The losses
of `step` and `replicated` must be the same, or the figures are not printed.

With --keras there are two programs more, and neither `wire` nor `replicated`:

    keras        the same model under Keras's `fit`, with this library
    plain_keras  plain Keras: each process fits one rank's part of the work, with whole tables

A last line compares a step of `fit` with the session's and plain Keras's own overhead.

With --against only `step` runs, on this checkout of the library and on another one in turn, at
dimensions 16 and 128 unless --dim names one. The ratio is this checkout's step over the other's,
the median of each round's ratio; the losses must be the same.

With --hosts H the ranks are on H hosts, made of network namespaces (which takes root, `ip` and
`tc`), with links of --link and --delay. `step` runs with exchanges that are flat, and with
hierarchical ones, in turn: scope(hierarchical=False), True. What a host sends in a step, of
whatever kind, is read off its interface. With --against the two checkouts' steps are compared
there.

With --json the last line is a JSON object. Its names say what most figures are. *_ms are medians,
in ms; bytes_per_step is what a rank receives by collectives (its own part included), the mean over
ranks, counted in the trace of one step, as is collectives_per_step; copying_ms is what copying
`wire`'s bytes takes within a process; peak_rss_mb is the largest of a
rank, data_mb of it the batches; ratio_to is each program's step over plain's; cpu_ms is processor
time of a rank, all its threads together; shard_mb is a rank's shards with slots.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jobs
from argument_types import checkout, count, policy_option, span
from training_step import hosts as step_hosts
from training_step import parts as step_parts
from training_step import report as step_report
from training_step import workload as step_workload
from training_step.report import Round
from training_step.workload import SLOTS, Setting

PROGRAMS = ("step", "plain", "wire", "replicated")
WITH_KERAS = ("step", "plain", "keras", "plain_keras")
COMPARED_DIMS = (16, 128)
COMPARED_ROUNDS = 3
CARRIERS = ("horovod", "shared_memory")
SCOPE_OPTIONS = (
    "wire_dtype",
    "gradient_wire_dtype",
    "dense_compression",
    "local_steps",
    "prefetch_keys",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Setting()

    add("--ranks", type=count, default=default.ranks)
    add("--tables", type=count, default=default.tables, help="more than 26 share the ids of 26")
    add("--dim", type=count, help=f"of the tables ({default.dim}; with --against, 16 and 128)")
    add("--ids", type=span, default=default.ids, help="a feature: 1, or 1-10, say, sum-pooled")
    add("--batch", type=count, default=default.batch, help="of all ranks together")
    add("--backend", choices=["hb", "sok"], default=default.backend)
    add("--optimizer", choices=list(SLOTS), default=default.optimizer)
    add("--network", choices=["dlrm", "wide", "none"], default=default.network)
    add("--input", choices=["feed", "dataset"], help="(feed; dataset with --prefetch-keys)")
    add("--dynamic", action="store_true", help="the library's tables take any key")
    add(
        "--policy",
        nargs="+",
        type=policy_option,
        metavar="OPTION=NUMBER",
        help="of the TablePolicy of dynamic tables: steps_to_live=1000 capacity=100000, say",
    )
    add("--steps", type=count, default=default.steps, help="that are timed")
    add("--warmup", type=int, default=default.warmup, help="steps before them")
    add("--zipf", type=float, default=default.zipf, help="exponent of the ids' law; 0: uniform")
    add("--min-rows", type=count, default=default.min_rows, help="of a table")
    add("--max-rows", type=count, default=default.max_rows, help="of a table")
    add("--seed", type=int, default=default.seed)
    add("--inter-op", type=count, default=default.inter_op, help="threads that run operations")
    add(
        "--carrier",
        choices=CARRIERS,
        help="of the collectives of `step` and `wire`; with --against the other checkout has "
        "Horovod (--against . compares the carriers)",
    )

    add("--against", type=checkout, metavar="CHECKOUT", help="compare with another checkout")
    add("--repeat", type=count, help="rounds of all programs (1; with --against, 3)")
    add("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="not with --against")
    add("--keras", action="store_true", help="compare with Keras's `fit`")
    add(
        "--malloc",
        choices=list(jobs.ALLOCATORS),
        default="default",
        help="retain: freed memory stays in the process",
    )
    add("--hosts", type=count, help="compare exchanges between so many hosts")
    add("--link", default="1gbit", help="bandwidth of a host's link, with --hosts")
    add("--delay", default="0.2ms", help="delay of a host's link in each direction, with --hosts")
    add("--trace", type=Path, help="folder for Chrome traces of one step of each rank")
    add("--timeout", type=float, default=600, help="seconds for one program")
    add("--json", action="store_true", help="one last line for programs")

    scope = parser.add_argument_group(
        "options of the library's scope(), of `step` alone; not given, they are scope()'s own"
    )
    dtypes = ["float16", "bfloat16", "float32"]
    scope.add_argument("--grouping", choices=["on", "off"])
    scope.add_argument("--wire-dtype", choices=dtypes)
    scope.add_argument("--gradient-wire-dtype", choices=dtypes)
    scope.add_argument("--dense-compression", choices=["none", "fp16", "bf16"])
    scope.add_argument("--local-steps", type=count)
    scope.add_argument("--prefetch-keys", action="store_true", default=None)
    parsed = parser.parse_args(arguments)
    if parsed.hosts and parsed.ranks % parsed.hosts:
        parser.error(
            f"--hosts {parsed.hosts} takes --ranks that are a multiple of it, not {parsed.ranks}"
        )
    if parsed.keras:
        if parsed.hosts or parsed.against:
            parser.error("--keras goes with neither --hosts nor --against")
        parsed.only = WITH_KERAS
    return parsed


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """Returns what to measure: one setting, or one for each dimension that is compared."""
    scope = {}
    for name in SCOPE_OPTIONS:
        if getattr(arguments, name) is not None:
            scope[name] = getattr(arguments, name)
    if arguments.grouping:
        scope["grouping"] = arguments.grouping == "on"
    fields = {}
    for field in dataclasses.fields(Setting):
        if hasattr(arguments, field.name):
            fields[field.name] = getattr(arguments, field.name)
    by_default = "dataset" if arguments.prefetch_keys else "memory" if arguments.keras else "feed"
    fields["input"] = arguments.input or by_default
    fields["scope"] = scope
    fields["policy"] = dict(arguments.policy or [])
    dims = COMPARED_DIMS if arguments.against else (Setting.dim,)
    if arguments.dim:
        dims = (arguments.dim,)
    return [Setting(**{**fields, "dim": dim}) for dim in dims]


def is_possible_by_fit(setting: Setting) -> bool:
    return (
        not (setting.pooled or setting.dynamic or setting.policy or setting.scope)
        and setting.optimizer != "lazy_adam"
        and setting.network in ("dlrm", "wide", "none")
    )


def run(
    program: str,
    setting: Setting,
    folder: Path,
    *,
    library: Path = jobs.CHECKOUT,
    carrier: str | None = None,
    malloc: str = "default",
    trace: Path | None = None,
    parts: bool = False,
    timeout: float = 600.0,
    hosts: jobs.Hosts | None = None,
) -> dict[str, Any]:
    """Runs one program on all ranks and returns its `training_step.report.summary`.

    Args:
        program: one of PROGRAMS.
        setting: what to measure.
        folder: what `training_step.workload.write` has filled for the setting.
        library: the checkout to run on.
        carrier: one of CARRIERS; the library's own choice without it.
        malloc: one of `jobs.ALLOCATORS`.
        trace: folder for Chrome traces.
        parts: take some steps apart: 'parts' of the summary (`training_step.parts.medians`).
        timeout: seconds.
        hosts: on which the ranks are.
    """
    for mark in [*folder.glob("start.*"), *folder.glob("end.*")]:
        mark.unlink()
    trace_arguments = ["--parts"] if parts else []
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
        trace_arguments += ["--trace", str(trace.resolve())]
    ranks = jobs.run(
        Path(__file__).with_name("step_program.py"),
        program,
        folder,
        ranks=setting.ranks,
        arguments=trace_arguments,
        environment={
            "COLLECTIVE_STRATEGY": setting.backend,
            "TF_NUM_INTEROP_THREADS": str(setting.inter_op),
            **({"COLLECTIVE_CARRIER": carrier} if carrier else {}),
            **jobs.ALLOCATORS[malloc],
        },
        library=library,
        timeout=timeout,
        hosts=hosts,
    )
    summary = step_report.summary(program, ranks)
    if parts:
        summary["parts"] = step_parts.medians([rank["parts"] for rank in ranks])
    return summary


def carrier_of(column: str, arguments: argparse.Namespace) -> str | None:
    """Returns the carrier of a program, or of another checkout's column."""
    is_own = column in ("step", "wire", "collective")
    return "horovod" if arguments.carrier and not is_own else arguments.carrier


def run_rounds(
    setting: Setting,
    arguments: argparse.Namespace,
    folder: Path,
    repeat: int,
    hosts: jobs.Hosts | None = None,
) -> list[Round]:
    """Runs the programs in turn, or with --against `step` on the two checkouts in turn."""
    step_workload.write(setting, folder)
    runs = {name: (name, jobs.CHECKOUT) for name in arguments.only}
    if arguments.against:
        runs = {"step": ("step", jobs.CHECKOUT), "against": ("step", arguments.against)}
    rounds = []
    for _ in range(repeat):
        round_ = {}
        for name, (program, library) in runs.items():
            round_[name] = run(
                program,
                setting,
                folder,
                library=library,
                carrier=carrier_of(name, arguments),
                malloc=arguments.malloc,
                trace=arguments.trace and arguments.trace / name,
                timeout=arguments.timeout,
                hosts=hosts,
            )
        other = "against" if arguments.against else "keras" if arguments.keras else "replicated"
        step_report.check_losses(setting, round_, other)
        rounds.append(round_)
    return rounds


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints this checkout's step compared with another checkout's; returns what --json prints."""
    results, repeat = [], arguments.repeat or COMPARED_ROUNDS
    with contextlib.ExitStack() as opened:
        hosts = None
        if arguments.hosts:
            slow = step_hosts.slow_hosts(arguments.hosts, arguments.link, arguments.delay)
            hosts, link = opened.enter_context(slow)
            print(f"{arguments.hosts} hosts, {link}")
        for setting in settings_of(arguments):
            with tempfile.TemporaryDirectory(prefix="step-") as folder:
                rounds = run_rounds(setting, arguments, Path(folder), repeat, hosts)
            results.append(step_report.comparison(setting, rounds))
    print(step_report.comparison_table(setting, results))
    return {"against": str(arguments.against), "comparisons": results}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the figures of all programs; returns what --json prints."""
    (setting,) = settings_of(arguments)
    if arguments.keras and not is_possible_by_fit(setting):
        sys.exit(
            "step.py: --keras takes one id a feature of static tables, and --optimizer adagrad, "
            "ftrl or sgd, without options of scope()"
        )
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        folder = Path(name)
        rounds = run_rounds(setting, arguments, folder, arguments.repeat or 1)
        batches = folder.glob("*.0.*.npy")
        data_mb = round(sum(file.stat().st_size for file in batches) / 2**20, 1)
    result = {**step_report.figures(setting, rounds, data_mb), "malloc": arguments.malloc}
    print(step_report.program_table(setting, result))
    return result


def measure_hosts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints flat and hierarchical steps between hosts; returns what --json prints."""
    (setting,) = settings_of(arguments)
    carrier, malloc, timeout = arguments.carrier, arguments.malloc, arguments.timeout
    ways = {
        name: dataclasses.replace(setting, scope={**setting.scope, "hierarchical": wanted})
        for name, wanted in (("flat", False), ("hierarchical", True))
    }
    rounds = []
    with (
        step_hosts.slow_hosts(arguments.hosts, arguments.link, arguments.delay) as (hosts, link),
        tempfile.TemporaryDirectory(prefix="step-") as folder,
    ):
        for _ in range(arguments.repeat or 1):
            round_ = {}
            for name, way in ways.items():
                step_workload.write(way, Path(folder))
                round_[name] = run(
                    "step",
                    way,
                    Path(folder),
                    carrier=carrier,
                    malloc=malloc,
                    timeout=timeout,
                    trace=arguments.trace and arguments.trace / name,
                    hosts=hosts,
                )
            step_report.check_losses(
                setting, {"step": round_["hierarchical"], "flat": round_["flat"]}, "flat"
            )
            rounds.append(round_)
    print(step_report.hosts_table(setting, arguments.hosts, link, rounds))
    return {"hosts": arguments.hosts, "link": link, "rounds": rounds}


def main() -> None:
    arguments = parse()
    jobs.exit_on_sigterm()
    if arguments.against:
        result = compare(arguments)
    else:
        result = measure_hosts(arguments) if arguments.hosts else measure(arguments)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
