"""Shows how the cost of a training step grows with ranks, tables, samples and rows.

    python benchmarks/scaling.py [--svg scaling.svg] [--thousand] [--eight]
    python benchmarks/scaling.py --planned

One thing is changed at a time, the others stay: 2 ranks, 8 tables [100,000, 16] with one id each
in 4,096 samples, Adagrad, and a small network. For a rank and step the program prints:

    bytes       that come out of collectives, a rank's own part included
    messages    a collective is one to each other rank
    operations  that TensorFlow runs
    memory      MB of the process at most, from its start
    CPU ms      processor time of all of the process's threads; more ranks than cores only wait

and the exponent e of the growth that fits best: cost ~ x^e, from the least squares of logarithms.
Bytes, messages and operations are counted by the profile of two steps, so they don't depend on the
machine. With --svg it draws each cost on logarithmic scales. --planned measures nothing: it prints
what the planner's model predicts for DLRM (rows of MLPerf's, dimension 128, batch 65,536) on GPUs,
with the figures that are published for them.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import jobs
import numpy as np
import report

from collective.planner import published, search
from collective.planner.workload import TableWork, Workload

DIMENSION = 16
WARM_UP, STEPS = 6, 20
COSTS = ("bytes", "messages", "operations", "memory MB", "CPU ms")
# MLPerf's recommendation benchmark: Criteo's 26 features, at most 40 million rows each.
DLRM_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
DLRM_PARAMETERS = 2_400_000
# What others publish for whole steps on eight GPUs.
MARKS = {
    "8 x A100-SXM-80GB": "7.2 distributed-embeddings, 8.25 SOK (DLRM)",
    "8 x H100-SXM-80GB": "14.9 TorchRec (recsys-examples, 26 features: another workload)",
}


class Point(NamedTuple):
    """Describes a job: what is changed is one of its fields."""

    ranks: int = 2
    tables: int = 8
    batch: int = 4096
    rows: int = 100_000


def series(thousand: bool, eight: bool) -> dict[str, list[Point]]:
    return {
        "ranks": [Point(ranks=n) for n in (1, 2, 4, *([8] if eight else []))],
        "tables": [Point(tables=n) for n in (1, 8, 50, 300, *([1000] if thousand else []))],
        "batch": [Point(batch=n) for n in (256, 4096, 16_384, 65_536)],
        "rows": [Point(rows=n) for n in (1000, 10_000, 100_000, 1_000_000)],
    }


def run_rank(folder: Path, point: Point) -> None:
    """Trains on this rank, and writes what a step costs."""
    import tensorflow.compat.v1 as tf

    from collective import CollectiveStrategy

    tf.disable_eager_execution()
    strategy = CollectiveStrategy()
    rank, ranks = strategy.rank(), strategy.world_size()
    profile = str(folder / "profile")
    options = {"profile": profile, "profile_steps": (WARM_UP - 1, WARM_UP)}
    random = np.random.default_rng(rank)
    ids = random.integers(0, point.rows, [point.tables, point.batch // point.ranks])
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [
                tf.get_variable(f"t{i}", [point.rows, DIMENSION]) for i in range(point.tables)
            ]
        rows = [tf.nn.embedding_lookup(table, tf.constant(x)) for table, x in zip(tables, ids)]
        loss = tf.reduce_mean(tf.square(tf.keras.layers.Dense(1)(tf.concat(rows, 1)) - 1))
        train = tf.train.AdagradOptimizer(0.01).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(WARM_UP):
                session.run(train)
            start = time.process_time()
            for _ in range(STEPS):
                session.run(train)
            seconds = (time.process_time() - start) / STEPS
    split = json.loads((folder / "profile" / "split.json").read_text()) if rank == 0 else {}
    trace = json.loads((folder / "profile" / f"rank_{rank}.trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    received = split["received"][0] if split else {}
    steps = 2
    jobs.write_measurements(
        "scaling",
        folder,
        {
            "bytes": sum(received.values()),
            "messages": len(received) * (ranks - 1),
            "operations": sum(event.get("ph") == "X" for event in events) / steps,
            "memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
            "CPU ms": 1e3 * seconds,
        },
    )


def measure(point: Point) -> dict[str, float]:
    """Returns the costs of a step on rank 0."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        return jobs.run(
            Path(__file__),
            "scaling",
            Path(folder),
            ranks=point.ranks,
            arguments=list(map(str, point)),
            timeout=1200,
        )[0]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns e of the best y = c x^e; of values that are 0 there is no logarithm."""
    pairs = [(x, y) for x, y in zip(xs, ys) if y > 0]
    if len(pairs) < 2:
        return 0.0
    return float(np.polyfit(*np.log(np.array(pairs)).T, 1)[0])


def picture(measured: dict[str, tuple[list[int], list[dict[str, float]]]]) -> str:
    """Draws a row of plots for each thing that is changed, one for each cost, as an SVG file."""
    width, height, gap = 170, 110, 60
    out = []
    for line, (name, (xs, costs)) in enumerate(measured.items()):
        for column, cost in enumerate(COSTS):
            left, top = gap + column * (width + gap), 40 + line * (height + gap)
            ys = [max(each[cost], 1e-3) for each in costs]
            across, up = np.log10(xs), np.log10(ys)
            low, high = up.min(), max(up.max(), up.min() + 1)
            places = [
                (
                    left + width * (x - across.min()) / max(np.ptp(across), 1e-9),
                    top + height * (1 - (y - low) / (high - low)),
                )
                for x, y in zip(across, up)
            ]
            line_of = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            title = f"{cost} by {name}: x^{exponent(xs, ys):.2f}"
            out.append(f'<text x="{left}" y="{top - 8}">{escape(title)}</text>')
            out.append(
                f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
                'stroke="#999999"/>'
            )
            out.append(f'<polyline points="{line_of}" fill="none" stroke="#0072b2"/>')
            for (x, y), number, value in zip(places, xs, ys):
                out.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#0072b2">'
                    f"<title>{number:,}: {value:,.4g}</title></circle>"
                )
            for x, number in ((left, xs[0]), (left + width, xs[-1])):
                out.append(
                    f'<text x="{x}" y="{top + height + 14}" text-anchor="middle">{number:,}</text>'
                )
            for y, value in ((top + height, 10**low), (top + 8, 10**high)):
                out.append(f'<text x="{left - 4}" y="{y}" text-anchor="end">{value:,.3g}</text>')
    size = f"{gap + len(COSTS) * (width + gap)} {40 + len(measured) * (height + gap)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-size="10"'
    return "\n".join(
        [head + ' font-family="sans-serif">', '<rect width="100%" height="100%" fill="#fff"/>']
        + [*out, "</svg>\n"]
    )


def print_planned() -> None:
    """Prints the predicted steps of DLRM on GPUs, with the figures that they follow from."""
    tables = tuple(TableWork(f"t{i:02}", rows, 128) for i, rows in enumerate(DLRM_ROWS))
    names = ["devices", "within a host", "between", "batch", "predicted ms", "published ms"]
    rows = []
    for kind in ("A100-SXM-80GB", "H100-SXM-80GB"):
        for count in (8, 64, 512):
            name = f"{count} x {kind}"
            machines = published.cluster(name)
            for batch in (65_536, 8192 * count)[: 1 if count == 8 else 2]:
                forecast = search.forecast(Workload(tables, batch, DLRM_PARAMETERS), machines)
                device = machines.device
                rows.append(
                    [
                        name,
                        f"{device.within_rate.value / 1e9:g} GB/s",
                        f"{device.between_rate.value / 1e9:g} GB/s" if count > 8 else "",
                        f"{batch:,}",
                        f"{1e3 * forecast.parts.seconds:.2f}",
                        MARKS.get(name, ""),
                    ]
                )
    print(report.table(names, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--svg", metavar="FILE", help="draw what was measured")
    parser.add_argument("--eight", action="store_true", help="also 8 ranks")
    parser.add_argument("--thousand", action="store_true", help="also 1,000 tables")
    parser.add_argument("--planned", action="store_true", help="print the planner's steps on GPUs")
    # What the benchmark starts itself with on each rank.
    parser.add_argument("program", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("point", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        return run_rank(arguments.folder, Point(*arguments.point))
    if arguments.planned:
        return print_planned()
    jobs.exit_on_sigterm()
    print(f"{report.machine_load()}; otherwise {Point()}")
    known: dict[Point, dict[str, float]] = {}
    measured = {}
    for name, points in series(arguments.thousand, arguments.eight).items():
        print("\n" + report.heading([name, *COSTS]))
        for point in points:
            if point not in known:
                known[point] = measure(point)
            cells = [report.number(known[point][cost], 1) for cost in COSTS]
            print(report.row([f"{getattr(point, name):,}", *cells]), flush=True)
        xs = [getattr(point, name) for point in points]
        measured[name] = xs, [known[point] for point in points]
        fitted = [exponent(xs, [known[point][cost] for point in points]) for cost in COSTS]
        print(report.row(["exponent", *(f"{value:.2f}" for value in fitted)]))
    print(f"\n{report.machine_load()}")
    if arguments.svg:
        Path(arguments.svg).write_text(picture(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
