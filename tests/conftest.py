"""Which tests run, by tier: what `make test` runs, what others add to it, or all."""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict

import pytest

# Hundreds of processes import the library, and its tests: each would compile them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["tests.rank_plugin", "tests.modelzoo_fixtures"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.option.tier
    if tier == "all":
        return
    left_to_matrix = unsampled(items)
    chosen, rest = [], []
    for item in items:
        (chosen if runs(item, tier, left_to_matrix) else rest).append(item)
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = chosen


def unsampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the items of functions marked `sample` that `make test` leaves to the matrix.

    Those that the matrix leaves out, too, are marked `long`.
    """
    from tests.rank_plugin.configuration import Marks  # pytest rewrites it as a plugin first

    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None and not is_rank_case(item):
            functions[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    rest = set()
    for cases in functions.values():
        marks = Marks.of(cases[0])
        in_matrix = {cases[number] for number in marks.in_matrix(len(cases))}
        rest |= in_matrix
        for case in {*cases} - in_matrix - {cases[number] for number in marks.in_test(len(cases))}:
            case.add_marker("long")
    return rest


def is_rank_case(item: pytest.Item) -> bool:
    return "configuration" in getattr(getattr(item, "callspec", None), "params", {})


def runs(item: pytest.Item, tier: str, left_to_matrix: set[pytest.Item]) -> bool:
    if item.get_closest_marker("long") is not None:
        return False
    if is_rank_case(item) and tier != "slow":
        return True  # which the tier has chosen
    if item in left_to_matrix:
        return tier == "matrix"
    for tier_of_mark, every in (("matrix", 8), ("slow", 3)):
        marker = item.get_closest_marker(tier_of_mark)
        if marker is not None:
            has_one = marker.kwargs.get("always", False) or has_turn(item, every)
            return tier == tier_of_mark and has_one
    return tier == "test"


def has_turn(item: pytest.Item, every: int) -> bool:
    """Tells whether an item is one of every `every`-th, which its name decides."""
    return zlib.crc32(item.nodeid.encode()) % every == 0
