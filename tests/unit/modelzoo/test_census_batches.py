"""The global batches must not depend on the number of ranks."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from census_income import batches, click_log, loader
from census_income.columns import LABEL
from census_income.features import Encoder


def global_batches(ranks: int, **changes) -> list[np.ndarray]:
    arguments = {"rows": 50, "batch": 12, "steps": 11, "seed": 3, **changes}
    shares = [list(batches.training(rank=rank, ranks=ranks, **arguments)) for rank in range(ranks)]
    assert {len(part) for share in shares for part in share} == {12 // ranks}
    return [np.concatenate([share[step] for share in shares]) for step in range(arguments["steps"])]


@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_the_shares_make_up_the_same_global_batches(ranks):
    np.testing.assert_array_equal(global_batches(ranks), global_batches(1))


@pytest.mark.parametrize("finished", [0, 1, 4, 6, 11])
def test_finished_steps_are_left_out(finished):
    rest = list(batches.training(50, 12, 11, 3, rank=1, ranks=2, finished=finished))
    whole = list(batches.training(50, 12, 11, 3, rank=1, ranks=2))
    assert len(rest) == 11 - finished
    np.testing.assert_array_equal(rest, whole[finished:])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_of_all_ranks_are_dealt_as_the_shares(ranks):
    batches_of_all_ranks = list(batches.training_of_all_ranks(50, 12, 11, 3, ranks, finished=2))
    for rank in range(ranks):
        np.testing.assert_array_equal(
            batches_of_all_ranks[rank::ranks],
            list(batches.training(50, 12, 11, 3, rank, ranks, finished=2)),
        )


def test_an_epoch_takes_a_row_at_most_once_and_drops_the_last_partial_batch():
    steps = global_batches(1)
    assert len(steps) == 11  # four batches in an epoch: two rows of each are dropped
    epochs = [np.concatenate(steps[start : start + 4]) for start in (0, 4, 8)]
    assert [len(np.unique(epoch)) for epoch in epochs] == [48, 48, 36]
    assert (epochs[0] != epochs[1]).any()
    assert (np.concatenate(global_batches(1, seed=4)) != np.concatenate(steps)).any()


@pytest.mark.parametrize("rows, count", [(16281, 4), (7, 1), (4096, 1), (4097, 2)])
def test_evaluation_takes_every_row_once_in_order(rows, count):
    taken = list(batches.evaluation(rows, 4096))
    assert len(taken) == count
    np.testing.assert_array_equal(np.concatenate(taken), np.arange(rows))


def test_the_example_needs_no_horovod():
    """`make train` doesn't wait for its build."""
    folder = Path(batches.__file__).parents[1]
    for program in [*folder.glob("census_income/*.py"), *folder.glob("common/*.py")]:
        text = program.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) horovod", text, re.MULTILINE), program


@pytest.mark.parametrize("first", [0, 1, 3, 4, 9])
def test_batches_without_gaps_go_on_from_any_number(first):
    """An epoch of 50 rows ends in the middle of the batches of 12."""
    rows = np.concatenate(list(itertools.islice(batches.epochs(50, 3), 4)))
    assert sorted(rows) == sorted([*range(50)] * 4)
    assert (rows[:50] != rows[50:100]).any()
    found = list(itertools.islice(batches.without_gaps(50, 12, 3, first), 16 - first))
    np.testing.assert_array_equal(np.concatenate(found), rows[12 * first : 12 * 16])


@pytest.mark.parametrize("streams, first", [(1, 0), (2, 0), (3, 2)])
def test_loaders_take_turns_with_the_batches_of_the_program(streams, first):
    log = click_log.generate(train_rows=50, test_rows=1)
    examples = Encoder(log.train).encode(log.train)
    make = loader.training(examples, 12, seed=3)
    rows = np.concatenate(list(itertools.islice(batches.epochs(50, 3), 4)))
    for stream in range(streams):
        for number, batch in enumerate(itertools.islice(make(stream, streams, first), 3), first):
            start = 12 * (number * streams + stream)
            own = rows[start : start + 12]
            np.testing.assert_array_equal(batch.labels[LABEL], examples.label[own])
            np.testing.assert_array_equal(batch.dense["numeric"], examples.numeric[own])
            for column, ids in examples.ids.items():
                assert batch.ids[column].to_list() == [[each] for each in ids[own]]
