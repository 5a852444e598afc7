"""Each record is used once an epoch, on any number of ranks, wherever a job begins."""

from __future__ import annotations

import collections
import os
import tempfile
from concurrent.futures import Future

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as some

from collective.data import batch_reader
from collective.data.batch_reader import BatchReader
from collective.data.parquet_files import ParquetFiles
from collective.data.record_order import Piece, RecordOrder


class AtOnce:
    """Stands in for the threads that read ahead: handing work over would take most of the time."""

    def submit(self, function, *args):
        done = Future()
        done.set_result(function(*args))
        return done


REPEATABLE = hypothesis.settings(max_examples=300, derandomize=True, deadline=None, database=None)
# Row groups of a file, as their numbers of rows.
FILES = some.lists(some.lists(some.integers(0, 9), max_size=3), min_size=1, max_size=3)
OPTIONS = some.fixed_dictionaries(
    {
        "batch_size": some.integers(1, 7),
        "shuffle": some.booleans(),
        "seed": some.integers(0, 2**32 - 1),
        "interleave": some.integers(1, 4),
        "drop_remainder": some.booleans(),
    }
)


def write(folder, files):
    """Writes files of these row groups, whose records are numbered; returns their paths."""
    paths, first = [], 0
    schema = pyarrow.schema([("id", pyarrow.int64())])
    for number, groups in enumerate(files):
        paths.append(os.path.join(folder, f"{number}.parquet"))
        with pyarrow.parquet.ParquetWriter(paths[-1], schema) as writer:
            for rows in groups:
                ids = np.arange(first, first + rows)
                writer.write_table(pyarrow.table([ids], schema), row_group_size=max(rows, 1))
                first += rows
    return paths


@pytest.mark.slow
@REPEATABLE
@hypothesis.given(
    FILES, OPTIONS, some.lists(some.tuples(some.integers(1, 5), some.integers(0, 4)), max_size=3)
)
def test_each_record_is_used_once_over_ranks_and_restarts(files, options, stages):
    """Jobs of some ranks take some steps each, one after the other, and the last one ends."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_reader, "reading_threads", AtOnce)
        source = ParquetFiles(write(folder, files))
        order = RecordOrder([group.rows for group in source.groups], **options)
        hypothesis.assume(order.batches)
        end, position, used = 2 * order.batches, 0, collections.defaultdict(list)
        for ranks, steps in [*stages, (2, end)]:
            stop = min(position + ranks * steps, end)
            for rank in range(ranks):
                numbers = [n for n in range(position, stop) if n % ranks == rank]
                reader = BatchReader(source, order, end, ranks)
                for number in numbers:
                    used[number // order.batches].append((number, reader.read(number)[0].tolist()))
            position = stop
    whole = order.batches * options["batch_size"] if options["drop_remainder"] else order.records
    for epoch in range(2):
        ids = [record for _, batch in used[epoch] for record in batch]
        assert len(ids) == len(set(ids)) == min(whole, order.records)
        assert set(ids) <= set(range(order.records))
        sizes = [len(batch) for _, batch in sorted(used[epoch])]
        assert all(size == options["batch_size"] for size in sizes[:-1])


def records(order, numbers):
    """Returns the records of batches, as (row group, row)."""
    out = []
    for number in numbers:
        batch = order.batch(number)
        for piece in batch.pieces:
            rows = order.permutation(piece.epoch, piece.group)
            rows = np.arange(100) if rows is None else rows
            chosen = rows[piece.first : piece.first + piece.count]
            out += [(piece.group, int(row)) for row in chosen]
    return out


def test_the_pages_picture():
    """Three row groups of two batches each are read side by side."""
    order = RecordOrder([4] * 6, 2, interleave=3)
    groups = [[piece.group for piece in order.batch(number).pieces] for number in range(12)]
    assert groups == [[0], [1], [2], [0], [1], [2], [3], [4], [5], [3], [4], [5]]
    assert order.batch(3).pieces == (Piece(0, 2, 2),)
    assert order.batch(3).beyond == 6 and order.batch(3).window == {(0, 0), (0, 1), (0, 2)}
    for rank in range(3):
        read = {p.group for number in range(rank, 12, 3) for p in order.batch(number).pieces}
        assert read == {rank, rank + 3}


def test_row_groups_of_unequal_length_leave_no_gap():
    order = RecordOrder([5, 0, 1, 4], 2, interleave=2)
    assert records(order, range(order.batches)) == [
        *[(0, 0), (0, 1), (2, 0), (0, 2), (0, 3), (0, 4)],
        *[(3, 0), (3, 1), (3, 2), (3, 3)],
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_steps_of_several_ranks_are_those_of_one(shuffle):
    """Three ranks with batches of 4 use the records that one rank has in a batch of 12."""
    rows = [7, 20, 1, 13, 31]
    one = RecordOrder(rows, 12, shuffle=shuffle, seed=3)
    three = RecordOrder(rows, 4, shuffle=shuffle, seed=3)
    for step in range(one.batches):
        assert records(one, [step]) == records(three, range(3 * step, 3 * step + 3))


def test_a_shuffled_epoch_is_another_order_of_the_same_records():
    order = RecordOrder([10, 30, 20], 7, shuffle=True, seed=1)
    first, second = (
        records(order, range(epoch * order.batches, (epoch + 1) * order.batches))
        for epoch in range(2)
    )
    assert sorted(first) == sorted(second) and first != second
    again = RecordOrder([10, 30, 20], 7, shuffle=True, seed=1)
    assert records(again, range(order.batches)) == first
    other = RecordOrder([10, 30, 20], 7, shuffle=True, seed=2)
    assert records(other, range(order.batches)) != first


def test_an_order_stays_from_version_to_version():
    """A job that goes on after an upgrade reads the same records."""
    order = RecordOrder([6, 5], 4, shuffle=True, seed=7)
    assert records(order, range(order.batches)) == [
        *[(1, row) for row in (4, 1, 3, 0, 2)],
        *[(0, row) for row in (5, 2, 3, 0, 4, 1)],
    ]
