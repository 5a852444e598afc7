"""A table whose keys are mostly on one rank is named; what costs nothing isn't."""

import pytest

from collective.profiling.owner_balance import imbalances, uneven


def found(keys, dynamic=(), whole=()):
    return uneven(keys, {name: name in dynamic for name in keys}, set(whole))


def test_a_sharded_table_on_one_rank():
    told = found({"t": [0, 0, 90, 10], "u": [25, 25, 25, 25]})
    assert list(told) == ["t"]
    assert "table 't': 90% of the keys that a step asks for are on rank 2 of 4" in told["t"]
    assert "(3.6 times the mean)" in told["t"] and "Key k is on rank k mod 4" in told["t"]


def test_a_dynamic_table_s_keys_are_mixed():
    told = found({"t": [0, 0, 9]}, dynamic={"t"})
    assert "few distinct keys" in told["t"] and "mod" not in told["t"]


@pytest.mark.parametrize(
    "keys",
    [
        {"t": [50, 150]},  # two ranks: the mean of both is at least half of either
        {"t": [200, 100, 0]},  # exactly twice the mean
        {"t": [3, 0, 0, 0], "u": [100, 100, 100, 100]},  # three keys of four hundred
        {"t": [0, 0, 0]},
        {"t": [100]},
        {},
    ],
)
def test_what_is_no_trouble(keys):
    assert found(keys) == {}


def test_a_whole_table_counts_with_the_others():
    """It is on one rank by choice: what matters is what a rank has to do for all tables."""
    balanced = {"a": [100, 0, 0], "b": [0, 100, 0], "c": [0, 0, 100]}
    assert found(balanced, whole="abc") == {}
    told = found({"a": [100, 0, 0, 0], "b": [90, 0, 0, 0], "t": [10, 10, 10, 10]}, whole="ab")
    assert list(told) == ["a"]
    assert "rank 0 is asked for 3.5 times the keys of the mean rank, 50%" in told["a"]


def test_imbalances():
    assert imbalances({"t": [3, 1], "u": [0, 0], "alone": [4]}) == {"t": 1.5}
