"""Holds the choice of tests by tier to what CONTRIBUTING.md says of it."""

import dataclasses
import itertools

import pytest

from tests.rank_plugin.configuration import BACKENDS, PARAMETERS, Choice, Configuration, Marks

MARKS = [
    Marks(),
    Marks(matrix=True),
    Marks(backends=BACKENDS),
    Marks(backends=BACKENDS, sample=3, ranks=(1, 3)),
    Marks(backends=("hb",), ranks=(3,)),
    Marks(either_backend=True, sample=1),
    Marks(either_backend=True, matrix=True, ranks=(1,), ungrouped=True),
    Marks(either_backend=True, carriers=True),
]


def ran(tier, marks, count):
    """Returns (configuration, parameter) of each run that a tier has of a case."""
    choice = Choice(tier)
    return [
        (configuration, number)
        for configuration, number in itertools.product(choice.of(marks), range(count))
        if choice.runs(marks, configuration, number, count)
    ]


@pytest.mark.parametrize("marks", MARKS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("turn", [3, 11 | 1 << 8, 5 | 1 << 12])
def test_the_matrix_runs_a_case_once_more_with_another_parameter(marks, count, turn):
    marks = dataclasses.replace(marks, turn=turn)
    in_test, in_matrix = ran("test", marks, count), ran("matrix", marks, count)
    few = min(marks.sample or PARAMETERS, count)
    assert len(in_test) == (0 if marks.matrix else few)
    if marks.matrix:
        assert len(in_matrix) == few
    elif few < count:
        assert len(in_matrix) == PARAMETERS
    else:
        assert len(in_matrix) == (Choice("matrix").of(marks) != Choice().of(marks))
    both = in_test + in_matrix
    assert len(both) == len({*both})
    if few < count:
        assert len({number for _, number in both}) == len(both)


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_slow_is_left_to_a_tier_of_its_own(count):
    for marks in (Marks(sample=2), Marks(backends=BACKENDS, sample=3, ranks=(1, 3))):
        slow = dataclasses.replace(marks, slow=True)
        assert ran("test", slow, count) == [] == ran("slow", marks, count)
        assert ran("slow", slow, count) == ran("test", marks, count) != []
        assert ran("all", slow, count) == ran("all", marks, count)


def test_backends_take_turns():
    marks = Marks(backends=BACKENDS, sample=4)
    ran = [
        [c.backend for c in Choice().of(marks) if Choice().runs(marks, c, number, 4)]
        for number in range(4)
    ]
    # each parameter of an inner decorator of two comes to both
    assert ran == [["hb"], ["sok"], ["sok"], ["hb"]]


def chosen(marks):
    (configuration,) = Choice("matrix").of(marks)
    return str(configuration)


def test_the_matrix_has_each_configuration_in_turn():
    depends = dict(ranks=(1, 3), ungrouped=True, carriers=True, two_levels=True, double="matrix")
    most, left_out = 1 << 12, 1 << 10
    assert {chosen(Marks(**depends, turn=turn | most)) for turn in range(8)} == {
        "2-hb",
        "1-hb",
        "3-hb",
        "2-hb-ungrouped",
        "2-sok-horovod",
        "3-hb-mixed",
        "4-hb-two_levels",
        "2-sok-double",
    }
    # every other one has the most ranks
    assert {chosen(Marks(**depends, turn=turn)) for turn in range(8)} == {"3-hb"}
    # of the rest seven of eight are left out, or have another parameter
    assert chosen(Marks(**depends, turn=left_out)) == "2-sok"
    assert ran("matrix", Marks(turn=left_out), 1) == []
    # where nothing depends on the ranks, or the case is slow, every sixteenth one has a turn
    assert chosen(Marks()) == "2-hb" and chosen(Marks(either_backend=True)) == "2-sok"
    for few in (Marks(), Marks(**depends, slow=True)):
        for turn in (left_out, 1 << 11):
            assert chosen(dataclasses.replace(few, turn=turn)) == "2-sok"
    assert chosen(Marks(**depends, slow=True)) == "3-hb"


def test_other_parameters_run_of_every_eighth_case():
    assert ran("matrix", Marks(turn=1 << 8), 3) == [(Configuration(2, "sok"), 1)]
    assert ran("matrix", Marks(turn=1 << 8 | 1 << 13), 3) == []
    assert ran("matrix", Marks(matrix=True, turn=1 << 8 | 1 << 13), 3) != []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_parameter_runs_in_another_configuration(count):
    marks = Marks(ranks=(1, 3), turn=10)
    ((configuration, number),) = ran("matrix", marks, count)
    assert configuration not in Choice().of(marks)
    assert [number] == (marks.in_matrix(count) or [0])
    assert {(configuration, n) for n in range(count)} <= {*ran("all", marks, count)}


def test_configurations_tell_ranks_what_they_are():
    merging = Configuration(4, "hb", carrier="two_levels")
    assert Configuration.parse(str(merging)) == merging
    assert merging.environment()["COLLECTIVE_TEST_FIRST_HOST"] == "2"
    horovod = Configuration(2, "sok", carrier="horovod")
    assert horovod.environment()["COLLECTIVE_CARRIER"] == "horovod"
    assert Configuration(2, "sok").environment()["COLLECTIVE_CARRIER"] == "auto"
    assert Configuration(2, "sok", double=True).environment()["COLLECTIVE_CARRIER"] == "horovod"


def test_the_double_is_for_marked_cases_alone():
    forced = Choice(double=True)
    assert forced.of(Marks()) == []
    marked = Marks(double="all")
    assert [c.double for c in forced.of(marked)] == [True]
    assert Choice().of(Marks()) == Choice().of(marked) != []
    assert Choice().of(Marks(double="test")) == [Configuration(2, "sok", double=True)]
