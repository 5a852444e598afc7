"""When the ranks' first batches are the same by mistake, and when they may be: as threads."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.monitoring import input_check
from collective.ops.communication import collectives
from tests.unit.rank_threads import Session

# The batches that each of three ranks has, run by run, and how many runs are compared.
WELL = {
    "of their own": (["ab", "cd", "ef"], 1),
    "two ranks of three have the same": (["abc", "abc", "xyz"], 1),
    "constant": (["a" * 20] * 3, input_check.MOST_RUNS),
    "as long as two batches": (["ab" * 10] * 3, input_check.MOST_RUNS),
    "the same once": (["abcd", "axcd", "abyd"], 2),
    "the same twice": (["abcd", "abxd", "abcy"], 3),
}


class Read:
    """What a rank has read: checksums by iterators, and one of ids."""

    def __init__(self, checksums, ids="", is_put_off=False):
        self._checksums, self._ids, self.is_put_off = checksums, ids, is_put_off

    def checksums(self):
        return self._checksums

    def ids_checksum(self):
        return self._ids


def compared(rank_threads, batches, monkeypatch):
    """Returns how many runs the ranks compare, and their warnings."""
    warned = []
    monkeypatch.setattr(input_check, "_warn", warned.append)

    def on_rank(rank, coordinator):
        check, session = input_check.InputCheck(), Session()
        for checksums in batches[rank]:
            check.compare(session, Read(checksums))
            if check.is_over:
                break
        return check.runs

    return rank_threads(len(batches), on_rank), warned


@pytest.mark.parametrize("case", WELL)
def test_no_false_alarm(rank_threads, monkeypatch, case):
    batches, runs = WELL[case]
    of_ranks = [[{"it": batch} for batch in of_rank] for of_rank in batches]
    assert compared(rank_threads, of_ranks, monkeypatch) == ([runs] * 3, [])


@pytest.mark.parametrize("batches, runs", [("abc", 3), ("aabbc", 5), ("abac", 4)])
def test_several_batches_that_all_ranks_have_are_a_mistake(
    rank_threads, monkeypatch, batches, runs
):
    of_ranks = [[{"it": batch} for batch in batches]] * 3
    assert compared(rank_threads, of_ranks, monkeypatch) == ([runs] * 3, ["it"])


def test_one_that_is_constant_says_nothing_about_another(rank_threads, monkeypatch):
    of_ranks = [[{"constant": "c", "whole": f"{i}"} for i in range(9)]] * 2
    assert compared(rank_threads, of_ranks, monkeypatch) == ([3, 3], ["whole"])


def test_one_of_each_ranks_own_says_that_all_is_well(rank_threads, monkeypatch):
    """Another may be alike on purpose: numbers of steps, or negatives that the ranks share."""
    of_ranks = [[{"own": f"{rank}{i}", "shared": f"{i}"} for i in range(9)] for rank in range(2)]
    assert compared(rank_threads, of_ranks, monkeypatch) == ([1, 1], [])
    of_ranks = [
        [{"own": f"{rank if i else 0}{i}", "shared": f"{i}"} for i in range(9)] for rank in range(2)
    ]
    assert compared(rank_threads, of_ranks, monkeypatch) == ([2, 2], [])


def test_ranks_without_datasets_compare_once(rank_threads, monkeypatch):
    """Or one that has none, while the others read: it feeds, say."""
    assert compared(rank_threads, [[{}] * 9] * 2, monkeypatch) == ([1, 1], [])
    with_data = [{"it": "a"}] * 9
    assert compared(rank_threads, [with_data, [{}] * 9], monkeypatch) == ([1, 1], [])
    assert compared(rank_threads, [[{}] * 9, with_data], monkeypatch) == ([1, 1], [])


def test_an_iterator_that_comes_later_is_none_of_the_first(rank_threads, monkeypatch):
    """Another train_op with an iterator of its own: what was compared first decides."""
    runs = [{"a": "1"}, {"b": "1"}, {"b": "2"}, {"b": "3"}]
    assert compared(rank_threads, [runs, runs], monkeypatch) == ([2, 2], [])


@pytest.mark.parametrize(
    "one, other",
    [
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros([2, 3]), np.zeros([3, 2])),
        (np.array([b"ab", b"c"], object), np.array([b"a", b"bc"], object)),
        (np.array([b"a"], object), np.array([b"b"], object)),
        (np.array(1), np.array(2)),
        (np.array([True, False]), np.array([True, True])),
    ],
)
def test_checksums_tell_batches_apart(one, other):
    assert input_check._checksum([one]) == input_check._checksum([one.copy()])
    assert input_check._checksum([one]) != input_check._checksum([other])
    assert input_check._checksum([one, other]) != input_check._checksum([other, one])


def test_other_values_have_checksums_too():
    for value in (b"text", 3, np.float32(2), np.zeros([0, 4]), np.array(b"x", object)):
        assert input_check._checksum([value])


def test_the_warning_names_the_fix(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        input_check._warn("IteratorGetNext")
    (warning,) = caught
    text = str(warning.message)
    assert "'IteratorGetNext'" in text and "strategy.shard(dataset)" in text
    assert "dataset.batch(B // strategy.world_size())" in text
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "every rank trains")
        input_check._warn("IteratorGetNext")
    assert not caught


def test_ranks_that_look_up_other_ids_read_other_records(monkeypatch, rank_threads):
    """An iterator may give numbers by which each rank finds its own records."""
    warned = []
    monkeypatch.setattr(input_check, "_warn", warned.append)

    def on_rank(rank, coordinator):
        check = input_check.InputCheck()
        check.compare(Session(), Read({"it": "0"}, f"ids of rank {rank}"))
        return check.is_over

    assert rank_threads(2, on_rank) == [True, True] and not warned


def test_a_run_that_one_rank_traces_is_not_looked_at(monkeypatch, rank_threads):
    """Nor is it the end: the next ones are compared in its place."""
    warned = []
    monkeypatch.setattr(input_check, "_warn", warned.append)

    def on_rank(rank, coordinator):
        check, session = input_check.InputCheck(), Session()
        check.compare(session, Read({}, is_put_off=True) if rank else Read({"it": "0"}))
        for i in range(3):
            assert not check.is_over
            check.compare(session, Read({"it": str(i)}))
        return check.is_over

    assert rank_threads(2, on_rank) == [True, True] and warned == ["it"]


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_checksums_that_fail_end_the_check_on_all_ranks(monkeypatch, rank_threads, failing):
    """The step has been made: no rank fails for it, and none waits for another."""
    warned = []
    monkeypatch.setattr(input_check, "_warn", warned.append)

    class Unreadable(Read):
        def checksums(self):
            raise TypeError("can't concat str to bytes")

    def on_rank(rank, coordinator):
        check = input_check.InputCheck()
        read = Unreadable({}) if rank in failing else Read({"it": "0"})
        check.compare(Session(), read)
        return check.is_over

    assert rank_threads(2, on_rank) == [True, True] and not warned


@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_fed_in_a_batchs_place_is_left_out(by_name):
    """Its values are the script's, of any type."""
    with tf.Graph().as_default(), tf.Session() as session:
        data = tf.data.Dataset.from_tensors((b"text", 1)).repeat()
        text, number = tf.data.make_one_shot_iterator(data).get_next()
        ids = tf.placeholder(tf.string, [None])
        recorder = input_check.Recorder({"it": [text, number]}, [ids])
        original = lambda session, fetches, *rest: session.run(fetches, *rest)  # noqa: E731

        def read(fetches, feeds):
            reading = recorder.reading()
            run = reading.added_to(original)
            recorder.restart(original, session)
            return reading, run(session, [fetches, recorder.record], feeds, None, None)[0]

        feeds = {text.name if by_name else text: "fed", ids: np.array(["a", "b"], object)}
        reading, value = read(number + 1, feeds)
        assert value == 2
        assert reading.batches == {"it": [number]}
        assert reading.checksums() == {"it": input_check._checksum([np.int32(1)])}
        assert reading.ids_checksum() == input_check._checksum([np.array([b"a", b"b"], object)])
        reading, _ = read(number.op, {**feeds, number: 3})
        assert reading.checksums() == {}


def test_a_recorder_keeps_what_nobody_has_taken_and_nothing_else():
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        recorder = input_check.Recorder({"it": [x]}, [])
        original = lambda session, fetches, *rest: session.run(fetches, *rest)  # noqa: E731
        with tf.Session() as session:
            for value in ([1.0, 2.0], [3.0]):
                session.run(recorder.record, {x: value})
            assert recorder.holds_copies
            assert recorder.take(original, session)[0].tolist() == [3.0]
            session.run(recorder.record, {x: [4.0]})
            assert not recorder.holds_copies
            with pytest.raises(tf.errors.FailedPreconditionError):
                recorder.take(original, session)
            recorder.restart(original, session)
            session.run(recorder.record, {x: [5.0]})
            assert recorder.take(original, session)[0].tolist() == [5.0]
