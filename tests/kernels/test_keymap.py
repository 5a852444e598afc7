"""Tests the compiled key map compared with a Python dictionary: NumPy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.ops.rows import keymap
from collective.ops.rows.keymap import KeyMap

ROOT = Path(__file__).resolve().parents[2]
EDGES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**32 - 1, 2**32, 2**63 - 1]


class Reference:
    """What a map must answer."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def find_or_insert(self, keys: np.ndarray) -> list[int]:
        return [self.rows.setdefault(int(key), len(self.rows) + 1) for key in keys]

    def find(self, keys: np.ndarray) -> list[int]:
        return [self.rows.get(int(key), 0) for key in keys]


def compare(batches: list[np.ndarray]) -> KeyMap:
    tried, wanted = KeyMap(10**6), Reference()
    for batch in batches:
        assert tried.find(batch).tolist() == wanted.find(batch)
        assert tried.find_or_insert(batch).tolist() == wanted.find_or_insert(batch)
        assert len(tried) == len(wanted.rows)
    known = np.array(list(wanted.rows), np.int64)
    np.testing.assert_array_equal(tried.keys(1, len(tried) + 1), known)
    np.testing.assert_array_equal(tried.find(known), np.arange(1, len(known) + 1))
    return tried


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3)),
            max_size=200,
        ),
        max_size=5,
    )
)
def test_any_keys_in_any_batches(batches: list[list[int]]):
    compare([np.array(batch, np.int64) for batch in batches])


def unmixed(values: np.ndarray) -> np.ndarray:
    """The keys whose hash in the map is `values`: the finalizer of MurmurHash3, backwards."""
    x = values.astype(np.uint64)
    with np.errstate(over="ignore"):
        for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
            x ^= x >> np.uint64(33)
            x *= np.uint64(pow(factor, -1, 2**64))
        x ^= x >> np.uint64(33)
    return x.view(np.int64)


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(30000),
        np.arange(30000) * 2**40,
        np.arange(30000) + np.iinfo(np.int64).min,
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100000),
        np.zeros(1000),
        # all in the first bucket, and of one tag
        unmixed(np.arange(3000)),
        # all in the last ones: probes go round
        unmixed(np.arange(3000, dtype=np.uint64) - np.uint64(3000)),
    ],
    ids=["ascending", "multiples", "negative", "random", "one", "first bucket", "last bucket"],
)
def test_patterns(keys: np.ndarray):
    keys = keys.astype(np.int64)
    compare([keys[:10], keys, keys[::-1]])


def test_keys_of_one_rank_fill_it_evenly():
    """Keys that share a residue of the mix that chooses their rank must not share buckets here."""
    x = np.arange(300000, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
        mine = np.flatnonzero(x % np.uint64(64) == 5).astype(np.int64)
        hashed = mine.view(np.uint64) ^ (mine.view(np.uint64) >> np.uint64(33))
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            hashed = hashed * np.uint64(factor)
            hashed ^= hashed >> np.uint64(33)
    buckets = np.bincount((hashed >> np.uint64(54)).astype(np.int64), minlength=1024)
    expected = len(mine) / 1024
    assert ((buckets - expected) ** 2 / expected).sum() < 1024 + 5 * (2 * 1024) ** 0.5
    compare([mine])


def test_a_full_map_says_so_and_keeps_what_it_has():
    tried = KeyMap(3)
    with pytest.raises(MemoryError, match="full: 3 rows of 3"):
        tried.find_or_insert(np.arange(5))
    assert tried.find(np.arange(5)).tolist() == [1, 2, 3, 0, 0]
    assert tried.find_or_insert(np.array([2, 0])).tolist() == [3, 1]
    with pytest.raises(MemoryError):
        KeyMap(2**32)
    with pytest.raises(IndexError):
        tried.keys(1, 5)


def test_shapes_are_kept_and_nothing_is_nothing():
    tried = KeyMap(10)
    assert tried.find_or_insert(np.array([[7, 8], [7, 9]])).tolist() == [[1, 2], [1, 3]]
    assert (
        tried.find(np.empty((0, 2), np.int64)).shape == (0, 2)
        and tried.find_or_insert(np.empty(0, np.int64)).size == 0
    )
    assert tried.find(np.arange(20)[::2]).tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]


def test_memory_is_little_more_than_the_keys():
    tried = KeyMap(keymap.MOST_ROWS)
    assert tried.nbytes < 10000
    tried.find_or_insert(np.arange(10**6))
    assert tried.nbytes <= 10**6 * (8 + 4 / 0.8 * 1.5) + 10000


def test_what_isnt_built_says_how_to(tmp_path: Path):
    """Without the library, importing the module is fine, and the first map is the error."""
    (tmp_path / "keymap.py").write_text((ROOT / "ops" / "rows" / "keymap.py").read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import keymap; keymap.KeyMap(9)"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert "ImportError" in done.stderr and "make setup" in done.stderr
