"""Two ranks' copies of a variable may differ by rounding, and no more."""

from __future__ import annotations

import warnings

import pytest

from collective.monitoring.consistency_check import _is_near

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "a, b, is_near",
    [
        ([1.0, 0.5], [1.0, 0.5001], True),
        ([1.0, 0.5], [1.0, 0.6], False),
        ([NAN, NAN], [NAN, NAN], True),
        ([NAN, NAN], [1.0, 0.5], False),
        ([INF, NAN], [INF, NAN], True),
        ([INF, NAN], [1.0, 0.5], False),
    ],
)
def test_differences(a, b, is_near):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _is_near(a, b) is is_near
