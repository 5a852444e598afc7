"""Compares the planner's steps with real ones, on the CPU ranks of one machine.

    collective launch -np 2 benchmarks/planner.py
    python benchmarks/planner.py --hosts 2 [--ranks 2] [--link 1gbit] [--delay 0.2ms]

Trains each set of tables with all of them by rows, replicated, whole on one rank each (`whole`: the
largest first, to the rank with the fewest bytes), whole on rank 0, with the three kinds in turn
(`mixed`), and as `placement='auto:FILE'` places them with a file of these tables (`auto`). Steps of
these placements take turns. Prints the least and the median milliseconds of a step and of its
processor time next to the predicted ones, the rank correlation (Spearman's) of predicted and
measured, how often the planner's order of two placements is the real one, and how long a step takes
with `auto` compared with the best of `rows`, `whole` and `replicated`. Processor time is that of
the rank with most of it, and what is left to compare where other programs use the machine.

The planner knows the machine as `placement='auto'` does: by what the ranks measure, or have kept.
Ids are drawn equally likely, as the planner assumes; of some tables only multiples of the number of
ranks, so that by rows one rank is asked for all of them. Give the machine nothing else to do.

With --hosts the ranks are on so many hosts, made of network namespaces (which takes root, `ip` and
`tc`), with a slow link each.

    python benchmarks/planner.py --search

compares what the planner chooses for 200 random sets of tables, on 2 to 64 ranks that there needn't
be, with other ways to choose, all by the planner's model: all placements of small sets, simulated
annealing of large ones, rules, and the proposals of TorchRec's greedy planner.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jobs
import numpy as np
import tensorflow.compat.v1 as tf
from training_step.hosts import slow_hosts

from collective import CollectiveStrategy
from collective.coordination import barrier
from collective.plan import job_machines
from collective.planner import first_placements, search
from collective.planner.machines import Machines
from collective.planner.step_model import StepModel
from collective.planner.workload import (
    Placement,
    TableWork,
    Workload,
    distinct_of_equally_likely,
)

OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.01),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.01),
}
UNIFORM = ("rows", "whole", "replicated")
SMALL_SETS, LARGE_SETS, ANNEALED = 100, 100, 3000
CLEARLY = 1.1  # times of two placements that differ by less are taken as equal
UNCOUNTED, COUNTED = 2, 8  # steps of a placement before the next one's turn


class Tables(NamedTuple):
    """Describes `count` tables [rows, dimension], of whose rows a sample names `ids`.

    With `one_owner`, ids are multiples of the number of ranks: by rows, rank 0 owns all of them.
    """

    count: int
    rows: int
    dimension: int
    ids: int = 1
    one_owner: bool = False

    def __str__(self) -> str:
        ids = f", {self.ids} ids" if self.ids > 1 else ""
        return f"{self.count} x [{self.rows}, {self.dimension}]{ids}" + ", uneven" * self.one_owner


class Setting(NamedTuple):
    """Describes a model: tables, samples of a step of all ranks together, the tables' optimizer."""

    tables: tuple[Tables, ...]
    batch: int
    optimizer: str = "adagrad"

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.tables))}; {self.batch}; {self.optimizer}"


SETTINGS = (
    Setting((Tables(1, 100, 8),), 256),
    Setting((Tables(1, 100, 8),), 16384),
    Setting((Tables(1, 100_000, 64),), 4096),
    Setting((Tables(2, 5000, 32, 2),), 512),
    Setting((Tables(4, 1000, 16),), 1024),
    Setting((Tables(4, 1000, 16, 10),), 4096),
    Setting((Tables(4, 10_000, 64),), 8192),
    Setting((Tables(4, 100_000, 16, 5),), 8192),
    Setting((Tables(4, 20_000, 16),), 1024, "adam"),
    Setting((Tables(10, 500, 16),), 2048, "sgd"),
    Setting((Tables(13, 50_000, 32),), 4096),
    Setting((Tables(26, 100, 4),), 256),
    Setting((Tables(26, 100, 16),), 8192),
    Setting((Tables(26, 1000, 8),), 4096),
    Setting((Tables(26, 10_000, 16),), 2048, "sgd"),
    Setting((Tables(26, 10_000, 64),), 8192),
    Setting((Tables(26, 2000, 16, 3),), 1024),
    Setting((Tables(50, 200, 8),), 512),
    Setting((Tables(100, 20, 8),), 1024),
    # Hardly more rows than ranks, tables of different sizes, and ids that rows share out badly.
    Setting((Tables(8, 3, 64),), 8192),
    Setting((Tables(1, 100_000, 64, 5), Tables(20, 100, 8)), 4096),
    Setting((Tables(2, 200_000, 32), Tables(8, 5000, 32), Tables(16, 100, 32)), 4096),
    Setting((Tables(2, 50_000, 16), Tables(6, 1000, 16)), 2048, "adam"),
    Setting((Tables(3, 20_000, 16, 8), Tables(3, 20_000, 64)), 2048),
    Setting((Tables(1, 100_000, 64, 2, True),), 4096),
    Setting((Tables(4, 100_000, 32, 5, True),), 4096),
    Setting((Tables(8, 20_000, 64, 1, True),), 8192),
    Setting((Tables(12, 30_000, 16, 3, True),), 2048),
    Setting((Tables(2, 100_000, 64, 5, True), Tables(20, 100, 8)), 4096),
    Setting((Tables(3, 50_000, 32, 3, True), Tables(5, 50_000, 32, 3)), 4096),
    Setting((Tables(10, 2000, 16, 1, True), Tables(10, 2000, 16)), 1024, "sgd"),
    Setting((Tables(6, 40_000, 16, 1, True),), 2048, "adam"),
)


class Measured(NamedTuple):
    """Holds milliseconds of a setting's steps with a placement.

    Attributes:
        setting: in words.
        placement: its name.
        least: the shortest step of rank 0.
        median: the median of its steps.
        processor: processor time of a step, the mean of the round with least, on the rank that
            takes most.
        predicted: by the planner's model.
    """

    setting: str
    placement: str
    least: float
    median: float
    processor: float
    predicted: float


MEASURED = ("least", "median", "processor")


def each_table(setting: Setting) -> list[tuple[str, Tables]]:
    """Returns the names of tables, and what describes each."""
    every = [tables for tables in setting.tables for _ in range(tables.count)]
    return [(f"t{number}", tables) for number, tables in enumerate(every)]


def workload_of(setting: Setting, ranks: int) -> Workload:
    def table(name: str, tables: Tables) -> TableWork:
        work = TableWork(
            name, tables.rows, tables.dimension, ids=tables.ids, optimizer=setting.optimizer
        )
        if not tables.one_owner:
            return work
        drawn = setting.batch / ranks * tables.ids
        distinct = distinct_of_equally_likely(drawn, tables.rows // ranks) / drawn
        return dataclasses.replace(work, distinct=distinct, imbalance=float(ranks))

    every = each_table(setting)
    width = sum(tables.dimension for _, tables in every)
    return Workload(tuple(table(*one) for one in every), setting.batch, width + 1)


def placements_of(model: StepModel) -> dict[str, dict[str, Placement]]:
    """Returns the placements that are compared, by their names."""
    ranks, names = model.machines.ranks, [table.name for table in model.workload.tables]

    def in_turn(number: int) -> Placement:
        return ("rows", f"whole:{number // 3 % ranks}", "replicated")[number % 3]

    return {
        "rows": dict.fromkeys(names, "rows"),
        "replicated": dict.fromkeys(names, "replicated"),
        "whole": first_placements.all_of(model, "whole"),
        "whole:0": dict.fromkeys(names, "whole:0"),
        "mixed": {name: in_turn(number) for number, name in enumerate(names)},
        "auto": search.forecast(model.workload, model.machines).placements,
    }


def drawn_ids(strategy: CollectiveStrategy, setting: Setting) -> dict[str, np.ndarray]:
    """Returns this rank's ids of a step, [samples, ids], by the tables' names."""
    random = np.random.default_rng(strategy.rank())
    samples, ranks = setting.batch // strategy.world_size(), strategy.world_size()

    def draw(tables: Tables) -> np.ndarray:
        spread = ranks if tables.one_owner else 1
        return spread * random.integers(0, tables.rows // spread, [samples, tables.ids])

    return {name: draw(tables) for name, tables in each_table(setting)}


def built(
    strategy: CollectiveStrategy,
    setting: Setting,
    ids: Mapping[str, np.ndarray],
    placements: Mapping[str, Placement],
) -> tuple[tf.Session, tf.Operation]:
    """Builds a model, and returns a session of it and what trains a step."""
    with tf.Graph().as_default():
        pooled = []
        for name, tables in each_table(setting):
            with strategy.embedding_scope(placement=placements[name]):
                table = tf.get_variable(name, [tables.rows, tables.dimension])
            if tables.ids == 1:
                pooled.append(tf.nn.embedding_lookup(table, tf.constant(ids[name][:, 0])))
            else:
                sparse = tf.sparse.from_dense(tf.constant(ids[name] + 1))
                sparse = tf.SparseTensor(sparse.indices, sparse.values - 1, sparse.dense_shape)
                pooled.append(tf.nn.embedding_lookup_sparse(table, sparse, None, combiner="sum"))
        loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.concat(pooled, 1), 1)))
        train = OPTIMIZERS[setting.optimizer]().minimize(loss)
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        return session, train


def step_ms(
    models: Sequence[tuple[tf.Session, tf.Operation]], rounds: int
) -> tuple[list[list[float]], list[float]]:
    """Measures this rank's steps of each model; the models take turns.

    Returns:
        Milliseconds of the steps; milliseconds of processor time of a step, by the best round.
    """
    times: list[list[float]] = [[] for _ in models]
    processor = [float("inf")] * len(models)
    for _ in range(rounds):
        for model, (session, train) in enumerate(models):
            for _ in range(UNCOUNTED):
                session.run(train)
            before = time.process_time()
            for _ in range(COUNTED):
                start = time.perf_counter()
                session.run(train)
                times[model].append(1e3 * (time.perf_counter() - start))
            used = 1e3 * (time.process_time() - before) / COUNTED
            processor[model] = min(processor[model], used)
    return times, processor


def measure(
    strategy: CollectiveStrategy, setting: Setting, machines: Machines, rounds: int
) -> list[Measured]:
    """Measures a setting with all placements. Placements that are the same are measured once."""
    model = StepModel(workload_of(setting, machines.ranks), machines)
    named = placements_of(model)
    different: list[dict[str, Placement]] = []
    for placements in named.values():
        if placements not in different:
            different.append(placements)
    ids = drawn_ids(strategy, setting)
    with strategy.scope(plan="quiet"), contextlib.ExitStack() as opened:
        models = [built(strategy, setting, ids, placements) for placements in different]
        for session, _ in models:
            opened.enter_context(contextlib.closing(session))
        times, processor = step_ms(models, rounds)
    of_ranks = barrier.exchange(None, f"measures {setting}", {"processor": processor})
    slowest = [max(of_models) for of_models in zip(*(rank["processor"] for rank in of_ranks))]
    measured = []
    for name, placements in named.items():
        number = different.index(placements)
        wall = min(times[number]), statistics.median(times[number])
        predicted = 1e3 * model.step(placements).seconds
        measured.append(Measured(str(setting), name, *wall, slowest[number], predicted))
    return measured


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


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of two lists; equal values have their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - counts / 2)[places]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def summary(measured: Sequence[Measured]) -> list[str]:
    """Returns the lines of two tables: of placements, and of `auto` compared with the uniform."""
    # A placement that has several names is one measurement.
    once = list({(m.setting, m.least, m.median): m for m in measured}.values())
    groups = {
        name: [m for m in measured if m.placement == name]
        for name in dict.fromkeys(m.placement for m in measured)
    }
    lines = [
        "| placement | sets | correlation with the least | the median | processor time |",
        5 * "|---" + "|",
    ]
    for name, group in {**groups, "all": once}.items():
        predicted = [m.predicted for m in group]
        found = [correlation([getattr(m, f) for m in group], predicted) for f in MEASURED]
        lines.append(f"| {name} | {len(group)} | {' | '.join(f'{c:.3f}' for c in found)} |")
    head = ["steps", "the faster of two", "auto ÷ best uniform: median", "worst", "at most 1.05"]
    lines += ["", f"| {' | '.join(head)} |", 5 * "|---" + "|"]
    for field in MEASURED:
        pairs = [
            (getattr(a, field) / getattr(b, field), a.predicted / b.predicted)
            for a, b in itertools.combinations(once, 2)
            if a.setting == b.setting
        ]
        clear = [(m, p) for m, p in pairs if max(m, 1 / m) > CLEARLY]
        right = sum((m > 1) == (p > 1) for m, p in clear)
        ratios = auto_ratios(measured, field)
        within = sum(ratio <= 1.05 for ratio in ratios)
        lines.append(
            f"| {field} | {right} of {len(clear)} right | {statistics.median(ratios):.3f} | "
            f"{max(ratios):.3f} | {within} of {len(ratios)} |"
        )
    return lines


def auto_ratios(measured: Sequence[Measured], field: str) -> list[float]:
    """Returns a step with `auto` divided by the best with a uniform placement, of each setting."""
    by_setting: dict[str, dict[str, float]] = {}
    for m in measured:
        by_setting.setdefault(m.setting, {})[m.placement] = getattr(m, field)
    return [times["auto"] / min(times[u] for u in UNIFORM) for times in by_setting.values()]


def run_on_hosts(arguments: argparse.Namespace) -> None:
    """Runs this program on ranks of hosts with slow links; the first host shows what it prints.

    Raises:
        SystemExit: there can be no such hosts here, or a launcher failed.
    """
    program = [__file__, "--rounds", str(arguments.rounds)]
    if arguments.json:
        program += ["--json", os.path.abspath(arguments.json)]
    each = str(arguments.ranks // arguments.hosts)
    with slow_hosts(arguments.hosts, arguments.link, arguments.delay) as (hosts, link):
        print(f"{arguments.ranks} ranks on {arguments.hosts} hosts, {link}", flush=True)
        started = [
            subprocess.Popen(
                [
                    *(*hosts.on_host(name), sys.executable, "-m", "collective.launch"),
                    *(*hosts.options_of(name), "-np", each, "--device", "cpu", *program),
                ],
                env={**jobs.environment_of(jobs.CHECKOUT), "TF_NUM_INTRAOP_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
            for name in hosts.names
        ]
        try:
            codes = [launcher.wait() for launcher in started]
        finally:
            for launcher in started:
                if launcher.poll() is None:
                    jobs.stop(launcher)
    if any(codes):
        sys.exit(f"planner.py: the launchers ended with exit codes {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="of ten steps of each placement")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--search", action="store_true", help="compare searches, without ranks")
    parser.add_argument("--hosts", type=int, default=0, help="run on so many hosts")
    parser.add_argument("--ranks", type=int, default=2, help="of all hosts, with --hosts")
    parser.add_argument("--link", default="1gbit", help="bandwidth of a host's link")
    parser.add_argument("--delay", default="0.2ms", help="delay of a link in each direction")
    arguments = parser.parse_args()
    if arguments.search:
        print("\n".join(search_lines()))
        return
    if arguments.hosts:
        if arguments.ranks % arguments.hosts:
            parser.error(
                f"--hosts {arguments.hosts} takes --ranks that are a multiple of it, not "
                f"{arguments.ranks}"
            )
        run_on_hosts(arguments)
        return
    strategy = CollectiveStrategy()
    machines = job_machines.agree("").machines
    is_first = strategy.rank() == 0
    if is_first:
        head = "| setting | placement | least | median | processor | predicted |"
        print(head + "\n" + 6 * "|---" + "|")
    measured: list[Measured] = []
    for setting in SETTINGS:
        of_setting = measure(strategy, setting, machines, arguments.rounds)
        measured += of_setting
        if is_first:
            for m in of_setting:
                times = " | ".join(f"{value:.2f}" for value in m[2:])
                print(f"| {m.setting} | {m.placement} | {times} |", flush=True)
    if not is_first:
        return
    print("\n".join(["", *summary(measured)]))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump([m._asdict() for m in measured], file)


if __name__ == "__main__":
    main()
