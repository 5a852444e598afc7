"""The estimate of a step on all ranks compared with one rank's, worked out by hand."""

from __future__ import annotations

import dataclasses
import types

import pytest
import tensorflow.compat.v1 as tf

from collective.plan import step_estimate, step_work
from collective.plan.data import StepEstimate
from collective.plan.step_estimate import StepWork
from tests.unit.plan.test_plan_text import plan_of, table

# 26 features of one id in tables of dimension 16, and a network of 50,000 parameters.
ROW_BYTES = 26 * 16 * 4


def test_a_step_worked_out_by_hand():
    """1,000 samples on 2 ranks.

    A sample: 1,664 bytes at 0.6 GB/s are 2.7733 us, 300,000 operations at 50 G/s 6 us. Over sockets
    it sends 3,328 bytes at 2.6 GB/s: 1.28 us. Five exchanges take 1.75 ms, 400,000 bytes of dense
    gradients 0.1538 ms. Through memory that is 0.416 us, 0.15 ms and 0.05 ms.
    """
    work = StepWork(2, 5, ROW_BYTES, parameters=50000, samples=1000, wire=step_estimate.HOROVOD)
    estimate = step_estimate.estimate(work)
    assert estimate.one_rank_ms == pytest.approx(0.8 + 8.7733, abs=1e-3)
    assert estimate.all_ranks_ms == pytest.approx(0.8 + 500 * 0.0100533 + 1.75 + 0.1538, abs=1e-3)
    # Each sample saves 8.7733 - 10.0533 / 2 us of the 1.9038 ms.
    assert estimate.break_even_samples == pytest.approx(1903.8 / 3.74665, abs=1)
    by_memory = dataclasses.replace(work, wire=step_estimate.SHARED_MEMORY)
    estimate = step_estimate.estimate(by_memory)
    assert estimate.all_ranks_ms == pytest.approx(0.8 + 500 * 0.0091893 + 0.15 + 0.05, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("parameters", [0, 1000, 10**6])
def test_from_the_break_even_on_all_ranks_are_faster(ranks, parameters):
    work = StepWork(ranks, 4, ROW_BYTES, parameters, samples=None)
    samples = step_estimate.estimate(work).break_even_samples
    at, below = (
        step_estimate.estimate(StepWork(ranks, 4, ROW_BYTES, parameters, count))
        for count in (samples, samples - 1)
    )
    assert at.all_ranks_ms <= at.one_rank_ms
    assert below.all_ranks_ms > below.one_rank_ms


def test_without_known_samples_there_are_no_times():
    estimate = step_estimate.estimate(StepWork(2, 4, ROW_BYTES, 0, None, step_estimate.HOROVOD))
    assert (estimate.samples, estimate.one_rank_ms, estimate.all_ranks_ms) == (None, None, None)
    # 1.4 ms over 2.7733 - 4.0533 / 2 us
    assert estimate.break_even_samples == pytest.approx(1400 / 0.74665, abs=2)


SMALL = [table("user", 1000, 16)]


def test_a_small_model_is_told_the_times_and_what_to_try():
    plan = plan_of(SMALL, estimate=StepEstimate(768, 1.53, 4.21, 3000))
    assert " ".join(step_estimate.advice(plan)) == (
        "An estimate: sharding doesn't pay here. A step of 768 samples takes 4.2 ms on 4 ranks, "
        "1.5 ms on one. Try larger batches, scope(local_steps=…), "
        "embedding_scope(replicate_below='1 MB') for small tables, or one rank."
    )
    assert str(plan).splitlines()[-2:] == step_estimate.advice(plan)


def test_where_the_samples_are_unknown_the_claim_has_a_condition():
    plan = plan_of(SMALL, estimate=StepEstimate(None, None, None, 4262))
    assert " ".join(step_estimate.advice(plan)).startswith(
        "An estimate: with fewer than 4,300 samples in a step of 4 ranks sharding doesn't pay: one "
        "rank alone is faster. Try larger batches, scope(local_steps=…), "
    )


@pytest.mark.parametrize(
    "tables, estimate",
    [
        (SMALL, None),
        # It pays, or nearly.
        (SMALL, StepEstimate(8192, 20.0, 12.0, 3000)),
        (SMALL, StepEstimate(2500, 6.0, 7.0, 3000)),
        # Nobody trains with so few.
        (SMALL, StepEstimate(None, None, None, 300)),
        # One rank might not hold them.
        ([table("user", 100_000_000, 16)], StepEstimate(768, 1.5, 4.2, 3000)),
        ([table("user", None, 16)], StepEstimate(768, 1.5, 4.2, 3000)),
    ],
)
def test_nothing_is_claimed_where_it_might_be_false(tables, estimate):
    plan = plan_of(tables, estimate=estimate)
    assert step_estimate.advice(plan) == []
    assert "An estimate" not in str(plan)


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_of_unknown_size_has_unknown_samples(version):
    """Scripts of TensorFlow 1 disable version 2, whose shapes have other items."""
    if version == 1:
        tf.disable_v2_tensorshape()
    try:
        with tf.Graph().as_default():
            lookups = [
                types.SimpleNamespace(ids=tf.placeholder(tf.int64, shape), sparse_ids=None)
                for shape in ([6], [8, 2], [None, 2])
            ]
        assert step_work.samples_of(lookups[:2]) == 8
        assert step_work.samples_of(lookups) is None
    finally:
        tf.enable_v2_tensorshape()
