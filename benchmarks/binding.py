"""Measures what the binding of kernels costs the host in a step of many small tables: tensors
to arrays, and back.

    python benchmarks/binding.py [--tables 26] [--dim 16] [--batch 64] [--steps 30] [--dynamic]
    python -m tests.gpu_double benchmarks/binding.py [...]

The second line needs no GPU: NumPy is in the place of the kernels, so the time that they compute is
no measure and stands by itself. The rest is done as for a GPU, but that CuPy's arrays cost more
than NumPy's, and that the host waits for the GPU. One rank, Adagrad, one thread. Prints the median,
the 10th and the 90th percentile of a step's milliseconds, and how many calls it has.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import collective  # noqa: E402
from collective.ops import placement  # noqa: E402
from collective.ops.gpu.memory_bridge import MemoryBridge  # noqa: E402
from collective.ops.gpu.tensorflow_call import KernelCaller  # noqa: E402

WARM = 5


class Clock:
    """Adds up the time that methods take."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = collections.Counter()
        self.calls: dict[str, int] = collections.Counter()

    def around(self, what: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.ms[what] += 1e3 * (time.perf_counter() - begin)
                self.calls[what] += 1

        return timed


def watch(clock: Clock) -> None:
    """Has `clock` time each call of kernels from now on."""
    for what, method in (("tensors to arrays", "given"), ("arrays to tensors", "results")):
        owners = [MemoryBridge, *MemoryBridge.__subclasses__()]
        for owner in owners:
            if method in vars(owner):
                setattr(owner, method, clock.around(what, getattr(owner, method)))
    operation = KernelCaller._operation

    def around_work(caller: Any, name: str, work: Any, *rest: Any) -> Any:
        return operation(caller, name, clock.around("kernels", work), *rest)

    # not by an assignment, which mypy refuses
    setattr(KernelCaller, "_operation", around_work)  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tables", 26), ("dim", 16), ("batch", 64), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dynamic", action="store_true", help="dynamic tables")
    given = parser.parse_args()
    if not placement.on_device(given.dynamic):
        sys.exit("no kernels compute here: see --help for the double of a GPU")
    clock, strategy, rng = Clock(), collective.CollectiveStrategy(), np.random.default_rng(0)
    watch(clock)
    spent: list[dict[str, float]] = []
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [
                tf.get_variable(f"t{t}", [None if given.dynamic else 1000, given.dim])
                for t in range(given.tables)
            ]
        ids = [tf.placeholder(tf.int64, [None]) for _ in tables]
        loss = tf.add_n(
            [tf.reduce_sum(tf.nn.embedding_lookup(table, of)) for table, of in zip(tables, ids)]
        )
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.Session(
            config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        ) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(WARM + given.steps):
                feeds = {of: rng.integers(0, 1000, given.batch) for of in ids}
                clock.ms.clear()
                clock.calls.clear()
                clock.around("the whole step", session.run)(train, feeds)
                spent.append(dict(clock.ms))
    print(f"{'':<30} {'ms':>8} {'p10':>8} {'p90':>8} {'calls':>6}")
    for what in sorted(spent[-1]):
        times = [step.get(what, 0.0) for step in spent[WARM:]]
        low, median, high = np.percentile(times, [10, 50, 90])
        print(f"{what:<30} {median:8.2f} {low:8.2f} {high:8.2f} {clock.calls[what]:6}")


if __name__ == "__main__":
    main()
