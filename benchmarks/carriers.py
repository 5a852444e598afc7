"""Times each collective as an operation of TensorFlow, by carrier and size, compared with copying
its bytes.

    python benchmarks/carriers.py [--ranks 2] [--bytes 64 32000000] [--repeat 3] [--json]

Every rank gives --bytes to a collective, of which it keeps one N-th in an all-to-all (N ranks).
Printed are milliseconds of one operation on the slowest rank, medians of --repeat rounds; an
operation is one link of a chain that a single run executes, so that what a run costs is shared by
many. `memcpy` is what one thread of each rank needs to copy the bytes that an all-to-all gives it,
all ranks at once. With --json the last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs  # noqa: E402
import numpy as np  # noqa: E402
import report  # noqa: E402
from argument_types import count  # noqa: E402

CARRIERS = ("shared_memory", "horovod")
KINDS = ("alltoall", "allgather", "allreduce")
# Bytes that a chain moves at least, and its longest and shortest length.
CHAIN_BYTES, LONGEST, SHORTEST = 64 << 20, 200, 8
RUNS = 15


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=count, default=2)
    add("--bytes", type=count, nargs="+", default=[64, 65536, 32_000_000], help="that a rank gives")
    add("--carriers", nargs="+", choices=CARRIERS, default=CARRIERS)
    add("--repeat", type=count, default=3, help="rounds")
    add("--timeout", type=float, default=300, help="seconds for one round")
    add("--json", action="store_true", help="one last line for programs")
    # What the benchmark starts itself with on each rank.
    add("program", nargs="?", choices=CARRIERS, help=argparse.SUPPRESS)
    add("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chain_length(size: int) -> int:
    return max(SHORTEST, min(LONGEST, CHAIN_BYTES // size))


def median_ms(run: Callable[[], Any], links: int) -> float:
    """Returns the median milliseconds of a link, of `RUNS` runs after three that warm up."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3 / links


def measure_rank(carrier: str, folder: Path, sizes: list[int]) -> None:
    """Times all collectives on one of the ranks, and writes what it measured."""
    import tensorflow.compat.v1 as tf

    from collective.ops.communication import carrier_choice, collectives

    tf.disable_eager_execution()
    collectives.init()
    if carrier_choice.in_force() != carrier:
        raise SystemExit(f"{carrier} can't be had: {carrier_choice.explanation()}")
    milliseconds = {}
    for size in sizes:
        for kind in KINDS:
            milliseconds[f"{kind} {size}"] = collective_ms(kind, size)
        milliseconds[f"memcpy {size}"] = copying_ms(size)
    jobs.write_measurements(carrier, folder, milliseconds)


def collective_ms(kind: str, size: int) -> float:
    """Returns the milliseconds of one collective of a chain, each given `size` bytes."""
    import tensorflow.compat.v1 as tf

    from collective.ops.communication import collectives

    ranks, links = collectives.size(), chain_length(size)
    words = max(ranks, size // 4 // ranks * ranks)

    def collective(x: tf.Tensor, name: str) -> tf.Tensor:
        if kind == "alltoall":
            return collectives.alltoall(x, tf.fill([ranks], words // ranks), name, 0)[0]
        if kind == "allreduce":
            return collectives.allreduce_sum([x], name, 0)[0]
        return collectives.allgather(x, name, 0)[:words]

    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("x", [words], use_resource=True)
        x = variable.read_value()
        for _ in range(links):
            x = collective(x, collectives.unique_name(f"carriers/{kind}"))
        session.run(variable.initializer)
        return median_ms(lambda: session.run(x.op), links)


def copying_ms(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    return median_ms(lambda: np.copyto(target, source), 1)


def measure_round(arguments: argparse.Namespace, carrier: str) -> dict[str, float]:
    """Returns the milliseconds of the slowest rank, by collective and size."""
    with tempfile.TemporaryDirectory(prefix="carriers-") as folder:
        ranks = jobs.run(
            Path(__file__),
            carrier,
            Path(folder),
            ranks=arguments.ranks,
            arguments=["--bytes", *map(str, arguments.bytes)],
            environment={"COLLECTIVE_CARRIER": carrier},
            timeout=arguments.timeout,
        )
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    arguments = parse()
    if arguments.program:
        return measure_rank(arguments.program, arguments.folder, arguments.bytes)
    jobs.exit_on_sigterm()
    print(f"{report.machine_load()}, {arguments.ranks} ranks, medians of {arguments.repeat} rounds")
    rounds: dict[str, list[dict[str, float]]] = {carrier: [] for carrier in arguments.carriers}
    for _ in range(arguments.repeat):
        for carrier in arguments.carriers:
            rounds[carrier].append(measure_round(arguments, carrier))
    print(report.heading(["bytes", "carrier", *KINDS, "memcpy", "alltoall ÷ memcpy"]))
    for size in arguments.bytes:
        for carrier in arguments.carriers:
            names = [f"{kind} {size}" for kind in (*KINDS, "memcpy")]
            medians = [statistics.median(r[name] for r in rounds[carrier]) for name in names]
            ratio = statistics.median(
                r[f"alltoall {size}"] / r[f"memcpy {size}"] for r in rounds[carrier]
            )
            cells = [report.number(ms, 4) for ms in medians]
            print(report.row([f"{size:,}", carrier, *cells, report.number(ratio)]))
    print(f"\n{report.machine_load()}")
    if arguments.json:
        print(json.dumps(rounds))


if __name__ == "__main__":
    main()
