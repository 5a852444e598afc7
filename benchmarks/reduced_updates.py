"""Measures processor time of one operation that sums gradients and updates rows, compared with two.

    python benchmarks/reduced_updates.py [--optimizers adagrad …] [--threads 1]

What the owner does for the gradients of two ranks, for the keys of `step.py`'s workload with `hb`.
Both ways run in turn, in one process. Prints a table in Markdown: ms for all tables, medians of
--rounds rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import report
import tensorflow.compat.v1 as tf
from exchange_ops import aligned
from sparse_updates import OPTIMIZERS
from training_step import workload as step_workload
from training_step.workload import Setting

from collective.ops import native_library
from collective.ops.updates import reduced_updates

# Tables, D, ids a feature
SETTINGS = ((26, 16, (1, 1)), (26, 128, (1, 1)), (260, 16, (1, 1)), (26, 16, (1, 10)))
WAYS = {"two operations": contextlib.nullcontext, "one operation": reduced_updates.fusing}


def received(setting: Setting) -> list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
    """Returns for each batch what rank 0 is asked for: message, splits, rows by table."""
    of_ranks = [list(step_workload.batches(setting, r)) for r in range(setting.ranks)]
    messages = []
    for batch in zip(*of_ranks):
        words, splits, rows = [], [], [[] for _ in range(setting.tables)]
        for of_rank in batch:
            keys = []
            for t, (ids, _) in enumerate(step_workload.by_feature(setting, of_rank)):
                own, first = np.unique(ids[ids % setting.ranks == 0], return_index=True)
                keys.append(own[np.argsort(first)] // setting.ranks)
                rows[t].append(keys[-1])
            header = np.repeat([len(x) for x in keys], 2)
            words.append(np.concatenate([header, *keys]).astype(np.int64))
            splits.append(len(words[-1]))
        messages.append(
            (
                aligned(np.concatenate(words)),
                aligned(np.array(splits, np.int32)),
                [aligned(np.concatenate(x)) for x in rows],
            )
        )
    return messages


def measure(optimizer: Any, setting: Setting, threads: int, rounds: int) -> dict[str, list[float]]:
    """Returns the ms of each round by way."""
    tables, dim = setting.tables, setting.dim
    messages, sizes = received(setting), [(n + 1) // setting.ranks for n in setting.rows()]
    gradient, message = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.int64, [None])
    splits = tf.placeholder(tf.int32, [setting.ranks])
    rows = [tf.placeholder(tf.int64, [None]) for _ in range(tables)]
    numbers = [tf.constant(number, tf.float32) for number in optimizer.numbers]
    steps = {}
    for way, context in WAYS.items():
        variables = []
        for t, size in enumerate(sizes):
            with tf.variable_scope(f"{way[:3]}{t}"):
                table = tf.get_variable("table", [size, dim], use_resource=True)
                made = optimizer.make()
                made._create_slots([table])
                slots = [made.get_slot(table, slot) for slot in optimizer.slots]
            variables.append((table, *slots))
        sums = native_library.library().collective_reduce_rows(
            gradient,
            [table.handle for table, *_ in variables],
            rows,
            message,
            splits,
            [],
            max_norms=[0.0] * tables,
            shapes=[[size, dim] for size in sizes],
            scale=1 / setting.ranks,
            ranks=setting.ranks,
            section_tables=list(range(tables)),
            kinds=[0] * tables,
            dims=[dim] * tables,
            pooled=[False] * tables,
            weighted=[False] * tables,
        )
        with context():
            updates = [
                optimizer.update(*of_table, *numbers, values, indices)
                for of_table, values, indices in zip(variables, sums.values, sums.indices)
            ]
        steps[way] = tf.group(*updates)
    milliseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    config = tf.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=1)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        feeds, rng = [], np.random.default_rng(0)
        for of_message, of_splits, of_rows in messages:
            values = rng.normal(size=sum(map(len, of_rows)) * dim).astype(np.float32)
            feeds.append([aligned(values), of_message, of_splits, *of_rows])
        inputs = [gradient, message, splits, *rows]
        calls = {way: session.make_callable(op, feed_list=inputs) for way, op in steps.items()}
        other_memory = np.ones(5_000_000)
        for i in range(rounds + 4):  # The first ones warm up.
            for way, call in calls.items():
                other_memory.sum()  # A step has had other things in the caches.
                start = time.process_time()
                call(*feeds[i % len(feeds)])
                if i >= 4:
                    milliseconds[way].append((time.process_time() - start) * 1e3)
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["adagrad"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    print(f"{report.machine_load()}\n")
    names = ["optimizer", "tables", "dim", "ids", *(f"{way} (ms)" for way in WAYS), "ratio"]
    print(report.heading(names))
    for name in arguments.optimizers:
        for tables, dim, ids in SETTINGS:
            setting = Setting(ranks=2, tables=tables, dim=dim, ids=ids, batch=8192, pool=4)
            with tf.Graph().as_default():
                times = measure(OPTIMIZERS[name], setting, arguments.threads, arguments.rounds)
            two, one = (statistics.median(times[way]) for way in WAYS)
            ratio = statistics.median(o / t for t, o in zip(*times.values()))
            cells = [name, str(tables), str(dim), "-".join(map(str, dict.fromkeys(ids)))]
            print(report.row([*cells, *map(report.number, (two, one, ratio))]), flush=True)


if __name__ == "__main__":
    main()
