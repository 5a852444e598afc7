"""The planner's choices, compared with all placements there are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from collective.planner import search
from collective.planner.machines import Machines
from collective.planner.search import DoesNotFit
from collective.planner.step_model import StepModel
from collective.planner.workload import OPTIMIZERS, TableWork, Workload
from tests.unit.planner.test_step_model import device

CASES = 60


def problem(seed: int, most_tables: int) -> tuple[Workload, Machines]:
    """Draws tables and machines for which it isn't clear which placement is better."""
    draw = random.Random(seed)
    tables = tuple(
        TableWork(
            f"t{i}",
            rows=int(10 ** draw.uniform(1, 5)),
            dimension=draw.choice([1, 4, 16, 64]),
            type=draw.choice(["float32", "float32", "float16"]),
            ids=draw.choice([0.1, 1, 1, 10]),
            distinct=draw.choice([None, None, 0.5, 1.0]),
            optimizer=draw.choice(sorted(OPTIMIZERS)),
            imbalance=draw.choice([1.0, 3.0]),
            dynamic=draw.random() < 0.1,
            bounded=draw.random() < 0.1,
        )
        for i in range(draw.randint(1, most_tables))
    )
    ranks_of_host, hosts = draw.choice([(2, 1), (8, 1), (8, 2), (8, 8), (4, 4)])
    rates = {
        "between_rate": 10 ** draw.uniform(5, 9),
        "within_rate": 10 ** draw.uniform(7, 11),
        "memory_rate": 10 ** draw.uniform(9, 12),
        "start": 10 ** draw.uniform(-9, -5),
        "within_wait": 10 ** draw.uniform(-5, -3),
        "between_wait": 10 ** draw.uniform(-5, -3),
    }
    workload = Workload(tables, draw.choice([64, 1024, 65536]), draw.choice([0, 10**5]))
    machines = Machines(device(**rates, memory=1e15), ranks_of_host * hosts, hosts)
    model = StepModel(workload, machines)
    by_rows, most = (
        model.bytes_of(search._start(model, placement)) for placement in ("rows", "replicated")
    )
    # From too little for anything but rows to enough for everything.
    memory = by_rows + draw.choice([0.001, 0.1, 0.5, 1.0]) * (most - by_rows) + 1
    return workload, Machines(device(**rates, memory=memory), machines.ranks, hosts)


def everything(workload: Workload, machines: Machines) -> float:
    """Returns the seconds of the best of all placements that are possible and fit."""
    model = StepModel(workload, machines)
    choices = [search._possible(table) for table in workload.tables]
    names = [table.name for table in workload.tables]
    fitting = []
    for placements in itertools.product(*choices):
        each = dict(zip(names, placements))
        if model.bytes_of(each) <= machines.room:
            fitting.append(model.step(each).seconds)
    return min(fitting)


def test_small_sets_of_tables_are_placed_as_by_exhaustive_search():
    """Within 5 % everywhere; and both placements are chosen often, or it would show little."""
    chosen = {"rows": 0, "replicated": 0}
    exact = 0
    for seed in range(CASES):
        workload, machines = problem(seed, most_tables=8)
        found = search.forecast(workload, machines)
        best = everything(workload, machines)
        assert best * (1 - 1e-9) <= found.parts.seconds <= 1.05 * best, seed
        assert found.bytes <= machines.room, seed
        exact += found.parts.seconds <= best * (1 + 1e-9)
        for placement in found.placements.values():
            chosen[placement] += 1
    assert exact == CASES
    assert min(chosen.values()) > CASES / 2, chosen


def test_it_is_never_worse_than_rules():
    """Than all by rows, and than replicating whatever is smaller than some size."""
    better = 0
    for seed in range(1000, 1000 + CASES):
        workload, machines = problem(seed, most_tables=40)
        found = search.forecast(workload, machines)
        model = StepModel(workload, machines)
        by_rule = []
        for below in (0, 1e4, 1e5, 1e6, 1e7, 1e9):
            by_size = {
                t.name: "replicated"
                if t.rows * t.weight_bytes < below and "replicated" in search._possible(t)
                else "rows"
                for t in workload.tables
            }
            if model.bytes_of(by_size) <= machines.room:
                by_rule.append(model.step(by_size).seconds)
        assert found.parts.seconds <= min(by_rule) * (1 + 1e-9), seed
        better += found.parts.seconds < 0.99 * min(by_rule)
    assert better > CASES / 10


def test_the_order_of_tables_changes_nothing():
    workload, machines = problem(3, most_tables=40)
    expected = search.forecast(workload, machines)
    for seed in range(3):
        tables = random.Random(seed).sample(list(workload.tables), len(workload.tables))
        assert search.forecast(dataclasses.replace(workload, tables=tables), machines) == expected


def test_what_the_other_placement_costs_is_what_it_costs():
    workload, machines = problem(5, most_tables=8)
    found = search.forecast(workload, machines)
    model = StepModel(workload, machines)
    compared = 0
    for choice in found.choices:
        if choice.other_costs is None:
            continue
        changed: Any = {**found.placements, choice.table.name: choice.other}
        seconds = model.step(changed).seconds
        assert choice.other_costs == pytest.approx(seconds - found.parts.seconds, rel=1e-6)
        assert choice.other_costs >= 0
        compared += 1
    assert compared


def test_what_can_not_be_chosen_says_why():
    tables = (
        TableWork("dynamic", 10, 4, dynamic=True),
        TableWork("bounded", 10, 4, bounded=True),
        TableWork("given", 10, 4, placement="replicated"),
        TableWork("large", 10**7, 4),
    )
    found = search.forecast(Workload(tables, 64), Machines(device(memory=3e8), 2))
    whys = {choice.table.name: choice.why for choice in found.choices}
    assert whys["dynamic"] == "a dynamic table can't be replicated"
    assert whys["bounded"] == "a table with a weight_bound can't be replicated"
    assert whys["given"] == "placement: replicated is given"
    assert whys["large"] == "'replicated' takes 0.3 GB of a rank: too much"
    assert found.placements["given"] == "replicated"


def test_a_table_that_does_not_fit_is_named():
    tables = (TableWork("small", 10, 4), TableWork("large", 10**9, 16))
    with pytest.raises(DoesNotFit) as raised:
        search.forecast(Workload(tables, 64), Machines(device(memory=2e9), 8))
    assert str(raised.value).startswith(
        "8 ranks can't hold these tables. The largest, 'large' [1,000,000,000, 16] with its slots, "
        "takes 16.0 GB of each rank with placement 'rows'; everything takes 16.0 GB, and may take "
        "2.0 GB of the 2.0 GB of D-1GB. Take at least 65 ranks"
    )
    given = dataclasses.replace(tables[1], placement="replicated")
    with pytest.raises(DoesNotFit, match="Leave out the placement of 'large'"):
        search.forecast(Workload((given,), 64), Machines(device(memory=2e9), 80))
    network = Workload(tables[:1], 64, parameters=10**10)
    with pytest.raises(DoesNotFit, match="More ranks don't help"):
        search.forecast(network, Machines(device(memory=2e9), 8))


@pytest.mark.parametrize(
    "rows, ranks, hosts", [(10, 1, 1), (5 * 10**7, 4, 1), (10**9, 72, 9), (10**10, 648, 81)]
)
def test_the_smallest_cluster_holds_it_and_a_smaller_one_does_not(rows, ranks, hosts):
    workload = Workload((TableWork("t", rows, 16),), 64)
    machines = Machines(device(memory=2e9), 8)
    found = search.smallest(workload, machines, 8)
    assert (found.ranks, found.hosts) == (ranks, hosts)
    search.forecast(workload, found)
    if ranks > 1:
        fewer = dataclasses.replace(
            found, ranks=ranks - (1 if hosts == 1 else 8), hosts=max(1, hosts - 1)
        )
        with pytest.raises(DoesNotFit):
            search.forecast(workload, fewer)


def test_a_thousand_tables_are_placed():
    draw = random.Random(0)
    tables = tuple(
        TableWork(f"t{i}", int(10 ** draw.uniform(1, 5)), 16, distinct=0.5) for i in range(1000)
    )
    machines = Machines(device(start=1e-7, between_rate=1e7), 16, 2)
    found = search.forecast(Workload(tables, 4096), machines)
    assert 0 < sum(p == "replicated" for p in found.placements.values()) < 1000
    assert found.parts.seconds <= (found.by_rows or 0)
