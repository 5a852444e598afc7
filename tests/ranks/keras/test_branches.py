"""Branches and loops of a `tf.function`: all ranks take the same, or none does the call."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError
from tests.ranks.keras.models import keras

pytestmark = pytest.mark.double

new = keras.optimizers


class Functions:
    """Has functions that train a weight, alike in plain TensorFlow and on ranks."""

    def __init__(self):
        self.weight = tf2.Variable(2.0)
        self.optimizer = new.SGD(0.25, momentum=0.5)
        self.optimizer.build([self.weight])
        self.branch = tf2.function(self.in_branch)
        self.loop = tf2.function(self.in_loop)
        self.update = tf2.function(self.update_in_branch)
        self.late = tf2.function(self.late_branch)
        self.case = tf2.function(self.in_case)

    def gradient(self, x):
        with tf2.GradientTape() as tape:
            loss = self.weight * x
        return tape.gradient(loss, self.weight)

    def train(self, x):
        self.optimizer.apply_gradients([(self.gradient(x), self.weight)])

    def in_branch(self, x, chosen):
        if chosen > 1:
            self.train(x)
        return self.weight.read_value()

    def in_loop(self, x, turns):
        for _ in tf2.range(turns):
            self.train(x)
        return self.weight.read_value()

    def update_in_branch(self, x, chosen):
        gradient = self.gradient(x)
        if chosen > 1:
            self.optimizer.apply_gradients([(gradient, self.weight)])
        return self.weight.read_value()

    def late_branch(self, x, chosen):
        gradient = self.gradient(x)
        if gradient * tf2.cast(chosen, tf2.float32) > 1:
            self.optimizer.apply_gradients([(gradient, self.weight)])
        return self.weight.read_value()

    def in_case(self, x, chosen):
        gradients = [lambda: 0.0, lambda: self.gradient(x), lambda: self.gradient(2 * x)]
        return tf2.switch_case(chosen, gradients)


def test_what_all_ranks_take_alike_equals_one_process(strategy, rank, size):
    plain, xs = Functions(), np.arange(1.0, size + 1, dtype=np.float32)
    with strategy.scope():
        mine = Functions()
        for name in ("branch", "loop", "update", "late", "case"):
            for chosen in (2, 0):
                got = getattr(mine, name)(tf2.constant(xs[rank]), tf2.constant(chosen))
                want = getattr(plain, name)(tf2.constant(xs.mean()), tf2.constant(chosen))
                np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"{name} {chosen}")


@pytest.mark.ranks(2, 3)
def test_what_ranks_would_take_differently_is_refused(strategy, rank, size):
    """Before anything changes, and training goes on."""
    with strategy.scope():
        mine = Functions()
        differs = tf2.constant(2 if rank == 0 else 1)
        for name, kind in (("branch", "branch"), ("loop", "loop"), ("update", "branch")):
            with pytest.raises(RankError, match=f"rank 0: the {kind} '.*' depends on .*; rank 1: "):
                getattr(mine, name)(tf2.constant(1.0), differs)
        assert float(mine.weight) == 2 and int(mine.optimizer.iterations) == 0
        assert float(mine.loop(tf2.constant(1.0), tf2.constant(1))) == 1.75


@pytest.mark.ranks(2, 3)
def test_what_ranks_can_not_compare_is_refused(strategy, rank, size):
    with strategy.scope():
        mine = Functions()

        @tf2.function
        def until_small(x):
            for _ in tf2.range(5):
                if mine.gradient(x) < 1:
                    break

        @tf2.function
        def branch_in_loop(x):
            for i in tf2.range(4):
                if i % 2 == 0:
                    mine.train(x)

        @tf2.function
        def over(dataset):
            for x in dataset:
                mine.train(x)

        x = tf2.constant(1.0)
        with pytest.raises(NotImplementedError, match="make sure that all of them do: its turns"):
            until_small(x)
        with pytest.raises(NotImplementedError, match="the branch or loop inside a loop"):
            branch_in_loop(x)
        with pytest.raises(NotImplementedError, match="may have different numbers of batches"):
            over(tf2.data.Dataset.from_tensors(1.0))


def test_a_lookup_in_a_branch_or_loop_is_refused(strategy, size):
    ids = tf2.constant([1, 2])
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
            layer.build([None])

        @tf2.function
        def in_loop(ids):
            total = 0.0
            for i in tf2.range(2):
                total += tf2.reduce_sum(layer(ids + i))
            return total

        @tf2.function
        def in_branch(ids):
            return tf2.cond(ids[0] > 0, lambda: tf2.reduce_sum(layer(ids)), lambda: 0.0)

        for function in (in_loop, in_branch):
            with pytest.raises(NotImplementedError, match="before the branch or loop"):
                function(ids)

        # Ids of a branch that each rank takes for itself, and rows in one.
        @tf2.function
        def around(ids, own):
            ids = tf2.cond(own > 0, lambda: ids, lambda: ids + 1)
            rows = layer(ids)
            return tf2.cond(own > 0, lambda: tf2.reduce_sum(rows), lambda: 0.0)

        own = strategy.rank()
        assert float(around(ids, tf2.constant(own))) == (4 if own else 0)
