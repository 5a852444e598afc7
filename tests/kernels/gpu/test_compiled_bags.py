"""Checks compiled operations by kernels where owners pool: rows of bags, sums of their gradients.

See `test_compiled_operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bagged import CLIPPED, DIMS, MIXED, PLAIN, ROWS, Bagged, Section, initialized, near

from collective.ops import native_library
from collective.ops.gpu import pool
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge


@pytest.mark.parametrize("sections", [PLAIN, MIXED, CLIPPED])
@pytest.mark.usefixtures("bound")
def test_rows_are_pooled(stand_in: driver.StandIn, sections: tuple[Section, ...]):
    """As NumPy and the CPU's operation pool them, where nothing is done before somebody waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged(sections)
        on_cpu = made.gathered(native_library.library())
        flat = made.gathered()
        initialized(session, stand_in, delays=True)
        got = session.run(flat)
        assert not stand_in.queued
        near([got, got], [made.wanted_rows(), session.run(on_cpu)])
    is_plain = sections == PLAIN
    unpooled = ["gather_rows"] if not all(one.pooled for one in sections) else []
    squares = ["pool_products"] if sections == CLIPPED else []
    pooled = ["pool_rows_plain" if is_plain else "pool_rows"]
    assert stand_in.launches == [*unpooled, "bag_offsets", *squares, *pooled]
    assert stand_in.calls.count("copy_to_device") == 1 and "copy_to_host" not in stand_in.calls


@pytest.mark.parametrize("sections", [PLAIN, MIXED, CLIPPED])
@pytest.mark.usefixtures("bound")
def test_gradients_of_bags_are_summed_by_row(
    stand_in: driver.StandIn, sections: tuple[Section, ...]
):
    """As NumPy and the CPU's operation sum them; of rows that are clipped, too."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged(sections, seed=1)
        on_cpu = made.reduced(native_library.library())
        sums = made.reduced()
        initialized(session, stand_in, delays=True)
        got = session.run(sums)
        assert not stand_in.queued
        near(got, made.wanted_sums())
        near(got, session.run(on_cpu))
    assert ("gather_rows" in stand_in.launches) == (sections == CLIPPED)
    assert stand_in.calls.count("copy_to_device") == 2
    assert stand_in.calls.count("wait_for_event") == 1, "for how many rows are distinct"


@pytest.mark.usefixtures("bound", "stand_in")
def test_many_bags_and_a_row_that_occurs_often():
    """More bags than a block has threads; sums of pieces."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged((Section(0, weighted=True), Section(1)), 1, 9000, 1, seed=7)
        session.run(tf.global_variables_initializer())
        near([session.run(made.gathered())], [made.wanted_rows()])
        for one, other in zip(session.run(made.reduced()), made.wanted_sums()):
            np.testing.assert_allclose(one, other, 2e-3, 2e-3)


@pytest.mark.usefixtures("bound")
def test_no_bags(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged(CLIPPED, most=0)
        fetches = [made.gathered(), *made.reduced()]
        initialized(session, stand_in)
        near(session.run(fetches), [made.wanted_rows(), *made.wanted_sums()])
    assert stand_in.launches == []


def _planned(
    made: Bagged, order: list[tuple[int, int]], each: int | None, lanes: int | None
) -> Any:
    """Returns the words of these pieces' lookups as Python plans them, except for the addresses."""
    lookups = [
        pool.Lookup(
            len(made.sent[rank][s].lengths),
            DIMS[made.sections[s].table],
            pool.SUM,
            made.sections[s].weighted,
            made.sections[s].max_norm,
            made.sections[s].table,
        )
        for rank, s in order
    ]
    runs = np.array([[lookup.source, 1] for lookup in lookups]).reshape(-1, 2)
    nowhere = np.zeros(len(lookups), np.int64)
    return without_addresses(pool._words(lookups, runs, nowhere, (0, 0), each, lanes)[0])


def without_addresses(words: np.ndarray) -> np.ndarray:
    return np.delete(words.reshape(-1, 14), [5, 11, 12], 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_that_of_python(
    monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn, seed: int
):
    """Word by word, except for the addresses: of lookups, and of where their bags begin."""
    bind(EmulatedBridge(), monkeypatch)
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged((*MIXED, *CLIPPED), 3, 40, 3, seed)
        flat, sums = made.gathered(), made.reduced()
        initialized(session, stand_in)
        session.run(flat)
        (words,) = (np.frombuffer(one, np.int64) for one in stand_in.uploads)
        everything = [(rank, s) for rank in range(3) for s in range(len(made.sections))]
        pooled = [(rank, s) for rank, s in everything if made.sections[s].pooled]
        bags = some_bags(made, pooled)
        lookups = _planned(made, pooled, 4, None)
        by_id = _planned(made, pooled, 1, None)
        split = np.split(words[::-1], np.cumsum([14 * len(lookups), 14 * len(by_id), 9]))
        got = [one[::-1] for one in split]
        np.testing.assert_array_equal(without_addresses(got[0]), lookups)
        np.testing.assert_array_equal(without_addresses(got[1]), by_id)
        np.testing.assert_array_equal(got[2].reshape(3, 3)[:, :2], [[0, ROWS]] * 3)
        got_bags = got[3][-6 * len(bags) :].reshape(-1, 6)
        np.testing.assert_array_equal(got_bags[:, :5], bags)
        assert got_bags[:, 5].all() and (len(got[3]) - 6 * len(bags)) % 9 == 0

        stand_in.reset()
        session.run(sums)
        words = np.frombuffer(stand_in.uploads[0], np.int64)
        by_table = [piece for t in range(len(DIMS)) for piece in made.pieces(t)]
        by_thread, by_id = (_planned(made, by_table, 1, lanes) for lanes in (1, None))
        bags = some_bags(made, by_table)
        runs = len(bags)  # of gradients: pieces of one table don't lie side by side
        sizes = [3 * runs, 14 * len(by_thread), 14 * len(by_id), 9, 6 * len(bags)]
        split = [one[::-1] for one in np.split(words[::-1], np.cumsum(sizes))]
        np.testing.assert_array_equal(without_addresses(split[1]), by_thread)
        np.testing.assert_array_equal(without_addresses(split[2]), by_id)
        np.testing.assert_array_equal(split[4].reshape(-1, 6)[:, :5], bags)
        is_pooled = [made.sections[s].pooled for rank, s in by_table if count(made, rank, s)]
        assert (split[4].reshape(-1, 6)[:, 5] != 0).tolist() == is_pooled


def count(made: Bagged, rank: int, s: int) -> int:
    return len(made.sent[rank][s].lengths)


def some_bags(made: Bagged, pieces: list[tuple[int, int]]) -> np.ndarray:
    """Returns block, bags and ids of the pieces that have bags."""
    bags = np.array([count(made, rank, s) for rank, s in pieces])
    keys = np.array([len(made.sent[rank][s].rows) for rank, s in pieces])
    ends = np.cumsum(bags)
    words = np.stack([np.cumsum(bags > 0) - 1, ends - bags, ends, np.cumsum(keys) - keys, keys], 1)
    return words[bags > 0]


def with_lengths(made: Bagged, change: Callable[[np.ndarray], None]) -> np.ndarray:
    """Returns the message, of which the lengths of the first section of rank 0 are others."""
    first = made.sent[0][0]
    words = np.concatenate([made._words(of_rank) for of_rank in made.sent])
    at = 2 * (2 * len(made.sections) + len(first.rows))
    change(words.view(np.int32)[at : at + len(first.lengths)])
    return words


@pytest.mark.parametrize(
    "change",
    [
        lambda lengths: lengths.__setitem__(1, 1000),
        lambda lengths: lengths.__setitem__(1, -1),
        lambda lengths: lengths.__setitem__(slice(None), 2**31 - 1),
        lambda lengths: lengths.__setitem__(slice(None), 0),
    ],
)
@pytest.mark.usefixtures("bound", "stand_in")
def test_other_lengths_than_those_of_keys(change: Callable[[np.ndarray], None]):
    """The step is refused; what is pooled before that is of the message's own keys."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged(MIXED, seed=2)
        assert len(made.sent[0][0].rows) > 1
        feed = {made.message: with_lengths(made, change)}
        session.run(tf.global_variables_initializer())
        got, right = session.run(made.gathered(), feed), made.wanted_rows()
        size = DIMS[0] * count(made, 0, 0)
        np.testing.assert_allclose(got[size:], right[size:], 1e-4, 1e-5)
        with pytest.raises(tf.errors.InvalidArgumentError, match="lengths of its bags are not"):
            session.run(made.reduced(), feed)


@pytest.mark.parametrize("kind", ["gathered", "reduced"])
def test_each_call_of_the_driver_may_fail(kind: str, bound: Any, stand_in: driver.StandIn):
    """Then the operation fails, nothing of it is under way after it, and the next one works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Bagged(CLIPPED)
        fetched = getattr(made, kind)()
        initialized(session, stand_in)
        session.run(fetched)
        stand_in.reset()
        session.run(fetched)
        names = list(stand_in.calls)
        assert len(names) > 4
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            if name == "destroy_event":
                session.run(fetched)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(fetched)
            if name != "wait_for_stream":  # on a GPU, the stream itself keeps what is left in order
                assert not stand_in.queued
        stand_in.reset()
        got = session.run(fetched)
        if kind == "gathered":
            near([got], [made.wanted_rows()])
        else:
            near(got, made.wanted_sums())
