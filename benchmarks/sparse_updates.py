"""Processor time of Adagrad's sparse update: TensorFlow's operation and the compiled one, in turn,
on one thread.

    python benchmarks/sparse_updates.py

Prints a table in Markdown: ms for all tables, the least of three rounds of ten; and by how much the
results differ.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import sparse_updates

# D, rows, rows updated, tables
SETTINGS = ((128, 60_000, 1000, 26), (16, 200_000, 1000, 26), (16, 100_000, 100, 260))


def measure(dim: int, rows: int, updated: int, tables: int) -> tuple[dict[str, float], float]:
    rng = np.random.default_rng(0)
    gradients = [
        tf.constant(rng.normal(size=(updated, dim)).astype(np.float32)) for _ in range(tables)
    ]
    places = [tf.constant(rng.choice(rows, updated, False).astype(np.int64)) for _ in range(tables)]
    ways, first = {}, []
    for name in ("TensorFlow", "compiled"):
        pairs = [
            [
                tf.get_variable(
                    f"{name}/{what}{t}",
                    [rows, dim],
                    initializer=tf.constant_initializer(start),
                    use_resource=True,
                )
                for what, start in (("table", 0.0), ("accumulator", 0.1))
            ]
            for t in range(tables)
        ]
        ways[name] = tf.group(
            *(
                sparse_updates.adagrad(v, a, tf.constant(0.05), g, i)
                if name == "compiled"
                else tf.raw_ops.ResourceSparseApplyAdagrad(
                    var=v.handle, accum=a.handle, lr=0.05, grad=g, indices=i
                )
                for (v, a), g, i in zip(pairs, gradients, places)
            )
        )
        first.append(pairs[0][0].read_value())
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for round_ in range(4):  # the first warms up
            for name, update in ways.items():
                began = time.process_time()
                for _ in range(10):
                    session.run(update)
                taken[name] += [100 * (time.process_time() - began)] * (round_ > 0)
        one, other = session.run(first)
    return {name: min(times) for name, times in taken.items()}, float(np.abs(one - other).max())


def main() -> None:
    print(
        "| dim | rows updated | tables | TensorFlow (ms) | compiled (ms) | largest difference "
        "|\n|---|---|---|---|---|---|"
    )
    for dim, rows, updated, tables in SETTINGS:
        with tf.Graph().as_default():
            taken, difference = measure(dim, rows, updated, tables)
        print(
            f"| {dim} | {updated} | {tables} | {taken['TensorFlow']:.2f} | "
            f"{taken['compiled']:.2f} | {difference:.1e} |"
        )


if __name__ == "__main__":
    main()
