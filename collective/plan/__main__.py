"""The command that plans placements: `collective plan --tables FILE --devices "8 x H100-80GB"`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from collective.plan.forecast import data, picture, text
from collective.planner import machines, published, search, tables_file
from collective.planner.machines import RANKS_OF_HOST, Figure, Machines
from collective.planner.published import DEVICES
from collective.planner.search import DoesNotFit, Forecast
from collective.planner.workload import Workload

EPILOG = """
FILE is YAML or JSON:

  batch: 65536          # samples of a step, of all ranks together (default 8192)
  parameters: 2500000   # numbers of the dense network (default 0)
  optimizer: adagrad    # of tables that don't name one
  tables:
    user: {rows: 40000000, dimension: 128, distinct: 0.4}
    tag: {rows: 5000, dimension: 16, ids: 12.5, optimizer: ftrl}

A table's keys: rows, dimension; type (float32), ids (of a sample, 1), distinct (of a rank's ids in
a step, the share that is distinct; by default as if all rows were equally likely), optimizer,
imbalance (keys of the busiest owner by the mean, 1), dynamic, weight_bound (false), placement
(auto, rows, replicated, whole on a rank of the planner's choice, or whole:K on rank K).

No machine is needed. A rank is a device. Rates are the makers'; every number is printed with
its source. Several --devices or --batch are compared.

exit codes: 0 there is a plan; 1 the tables don't fit, or a file can't be read or written; 2 usage
"""
PROGRAM = "collective plan"


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog=prog,
        description="Chooses where the rows of each table are, and predicts a training step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--tables", metavar="FILE", required=True, help="tables, batch, network")
    out.add_argument(
        "--devices",
        action="append",
        required=True,
        metavar="TEXT",
        help="how many and which: '64 x H100-80GB'. Known: "
        + ", ".join(device.name for device in DEVICES),
    )
    out.add_argument(
        "--hosts",
        type=int,
        metavar="H",
        help=f"hosts of the devices; by default as many as {RANKS_OF_HOST} a host make",
    )
    out.add_argument(
        "--batch",
        action="append",
        metavar="B",
        help="samples of a step in place of the file's, or a multiple of these: 2x",
    )
    out.add_argument("--memory", metavar="SIZE", help="of a device: '64 GB'")
    out.add_argument("--within", metavar="RATE", help="of a rank within its host: '300 GB/s'")
    out.add_argument("--between", metavar="RATE", help="of a rank to other hosts: '100 Gbit/s'")
    out.add_argument(
        "--smallest",
        action="store_true",
        help="plan the fewest of these devices that hold the tables, instead of as many",
    )
    out.add_argument("--full", action="store_true", help="list every table")
    out.add_argument("--json", action="store_true", help="print data instead of text")
    out.add_argument("--svg", metavar="FILE", help="draw the memory of ranks")
    return out


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Runs the command and returns its exit code."""
    command = parser(prog)
    args = command.parse_args(arguments)
    try:
        clusters = [
            _with_given(published.cluster(devices, args.hosts), args) for devices in args.devices
        ]
    except ValueError as error:
        command.error(str(error))
    try:
        workload = tables_file.load(args.tables).workload()
        workloads = [workload.of_batch(batch) for batch in args.batch or ["1x"]]
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    forecasts: list[Forecast | tuple[str, str]] = []
    for cluster in clusters:
        for work in workloads:
            try:
                forecasts.append(_forecast(work, cluster, args))
            except DoesNotFit as error:
                if not forecasts:
                    print(f"{prog}: {error}", file=sys.stderr)
                    return 1
                name = f"{cluster.name}, batch {work.batch:,}"
                forecasts.append((name, str(error)))
    first = forecasts[0]
    assert isinstance(first, Forecast)
    if args.svg:
        try:
            with open(args.svg, "w", encoding="utf-8") as file:
                file.write(picture.svg(first))
        except OSError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return 1
    if args.json:
        return _print(json.dumps([_values(each) for each in forecasts], indent=2))
    lines = text.lines_of(first, args.full)
    if len(forecasts) > 1:
        lines = [*lines, "", "Compared:", *text.comparison_lines(forecasts)]
    return _print("\n".join(lines))


def _print(answer: str) -> int:
    """Prints what the user asked for; returns the exit code."""
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again at exit
        return 128 + signal.SIGPIPE
    return 0


def _values(forecast: Forecast | tuple[str, str]) -> dict[str, object]:
    if isinstance(forecast, Forecast):
        return data.values_of(forecast)
    return {"format": data.FORMAT, "doesnt_fit": forecast[1]}


def _forecast(workload: Workload, cluster: Machines, args: argparse.Namespace) -> Forecast:
    if args.smallest:
        cluster = search.smallest(workload, cluster, cluster.ranks_of_host)
    return search.forecast(workload, cluster)


def _with_given(cluster: Machines, args: argparse.Namespace) -> Machines:
    """Returns the machines with the figures that the command line gives.

    Raises:
        ValueError: one is no size.
    """
    changes: dict[str, Any] = {}
    if args.memory:
        changes["memory"] = Figure(machines.size_of(args.memory), "given", "--memory")
    for name in ("within", "between"):
        rate = getattr(args, name)
        if rate:
            value = machines.size_of(rate, per_second=True)
            changes[f"{name}_rate"] = Figure(value, "given", f"--{name}")
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **changes))


if __name__ == "__main__":
    sys.exit(main())
