"""Holds the choice of tests by tier to its promise: what `make test` leaves out the matrix runs."""

import itertools

import pytest

from tests.rank_plugin.configuration import BACKENDS, Choice, Configuration, Marks, sampled

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
def test_every_parameter_runs_once_where_make_test_runs_the_case(marks, count):
    test, matrix = Choice(), Choice("matrix")
    for configuration, number in itertools.product(test.of(marks), range(count)):
        ran = [tier.runs(marks, configuration, number, count) for tier in (test, matrix)]
        assert sum(ran) == 1, (configuration, number)
        assert configuration in matrix.of(marks)


def test_the_matrix_can_have_a_sample_of_its_own():
    marks = Marks(either_backend=True, sample=3, sample_in_matrix=10)
    [configuration] = Choice().of(marks)
    tiers = [
        {n for n in range(30) if Choice(tier).runs(marks, configuration, n, 30)}
        for tier in ("test", "matrix", "all")
    ]
    assert tiers[0] == {*sampled(30, 3)} and tiers[0] | tiers[1] == {*sampled(30, 10)} | tiers[0]
    assert not tiers[0] & tiers[1] and tiers[2] == {*range(30)}


def test_backends_take_turns():
    marks = Marks(backends=BACKENDS)
    ran = [
        [c.backend for c in Choice().of(marks) if Choice().runs(marks, c, number, 4)]
        for number in range(4)
    ]
    # each parameter of an inner decorator of two comes to both
    assert ran == [["hb"], ["sok"], ["sok"], ["hb"]]


def test_the_matrix_adds_numbers_of_ranks():
    marks = Marks(ranks=(1, 3), sample=2)
    added = Configuration(3, "hb")
    assert added in Choice("matrix").of(marks) and added not in Choice().of(marks)
    ran = [n for n in range(9) if Choice("matrix").runs(marks, added, n, 9)]
    assert ran == sampled(9, 2)


@pytest.mark.parametrize("count, most", [(1, 1), (2, 1), (5, 3), (8, 4)])
def test_half_of_the_parameters_run_in_other_configurations(count, most):
    added = Configuration(2, "hb")
    ran = [n for n in range(count) if Choice("matrix").runs(Marks(), added, n, count)]
    assert ran == sampled(count, most) and len(ran) == most
    assert all(Choice("all").runs(Marks(), added, n, count) for n in range(count))


def test_the_matrix_runs_what_depends_on_the_carrier_over_horovod():
    added = Configuration(2, "sok", carrier="horovod")
    for carriers in (True, False):
        assert (added in Choice("matrix").of(Marks(carriers=carriers))) is carriers
    assert added.environment()["COLLECTIVE_CARRIER"] == "horovod"
    merging = Configuration(4, "hb", carrier="two_levels")
    assert Configuration.parse(str(merging)) == merging
    for two_levels in (True, False):
        assert (merging in Choice("matrix").of(Marks(two_levels=two_levels))) is two_levels
    assert merging.environment()["COLLECTIVE_TEST_FIRST_HOST"] == "2"
    assert Configuration(2, "sok").environment()["COLLECTIVE_CARRIER"] == "auto"
    assert Configuration(2, "sok", double=True).environment()["COLLECTIVE_CARRIER"] == "horovod"


def test_the_double_is_for_marked_cases_alone():
    forced = Choice(double=True)
    assert forced.of(Marks()) == []
    marked = Marks(double="all")
    assert [c.double for c in forced.of(marked)] == [True]
    assert Choice().of(Marks()) == Choice().of(marked) != []
