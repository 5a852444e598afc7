"""Measures processor time of sparse updates: TensorFlow's operations and the compiled ones.

    python benchmarks/sparse_updates.py [--optimizers adagrad ftrl …]

They run in turn, on one thread. Prints a table in Markdown: ms for all tables, the least of three
rounds of five; how many times as long TensorFlow takes; and by how much the results differ. Where
TensorFlow has no such optimizer, `collective.train` is written with its operations.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from typing import Any, Callable, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import report
import tensorflow.compat.v1 as tf

from collective import train
from collective.ops.updates import sparse_updates

# D, rows, rows updated, tables
SETTINGS = ((16, 200_000, 100_000, 1), (128, 200_000, 100_000, 1), (16, 2000, 100, 260))
RATE = 0.05
ROUNDS, UPDATES = 4, 5  # the first round warms up
KERNELS = ("TensorFlow", "compiled")


class Optimizer(NamedTuple):
    """Describes an optimizer: as TensorFlow has it, and its compiled update with its numbers."""

    make: Callable[[], tf.train.Optimizer]
    slots: tuple[str, ...]
    update: Callable[..., tf.Operation]
    numbers: tuple[float, ...]


def corrected_rate(beta1: float, beta2: float) -> float:
    """Returns Adam's learning rate of the first step, which the benchmark never leaves."""
    return float(RATE * np.sqrt(1 - beta2) / (1 - beta1))


ADAM = (corrected_rate(0.9, 0.999), 0.9, 0.999, 1e-8)
OPTIMIZERS = {
    "adagrad": Optimizer(
        lambda: tf.train.AdagradOptimizer(RATE), ("accumulator",), sparse_updates.adagrad, (RATE,)
    ),
    "row-wise adagrad": Optimizer(
        lambda: train.RowWiseAdagradOptimizer(RATE),
        ("accumulator",),
        sparse_updates.row_wise_adagrad,
        (RATE, 0.0),
    ),
    "momentum": Optimizer(
        lambda: tf.train.MomentumOptimizer(RATE, 0.9),
        ("momentum",),
        functools.partial(sparse_updates.momentum, nesterov=False),
        (RATE, 0.9),
    ),
    "nesterov": Optimizer(
        lambda: tf.train.MomentumOptimizer(RATE, 0.9, use_nesterov=True),
        ("momentum",),
        functools.partial(sparse_updates.momentum, nesterov=True),
        (RATE, 0.9),
    ),
    "ftrl": Optimizer(
        lambda: tf.train.FtrlOptimizer(RATE, l1_regularization_strength=0.01),
        ("accum", "linear"),
        sparse_updates.ftrl,
        (RATE, 0.01, 0.0, 0.0, -0.5),
    ),
    "ftrl, power -0.7": Optimizer(
        lambda: tf.train.FtrlOptimizer(RATE, -0.7, l1_regularization_strength=0.01),
        ("accum", "linear"),
        sparse_updates.ftrl,
        (RATE, 0.01, 0.0, 0.0, -0.7),
    ),
    "lazy adam": Optimizer(
        lambda: train.LazyAdamOptimizer(RATE), ("m", "v"), sparse_updates.lazy_adam, ADAM
    ),
    "adam": Optimizer(lambda: tf.train.AdamOptimizer(RATE), ("m", "v"), sparse_updates.adam, ADAM),
}


def update(
    kernel: str, optimizer: Optimizer, table: Any, gradient: tf.Tensor, rows: tf.Tensor
) -> tf.Operation:
    """Returns an update of one table, without what comes before: making rows distinct."""
    made = optimizer.make()
    made._create_slots([table])
    made._prepare()
    if kernel == "TensorFlow":
        return made._resource_apply_sparse(gradient, table, rows)
    slots = [made.get_slot(table, slot) for slot in optimizer.slots]
    numbers = [tf.constant(number, tf.float32) for number in optimizer.numbers]
    return optimizer.update(table, *slots, *numbers, gradient, rows)


def measure(
    optimizer: Optimizer, dim: int, rows: int, updated: int, tables: int
) -> tuple[dict[str, float], float]:
    """Returns ms by kernel, and the largest difference of the first table's values."""
    rng = np.random.default_rng(0)
    gradients, indices = [], []
    for _ in range(tables):
        gradients.append(tf.constant(rng.normal(size=(updated, dim)).astype(np.float32)))
        indices.append(tf.constant(rng.choice(rows, updated, False).astype(np.int64)))
    train_by_kernel, first_tables = {}, []
    for kernel in KERNELS:
        updates = []
        for t in range(tables):
            initializer = tf.random_uniform_initializer(-0.1, 0.1, seed=t)
            with tf.variable_scope(f"{kernel}{t}"):
                table = tf.get_variable("table", [rows, dim], initializer=initializer)
                updates.append(update(kernel, optimizer, table, gradients[t], indices[t]))
            if t == 0:
                first_tables.append(table.read_value())
        train_by_kernel[kernel] = tf.group(*updates)

    milliseconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(ROUNDS):
            for kernel, train_op in train_by_kernel.items():
                start = time.process_time()
                for _ in range(UPDATES):
                    session.run(train_op)
                seconds = time.process_time() - start
                milliseconds[kernel].append(seconds * 1e3 / UPDATES)
        one, other = session.run(first_tables)
    least = {kernel: min(times[1:]) for kernel, times in milliseconds.items()}
    return least, float(np.abs(one - other).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    chosen = parser.parse_args().optimizers
    print(f"{report.machine_load()}\n")
    names = ["optimizer", "dim", "rows updated", "tables", "TensorFlow (ms)", "compiled (ms)"]
    print(report.heading([*names, "ratio", "largest difference"]))
    for name in chosen:
        for dim, rows, updated, tables in SETTINGS:
            with tf.Graph().as_default():
                milliseconds, difference = measure(OPTIMIZERS[name], dim, rows, updated, tables)
            before, after = (milliseconds[kernel] for kernel in KERNELS)
            figures = [report.number(figure) for figure in (before, after, before / after)]
            cells = [name, str(dim), str(updated), str(tables), *figures, f"{difference:.1e}"]
            print(report.row(cells), flush=True)


if __name__ == "__main__":
    main()
