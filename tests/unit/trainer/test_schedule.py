"""A Trainer validates, saves and reports at positions that the number of ranks doesn't change."""

from __future__ import annotations

import pytest

from collective.trainer.schedule import Batch, Boundary, Epoch, Record, Schedule, Seconds

# (max_length, validation, checkpoint, reporting), B, R → steps of validations, of checkpoints, of
# reports. No row names a number of ranks: it is in no formula, and the rank tests train at each.
TABLE = [
    # Periods in batches; one that doesn't divide the length; the end has everything.
    ((Batch(6), Batch(2), Batch(3), Batch(1)), 4, None, [2, 4, 6], [3, 6], [1, 2, 3, 4, 5, 6]),
    ((Batch(7), Batch(3), Batch(5), Batch(100)), 4, None, [3, 6, 7], [5, 7], [7]),
    # None: never but at the end.
    ((Batch(5), None, None, None), 4, None, [5], [5], [5]),
    ((Batch(1), Batch(1), Batch(1), Batch(1)), 4, None, [1], [1], [1]),
    # Positions, in any order; one beyond the end has no effect.
    ((Batch(6), Batch([2, 5]), Batch((4,)), Batch({9})), 4, None, [2, 5, 6], [4, 6], [6]),
    # Records that B doesn't divide: 10, 20, 30, 40 are used after 2.5, 5, 7.5, 10 batches.
    ((Record(40), Record(10), Record(20), None), 4, None, [3, 5, 8, 10], [5, 10], [10]),
    ((Record(41), Record([1, 9, 40]), None, None), 4, None, [1, 3, 10, 11], [11], [11]),
    # A period shorter than a batch: after every batch, once.
    ((Batch(3), Record(1), Record(3), None), 4, None, [1, 2, 3], [1, 2, 3], [3]),
    # Epochs of 10 records in batches of 4 end after 10, 20, 30 records: no drift.
    ((Epoch(3), Epoch(1), None, None), 4, 10, [3, 5, 8], [8], [8]),
    ((Epoch(4), Epoch(2), Epoch([1, 3]), None), 4, 10, [5, 10], [3, 8, 10], [10]),
    # A batch longer than an epoch passes several ends at once.
    ((Epoch(5), Epoch(1), Epoch(2), None), 25, 10, [1, 2], [1, 2], [2]),
    # Mixed units.
    ((Epoch(2), Batch(2), Record(12), Epoch(1)), 4, 10, [2, 4, 5], [3, 5], [3, 5]),
    ((Batch(8), Epoch(1), Batch(4), Record(8)), 4, 10, [3, 5, 8], [4, 8], [2, 4, 6, 8]),
    ((Record(1), None, None, Epoch(1)), 4, 10, [1], [1], [1]),
]


@pytest.mark.parametrize("units, batch, records, validations, checkpoints, reports", TABLE)
def test_positions(units, batch, records, validations, checkpoints, reports):
    length, validation, checkpoint, reporting = units
    schedule = Schedule(length, batch, records, validation, checkpoint, reporting)
    boundaries = list(schedule.boundaries())
    assert [b.step for b in boundaries if b.validates] == validations
    assert [b.step for b in boundaries if b.saves] == checkpoints
    assert [b.step for b in boundaries if b.reports] == reports
    assert [b.step for b in boundaries if b.ends] == [schedule.last_step] == [validations[-1]]


def test_seconds():
    """Steps of 4 seconds: periods of 10 are over at 12, 20, 32; training ends after 30."""
    schedule = Schedule(Seconds(30), 4, None, Seconds(10), Seconds([5, 29.5]), Batch(5))
    assert schedule.last_step is None
    happens = [schedule.boundary(step, 4 * (step - 1), 4 * step) for step in range(1, 9)]
    assert [b.step for b in happens if b.validates] == [3, 5, 8]
    assert [b.step for b in happens if b.saves] == [2, 8]
    assert [b.step for b in happens if b.reports] == [5, 8]
    assert [b.step for b in happens if b.ends] == [8]


def test_a_boundary_of_nothing_is_empty():
    assert Schedule(Batch(5), 4, None, Batch(2)).boundary(3).is_empty
    assert Schedule(Batch(5), 4, None, Batch(2)).boundary(4) == Boundary(4, validates=True)
    assert Schedule(Batch(5), 4).epochs(2) is None and Schedule(Batch(5), 4, 16).epochs(2) == 0.5


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Batch(0), ValueError, r"Batch\(0\): 0 isn't a whole number from 1"),
        (lambda: Epoch(1.5), ValueError, "1.5 isn't a whole number from 1"),
        (lambda: Record(True), ValueError, "True isn't a whole number"),
        (lambda: Batch([3, -1]), ValueError, r"Batch\(\[3, -1\]\): -1 isn't"),
        (lambda: Batch([]), ValueError, "no position"),
        (lambda: Seconds(0), ValueError, "0 isn't a number of seconds above 0"),
        (lambda: Seconds(float("nan")), ValueError, "nan isn't a number of seconds"),
        (lambda: Schedule(100, 4), TypeError, r"max_length=100 has no unit.*Batch\(100\)"),
        (lambda: Schedule(None, 4), TypeError, "max_length=None has no unit"),
        (lambda: Schedule(Batch([1, 2]), 4), ValueError, "one number, not positions"),
        (lambda: Schedule(Batch(1), 4, None, 5), TypeError, "validation_period=5 has no unit"),
        (lambda: Schedule(Epoch(1), 4), ValueError, "records_per_epoch"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
