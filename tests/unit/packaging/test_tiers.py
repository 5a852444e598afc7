"""Holds the choice of tests by tier to what CONTRIBUTING.md says of it."""

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


@pytest.mark.parametrize("marks", MARKS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_matrix_runs_others_than_make_test_where_that_runs_the_case(marks, count):
    test, matrix = Choice(), Choice("matrix")
    ran = {
        tier: [
            number
            for configuration, number in itertools.product(test.of(marks), range(count))
            if tier.runs(marks, configuration, number, count)
        ]
        for tier in (test, matrix)
    }
    few = min(marks.sample or PARAMETERS, count)
    assert len(ran[test]) == (0 if marks.matrix else few)
    assert len(ran[matrix]) == (few if marks.matrix else min(PARAMETERS, count - few))
    both = ran[test] + ran[matrix]
    assert len(both) == len({*both}) and {*test.of(marks)} <= {*matrix.of(marks)}
    assert all(Choice("all").runs(marks, c, n, count) for c in test.of(marks) for n in range(count))


def test_backends_take_turns():
    marks = Marks(backends=BACKENDS, sample=4)
    ran = [
        [c.backend for c in Choice().of(marks) if Choice().runs(marks, c, number, 4)]
        for number in range(4)
    ]
    # each parameter of an inner decorator of two comes to both
    assert ran == [["hb"], ["sok"], ["sok"], ["hb"]]


def added(marks):
    return [c for c in Choice("matrix").of(marks) if c not in Choice().of(marks)]


def test_the_matrix_adds_the_most_ranks_and_one_more_configuration_in_turn():
    depends = dict(ranks=(1, 3), ungrouped=True, carriers=True, two_levels=True, double="matrix")
    turns = [added(Marks(**depends, turn=turn)) for turn in range(7)]
    assert {first for first, _ in turns} == {Configuration(3, "hb")}
    assert {str(second) for _, second in turns} == {
        "2-hb",
        "1-hb",
        "2-hb-ungrouped",
        "2-sok-horovod",
        "3-hb-mixed",
        "4-hb-two_levels",
        "2-sok-double",
    }
    assert added(Marks()) == [Configuration(2, "hb")] and added(Marks(either_backend=True)) == []
    assert added(Marks(**depends, turn=1 << 8)) == [Configuration(3, "hb")]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_parameter_runs_in_an_added_configuration(count):
    marks = Marks(ranks=(1, 3), turn=11)
    for configuration in added(marks):
        ran = [n for n in range(count) if Choice("matrix").runs(marks, configuration, n, count)]
        assert ran == [11 % count]
        assert all(Choice("all").runs(marks, configuration, n, count) for n in range(count))


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
