"""Batches of a stream by number: kept, made again, counted; whose turn it is."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.data import Batch
from collective.data.streams import stream_order
from collective.data.streams.numbered_batches import LoaderError, NumberedBatches


def batch(number, samples=2):
    return Batch(ids={"id": np.arange(samples) + 10 * number})


class Source:
    """Makes the batches of a stream, and records from where."""

    def __init__(self, length=None):
        self.length = length
        self.begun, self.made = [], []

    def __call__(self, first):
        self.begun.append(first)
        number = first
        while self.length is None or number < self.length:
            self.made.append(number)
            yield batch(number)
            number += 1


def taken(numbered, number):
    found = numbered.take(number, 10.0)
    return None if found is None else int(found.ids["id"].values[0]) // 10


def settled(source):
    """Returns the numbers that are made when nothing more is asked for."""
    count = -1
    while count != len(source.made):
        count = len(source.made)
        time.sleep(0.05)
    return source.made


def test_batches_are_made_ahead_and_no_further():
    source = Source()
    numbered = NumberedBatches(source, window=3, ahead=2)
    assert [taken(numbered, n) for n in (0, 1, 2)] == [0, 1, 2]
    assert settled(source) == [0, 1, 2, 3, 4]


def test_a_late_rank_gets_what_is_kept_and_a_later_one_has_them_begin_again():
    source = Source()
    numbered = NumberedBatches(source, window=3, ahead=2)
    assert [taken(numbered, n) for n in (5, 6, 7, 8, 5, 6)] == [5, 6, 7, 8, 5, 6]
    assert source.begun == [5]
    assert [taken(numbered, n) for n in (4, 5)] == [4, 5]
    assert source.begun == [5, 4]
    assert taken(numbered, 1000) == 1000
    assert source.begun == [5, 4, 1000]


def test_the_end_is_known_however_the_stream_was_begun():
    for first in (0, 3, 4, 9):
        source = Source(length=4)
        numbered = NumberedBatches(source, window=3, ahead=2)
        assert taken(numbered, first) == (3 if first == 3 else 0 if first == 0 else None)
        assert taken(numbered, 4) is None and taken(numbered, 100) is None
        assert [taken(numbered, n) for n in range(5)] == [0, 1, 2, 3, None]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=6))
def test_a_count_is_exact_whatever_came_before(length, calls):
    numbered = NumberedBatches(Source(length), window=2, ahead=1)
    for is_count, number in [*calls, (True, 50)]:
        if is_count:
            assert numbered.count(number) == min(length, number)
        else:
            assert taken(numbered, number) == (number if number < length else None)


def test_a_count_begins_the_batches_few_times():
    source = Source(length=1000)
    assert NumberedBatches(source, 2, 1).count(100_000) == 1000
    assert len(source.begun) <= 18


def test_threads_that_take_the_same_batches_make_them_once():
    source = Source(length=50)
    numbered = NumberedBatches(source, window=8, ahead=2)
    found = [[] for _ in range(4)]
    barrier = threading.Barrier(4)

    def take(own):
        for number in range(51):
            own.append(taken(numbered, number))
            if number % 4 == 0:
                barrier.wait(10)

    threads = [threading.Thread(target=take, args=[own]) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [[*range(50), None]] * 4
    assert source.begun == [0] and source.made == list(range(50))


def test_an_error_is_that_of_the_batch_and_the_next_request_tries_again():
    broken = [True]

    def make(first):
        for number in range(first, 5):
            if number == 2 and broken:
                broken.pop()
                raise OSError("no such file")
            yield batch(number)

    numbered = NumberedBatches(make, window=3, ahead=2)
    assert taken(numbered, 0) == 0
    with pytest.raises(LoaderError, match="batch 2 can't be made: OSError: no such file"):
        taken(numbered, 2)
    assert [taken(numbered, n) for n in (2, 1, 4, 5)] == [2, 1, 4, None]


def test_closing_ends_the_iterator_its_thread_and_who_waits():
    made, ended = threading.Event(), threading.Event()

    def make(first):
        try:
            yield batch(first)
            yield batch(first + 1)
            made.set()
            yield batch(first + 2)
        finally:
            ended.set()

    numbered = NumberedBatches(make, window=3, ahead=1)
    assert taken(numbered, 0) == 0
    numbered.close()
    assert ended.wait(10) and not made.is_set()
    numbered._thread.join(10)
    assert not numbered._thread.is_alive()
    for number in (0, 1, 7):
        with pytest.raises(TimeoutError):
            numbered.take(number, 10.0)

    gate = threading.Event()
    slow = NumberedBatches(lambda first: (gate.wait(20) and batch(n) for n in (0, 1)), 3, 1)
    threading.Timer(0.2, slow.close).start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        slow.take(0, 15.0)
    assert time.monotonic() - began < 10
    gate.set()
    NumberedBatches(make, 3, 1).close()  # one that never began


def test_what_is_no_batch_is_named():
    numbered = NumberedBatches(lambda first: iter([{"id": 1}]), 3, 2)
    with pytest.raises(LoaderError, match=r"batch 7 is no collective\.data\.Batch, but dict"):
        numbered.take(7, 10.0)


def test_a_slow_batch_says_so_and_comes_later():
    gate = threading.Event()

    def make(first):
        gate.wait(10)
        yield batch(first)

    numbered = NumberedBatches(make, 3, 2)
    with pytest.raises(TimeoutError):
        numbered.take(0, 0.05)
    gate.set()
    assert taken(numbered, 0) == 0


@given(st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=4))
def test_streams_take_turns_until_they_end(lengths):
    """The order equals one that is dealt batch by batch."""
    dealt = []
    for number in range(12):
        for stream, length in enumerate(lengths):
            if length is None or number < length:
                dealt.append((stream, number))
    known = {stream: n for stream, n in enumerate(lengths) if n is not None}
    for position, place in enumerate(dealt):
        assert stream_order.place_of(position, len(lengths), known) == place
        used = {s: sum(p[0] == s for p in dealt[:position]) for s in range(len(lengths))}
        assert stream_order.used_before(place, len(lengths), known) == used
    if None not in lengths:
        assert stream_order.place_of(len(dealt), len(lengths), known) is None
