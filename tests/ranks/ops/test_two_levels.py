"""Exchanges that hosts merge: bits of deterministic training, and what the plan says of them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.communication import carrier_choice, hierarchy
from tests.ranks import reference
from tests.ranks.strategies.test_grouping import batches, everything

pytestmark = [pytest.mark.two_levels, pytest.mark.grouped]
TWO_LEVELS = "two levels: the 2 ranks of each of 2 hosts merge what they exchange with others"


def minimized(*rows):
    return tf.train.GradientDescentOptimizer(0.1).minimize(
        tf.add_n([tf.reduce_mean(x) for x in rows])
    )


def test_the_plan_goes_by_the_scope_in_which_a_group_was_built(strategy):
    """The scope that is open when the plan is read may be another one."""
    with strategy.scope(plan="quiet", hierarchical=True), tf.Graph().as_default():
        merges = hierarchy.of_group() is not None
        with strategy.embedding_scope():
            a, b = reference.table("a", 9, 3), reference.table("b", 9, 3)
        with strategy.scope(hierarchical=False):
            minimized(tf.nn.embedding_lookup(a, [1, 2]))
        alone = strategy.plan()
        minimized(tf.nn.embedding_lookup(b, [1, 2]))
        both = strategy.plan()
    assert [group.hierarchical for group in alone.groups] == [False]
    assert [group.hierarchical for group in both.groups] == [False, merges]
    if merges:
        names = [group.name for group in both.groups]
        assert alone.notes["hierarchical"] == "flat: scope(hierarchical=False)"
        assert both.notes["hierarchical"] == (
            f"{names[0]} flat: scope(hierarchical=False); {names[1]} {TWO_LEVELS} "
            "(scope(hierarchical=True))"
        )
    else:
        assert "two levels" not in both.notes.get("hierarchical", "")


@pytest.mark.parametrize("deterministic", [False, True])
def test_exchanges_of_gradients_name_the_lookups_that_have_some(strategy, size, deterministic):
    with strategy.scope(plan="quiet", deterministic=deterministic), tf.Graph().as_default():
        with strategy.embedding_scope():
            a, b = reference.table("a", 9, 3), reference.table("b", 9, 4)
        kept = tf.stop_gradient(tf.nn.embedding_lookup(b, [1, 2]))
        minimized(tf.nn.embedding_lookup(a, [1, 2]), kept)
        plan = strategy.plan()
    gradients = [x for x in plan.exchanges if x.phase == "gradients"]
    assert len(gradients) == (0 if size == 1 else 2 if carrier_choice.can_mix() else 1)
    for exchange in gradients:
        assert (exchange.members, exchange.tables, exchange.sections) == (1, 1, 1)
    for exchange in plan.exchanges:
        if exchange.phase in ("keys", "rows"):
            assert (exchange.members, exchange.tables, exchange.sections) == (2, 2, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("wire", [None, "float16"])
def test_deterministic_training_has_the_bits_of_flat_exchanges(strategy, rank, size, wire):
    runs = [
        (["train", "wide"], {k: reference.part(v, rank, size) for k, v in feed.items()})
        for feed in batches()
    ]
    runs.append((["state"], {}))
    results = []
    for hierarchical in (True, False):
        with strategy.scope(
            hierarchical=hierarchical,
            deterministic=True,
            wire_dtype=wire or "float32",
            gradient_wire_dtype=wire or "float32",
        ):
            results.append(reference.sharded(strategy, lambda s: everything(s, True), runs))
    merged, flat = (
        [step["wide"] for step in steps[:-1]]
        + [steps[-1]["state"][k] for k in sorted(steps[-1]["state"])]
        for steps in results
    )
    for one, other in zip(merged, flat):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_ahead_give_the_numbers_of_keys_in_time(strategy, rank, deterministic):
    results = []
    for options in ({"prefetch_keys": True}, {"hierarchical": False}):
        options = {"hierarchical": True, **options}
        with (
            strategy.scope(deterministic=deterministic, plan="quiet", **options),
            tf.Graph().as_default(),
        ):
            tf.set_random_seed(1)
            with strategy.embedding_scope():
                table = reference.table("table", 40, 4)
            ids = np.random.default_rng(rank).integers(0, 40, (6, 12))
            data = tf.data.Dataset.from_tensor_slices(ids)
            rows = tf.nn.embedding_lookup(table, tf.data.make_one_shot_iterator(data).get_next())
            loss = tf.reduce_mean(tf.square(rows - 1.0))
            train = tf.train.AdagradOptimizer(0.1).minimize(loss)
            losses = []
            with tf.train.MonitoredTrainingSession() as session:
                while not session.should_stop():
                    losses.append(session.run([loss, train])[0])
            results.append(losses)
    assert len(results[0]) == 6
    if deterministic:
        assert results[0] == results[1]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
