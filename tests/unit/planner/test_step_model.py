"""Predicted steps, worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from collective.ops.exchange import slice_means
from collective.planner import step_model
from collective.planner.machines import Machines
from collective.planner.step_model import StepModel
from collective.planner.workload import TableWork, Workload, distinct_of_equally_likely
from tests.unit.planner.problems import device


def test_rows_worked_out_by_hand():
    """1,000 samples of 4 ranks: 250 ids a rank, 100 of them distinct, rows of 64 bytes.

    The other 150 ids' rows are read four times as fast. Keys 8 (250 + 100) 2, rows 64 (400 +
    3 * 137.5), the update 2 * 128 bytes of a quarter of what 400 draws among the table's million
    rows name. On the wires 100 (8 + 128), 3/4 of it.
    """
    table = TableWork("t", 1_000_000, 16, distinct=0.4)
    model = StepModel(Workload((table,), 1000), Machines(device(), 4))
    parts = model.table(table, "rows")
    named = 1e6 * (1 - (1 - 1e-6) ** 400) / 4
    assert parts.memory == pytest.approx(
        (5600 + 64 * (400 + 3 * 137.5) + 256 * named) / 1e9, rel=1e-6
    )
    assert parts.exchange == pytest.approx(0.75 * 13600 / 1e9)
    assert parts.starts == pytest.approx(step_model.ROWS_STARTS * 1e-6)
    assert (parts.network, parts.dense, parts.waits) == (0, 0, 0)


def test_replicated_worked_out_by_hand():
    """As a matrix, 2 * 3/4 of 100 * 17 numbers travel; as rows 3 times those of 250
    draws, each of 64 + 8 bytes."""
    table = TableWork("t", 100, 16)
    model = StepModel(Workload((table,), 1000), Machines(device(), 4))
    matrix = model.table(table, "replicated", as_matrices=True)
    assert matrix.dense == pytest.approx(1.5 * 100 * 17 * 4 / 1e9)
    assert matrix.exchange == 0
    sums = model.table(table, "replicated", as_matrices=False)
    drawn = 100 * (1 - 0.99**250)
    assert sums.exchange == pytest.approx(3 * drawn * 72 / 1e9)
    assert sums.dense == 0
    assert sums.memory > matrix.memory


def test_whole_worked_out_by_hand():
    """The owner answers what all 4 ranks ask: 400 keys, rows and gradients of the table above, and
    updates all that they name. The others only ask."""
    table = TableWork("t", 1_000_000, 16, distinct=0.4)
    model = StepModel(Workload((table,), 1000), Machines(device(), 4))
    asks = model.on_all_ranks(table, "whole:1")
    assert asks.memory == pytest.approx((16 * 250 + 3 * 64 * 137.5) / 1e9)
    assert asks.exchange == 0 and asks.starts == pytest.approx(step_model.ROWS_STARTS * 1e-6)
    out, back = model.answers(table)
    named = 1e6 * (1 - (1 - 1e-6) ** 400)
    assert out.memory == pytest.approx(2 * 400 * (8 + 64) / 1e9)
    assert out.exchange == pytest.approx(0.75 * 400 * 72 / 1e9)
    assert back.memory == pytest.approx((2 * 400 * 64 + 256 * named) / 1e9, rel=1e-6)
    assert back.exchange == pytest.approx(0.75 * 400 * 64 / 1e9)
    by_rows, whole = (model.table(table, where).seconds for where in ("rows", "whole:1"))
    assert whole - asks.seconds == pytest.approx(4 * (by_rows - asks.seconds), rel=1e-6)


def test_each_phase_lasts_as_long_as_its_slowest_rank():
    """Rank 1 answers most keys, rank 0 updates most: all slots of a table that is hardly used."""
    asked = TableWork("asked", 10**6, 16, ids=100.0)
    large = TableWork("large", 10**6, 16, ids=0.1, optimizer="adam")
    model = StepModel(Workload((asked, large), 1000), Machines(device(), 4))
    both = model.slowest_owners({"asked": "whole:1", "large": "whole:0"})
    assert both == [model.answers(asked)[0], model.answers(large)[1]]
    one = model.slowest_owners({"asked": "whole:1", "large": "whole:1"})
    assert one == [a + b for a, b in zip(model.answers(asked), model.answers(large))]
    assert model.slowest_owners({"asked": "rows", "large": "replicated"}) == []


@pytest.mark.parametrize("rows, imbalance, share", [(1000, 1, 1 / 4), (5, 1, 2 / 5), (5, 9, 1)])
def test_the_busiest_owner_of_rows(rows, imbalance, share):
    """It has one row more than others, or more keys, and never more than a whole table's owner."""
    table = TableWork("t", rows, 16, imbalance=imbalance)
    model = StepModel(Workload((table,), 1000), Machines(device(), 4))
    asks = model.on_all_ranks(table, "whole:0")
    by_rows = model.table(table, "rows") - asks
    whole = model.table(table, "whole:0") - asks
    assert by_rows.exchange == pytest.approx(share * whole.exchange)


def test_pooled_rows_pass_memory_nine_times():
    """Of 250 samples a rank, 16 and 4 numbers each: written, copied, read by a product and for its
    weights' gradient; their gradient is written, cut, and read. Ids and placement don't matter."""
    tables = TableWork("a", 10**6, 16, ids=20.0), TableWork("b", 10, 4)
    model = StepModel(Workload(tables, 1000), Machines(device(), 4))
    for placements in ({"a": "rows", "b": "replicated"}, {"a": "whole:1", "b": "rows"}):
        assert model.shared(placements).memory == pytest.approx(9 * 250 * 20 * 4 / 1e9)


def test_collectives_of_a_step():
    """The agreement; keys, rows, gradients; the dense gradients; an allgather a type."""
    tables = tuple(
        TableWork(name, rows, 16, type=type_)
        for name, rows, type_ in [("a", 10, "float32"), ("b", 10**6, "float16")]
    )
    machines = Machines(device(), 4)

    def waits(a: str, b: str, parameters: int = 0) -> float:
        model = StepModel(Workload(tables, 100, parameters), machines)
        return model.shared({"a": a, "b": b}).waits * 1e3

    assert waits("rows", "rows") == pytest.approx(4)
    assert waits("rows", "rows", 1000) == pytest.approx(5)
    assert waits("replicated", "rows") == pytest.approx(5)
    assert waits("whole:1", "whole:3") == pytest.approx(4)  # the same three, of all ranks
    assert waits("replicated", "replicated") == pytest.approx(3)
    assert waits("replicated", "replicated", 1000) == pytest.approx(4)


def test_wires():
    """The slower of two wires counts; a ring between hosts has those of all of a host's ranks."""
    two_hosts = Machines(device(), 8, hosts=2)
    assert two_hosts.all_to_all(8e6) == pytest.approx(4e6 / 1e8)
    assert two_hosts.ring(1e6) == pytest.approx(1e6 / 4e8)
    assert Machines(device(), 8).all_to_all(8e6) == pytest.approx(7e6 / 1e9)
    assert Machines(device(), 1).all_to_all(8e6) == 0
    assert Machines(device(), 1).wait == 0


def test_one_rank_waits_for_nobody():
    work = Workload((TableWork("t", 100, 16),), 100, parameters=1000)
    parts = StepModel(work, Machines(device(), 1)).step({"t": "rows"})
    assert (parts.waits, parts.exchange, parts.dense) == (0, 0, 0)
    assert parts.network == pytest.approx(6 * 1000 * 100 / 1e12)


@pytest.mark.parametrize("optimizer, slots, all_rows", [("sgd", 0, 0), ("adam", 2, 1)])
def test_an_update_of_all_rows_passes_all_rows(optimizer, slots, all_rows):
    table = TableWork("t", 10**6, 16, optimizer=optimizer)
    machines = Machines(device(), 4)
    big = StepModel(Workload((table,), 4), machines).table(table, "rows").memory
    assert table.row_bytes == 64 * (1 + slots)
    assert big > all_rows * 2 * 250_000 * 192 / 1e9
    assert all_rows or big < 1e-5


def test_memory_of_a_rank():
    """The rank with most rows: a quarter, rounded up; all rows of what is replicated."""
    table = TableWork("t", 101, 16, optimizer="rowwise_adagrad")
    model = StepModel(Workload((table,), 4), Machines(device(), 4))
    assert model.table_bytes(table, "rows") == 26 * 68
    assert model.table_bytes(table, "replicated") == 101 * 68
    buffers = 2 * 64 * (distinct_of_equally_likely(1, 101) + 1)
    assert model.bytes_of({"t": "rows"}) == pytest.approx(26 * 68 + buffers)
    answers = 2 * 64 * 3  # a row and a gradient for each other rank
    assert model.bytes_of({"t": "whole:2"}) == pytest.approx(101 * 68 + answers + buffers)


@pytest.mark.parametrize("draws, values", [(50, 10), (1000, 1000), (3, 10**9)])
def test_distinct_ids_are_those_of_draws(draws, values):
    generator = np.random.default_rng(0)
    seen = [np.unique(generator.integers(0, values, draws)).size for _ in range(200)]
    assert distinct_of_equally_likely(draws, values) == pytest.approx(np.mean(seen), rel=0.02)


def test_more_of_anything_never_makes_a_step_shorter():
    base = TableWork("t", 1000, 16)
    machines = Machines(device(), 4)

    def seconds(table: TableWork, placement: str, batch: int = 1000) -> float:
        return StepModel(Workload((table,), batch), machines).step({"t": placement}).seconds

    for placement in ("rows", "replicated"):
        first = seconds(base, placement)
        for change in ({"dimension": 64}, {"ids": 4.0}, {"rows": 4000}, {"optimizer": "adam"}):
            assert seconds(dataclasses.replace(base, **change), placement) >= first, change
        assert seconds(base, placement, 2000) > first
    skewed = dataclasses.replace(base, imbalance=3.0)
    assert seconds(skewed, "rows") > seconds(base, "rows")


def test_the_limit_of_matrices_is_the_librarys():
    assert step_model.MATRIX_ELEMENTS == slice_means.MOST_ELEMENTS
    assert TableWork("t", 7, 5).elements == slice_means._elements([7, 5])
    at = TableWork("t", slice_means.MOST_ELEMENTS // 16, 15)
    over = dataclasses.replace(at, rows=at.rows + 1)
    for table, expected in ((at, True), (over, False)):
        model = StepModel(Workload((table,), 10), Machines(device(), 2))
        assert model.as_matrices({"t": "replicated"}) is expected
        assert model.as_matrices({"t": "rows"})
    assert math.isclose(at.elements, slice_means.MOST_ELEMENTS)


def test_measured_distinct_ids_hold_for_other_numbers_of_ids():
    """Ids have a power law, so that distinct ones grow as n^β; there are never more than rows."""
    drawn = np.minimum(np.random.default_rng(3).zipf(1.5, 40_000), 1_000_000)
    counts = {n: np.unique(drawn[:n]).size for n in (200, 2000, 20_000)}
    measured = TableWork("t", 1_000_000, 4, distinct=counts[2000] / 2000, distinct_at=2000)
    assert measured.distinct_of(2000) == pytest.approx(counts[2000])
    constant = dataclasses.replace(measured, distinct_at=None)
    for n in (200, 20_000):
        assert measured.distinct_of(n) == pytest.approx(counts[n], rel=0.3)
        assert not constant.distinct_of(n) == pytest.approx(counts[n], rel=0.45)
    assert dataclasses.replace(measured, rows=30).distinct_of(20_000) == 30
    assert measured.distinct_of(0.5) == 0.5
    all_distinct = TableWork("t", 10**9, 4, distinct=1.0, distinct_at=50)
    assert all_distinct.distinct_of(70) == pytest.approx(70)
    one = TableWork("t", 10**9, 4, distinct=1 / 50, distinct_at=50)
    assert one.distinct_of(5000) == pytest.approx(1)
