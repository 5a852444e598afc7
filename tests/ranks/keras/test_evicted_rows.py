"""Rows of eager code's tables leave as their policies say, as from a dictionary in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

import collective
from collective import TableError, TablePolicy, every_steps
from collective import keras as collective_keras
from collective.ops import placement
from tests.ranks import admitted_keys
from tests.ranks.admitted_keys import KEYS, Truth, batches
from tests.ranks.dynamic_tables import D
from tests.ranks.keras.models import keras
from tests.ranks.keras.test_admitted_keys import compiled, own, train_by, train_by_fit

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

SMALL = 0.3
POLICIES = {
    "age": TablePolicy(steps_to_live=2),
    "weights": TablePolicy(l2_weight_threshold=SMALL),
    "some stay": TablePolicy(steps_to_live=1, keep_at_least=13, l2_weight_threshold=SMALL),
    "between saves": TablePolicy(steps_to_live=2, l2_weight_threshold=SMALL, evict=every_steps(3)),
    "weights between saves": TablePolicy(l2_weight_threshold=SMALL, evict=every_steps(2)),
    "capacity": TablePolicy(capacity=10),
    "counted": TablePolicy(capacity=5, filter_freq=2, steps_to_live=3),
    "drawn": TablePolicy(admit_probability=0.4),
    "drawn and old": TablePolicy(admit_probability=0.6, steps_to_live=1, filter_freq=2),
}


class Evicting(Truth):
    """Knows when rows were last used, too, and evicts them."""

    def __init__(self, policy, size):
        super().__init__(policy)
        self.size, self.used, self.evicted = size, {}, 0

    def train(self, keys):
        super().train(keys)
        self.used.update((k, self.step) for k in map(int, keys) if k in self.rows)
        evict = self.policy.evict
        if evict != "at_save" and self.step % evict.steps == 0:
            self.evict()
        self.limit(self.step)

    def limit(self, before):
        if self.policy.capacity is None:
            return
        for share, keys in self._by_rank(self.policy.capacity):
            by_age = sorted((self.used[k], k) for k in keys if self.used[k] < before)
            self.leave([k for _, k in by_age[: max(0, len(keys) - share)]])

    def evict(self):
        policy, small, old = self.policy, [], []
        if policy.l2_weight_threshold is not None:
            bound = policy.l2_weight_threshold
            small = [k for k, row in self.rows.items() if (row**2).sum() / 2 < bound]
        if policy.steps_to_live is not None:
            last = self.step - policy.steps_to_live
            for share, keys in self._by_rank(policy.keep_at_least or 0):
                left = [k for k in keys if k not in small]
                by_age = sorted((self.used[k], k) for k in left if self.used[k] <= last)
                spared = max(0, share - (len(left) - len(by_age)))
                old += [k for _, k in by_age[: max(0, len(by_age) - spared)]]
        self.leave([*small, *old])

    def leave(self, keys):
        self.remove(keys)
        self.evicted += len(keys)
        for k in keys:
            del self.used[k]

    def _by_rank(self, total):
        """Yields each rank's share of a number of rows, and its keys."""
        keys = np.array(list(self.rows), np.int64)
        owners = placement.dynamic(self.size).owner(keys)
        for rank in range(self.size):
            yield len(range(rank, total, self.size)), keys[owners == rank].tolist()


def compare(model, truth):
    """Compares what keys read outside of training, the rows, and when they were used."""
    table = model.table
    rows = tf2.function(lambda: tf2.nn.embedding_lookup(table, KEYS))()
    np.testing.assert_allclose(rows, truth.read(KEYS), rtol=1e-5, atol=1e-6)
    knows = table.last_used is not None
    found = {}
    for keys, _, *used in table.export(last_used=knows):
        found.update(zip(keys.tolist(), used[0].tolist() if knows else [0] * len(keys)))
    mine = [int(k) for k in KEYS[table._is_owned(KEYS)] if int(k) in truth.rows]
    assert found == {k: truth.used[k] if knows else 0 for k in mine}


def exported(model):
    return list(model.table.export(last_used=True))


WAYS = {
    "fit": (train_by_fit, {}),
    "several steps": (train_by_fit, {"steps_per_execution": 2}),
    "eagerly": (train_by_fit, {"run_eagerly": True}),
    "function": (train_by(tf2.function), {}),
    "tape": (train_by(lambda work: work), {}),
    "returned": (train_by(lambda work: work, take=tf2.function), {}),
}
CASES = [(way, name) for way in ("fit", "function") for name in POLICIES]
CASES += [(way, n) for way in ("eagerly", "tape", "returned") for n in POLICIES if "drawn" not in n]
CASES += [("several steps", name) for name in ("between saves", "capacity", "drawn and old")]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("way, name", CASES)
def test_rows_are_those_of_numpy(strategy, rank, size, folder, way, name):
    """Every lookup in training is a use, on every rank; nothing else is."""
    (train, options), policy = WAYS[way], POLICIES[name]
    truth, all_keys = Evicting(policy, size), batches(8, size=12)
    with strategy.scope(plan="quiet"), strategy.embedding_scope():
        saved = collective_keras.callbacks.Checkpoint(folder)
        model = compiled(policy, size, **options)
        for keys in (all_keys[:4], all_keys[4:]):
            train(model, rank, size, keys)
            for batch in keys:
                truth.train(batch)
            compare(model, truth)
            saved.save(model)
            truth.evict()
            compare(model, truth)
            for _ in range(3):
                tf2.nn.embedding_lookup(model.table, KEYS)
    assert truth.evicted or name == "drawn"
    assert 0 < len(truth.rows) < len(KEYS)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["age", "some stay", "counted", "drawn and old"])
def test_a_session_goes_on_and_fit_with_its_last_uses(strategy, rank, size, folder, name):
    """A model that has trained other keys has the checkpoint's rows and last uses afterwards."""
    policy, all_keys = POLICIES[name], batches(6, size=12)
    truth = Evicting(policy, size)
    with strategy.scope(plan="quiet"):
        saved = collective_keras.callbacks.Checkpoint(folder)
        model = compiled(policy, size)
        model.fit(own(all_keys[:2], rank, size), verbose=0, callbacks=[saved])
        tf = tf2.compat.v1
        with tf.Graph().as_default():
            graph_model = admitted_keys.Model(strategy, policy)
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                graph_model.steps(session, *all_keys[2:4])
        last = compiled(policy, size)
        last.fit(own([KEYS[-24:]] * 5, rank, size), verbose=0)
        assert saved.restore(last) == 4
        last.fit(own(all_keys[4:], rank, size), verbose=0)
        saved.save(last)
        for first in (0, 2, 4):
            for batch in all_keys[first : first + 2]:
                truth.train(batch)
            truth.evict()
            if first < 4:
                truth.limit(truth.step + 1)  # A restore keeps no batch.
        compare(last, truth)
    assert truth.evicted


@pytest.mark.slow
def test_last_use_starts_with_the_policy(strategy, rank, size, folder):
    """Restored with a policy that is new, all rows count as used at the checkpoint's step."""
    with strategy.scope(plan="quiet"):
        saved = collective_keras.callbacks.Checkpoint(folder)
        model = compiled(TablePolicy(), size)
        model.fit(own([KEYS[:12], KEYS[12:24], KEYS[:12]], rank, size), verbose=0)
        saved.save(model)
        model = compiled(TablePolicy(steps_to_live=2), size)
        assert saved.restore(model) == 3
        assert {int(used) for _, _, steps in exported(model) for used in steps} <= {3}
        for count in (24, 12):
            model.fit(own([KEYS[:12]], rank, size), verbose=0)
            saved.save(model)
            mine = KEYS[:count][model.table._is_owned(KEYS[:count])]
            assert [int(k) for keys, *_ in exported(model) for k in keys] == sorted(mine.tolist())


@pytest.mark.slow
def test_a_restore_keeps_to_the_capacity(strategy, rank, size, folder, monkeypatch):
    said = []
    monkeypatch.setattr(tf2.compat.v1.logging, "warning", said.append)
    before, after = (Evicting(TablePolicy(capacity=n), size) for n in (22, 9))
    with strategy.scope(plan="quiet"):
        saved = collective_keras.callbacks.Checkpoint(folder)
        model, all_keys = compiled(before.policy, size), batches(5, size=12)
        model.fit(own(all_keys, rank, size), verbose=0)
        saved.save(model)
        for batch in all_keys:
            before.train(batch)
        model = compiled(after.policy, size)
        assert saved.restore(model) == 5
        after.rows, after.used, after.step = before.rows, before.used, before.step
        after.limit(after.step + 1)
        compare(model, after)
        assert after.evicted > 0
        assert [f"left out: {after.evicted} rows" in text for text in said] == [True] * (rank == 0)


@pytest.mark.slow
def test_gradients_from_before_an_eviction_are_refused(strategy, rank, size, folder):
    """They know rows by their places, which have changed on some rank."""
    policy = TablePolicy(l2_weight_threshold=1e-30)
    with strategy.scope(plan="quiet"):
        saved = collective_keras.callbacks.Checkpoint(folder)
        model = compiled(policy, size)
        keys = KEYS[rank : rank + 6]
        with tf2.GradientTape(persistent=True) as tape:
            loss = tf2.reduce_sum(tf2.nn.embedding_lookup(model.table, keys))
        gradient = tape.gradient(loss, model.table)
        saved.save(model)
        with pytest.raises(NotImplementedError, match="A gradient of table 't' was made before"):
            model.optimizer.apply_gradients([(gradient, model.table)])
        with pytest.raises(NotImplementedError, match="A lookup of table 't' was made before"):
            tape.gradient(loss, model.table)
        model.fit(own([KEYS[:12]], rank, size), verbose=0)


@pytest.mark.slow
def test_steps_that_nobody_knows_are_refused(strategy, rank, size, folder):
    """Those of an update without an optimizer, and of optimizers that differ."""
    with strategy.scope(plan="quiet"):
        model, x = compiled(POLICIES["age"], size), tf2.Variable(1.0)

        @tf2.function
        def step():
            x.assign_add(tf2.reduce_sum(tf2.nn.embedding_lookup(model.table, KEYS[:3])))

        with pytest.raises(TableError, match="'t' .*steps_to_live=2, but .* without an optimizer"):
            step()
        assert x.numpy() == 1
        model.second = keras.optimizers.SGD()
        model.second.build([x])
        model.second.iterations.assign(5)
        with pytest.raises(NotImplementedError, match="'t' counts steps, .*'second': 5"):
            collective_keras.callbacks.Checkpoint(folder).save(model)


@pytest.mark.slow
def test_a_saved_model_keeps_the_rows_of_the_model(strategy, rank, size, folder):
    """An export evicts nothing, and plain TensorFlow serves it."""
    keys = np.array([5, 7, 9, 11, 13, 15], np.int64)
    policy = TablePolicy(steps_to_live=1, l2_weight_threshold=100, capacity=50)
    with strategy.scope(plan="quiet"), strategy.embedding_scope(policy=policy):
        ids = keras.Input([], dtype=tf2.int64, name="items")
        model = keras.Model(ids, collective_keras.layers.Embedding(D, name="open")(ids))
        model.compile("sgd", "mse")
        data = tf2.data.Dataset.from_tensors((keys[rank::size], keys[rank::size]))
        model.fit(data, verbose=0)
        want = tf2.function(lambda: model(tf2.constant(keys)))().numpy()
        path = strategy.export_saved_model(folder, model=model)
        np.testing.assert_array_equal(tf2.function(lambda: model(tf2.constant(keys)))(), want)
    (answer,) = (
        tf2.saved_model.load(path).signatures["serving_default"](items=tf2.constant(keys)).values()
    )
    np.testing.assert_allclose(answer, want, rtol=0, atol=1e-6)


def test_what_eager_lookups_do_not_know_is_refused(strategy):
    """The step at a lookup; and whether a lookup that no tape watches is one of training."""
    with strategy.scope(plan="quiet"):
        drawn = collective.get_embedding_variable("d", D, ev_option=POLICIES["drawn"])
        with (
            tf2.GradientTape(),
            pytest.raises(NotImplementedError, match="'d' .*admit_probability=0.4 .* Train in one"),
        ):
            tf2.nn.embedding_lookup(drawn, KEYS[:3])
        tf2.nn.embedding_lookup(drawn, KEYS[:3])
        fixed = collective.get_embedding_variable(
            "f", D, ev_option=TablePolicy(capacity=9), trainable=False
        )
        with (
            tf2.GradientTape(),
            pytest.raises(NotImplementedError, match="'f' .*notes the use .*capacity=9"),
        ):
            tf2.nn.embedding_lookup(fixed, KEYS[:3])
