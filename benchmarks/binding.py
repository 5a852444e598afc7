"""Measures what a step of many small tables costs the host where operations launch kernels of a
GPU, by operation.

    python -m tests.gpu_double benchmarks/binding.py [--tables 26] [--dim 16] [--batch 64]
        [--steps 30]
    python benchmarks/binding.py [...]

The first line needs no GPU: launches and copies do nothing, by functions of C++, so the host's time
is left. The second one measures on a GPU, whose copies the host then waits for. One rank, static
tables, Adagrad, one thread. Prints the median, the 10th and the 90th percentile of microseconds a
step, and how many operations of a type it has; of `all of the step`, TensorFlow's own operations
and its session are a part. Its processor time is that of all threads of the process: on a machine
that is busy with other work, it is what says most.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import collective  # noqa: E402
from collective.ops import kernel_device  # noqa: E402
from collective.ops.exchange import dispatch  # noqa: E402

WARM = 5
WHOLE = "all of the step"
PROCESSOR = "processor time of it"


def microseconds(metadata: Any, graph: tf.Graph) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the time and the number of operations of each type in a traced step."""
    times: dict[str, float] = collections.Counter()
    counts: dict[str, int] = collections.Counter()
    kinds = {op.name: op.type for op in graph.get_operations()}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            kind = kinds.get(node.node_name, "")
            if kind.startswith("Collective"):
                times[kind] += (node.op_end_rel_nanos - node.op_start_rel_nanos) / 1e3
                counts[kind] += 1
    return times, counts


def measured(
    session: tf.Session, fetches: Any, feeds: dict[Any, Any], steps: int
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Returns for each step the time of each type of operation and of the whole; and counts."""
    run_options = tf.RunOptions(trace_level=tf.RunOptions.SOFTWARE_TRACE)
    run, spent, counts = session.make_callable(fetches, list(feeds)), [], {}
    for step in range(WARM + steps):
        begin, processor = time.perf_counter(), time.process_time()
        run(*feeds.values())
        whole = {
            WHOLE: 1e6 * (time.perf_counter() - begin),
            PROCESSOR: 1e6 * (time.process_time() - processor),
        }
        metadata = tf.RunMetadata()
        session.run(fetches, feeds, options=run_options, run_metadata=metadata)
        times, counts = microseconds(metadata, session.graph)
        if step >= WARM:
            spent.append({**times, "all operations here": sum(times.values()), **whole})
    return spent, counts


def report(spent: Sequence[dict[str, float]], counts: dict[str, int]) -> None:
    """Prints the table."""
    print(f"{'':<30} {'us':>8} {'p10':>8} {'p90':>8} {'calls':>6}")
    for what in spent[-1]:
        low, median, high = np.percentile([step.get(what, 0.0) for step in spent], [10, 50, 90])
        print(f"{what:<30} {median:8.0f} {low:8.0f} {high:8.0f} {counts.get(what, ''):>6}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tables", 26), ("dim", 16), ("batch", 64), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if not kernel_device.on_device(False):
        sys.exit("no kernels compute here: see --help for the double of a GPU")
    strategy, rng = collective.CollectiveStrategy(), np.random.default_rng(0)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [tf.get_variable(f"t{t}", [1000, given.dim]) for t in range(given.tables)]
        # One placeholder: lookups whose ids come by several are not of one exchange.
        ids = tf.placeholder(tf.int64, [given.tables, None])
        loss = tf.add_n(
            [
                tf.reduce_sum(tf.nn.embedding_lookup(table, of))
                for table, of in zip(tables, tf.unstack(ids))
            ]
        )
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        feeds = {ids: rng.integers(0, 1000, (given.tables, given.batch))}
        with tf.Session(
            config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        ) as session:
            session.run(tf.global_variables_initializer())
            session.run(train, feeds)
            replaying = getattr(dispatch.bridge(), "replaying", contextlib.nullcontext)
            with replaying(lambda: session.run(train, feeds)):
                spent, counts = measured(session, train, feeds, given.steps)
    report(spent, counts)


if __name__ == "__main__":
    main()
