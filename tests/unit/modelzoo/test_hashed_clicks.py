"""Clicks on hashed ids are generated from row numbers alone, and new ids never stop coming."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from common import click_options, click_source
from hashed_ids import hashed_clicks
from hashed_ids.hashed_clicks import HashedClicks
from hashed_ids.keys import crossed
from hashed_ids.train import HashedIds

ENDLESS, PASSING = 12, 20  # the first column of each kind
FAR = 10**12


def ids(start: int, count: int = 20_000) -> np.ndarray:
    return hashed_clicks.generate(np.arange(start, start + count))[0]["categorical"]


def test_a_row_follows_from_its_number():
    numbers = np.random.default_rng(0).permutation(3000)
    whole, probability = hashed_clicks.generate(np.arange(3000))
    part, of_part = hashed_clicks.generate(numbers[:100])
    for name, values in whole.items():
        np.testing.assert_array_equal(part[name], values[numbers[:100]])
    np.testing.assert_array_equal(of_part, probability[numbers[:100]])
    other, _ = hashed_clicks.generate(np.arange(3000), seed=1)
    assert not np.isin(other["categorical"], whole["categorical"]).any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_the_same_rows_for_every_number_of_ranks(ranks):
    source = HashedClicks(200)

    def batches(rank, ranks):
        with tf.Graph().as_default(), tf.Session() as session:
            records = click_source.training(source, 12, 0, 2).shard(ranks, rank)
            dataset = click_source.batches(source, "train", records, 12 // ranks, whole=True)
            batch = tf.data.make_one_shot_iterator(dataset).get_next()
            return [session.run(batch) for _ in range(15)]

    whole, parts = batches(0, 1), [batches(rank, ranks) for rank in range(ranks)]
    in_order, _ = hashed_clicks.generate(np.arange(24, 36))
    np.testing.assert_array_equal(whole[0]["categorical"], in_order["categorical"])
    for step, batch in enumerate(whole):
        for name, values in batch.items():
            for rank in range(ranks):
                np.testing.assert_array_equal(parts[rank][step][name], values[rank::ranks])


def test_a_log_of_any_length_takes_the_memory_of_a_batch():
    source = HashedClicks(FAR)
    assert (source.count("train"), source.count("test")) == (FAR - 50_000, 50_000)
    tracemalloc.start()
    rows, _ = hashed_clicks.generate(np.arange(FAR - 512, FAR))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows["categorical"].shape == (512, 26) and peak < 4e6


def test_new_ids_never_stop_coming():
    early, late = ids(0), ids(FAR)
    for column in range(ENDLESS):
        assert len(np.unique(early[:, column])) > 0.98 * hashed_clicks.IDS[column]
        assert np.isin(late[:, column], early[:, column]).mean() > 0.99
    for column in range(ENDLESS, PASSING):
        come_again = np.isin(late[:, column], early[:, column]).mean()
        assert 0.2 < come_again < 0.5
        assert len(np.unique(late[:, column])) > 0.6 * len(late)
    for column in range(PASSING, 26):
        assert not np.isin(late[:, column], early[:, column]).any()
        assert len(np.unique(early[:, column])) < 1.5 * hashed_clicks.IDS[column]


def test_ids_are_hashes_of_64_bits():
    bits = np.unpackbits(np.unique(ids(0)[:, ENDLESS:]).view(np.uint8)).reshape(-1, 64)
    assert abs(bits.mean(0) - 0.5).max() < 0.01


def test_labels_come_from_the_probability_and_rare_ids_have_effects_as_large():
    rows, probability = hashed_clicks.generate(np.arange(40_000))
    for part in np.array_split(np.argsort(probability), 20):
        expected = probability[part]
        deviation = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        assert abs(rows["label"][part].mean() - expected.mean()) < 5 * deviation
    _, which, count = np.unique(rows["categorical"][:, 15], return_inverse=True, return_counts=True)
    spread = [np.log(p / (1 - p)).std() for p in (probability[count[which] == 1], probability)]
    assert spread[0] == pytest.approx(spread[1], rel=0.05)


def test_the_best_scores_are_those_of_the_true_probability():
    source = HashedClicks(60_000)
    auc, log_loss = source.best_scores
    p = np.sort(hashed_clicks.generate(np.arange(54_000, 60_000))[1])
    negatives_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
    assert auc == pytest.approx((p * negatives_below).sum() / (p.sum() * (1 - p).sum()), abs=0.012)
    assert log_loss == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(), abs=0.015)
    assert f"{auc:.4f}" in source.reference


def test_keys_are_hashes_in_which_order_and_column_count():
    with tf.Graph().as_default(), tf.Session() as session:
        first, second = tf.constant([3, 3, 2**62], tf.int64), tf.constant([5, -1, 3], tf.int64)
        given = (
            crossed(first, second),
            crossed(second, first),
            crossed(tf.range(3, 6, dtype=tf.int64), first),
        )
        keys = np.concatenate(session.run(given))
    assert keys.dtype == np.int64 and len(np.unique(keys)) == 9


def parse(*arguments):
    return click_options.parse(HashedIds.defaults, list(arguments), 0)


def policy(*arguments):
    return HashedIds(parse(*arguments), (), None)._policy()


def test_every_limit_can_be_switched_off():
    default = policy()
    assert default.filter_freq and default.steps_to_live and default.capacity
    changed = policy("--filter-freq", "0", "--steps-to-live", "7", "--capacity", "9")
    assert (changed.filter_freq, changed.steps_to_live, changed.capacity) == (None, 7, 9)
    assert default.max_element_size and policy("--filter-keys", "0").max_element_size is None
    forever = policy("--steps-to-live", "0")
    assert forever.capacity and (forever.steps_to_live, forever.evict) == (None, "at_save")
    assert policy("--filter-freq", "0", "--steps-to-live", "0", "--capacity", "0") is None
    assert policy("--unbounded") is None


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--unbounded", "--capacity", "7"), "--unbounded and --capacity 7 contradict each other"),
        (("--buckets", "7"), "--buckets is for tables of a fixed number of rows"),
        (
            ("--mode", "evaluate", "--checkpoint-dir", "x", "--course", "y"),
            "--course and --evaluate-steps are for --mode train",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, no_sleep, arguments, complaint):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert complaint in capsys.readouterr().err
