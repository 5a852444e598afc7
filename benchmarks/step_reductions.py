"""Times a training step with metrics and replicated embeddings, whose sums over ranks it needs.

    python benchmarks/step_reductions.py [--ranks 2] [--metrics 10] [--embeddings 50] [--batch 256]
                                         [--repeat 3] [--against CHECKOUT]

The model has one sharded table, and small embeddings that stay replicated. Its step is timed as it
is, with the metrics' updates, and with replicated embeddings, in jobs that take turns; with
--against, the same in another checkout. Prints milliseconds: the median of the rounds' medians, of
the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs
import report
from argument_types import checkout, count

CASES = ("step", "with metrics", "with embeddings", "with both")
WARM, STEPS = 30, 300


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--metrics", type=count, default=10, help="tf.metrics.auc's")
    parser.add_argument("--embeddings", type=count, default=50, help="of 200 rows, 16 columns")
    parser.add_argument("--batch", type=count, default=256, help="records of a rank")
    parser.add_argument("--repeat", type=count, default=3, help="rounds")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a job")
    parser.add_argument("--against", type=checkout, metavar="CHECKOUT")
    return parser.parse_args()


def measure_rank(arguments: argparse.Namespace) -> None:
    """Times one case on one of the ranks, and writes what it measured."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    from collective import CollectiveStrategy

    case = arguments.program.replace("_", " ")
    strategy = CollectiveStrategy()
    rng = np.random.default_rng(strategy.rank())
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("table", [10_000, 16])
        tables = [table]
        if case in ("with embeddings", "with both"):
            tables += [tf.get_variable(f"e{i}", [200, 16]) for i in range(arguments.embeddings)]
        ids = tf.constant(rng.integers(0, 200, arguments.batch))
        labels = tf.constant(rng.integers(0, 2, [arguments.batch, 1]), tf.float32)
        rows: list[Any] = [tf.nn.embedding_lookup(each, ids) for each in tables]
        logits = tf.layers.dense(tf.add_n(rows), 1)
        loss = tf.losses.sigmoid_cross_entropy(labels, logits)
        train = [tf.train.AdagradOptimizer(0.01).minimize(loss)]
        if case in ("with metrics", "with both"):
            scores = tf.sigmoid(logits)
            train += [
                tf.metrics.auc(labels, scores, name=f"auc{i}")[1] for i in range(arguments.metrics)
            ]
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            seconds = []
            for step in range(WARM + STEPS):
                start = time.perf_counter()
                session.run(train)
                if step >= WARM:
                    seconds.append(time.perf_counter() - start)
    measured = {"ms": statistics.median(seconds) * 1e3}
    jobs.write_measurements(arguments.program, arguments.folder, measured)


def milliseconds(arguments: argparse.Namespace, case: str, library: Path) -> float:
    """Returns the median step of the slowest rank in a job of its own."""
    name = case.replace(" ", "_")
    options = {"metrics": arguments.metrics, "embeddings": arguments.embeddings}
    options["batch"] = arguments.batch
    with tempfile.TemporaryDirectory(prefix="step-reductions-") as folder:
        ranks = jobs.run(
            Path(__file__),
            name,
            Path(folder),
            ranks=arguments.ranks,
            arguments=[word for key, value in options.items() for word in (f"--{key}", str(value))],
            library=library,
            timeout=arguments.timeout,
        )
    return max(float(rank["ms"]) for rank in ranks)


def main() -> None:
    arguments = parse()
    if arguments.program:
        return measure_rank(arguments)
    jobs.exit_on_sigterm()
    libraries = [jobs.CHECKOUT, *([arguments.against] if arguments.against else [])]
    rounds = [
        {
            (case, library): milliseconds(arguments, case, library)
            for case in CASES
            for library in libraries
        }
        for _ in range(arguments.repeat)
    ]
    print(f"{report.machine_load()}, {arguments.ranks} ranks, medians of {arguments.repeat} rounds")
    print(
        f"{arguments.metrics} metrics, {arguments.embeddings} embeddings, batch {arguments.batch}\n"
    )
    rows = []
    for case in CASES:
        medians = [
            statistics.median(each[case, library] for each in rounds) for library in libraries
        ]
        ratios = []
        if arguments.against:
            ratio = statistics.median(
                each[case, libraries[0]] / each[case, libraries[1]] for each in rounds
            )
            ratios = [report.number(ratio, 3)]
        rows.append([case, *(report.number(each, 2) for each in medians), *ratios])
    heads = ["", "ms", *(["against ms", "÷ against"] if arguments.against else [])]
    print(report.table(heads, rows))


if __name__ == "__main__":
    sys.exit(main())
