"""Which placement 'auto' chooses for a table, and by what."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow.compat.v1 as tf

from collective.planner import published, search
from collective.planner.machines import Figure, Machines
from collective.planner.step_model import MATRIX_ELEMENTS, StepModel
from collective.planner.workload import TableWork, Workload
from collective.tables import automatic_placement
from collective.tables.automatic_placement import AutomaticPlacement, Basis

CPUS = Machines(published.CPU, 2)
# Sending between hosts is slow, so that copies of small tables pay: a host's ranks share the sums
# of a ring. Operations take no time.
SLOW = Machines(
    dataclasses.replace(
        published.CPU,
        start=Figure(0, "given", ""),
        id_time=Figure(0, "given", ""),
        between_rate=Figure(1e5, "given", ""),
    ),
    16,
    2,
)


def chooser(machines=CPUS, workload=None):
    """Returns a chooser, and the files for which it has asked its ranks."""
    asked: list[str] = []
    made = AutomaticPlacement()

    def agree(file: str) -> Basis:
        asked.append(file)
        return Basis(machines, workload, "a test")

    made.connect(agree)
    return made, asked


def test_a_table_of_no_file_is_placed_by_what_it_alone_adds():
    """As a matrix: the copy of a small table is sent sooner than the rows of many ids."""
    small, large = TableWork("small", 10, 4), TableWork("large", 50_000, 4)
    with tf.Graph().as_default():
        made, asked = chooser(SLOW)
        assert made.choose("", small).placement == "replicated"
        assert made.choose("", large).placement == "rows"
        bounded = made.choose("", TableWork("bounded", 10, 4, bounded=True))
        assert bounded == ("rows", "a table with a weight_bound can't be replicated")
        assert asked == [""]  # once
        model = StepModel(Workload((small,), 8192), SLOW)
        assert model.table(small, "replicated").seconds < model.table(small, "rows").seconds
    with tf.Graph().as_default():
        made, _ = chooser(CPUS)
        placement, why = made.choose("", small)
        assert placement == "rows" and why.endswith("ms more for starting operations")
        made, _ = chooser(Machines(SLOW.device, 1))
        assert made.choose("", TableWork("other", 10, 4)) == ("rows", "one rank has all rows")


def test_copies_are_matrices_together():
    """Beyond the number of elements that travel as matrices, all of them would become slower."""
    with tf.Graph().as_default():
        made, _ = chooser(SLOW)
        small = [TableWork(f"s{i}", 10, 4) for i in range(3)]
        automatic_placement.of_graph().elements = MATRIX_ELEMENTS - 60
        assert [made.choose("", t).placement for t in small] == ["replicated", "rows", "rows"]
        assert "more than 262,144 numbers" in made.choose("", small[2]).why


def test_a_file_has_its_tables_placed_together():
    workload = Workload((TableWork("only", 10, 4), TableWork("b", 20, 4, ids=3.0)), 16)
    expected = search.forecast(workload, CPUS)
    with tf.Graph().as_default() as graph:
        made, asked = chooser(CPUS, workload)
        for choice in expected.choices:
            table = TableWork(choice.table.name, choice.table.rows, 4)
            assert made.choose("f", table) == (choice.placement, choice.why)
        wider = made.choose("f", TableWork("only ", 10, 8))
        assert wider.why.endswith("(not in f)")
        assert asked == ["f"]
        note = automatic_placement.note_of(graph)
        replicated = list(expected.placements.values()).count("replicated")
        assert note == f"replicates {replicated} of 3 tables, the others are by rows; a test"
    with tf.Graph().as_default():
        other = made.choose("f", TableWork("only", 11, 4))
        assert other.why.endswith("(in f it is [10, 4] float32, here [11, 4] float32)")
    assert automatic_placement.note_of(tf.Graph()) == ""
    given = (
        TableWork("copied", 10, 4, placement="replicated"),
        TableWork("whole", 10, 4, placement="whole:3"),
    )
    with tf.Graph().as_default() as graph:
        made, _ = chooser(CPUS, Workload(given, 16))
        bounded = made.choose("f", TableWork("copied", 10, 4, bounded=True))
        assert bounded == ("rows", "a table with a weight_bound can't be replicated")
        whole = made.choose("f", TableWork("whole", 10, 4, bounded=True))
        assert whole == ("whole:1", "placement: whole:3 is given")  # of two ranks
        note = automatic_placement.note_of(graph)
        assert note == (
            "replicates 0 of 2 tables, 1 is whole on one rank, the others are by rows; a test"
        )


def test_a_dynamic_table_of_a_file_may_be_whole():
    """The file says how many rows are expected; the table itself doesn't know."""
    tables = (
        TableWork("open", 1000, 4, dynamic=True, imbalance=2.0, placement="whole:3"),
        TableWork("closed", 1000, 4),
    )
    with tf.Graph().as_default():
        made, _ = chooser(CPUS, Workload(tables, 16))
        here = TableWork("open", 1, 4, dynamic=True)
        assert made.choose("f", here) == ("whole:1", "placement: whole:3 is given")
        closed = TableWork("closed", 1, 4, dynamic=True)
        wrong = "a dynamic table can't be replicated (in f it is [1000, 4] float32, here [None, 4] "
        assert made.choose("f", closed) == ("rows", f"{wrong}float32)")
        missing = made.choose("f", TableWork("other", 1, 4, dynamic=True))
        assert missing == ("rows", "a dynamic table can't be replicated (not in f)")
    uneven = [TableWork(f"t{i}", 1000, 64, ids=50.0, dynamic=True, imbalance=2.0) for i in "ab"]
    with tf.Graph().as_default():
        made, _ = chooser(CPUS, Workload(tuple(uneven), 4096))
        chosen = [made.choose("f", dataclasses.replace(t, rows=1)).placement for t in uneven]
        assert sorted(chosen) == ["whole:0", "whole:1"]


def test_what_does_not_fit_is_by_rows():
    full = dataclasses.replace(CPUS.device, memory=Figure(1e6, "given", ""))
    workload = Workload((TableWork("t", 10**6, 64), TableWork("u", 5, 1)), 16)
    with tf.Graph().as_default():
        made, _ = chooser(dataclasses.replace(CPUS, device=full), workload)
        placement, why = made.choose("f", TableWork("t", 10**6, 64))
        assert placement == "rows" and "can't hold these tables" in why


@pytest.mark.parametrize(
    "name, device",
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("Tesla T4", "T4-16GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
    ],
)
def test_a_gpu_is_known_by_cudas_name(name, device):
    assert published.named(name).name == device


def test_a_gpu_that_is_not_listed_is_assumed():
    device = published.named("NVIDIA Unheard-of")
    assert device.name == "NVIDIA Unheard-of"
    assert {figure.origin for figure in device.figures().values()} == {"assumed"}
