"""The planner's choices, compared with all placements there are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from collective.planner import choices, first_placements, search
from collective.planner.machines import Machines
from collective.planner.placement_costs import Costs
from collective.planner.search import DoesNotFit
from collective.planner.step_model import StepModel
from collective.planner.workload import Placement, TableWork, Workload, kind_of
from tests.unit.planner import other_searches
from tests.unit.planner.problems import CLUSTERS, device, problem

SMALL, LARGE = 60, 12
FEW_RANKS = [(2, 1), (1, 2), (3, 1)]


def test_small_sets_of_tables_are_placed_as_by_exhaustive_search():
    """Nearly always the same, and never much worse; all placements are chosen often, or it would
    show little."""
    exact = 0
    chosen = {"rows": 0, "replicated": 0, "whole": 0}
    for seed in range(SMALL):
        # Few ranks can share few whole tables evenly.
        clusters = FEW_RANKS if seed % 2 else CLUSTERS
        workload, machines = problem(seed, most_tables=5, clusters=clusters)
        found = search.forecast(workload, machines)
        best = other_searches.everything(StepModel(workload, machines))
        assert best * (1 - 1e-9) <= found.parts.seconds <= 1.05 * best, seed
        exact += found.parts.seconds <= best * (1 + 1e-9)
        assert found.bytes <= machines.room, seed
        for placement in found.placements.values():
            chosen[kind_of(placement)] += 1
    assert exact >= 0.95 * SMALL
    assert min(chosen.values()) > SMALL / 10, chosen


def test_it_is_never_worse_than_rules():
    """Than all by rows, than whatever is smaller than some size replicated, than all whole with the
    largest first, and than TorchRec's greedy proposals; often better than all of them."""
    better = 0
    for seed in range(1000, 1000 + LARGE):
        workload, machines = problem(seed, most_tables=40)
        found = search.forecast(workload, machines)
        model = StepModel(workload, machines)
        by_rule = [rule(model) for rule in other_searches.RULES.values()]
        assert found.parts.seconds <= min(by_rule) * (1 + 1e-9), seed
        assert found.bytes <= machines.room, seed
        better += found.parts.seconds < 0.99 * min(by_rule)
    assert better > LARGE / 10


def test_annealing_finds_nothing_much_better():
    workload, machines = problem(1002, most_tables=40, least_tables=20)
    found = search.forecast(workload, machines)
    model = StepModel(workload, machines)
    starts = [found.placements, first_placements.all_of(model, "rows")]
    best = other_searches.annealed(model, 0, 2000, starts)
    assert best <= found.parts.seconds <= 1.05 * best


def test_tables_of_which_ranks_would_be_asked_unevenly_are_whole_on_one_each():
    """Four equal tables for four ranks, whose busiest owner would have three times the mean."""
    tables = tuple(TableWork(f"t{i}", 10**5, 16, distinct=1.0, imbalance=3.0) for i in range(4))
    machines = Machines(device(), 4)
    found = search.forecast(Workload(tables, 4000), machines)
    assert sorted(found.placements.values()) == [f"whole:{rank}" for rank in range(4)]
    assert found.by_rows is not None
    # Keys, rows and gradients of the owner; all else is the same.
    asked, row = 4000, 64
    saved = (0.75 * asked * (8 + 2 * row) + asked * (2 * 8 + 4 * row)) * (3 - 1) / 1e9
    updates = found.by_rows - found.parts.seconds - saved
    assert 0 < updates < 2 * 2 * row * asked * 3 / 1e9
    for choice in found.choices:
        assert choice.other == "rows"
        assert choice.why.startswith("'rows': ")
        assert choice.why.endswith(" ms more for reading and writing memory")
    # A fifth one wouldn't be even.
    even = tuple(dataclasses.replace(table, imbalance=1.0) for table in tables)
    assert set(search.forecast(Workload(even, 4000), machines).placements.values()) == {"rows"}


@pytest.mark.parametrize("count", [12, 20])
def test_rounding_gains_nothing_by_whole_tables(count):
    """A step of equal tables is as long by rows as with the same number whole on each rank."""
    tables = tuple(TableWork(f"t{i:02}", 1000, 64) for i in range(count))
    found = search.forecast(Workload(tables, 4000), Machines(device(), 4))
    assert set(found.placements.values()) == {"rows"}


def test_whole_tables_are_where_they_were_given():
    tables = (
        TableWork("a", 1000, 16, placement="whole:6"),
        TableWork("b", 1000, 16, placement="whole"),
        TableWork("c", 10, 4, placement="whole:0"),
    )
    found = search.forecast(Workload(tables, 4000), Machines(device(), 4))
    assert found.placements["a"] == "whole:2" and found.placements["c"] == "whole:0"
    assert found.placements["b"] in ("whole:1", "whole:3")
    assert {choice.why for choice in found.choices} == {
        f"placement: {table.placement} is given" for table in tables
    }
    one = search.forecast(Workload(tables, 4000), Machines(device(), 1))
    rows = tuple(dataclasses.replace(table, placement=None) for table in tables)
    alone = search.forecast(Workload(rows, 4000), Machines(device(), 1))
    assert one.parts.seconds == pytest.approx(alone.parts.seconds)
    large = TableWork("large", 10**8, 16, placement="whole")
    with pytest.raises(DoesNotFit, match=r"takes 12.8 GB of one rank with placement 'whole:0'"):
        search.forecast(Workload((large,), 64), Machines(device(memory=2e9), 80))


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


@pytest.mark.parametrize("small, large", itertools.product(("replicated", "rows"), repeat=2))
def test_another_placement_changes_how_all_gradients_travel(small: Placement, large: Placement):
    """The small tables' gradients are matrices, unless the large table is replicated as well."""
    tables = tuple(TableWork(f"t{rows}", rows, 16) for rows in (100, 200, 20_000))
    model = StepModel(Workload(tables, 4000), Machines(device(), 4))
    placements: dict[str, Placement] = {"t100": small, "t200": "replicated", "t20000": large}
    assert model.as_matrices(placements) is (large == "rows")
    before = model.step(placements)
    for choice in choices.explained(Costs(model), placements):
        after = model.step({**placements, choice.table.name: choice.other})
        assert choice.other_costs == pytest.approx(after.seconds - before.seconds, rel=1e-6)


def test_what_can_not_be_chosen_says_why():
    tables = (
        TableWork("dynamic", 4 * 10**6, 4, dynamic=True),
        TableWork("open", 10, 4, dynamic=True),
        TableWork("bounded", 10, 4, bounded=True),
        TableWork("given", 10, 4, placement="replicated"),
        TableWork("large", 10**7, 4),
    )
    found = search.forecast(Workload(tables, 64), Machines(device(memory=3e8), 2))
    whys = {choice.table.name: choice.why for choice in found.choices}
    assert whys["dynamic"] == "a dynamic table can't be replicated"  # nor whole: it is too large
    assert whys["open"].startswith("'whole:0': ")
    assert whys["bounded"].startswith("'whole:0': ")
    assert whys["given"] == "placement: replicated is given"
    assert whys["large"] == "'replicated' takes 0.4 GB of a rank: too much"
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


@pytest.mark.slow
def test_a_thousand_tables_are_placed():
    draw = random.Random(0)
    tables = tuple(
        TableWork(f"t{i}", int(10 ** draw.uniform(1, 5)), 16, distinct=0.5) for i in range(1000)
    )
    machines = Machines(device(start=1e-7, between_rate=1e7), 64, 8)
    found = search.forecast(Workload(tables, 4096), machines)
    kinds = [kind_of(placement) for placement in found.placements.values()]
    assert 0 < kinds.count("replicated") < 1000 and kinds.count("whole")
    assert found.parts.seconds <= (found.by_rows or 0)
