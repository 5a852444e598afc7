"""Which tests run, by tier: what `make test` runs, what `make test-matrix` adds, or all."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.rank_plugin", "tests.modelzoo_fixtures"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.option.tier
    if tier == "all":
        return
    chosen, rest = [], []
    for item in items:
        (chosen if runs(item, tier) else rest).append(item)
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = chosen


def runs(item: pytest.Item, tier: str) -> bool:
    if item.get_closest_marker("long") is not None:
        return False
    if "configuration" in getattr(getattr(item, "callspec", None), "params", {}):
        return True  # which the tier has chosen
    return (item.get_closest_marker("matrix") is not None) == (tier == "matrix")
