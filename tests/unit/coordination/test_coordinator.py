"""Ranks meet, run, end, leave and fail together: as threads, with a graph that does nothing."""

from __future__ import annotations

import dataclasses
import os
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.coordination import preemption
from tests.unit.rank_threads import (
    RankError,
    Session,
    agreement,
    barrier,
    prepared_run,
    run_analysis,
)


class FakeRun:
    """A run whose first collective is the agreement, over `batches` batches of data."""

    def __init__(self, coordinator, session, batches, signature=1, trains=True):
        self.coordinator, self.session, self.batches = coordinator, session, batches
        idle_run = None if trains else run_analysis.IdleRun(["answer"], [], [])
        self.prepared = prepared_run.PreparedRun(
            run_analysis.RunFootprint(
                frozenset(), (f"lookup {signature}",), signature, (), trains, ()
            ),
            keep_alive=None,
            targets=["headers"],
            idle_run=idle_run,
            repeatable=False,
        )
        self.answered = 0

    def original(self, session, fetches, feeds, *more):
        """What TensorFlow would do: take a batch, agree, compute."""
        if fetches[0] == ["answer"]:
            self.answered += 1
            return None
        if not self.batches:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        number = self.coordinator.member_of(session).number
        headers = self.coordinator.channel.headers(
            agreement.Header(agreement.RUNNING, number, self.prepared.footprint.signature)
        )
        well = (agreement.RUNNING, agreement.IDLE)
        if {h.status for h in headers} - {*well} or len({h.signature for h in headers}) > 1:
            self.prepared.disagreement = headers
            raise tf.errors.UnknownError(None, None, "the gate stays closed")
        self.batches -= 1
        return ["result", [np.array([dataclasses.astuple(h) for h in headers])]]

    def __call__(self):
        return self.coordinator.run(
            self.original, self.session, self.prepared, ["loss"], {}, None, None
        )

    def to_the_end(self):
        """Returns how many steps it took, and the error that ended it."""
        steps = 0
        try:
            while True:
                self()
                steps += 1
        except tf.errors.OutOfRangeError as end:
            return steps, end.message


def test_all_meet_for_the_same(rank_threads):
    def on_rank(rank, coordinator):
        return coordinator.exchange(None, "saving", "saves", {"rank": rank})

    assert rank_threads(3, on_rank) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_ranks_that_meet_for_something_else_are_told(rank_threads):
    def on_rank(rank, coordinator):
        what = "restoring" if rank == 2 else "saving"
        return coordinator.exchange(None, what, what, {})

    errors = rank_threads(3, on_rank)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, RankError) for error in errors)
    assert "Rank 1: saving. Rank 2: restoring." in str(errors[0])


def test_training_ends_with_the_first_rank_that_is_out_of_data(rank_threads):
    def on_rank(rank, coordinator):
        return FakeRun(coordinator, Session(), (5, 3, 4)[rank]).to_the_end()

    ended = rank_threads(3, on_rank)
    assert [steps for steps, _ in ended] == [3, 3, 3]
    assert "rank 1 is out of data" in ended[0][1] and ended[1][1] == "End of sequence"


def test_an_evaluation_goes_on_until_all_are_out_of_data(rank_threads):
    def on_rank(rank, coordinator):
        run = FakeRun(coordinator, Session(), (1, 4)[rank], trains=False)
        return run.to_the_end()[0], run.answered

    assert rank_threads(2, on_rank) == [(1, 3), (4, 0)]


def test_ranks_that_run_something_else_are_told_both(rank_threads):
    def on_rank(rank, coordinator):
        return FakeRun(coordinator, Session(), 1, signature=1 + rank)()

    errors = rank_threads(2, on_rank)
    assert all(isinstance(error, RankError) for error in errors), errors
    assert "First difference: 'lookup 1' is used by rank 0 only." in str(errors[0])


def test_a_failure_is_told_to_the_peers_when_they_wait(rank_threads):
    """A rank survives its error, and goes on with the peers' next session."""

    def on_rank(rank, coordinator):
        session = Session()
        run = FakeRun(coordinator, session, 2)
        run()
        if rank == 1:
            coordinator.leave(session, ValueError("boom"))
            coordinator.deliver_failure()
            return None
        try:
            run()
        except RankError as error:
            return error
        finally:
            coordinator.leave(session)

    told = rank_threads(2, on_rank)
    assert "Rank 1: left its session with ValueError: boom" in str(told[0])


def test_who_ends_its_session_waits_for_all(rank_threads):
    """A peer that still runs ends there, and then comes to the end, too."""

    def on_rank(rank, coordinator):
        session = Session()
        run = FakeRun(coordinator, session, 9)
        run()
        steps, end = (0, "") if rank == 0 else run.to_the_end()
        coordinator.end(session)
        coordinator.leave(session)
        return steps, end, [h.status for h in coordinator.channel.exchanged[-2]]

    ended = rank_threads(3, on_rank)
    assert "rank 0 is at the end of the session" in ended[1][1]
    assert [steps for steps, *_ in ended] == [0, 0, 0]
    assert all(statuses == [agreement.CLOSING] * 3 for *_, statuses in ended)


def test_a_session_that_a_peer_has_left_can_not_be_saved(rank_threads):
    def on_rank(rank, coordinator):
        session = Session()
        FakeRun(coordinator, session, 1)()
        if rank == 0:
            coordinator.leave(session)
            return None
        return coordinator.exchange(session, "saving m-1", "saves m-1", {})

    error = rank_threads(2, on_rank)[1]
    assert isinstance(error, RankError)
    assert "Saves m-1 takes all ranks, but rank 0 has left the session" in str(error)


def test_a_step_that_fails_on_one_rank_fails_on_all(rank_threads):
    def on_rank(rank, coordinator):
        assert barrier.run_on_all_ranks(None, "merging", lambda: rank) == [0, 1, 2]
        return barrier.run_on_all_ranks(None, "moving", lambda: 1 // (rank - 1))

    errors = rank_threads(3, on_rank)
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankError)
        assert "moving failed on rank 1: ZeroDivisionError" in str(errors[rank])


def test_an_error_between_two_meetings_is_everyones_at_the_next(rank_threads):
    def on_rank(rank, coordinator):
        with barrier.Steps("the export") as steps:
            assert steps.meet({"rank": rank})[1] == {"rank": 1}
            if rank == 1:
                raise ValueError("disk full")
            steps.meet({})

    errors = rank_threads(2, on_rank)
    assert str(errors[0]) == "the export failed on rank 1: ValueError: disk full"
    assert isinstance(errors[1], ValueError)


def test_after_a_run_that_failed_half_way_nothing_goes_on(rank_threads):
    def on_rank(rank, coordinator):
        coordinator.broken = "InternalError: out of memory"
        return FakeRun(coordinator, Session(), 1)()

    (error,) = rank_threads(1, on_rank)
    assert isinstance(error, RankError) and "failed half-way on rank 0" in str(error)
    assert "out of memory" in str(error)


def test_a_fork_of_a_rank_waits_for_no_peer(rank_threads):
    """It leaves the sessions that it was forked in, and is told that it runs nothing in them."""

    def on_rank(rank, coordinator):
        session = Session()
        run = FakeRun(coordinator, session, batches=2)
        run()
        exchanged = len(coordinator.channel.exchanged)
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(RankError, match="forked from a rank and is not a rank itself"):
                    run()
                coordinator.end(session)
                coordinator.leave(session)
                coordinator.leave_all()
                os._exit(len(coordinator.channel.exchanged) - exchanged)
            finally:
                os._exit(99)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return ended, run()

    ((ended, values),) = rank_threads(1, on_rank)
    assert (ended, values) == (0, "result")


def test_a_session_that_one_rank_has_closed_is_no_other_session(rank_threads):
    """Its peers wouldn't count it, and take the next one for another."""

    def on_rank(rank, coordinator):
        session = Session()
        run = FakeRun(coordinator, session, batches=2)
        run()
        coordinator.leave(session)
        if rank == 0:
            with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
                run()
        return FakeRun(coordinator, Session(), batches=1)()

    assert rank_threads(2, on_rank) == ["result", "result"]


def test_a_thread_that_closes_a_session_waits_for_its_run(rank_threads):
    def on_rank(rank, coordinator):
        session = Session()
        run = FakeRun(coordinator, session, batches=2)
        closing = threading.Thread(target=coordinator.leave, args=(session,))

        def closed_in_mid_run(*args):
            closing.start()
            closing.join(0.1)
            return FakeRun.original(run, *args)

        run.original = closed_in_mid_run
        values = run()
        closing.join()
        with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
            run()
        return values

    assert rank_threads(1, on_rank) == ["result"]


@pytest.fixture
def wishes(monkeypatch):
    """The wish of each rank, as threads have one each; what they decide is forgotten."""
    wishes = {}
    monkeypatch.setattr(
        preemption.Preemption,
        "wish",
        property(lambda _: wishes.get(threading.get_ident(), 0)),
    )
    yield wishes
    preemption.PREEMPTION.decided = 0


@pytest.mark.parametrize("told", [[0, 15], [2, 0], [2, 15]])
def test_a_wish_of_one_rank_is_heard_by_all_in_the_same_run(rank_threads, wishes, told):
    heard = []

    def on_rank(rank, coordinator):
        run = FakeRun(coordinator, Session(), 9)
        for step in range(4):
            if step == 2:
                wishes[threading.get_ident()] = told[rank]
            run()
            heard.append((step, preemption.PREEMPTION.decided))
        return True

    assert rank_threads(2, on_rank) == [True, True]
    assert sorted(heard) == sorted(2 * [(0, 0), (1, 0), (2, max(told)), (3, max(told))])
