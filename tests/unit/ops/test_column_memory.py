"""A column of a dynamic table takes no more memory than its limit."""

from __future__ import annotations

import pytest

from collective.ops.rows import memory
from collective.tables.rows.row_store import more_memory

ROW, MOST = 1 << 20, 1 << 40
LARGE = 1 << 50  # bytes, more than any limit


@pytest.mark.parametrize("text, rows", [("", 96 << 10), ("2", 2 << 10), ("0.5", 512)])
def test_the_limit_of_a_column(monkeypatch, text, rows):
    monkeypatch.setenv("COLLECTIVE_COLUMN_GB", text)
    assert memory.rows_within(LARGE, ROW, MOST) == rows
    assert f"COLLECTIVE_COLUMN_GB ({text or 96}) higher" in more_memory()


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf", "1e9"])
def test_a_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("COLLECTIVE_COLUMN_GB", text)
    with pytest.raises(ValueError, match=f"COLLECTIVE_COLUMN_GB={text}: give a number of GB"):
        memory.rows_within(LARGE, ROW, MOST)
