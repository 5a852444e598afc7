"""Measures processor time of Adagrad's sparse update: TensorFlow's operation and the compiled one.

    python benchmarks/sparse_updates.py

They run in turn, on one thread. Prints a table in Markdown: ms for all tables, the least of three
rounds of ten; and by how much the results differ.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import report
import tensorflow.compat.v1 as tf

from collective.ops import sparse_updates

# D, rows, rows updated, tables
SETTINGS = ((128, 60_000, 1000, 26), (16, 200_000, 1000, 26), (16, 100_000, 100, 260))
LEARNING_RATE = 0.05
ROUNDS, UPDATES = 4, 10  # the first round warms up
KERNELS = ("TensorFlow", "compiled")


def variable(name: str, rows: int, dim: int, value: float) -> tf.Variable:
    initializer = tf.constant_initializer(value)
    return tf.get_variable(name, [rows, dim], initializer=initializer, use_resource=True)


def update(
    kernel: str, table: tf.Variable, slot: tf.Variable, gradient: tf.Tensor, rows: tf.Tensor
) -> tf.Operation:
    if kernel == "compiled":
        return sparse_updates.adagrad(table, slot, tf.constant(LEARNING_RATE), gradient, rows)
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=table.handle, accum=slot.handle, lr=LEARNING_RATE, grad=gradient, indices=rows
    )


def measure(dim: int, rows: int, updated: int, tables: int) -> tuple[dict[str, float], float]:
    """Returns ms by kernel, and the largest difference of the first table's values."""
    rng = np.random.default_rng(0)
    gradients = []
    for _ in range(tables):
        gradients.append(tf.constant(rng.normal(size=(updated, dim)).astype(np.float32)))
    indices = []
    for _ in range(tables):
        indices.append(tf.constant(rng.choice(rows, updated, False).astype(np.int64)))
    train_by_kernel, first_tables = {}, []
    for kernel in KERNELS:
        updates = []
        for t in range(tables):
            table = variable(f"{kernel}/table{t}", rows, dim, 0.0)
            slot = variable(f"{kernel}/accumulator{t}", rows, dim, 0.1)
            updates.append(update(kernel, table, slot, gradients[t], indices[t]))
            if t == 0:
                first_tables.append(table.read_value())
        train_by_kernel[kernel] = tf.group(*updates)

    milliseconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(ROUNDS):
            for kernel, train in train_by_kernel.items():
                start = time.process_time()
                for _ in range(UPDATES):
                    session.run(train)
                seconds = time.process_time() - start
                milliseconds[kernel].append(seconds * 1e3 / UPDATES)
        one, other = session.run(first_tables)
    least = {kernel: min(times[1:]) for kernel, times in milliseconds.items()}
    return least, float(np.abs(one - other).max())


def main() -> None:
    names = ["dim", "rows updated", "tables", "TensorFlow (ms)", "compiled (ms)"]
    print(report.heading([*names, "largest difference"]))
    for dim, rows, updated, tables in SETTINGS:
        with tf.Graph().as_default():
            milliseconds, difference = measure(dim, rows, updated, tables)
        figures = [report.number(milliseconds[kernel]) for kernel in KERNELS]
        cells = [str(dim), str(updated), str(tables), *figures, f"{difference:.1e}"]
        print(report.row(cells), flush=True)


if __name__ == "__main__":
    main()
