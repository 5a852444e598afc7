"""Allreduces of dense tensors are long enough to be worth their costs, and few."""

from __future__ import annotations

import pytest

from collective.ops.communication import dense_allreduce


@pytest.mark.parametrize(
    "sizes, buckets",
    [
        ([], []),
        ([0, 1], [[0, 1]]),
        ([3, 2, 0, 1, 9, 1], [[0, 1], [2, 3, 4, 5]]),  # the last one joins the one before it
        ([4, 4, 4], [[0], [1], [2]]),
        ([40] * 40, [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(12)] + [[36, 37, 38, 39]]),
    ],
)
def test_each_bucket_has_the_next_tensors(monkeypatch, sizes, buckets):
    monkeypatch.setattr(dense_allreduce, "BUCKET_BYTES", 4)
    assert dense_allreduce._buckets(dict(enumerate(sizes))) == buckets
    assert len(buckets) <= dense_allreduce.BUCKETS
