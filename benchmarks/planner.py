"""Compares the planner's steps with real ones, on the CPU ranks of one machine.

    collective launch -np 2 benchmarks/planner.py

Runs each setting with all tables sharded by rows, and with all of them replicated; prints the least
and the median milliseconds of a step next to the predicted ones, the rank correlation (Spearman's)
of predicted and measured, and how often the planner's order of the two placements is the real one.
The planner knows the machine as `placement='auto'` does: by what the ranks measure, or have kept.
Ids are drawn equally likely, as the planner assumes. Give the machine nothing else to do.

    python benchmarks/planner.py --search

compares what the planner chooses for 200 random sets of tables, on 2 to 64 ranks that there needn't
be, with other ways to choose, all by the planner's model: all placements of small sets, simulated
annealing of large ones, rules, and the proposals of TorchRec's greedy planner.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.plan import job_machines
from collective.planner import first_placements, search
from collective.planner.step_model import StepModel
from collective.planner.workload import TableWork, Workload

OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.01),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.01),
}
PLACEMENTS = ("rows", "replicated")
SMALL_SETS, LARGE_SETS, ANNEALED = 100, 100, 3000
CLEARLY = 1.1  # times of two placements that differ by less are taken as equal


class Setting(NamedTuple):
    """Describes a model: `tables` tables [rows, dimension], of whose rows a sample names `ids`."""

    tables: int
    rows: int
    dimension: int
    ids: int
    batch: int
    optimizer: str = "adagrad"


SETTINGS = (
    Setting(1, 100, 8, 1, 256),
    Setting(1, 100, 8, 1, 16384),
    Setting(1, 100_000, 64, 1, 4096),
    Setting(4, 1000, 16, 1, 1024),
    Setting(4, 1000, 16, 10, 4096),
    Setting(4, 10_000, 64, 1, 8192),
    Setting(4, 100_000, 16, 5, 8192),
    Setting(4, 20_000, 16, 1, 1024, "adam"),
    Setting(26, 100, 4, 1, 256),
    Setting(26, 100, 16, 1, 8192),
    Setting(26, 1000, 8, 1, 4096),
    Setting(26, 10_000, 16, 1, 2048, "sgd"),
    Setting(26, 10_000, 64, 1, 8192),
    Setting(26, 2000, 16, 3, 1024),
    Setting(100, 20, 8, 1, 1024),
    Setting(2, 5000, 32, 2, 512),
    Setting(10, 500, 16, 1, 2048, "sgd"),
    Setting(13, 50_000, 32, 1, 4096),
    Setting(50, 200, 8, 1, 512),
)


def workload_of(setting: Setting) -> Workload:
    tables = tuple(
        TableWork(
            f"t{i}",
            setting.rows,
            setting.dimension,
            ids=setting.ids,
            optimizer=setting.optimizer,
        )
        for i in range(setting.tables)
    )
    return Workload(tables, setting.batch, setting.tables * setting.dimension + 1)


def step_ms(
    strategy: CollectiveStrategy, setting: Setting, placement: str, steps: int
) -> list[float]:
    """Returns the milliseconds of this rank's steps, without the first quarter."""
    random = np.random.default_rng(strategy.rank())
    samples = setting.batch // strategy.world_size()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(placement=placement):
            tables = [
                tf.get_variable(f"t{i}", [setting.rows, setting.dimension])
                for i in range(setting.tables)
            ]
        pooled = []
        for table in tables:
            ids = random.integers(0, setting.rows, [samples, setting.ids])
            if setting.ids == 1:
                pooled.append(tf.nn.embedding_lookup(table, tf.constant(ids[:, 0])))
            else:
                sparse = tf.sparse.from_dense(tf.constant(ids + 1))
                sparse = tf.SparseTensor(sparse.indices, sparse.values - 1, sparse.dense_shape)
                pooled.append(tf.nn.embedding_lookup_sparse(table, sparse, None, combiner="sum"))
        loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.concat(pooled, 1), 1)))
        train = OPTIMIZERS[setting.optimizer]().minimize(loss)
        times = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                start = time.perf_counter()
                session.run(train)
                times.append(1e3 * (time.perf_counter() - start))
    return times[steps // 4 :]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of two lists without equal values."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def search_lines() -> list[str]:
    """Returns the lines of a table: the planner's steps compared with those of others."""
    from tests.unit.planner import other_searches, problems

    ratios: dict[str, list[float]] = {}
    kinds: list[str] = []
    for seed in range(SMALL_SETS + LARGE_SETS):
        is_small = seed < SMALL_SETS
        most, least = (5, 1) if is_small else (40, 6)
        clusters = [(2, 1), (1, 2), (3, 1)] if seed % 2 and is_small else problems.CLUSTERS
        workload, machines = problems.problem(seed, most, least, clusters)
        model = StepModel(workload, machines)
        found = search.forecast(workload, machines)
        kinds += [choice.placement.partition(":")[0] for choice in found.choices]
        others = {name: rule(model) for name, rule in other_searches.RULES.items()}
        if is_small:
            others["all placements (small sets)"] = other_searches.everything(model)
        else:
            starts = [found.placements, first_placements.all_of(model, "rows")]
            annealed = other_searches.annealed(model, seed, ANNEALED, starts)
            others["annealing (large sets)"] = annealed
        for name, seconds in others.items():
            if seconds < float("inf"):  # else it doesn't fit
                ratios.setdefault(name, []).append(found.parts.seconds / seconds)
    lines = [
        "| compared with | sets that fit | median | worst | planner is better by 1 % | worse |",
        6 * "|---" + "|",
    ]
    for name, values in ratios.items():
        better = sum(value < 0.99 for value in values)
        worse = sum(value > 1 + 1e-9 for value in values)
        lines.append(
            f"| {name} | {len(values)} | {statistics.median(values):.3f} | {max(values):.4f} | "
            f"{better} | {worse} |"
        )
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return [*lines, f"{len(kinds)} tables: {counts}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of each model")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--search", action="store_true", help="compare searches, without ranks")
    arguments = parser.parse_args()
    if arguments.search:
        print("\n".join(search_lines()))
        return
    strategy = CollectiveStrategy()
    machines = job_machines.agree("").machines
    is_first = strategy.rank() == 0
    if is_first:
        print("| setting | placement | least | median | predicted |\n" + 5 * "|---" + "|")
    measured: list[float] = []
    predicted: list[float] = []
    rows = []
    for setting in SETTINGS:
        model = StepModel(workload_of(setting), machines)
        for placement in PLACEMENTS:
            times = step_ms(strategy, setting, placement, arguments.steps)
            parts = model.step({t.name: placement for t in model.workload.tables})
            measured.append(statistics.median(times))
            predicted.append(1e3 * parts.seconds)
            rows.append((*setting, placement, min(times), measured[-1], predicted[-1]))
            if is_first:
                what = ", ".join(map(str, setting))
                print(
                    f"| {what} | {placement} | {min(times):.2f} | {measured[-1]:.2f} | "
                    f"{predicted[-1]:.2f} |",
                    flush=True,
                )
    if not is_first:
        return
    print(f"rank correlation: {correlation(measured, predicted):.3f}")
    ratios = [
        (measured[i] / measured[i + 1], predicted[i] / predicted[i + 1])
        for i in range(0, len(measured), 2)
    ]
    clear = [(m, p) for m, p in ratios if max(m, 1 / m) > CLEARLY]
    right = sum((m > 1) == (p > 1) for m, p in clear)
    print(f"the faster placement: right for {right} of {len(clear)} where it is clear")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
