"""Compares times of steps of small models with what `collective.plan.step_estimate` says of them.

    collective launch -np 2 benchmarks/small_models.py
    python benchmarks/small_models.py --ranks 2

The second, on one rank, takes all samples of a step by itself: the time that the first is compared
with. Milliseconds of a step, the least and the median; give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.plan import step_estimate

TABLES, ROWS = 26, 1000
# (dimension, hidden units, samples of a step, all ranks together)
MODELS = (
    (16, 8, 128),
    (16, 8, 1024),
    (16, 8, 8192),
    (64, 8, 1024),
    (64, 8, 8192),
    (16, 256, 128),
    (16, 256, 1024),
    (16, 256, 8192),
)


def step_ms(strategy: CollectiveStrategy, dim: int, hidden: int, samples: int, steps: int) -> tuple:
    """Returns the milliseconds of a rank's steps, and the plan."""
    random = np.random.default_rng(strategy.rank())
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(1)
        with strategy.embedding_scope():
            tables = [tf.get_variable(f"t{i}", [ROWS, dim]) for i in range(TABLES)]
        ids = tf.constant(random.integers(0, ROWS, [TABLES, samples]))
        rows = [tf.nn.embedding_lookup(table, ids[i]) for i, table in enumerate(tables)]
        values = tf.concat(rows, 1)
        for units in (hidden, hidden, 1):
            values = tf.layers.dense(values, units, tf.nn.relu)
        train = tf.train.AdagradOptimizer(0.01).minimize(tf.reduce_mean(values))
        times = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                start = time.perf_counter()
                session.run(train)
                times.append(1e3 * (time.perf_counter() - start))
        return times[steps // 4 :], strategy.plan()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each model")
    parser.add_argument("--ranks", type=int, help="on one rank: for how many ranks to estimate")
    arguments = parser.parse_args()
    strategy = CollectiveStrategy()
    ranks = strategy.world_size()
    job_ranks = arguments.ranks or ranks
    if strategy.rank() == 0:
        print(
            "| dim | hidden | samples | least | median | estimated |\n" + 6 * "|---" + "|",
            flush=True,
        )
    for dim, hidden, samples in MODELS:
        times, plan = step_ms(strategy, dim, hidden, samples // ranks, arguments.steps)
        parameters = TABLES * dim * hidden + hidden * hidden + 3 * hidden + 1
        work = step_estimate.StepWork(job_ranks, 5, TABLES * dim * 4, parameters, samples)
        estimated = step_estimate.estimate(work)
        if ranks > 1:
            assert plan.estimate == estimated, (plan.estimate, estimated)
        of_ranks = estimated.one_rank_ms if ranks == 1 else estimated.all_ranks_ms
        if strategy.rank() == 0:
            figures = f"{min(times):.2f} | {statistics.median(times):.2f} | {of_ranks:.2f}"
            print(f"| {dim} | {hidden} | {samples} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
