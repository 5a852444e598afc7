"""Measures the fixed costs of the library, compared with plain TensorFlow in the same run.

    python benchmarks/overhead.py [--ranks 1,2] [--tables 26,300,1000] [--only step dynamic …]
    python benchmarks/overhead.py --against CHECKOUT …

Prints tables in Markdown, each figure the median of --repeat rounds:

    step    milliseconds of a training step that has next to nothing to compute: --step-tables
            tables of 100 rows of 16, one id a feature, 64 samples a rank, Adagrad
    parts   the same step of the library taken apart (`training_step.parts`), in milliseconds
    dynamic milliseconds of such a step with ten tables that take any key, and with ten static ones
    start   seconds from the first line of a program to its first completed step, by the number of
            tables, on the largest number of ranks, and of its phases: importing, building the
            model, taking gradients (which groups the lookups), making the updates, initial values
            (the first run of the session), the first step
    import  seconds of `import collective` alone, which must not load TensorFlow, and of its first
            name that does, and of `import tensorflow`; each in a process of its own

`plain` is plain TensorFlow doing one rank's part, as many copies at once as there are ranks. The
programs take turns, each in processes of its own: plain, this checkout, with --against the other
checkout of the library, plain, … A ratio is the median of each round's ratio. Only public names of
the library are used, so that this file runs on earlier and later states of it.

With --json the last line is a JSON object with the rounds' figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jobs
import report
import step
from argument_types import checkout, count, counts
from training_step import parts as step_parts
from training_step import workload as step_workload
from training_step.workload import FEATURES, Setting

PARTS = ("step", "parts", "dynamic", "start", "import")
DYNAMIC_TABLES, ROWS, DIM, SAMPLES = 10, 100, 16, 64
WARMUP = 50
LIGHT_IMPORT = "import collective"
FULL_IMPORT = "from collective import CollectiveStrategy"
IMPORT_PROGRAM = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "tensorflow": "tensorflow" in sys.modules}}))
"""

# The figures of each round, by column: 'plain', 'collective', 'against'.
Rounds = list[dict[str, float]]
# A row's first cells and its rounds.
Row = tuple[tuple[str, ...], Rounds]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=counts, default=[1, 2], help="numbers of ranks, such as 1,2")
    add("--step-tables", type=counts, default=[26], help="numbers of tables of `step` and `parts`")
    add("--tables", type=counts, default=[26, 300, 1000], help="numbers of tables to start with")
    add("--steps", type=count, default=500, help="timed steps of each round")
    add("--repeat", type=count, default=3, help="rounds")
    add("--against", type=checkout, metavar="CHECKOUT", help="compare with another checkout")
    add(
        "--carrier",
        choices=step.CARRIERS,
        help="of the library's collectives, of `step`; the other checkout has Horovod then "
        "(--against . compares the carriers)",
    )
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--timeout", type=float, default=1200, help="seconds for one program")
    add("--json", action="store_true", help="one last line for programs")
    return parser.parse_args(arguments)


def libraries_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """Returns the checkouts to measure, by the name of their column."""
    libraries = {"collective": jobs.CHECKOUT}
    if arguments.against:
        libraries["against"] = arguments.against
    return libraries


def setting_of(ranks: int, tables: int, steps: int = 1) -> Setting:
    return Setting(
        ranks=ranks,
        tables=tables,
        dim=DIM,
        batch=round(SAMPLES * ranks * max(tables, FEATURES) / FEATURES),
        min_rows=ROWS,
        max_rows=ROWS,
        steps=steps,
        warmup=WARMUP,
    )


def measure_steps(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the median milliseconds of a step, by the numbers of tables and of ranks."""
    for tables in arguments.step_tables:
        for ranks in arguments.ranks:
            setting = setting_of(ranks, tables, arguments.steps)
            with tempfile.TemporaryDirectory(prefix="overhead-") as name:
                folder = Path(name)
                step_workload.write(setting, folder)
                rounds = [step_round(setting, folder, arguments) for _ in range(arguments.repeat)]
            yield (str(tables), str(ranks)), rounds


def step_round(setting: Setting, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    plain = step.run("plain", setting, folder, timeout=arguments.timeout)
    milliseconds = {"plain": plain["ms"]}
    for column, library in libraries_of(arguments).items():
        sharded = step.run(
            "step",
            setting,
            folder,
            library=library,
            carrier=step.carrier_of(column, arguments),
            timeout=arguments.timeout,
        )
        milliseconds[column] = sharded["ms"]
        milliseconds[f"least {column}"] = sharded["least_ms"]
    return milliseconds


def measure_parts(arguments: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Takes the library's step apart, by the numbers of tables and of ranks."""
    for tables in arguments.step_tables:
        for ranks in arguments.ranks:
            setting = setting_of(ranks, tables, arguments.steps)
            with tempfile.TemporaryDirectory(prefix="overhead-") as name:
                folder = Path(name)
                step_workload.write(setting, folder)
                summary = step.run(
                    "step",
                    setting,
                    folder,
                    carrier=arguments.carrier,
                    parts=True,
                    timeout=arguments.timeout,
                )
            yield str(tables), str(ranks), summary["parts"]


def measure_dynamic(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures milliseconds of a step with static and with dynamic tables, by library."""
    libraries = libraries_of(arguments)
    for ranks in arguments.ranks:
        setting = setting_of(ranks, DYNAMIC_TABLES, arguments.steps)
        rounds: dict[str, Rounds] = {column: [] for column in libraries}
        for _ in range(arguments.repeat):
            for column, library in libraries.items():
                rounds[column].append(dynamic_round(setting, library, arguments.timeout))
        for column in rounds:
            yield (str(ranks), column), rounds[column]


def dynamic_round(setting: Setting, library: Path, timeout: float) -> dict[str, float]:
    """Returns the median and the least milliseconds of a step, by the kind of tables."""
    milliseconds = {}
    for kind, dynamic in (("static", False), ("dynamic", True)):
        setting = dataclasses.replace(setting, dynamic=dynamic)
        with tempfile.TemporaryDirectory(prefix="overhead-") as name:
            folder = Path(name)
            step_workload.write(setting, folder)
            summary = step.run("step", setting, folder, library=library, timeout=timeout)
        milliseconds[kind] = summary["ms"]
        milliseconds[f"least {kind}"] = summary["least_ms"]
    return milliseconds


def measure_start(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the seconds of a start, by the number of tables and the phase."""
    for tables in arguments.tables:
        setting = setting_of(max(arguments.ranks), tables)
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
            step_workload.write(setting, Path(folder))
            rounds = [
                start_round(setting, Path(folder), arguments) for _ in range(arguments.repeat)
            ]
        for phase in rounds[0]:
            yield (f"{tables:,}", phase), [round_[phase] for round_ in rounds]


def start_round(
    setting: Setting, folder: Path, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Returns the seconds of each column, by phase."""
    seconds: dict[str, dict[str, float]] = {}
    for column, library in {"plain": jobs.CHECKOUT, **libraries_of(arguments)}.items():
        ranks = jobs.run(
            Path(__file__).with_name("overhead_program.py"),
            "plain" if column == "plain" else "collective",
            folder,
            ranks=setting.ranks,
            environment={"TF_NUM_INTEROP_THREADS": str(setting.inter_op)},
            library=library,
            timeout=arguments.timeout,
        )
        for phase, value in slowest([rank["seconds"] for rank in ranks]).items():
            seconds.setdefault(phase, {})[column] = value
    return seconds


def slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Returns the phases of the rank that finished last, and their sum."""
    last = max(ranks, key=lambda seconds: sum(seconds.values()))
    return {**last, "all": sum(last.values())}


def measure_imports(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the seconds of each statement; `import tensorflow` is the plain one."""
    light_rounds, full_rounds = [], []
    for _ in range(arguments.repeat):
        light, full = {}, {"plain": import_seconds("import tensorflow", jobs.CHECKOUT)}
        for column, library in libraries_of(arguments).items():
            light[column] = import_seconds(LIGHT_IMPORT, library)
            full[column] = import_seconds(FULL_IMPORT, library)
        light_rounds.append(light)
        full_rounds.append(full)
    yield (f"`{LIGHT_IMPORT}`",), light_rounds
    yield (f"`{FULL_IMPORT}`",), full_rounds


def import_seconds(statement: str, library: Path) -> float:
    """Returns the seconds of a statement in a new process.

    Raises:
        SystemExit: `import collective` loaded TensorFlow.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        output = subprocess.run(
            [sys.executable, "-c", IMPORT_PROGRAM.format(statement=statement)],
            cwd=folder,
            env={**jobs.environment_of(library), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    result = json.loads(output)
    if statement == LIGHT_IMPORT and result["tensorflow"]:
        sys.exit(f"overhead.py: `{LIGHT_IMPORT}` of {library} loads TensorFlow")
    return result["seconds"]


def median(rounds: Rounds, column: str) -> float | None:
    if column not in rounds[0]:
        return None
    return statistics.median(figures[column] for figures in rounds)


def ratio(rounds: Rounds, below: str) -> float | None:
    """Returns the median of each round's ratio of this checkout to another column."""
    if not {"collective", below} <= set(rounds[0]):
        return None
    return statistics.median(figures["collective"] / figures[below] for figures in rounds)


def column_names(against: bool) -> list[str]:
    names = ["plain", "collective", "÷ plain"]
    return [*names, "against", "÷ against"] if against else names


def cells(rounds: Rounds, against: bool, digits: int) -> list[str]:
    """Formats the figures of a row, under `column_names`."""
    formatted = [
        report.number(median(rounds, "plain"), digits),
        report.number(median(rounds, "collective"), digits),
        report.number(ratio(rounds, "plain")),
    ]
    if against:
        formatted.append(report.number(median(rounds, "against"), digits))
        formatted.append(report.number(ratio(rounds, "against"), 3))
    return formatted


def print_table(
    names: Sequence[str], rows: Iterable[Row], against: bool, digits: int = 2
) -> dict[str, Rounds]:
    """Prints every row as soon as it is measured; returns the rounds by the row's name.

    Args:
        names: of the first cells.
        rows: to print.
        against: another checkout was measured, too.
        digits: after the point, of the figures.
    """
    print(report.heading([*names, *column_names(against)]), flush=True)
    rounds_by_name = {}
    for first_cells, rounds in rows:
        print(report.row([*first_cells, *cells(rounds, against, digits)]), flush=True)
        rounds_by_name[" ".join(first_cells)] = rounds
    return rounds_by_name


def print_parts(rows: Iterable[tuple[str, str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Prints the parts of a step; returns them by the row's name."""
    print(report.heading(["tables", "ranks", *step_parts.PARTS]), flush=True)
    parts_by_name = {}
    for tables, ranks, parts in rows:
        cells = [report.number(parts[part], 3) for part in step_parts.PARTS]
        print(report.row([tables, ranks, *cells]), flush=True)
        parts_by_name[f"{tables} {ranks}"] = parts
    return parts_by_name


def print_dynamic(rows: Iterable[Row]) -> dict[str, Rounds]:
    """Prints how much ten dynamic tables add to a step; returns the rounds by the row's name.

    The least step of a round says more than its median where other programs have the processors.
    """
    names = ["static", "dynamic", "more"]
    least = [f"least {name}" for name in names]
    print(report.heading(["ranks", "library", *names, *least]), flush=True)
    rounds_by_name = {}
    for first_cells, rounds in rows:
        numbers = []
        for prefix in ("", "least "):
            static, dynamic = f"{prefix}static", f"{prefix}dynamic"
            numbers += [median(rounds, static), median(rounds, dynamic)]
            numbers.append(statistics.median(round_[dynamic] - round_[static] for round_ in rounds))
        print(report.row([*first_cells, *map(report.number, numbers)]), flush=True)
        rounds_by_name[" ".join(first_cells)] = rounds
    return rounds_by_name


def main() -> None:
    arguments = parse()
    jobs.exit_on_sigterm()
    against = arguments.against is not None
    figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    print(f"{report.machine_load()}, medians of {arguments.repeat} rounds")
    if against:
        print(f"collective: {jobs.CHECKOUT}; against: {arguments.against}")

    if "step" in arguments.only:
        print(f"\nMilliseconds of a step: {SAMPLES} samples a rank\n")
        figures["step"] = print_table(["tables", "ranks"], measure_steps(arguments), against)
    if "parts" in arguments.only:
        print(f"\nMilliseconds of the parts of a step: {SAMPLES} samples a rank\n")
        figures["parts"] = print_parts(measure_parts(arguments))
    if "dynamic" in arguments.only:
        print(f"\nMilliseconds of a step: {DYNAMIC_TABLES} tables, {SAMPLES} samples a rank\n")
        figures["dynamic"] = print_dynamic(measure_dynamic(arguments))
    if "start" in arguments.only:
        print(f"\nSeconds to the first completed step (ranks: {max(arguments.ranks)})\n")
        figures["start"] = print_table(["tables", "phase"], measure_start(arguments), against)
    if "import" in arguments.only:
        print(f"\nSeconds of an import; `{LIGHT_IMPORT}` loads no TensorFlow\n")
        figures["import"] = print_table(["statement"], measure_imports(arguments), against, 3)

    print(f"\n{report.machine_load()}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
