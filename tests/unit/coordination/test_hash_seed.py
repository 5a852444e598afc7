"""Ranks that hash texts in different ways are told so once, at the first meeting of all."""

from __future__ import annotations

import threading
import warnings

import pytest

from collective.coordination import hash_seed
from collective.ops.communication import collectives
from tests.unit.rank_threads import barrier


class CheckOfThread:
    """Gives each thread a check of its own, as each process has."""

    def __init__(self):
        self._local = threading.local()

    def __getattr__(self, name):
        if not hasattr(self._local, "check"):
            self._local.check = hash_seed.HashCheck()
        return getattr(self._local.check, name)


@pytest.mark.parametrize(
    "hashes, words",
    [([5, 5], None), ([5, 6], "is 5 on rank 0 and 6 on rank 1"), ([5, 5, 7], "and 7 on rank 2")],
)
def test_different_hashes_are_warned_of_once_by_rank_0(rank_threads, monkeypatch, hashes, words):
    monkeypatch.setattr(hash_seed, "CHECK", CheckOfThread())
    monkeypatch.setattr(hash_seed, "hash_of_text", lambda: hashes[collectives.rank()])

    def on_rank(rank, coordinator):
        return [barrier.exchange(None, "a case", {"rank": rank, "i": i}) for i in range(2)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = rank_threads(len(hashes), on_rank)
    said = [[{"rank": rank, "i": i} for rank in range(len(hashes))] for i in range(2)]
    assert messages == [said] * len(hashes), "what ranks say is as it was"
    texts = [str(w.message) for w in caught]
    assert len(texts) == (words is not None) and all(words in text for text in texts)
    assert all("PYTHONHASHSEED=0" in text for text in texts)


def test_a_rank_that_says_nothing_is_not_compared():
    """It has failed, and says that instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        payloads = [{"hash": 5}, {"error": "boom"}]
        hash_seed.HashCheck().compare(payloads)
    assert payloads == [{}, {"error": "boom"}]
