"""Says in NumPy which keys get rows, and which, and builds the model for comparison."""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from collective.tables.policies import bloom_filter
from collective.tables.rows import initializers
from tests.ranks.dynamic_tables import D, drawn, normal

KEYS = np.arange(40, dtype=np.int64) * 2**35 - 7
RATE = 0.25
MASK = 2**64 - 1


def mixed(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hashed(seed, counter):
    return mixed((seed + counter * 0x9E3779B97F4A7C15) & MASK)


class Exact:
    """Counts keys in a dictionary."""

    def __init__(self):
        self.of = collections.Counter()

    def add(self, key, count):
        self.of[key] += count

    def __getitem__(self, key):
        return self.of[key]

    def forget(self, key):
        del self.of[key]


class Bloom:
    """Counts keys in one array, as the whole filter has it."""

    def __init__(self, elements, probability, most):
        self.hashes, self.cells = bloom_filter.size(elements, probability)
        self.of, self.most = collections.Counter(), most

    def places(self, key):
        key &= MASK
        first = mixed(key) % bloom_filter.PARTITIONS
        stride = hashed(0xAEF17502108EF2D9, key) | 1
        places = set()
        for i in range(self.hashes):
            at = mixed((hashed(0x8CB92BA72F3D8DD7, key) + i * stride) & MASK)
            places.add((first, at * self.cells >> 64))
        return places

    def add(self, key, count):
        for place in self.places(key):
            self.of[place] = min(self.of[place] + count, self.most)

    def __getitem__(self, key):
        return min(self.of[place] for place in self.places(key))

    def forget(self, key):
        pass


class Truth:
    """A dictionary of rows, trained by gradient descent towards 1."""

    def __init__(self, policy, first=drawn):
        self.policy, self.first = policy, first
        self.rows, self.frequencies, self.step = {}, collections.Counter(), 0
        self.refused = collections.Counter()
        self.counts = Exact()
        if policy.max_element_size is not None:
            most = {"uint8": 255}.get(policy.counter_type, 2**62)
            self.counts = Bloom(policy.max_element_size, policy.false_positive_probability, most)
        with tf.Graph().as_default():
            tf.set_random_seed(7)
            self.seed = initializers.table_seed("t/admission", None)

    def read(self, keys):
        unknown = np.full(D, self.policy.default_value_no_permission)
        return np.array([self.rows.get(int(k), unknown) for k in keys]).reshape(-1, D)

    def admits(self, key):
        policy = self.policy
        if policy.counts_keys and self.counts[key] < policy.filter_freq:
            return False
        if not policy.draws_keys:
            return True
        bits = hashed(hashed(self.seed, key & MASK), self.step)
        return (bits >> 11) * 2.0**-53 < policy.admit_probability

    def train(self, keys):
        self.step += 1
        occurrences = collections.Counter(int(k) for k in keys)
        if not self.policy.counts_keys:  # a drawn key is seen at once
            self._admit(occurrences)
        gradients = {k: n * 2 * (self.read([k])[0] - 1) for k, n in occurrences.items()}
        if self.policy.counts_keys:
            for k, n in occurrences.items():
                if k in self.rows:
                    self.frequencies[k] += n
                else:
                    self.counts.add(k, n)
            self._admit(occurrences)
            for k, n in occurrences.items():
                self.refused[k] += n * (k not in self.rows)
        for k, gradient in gradients.items():
            if k in self.rows:
                self.rows[k] = self.rows[k] - RATE * gradient

    def _admit(self, keys):
        for k in [k for k in keys if k not in self.rows and self.admits(k)]:
            self.rows[k] = self.first([k])[0].astype(np.float64)
            if self.policy.counts_keys:
                self.frequencies[k] = self.counts[k]
                self.counts.forget(k)

    def remove(self, keys):
        for k in map(int, keys):
            self.rows.pop(k, None)
            self.frequencies.pop(k, None)


class Model:
    """Trains table 't' towards 1; a rank has its part of each batch."""

    def __init__(self, strategy, policy, optimizer=None, pooled=False, ids=None):
        tf.set_random_seed(7)
        self.size, self.rank = strategy.world_size(), strategy.rank()
        self.step = tf.train.get_or_create_global_step()
        self.table = collective.get_embedding_variable(
            "t", D, initializer=normal(), ev_option=policy
        )
        self.ids = tf.placeholder(tf.int64, [None]) if ids is None else ids
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        self.out = [self.rows]
        if pooled:
            # The first half of the keys is looked up so, which backend sok pools; and the others.
            half = tf.size(self.ids, out_type=tf.int64) // 2
            self.out = [
                tf.nn.embedding_lookup(self.table, self.ids[half:]),
                self._pooled(self.ids[:half]),
            ]
        self.loss = self.size * tf.add_n([tf.reduce_sum((x - 1) ** 2) for x in self.out])
        if pooled:
            # Another table in the same exchange, which doesn't count its keys.
            other = collective.get_embedding_variable("u", 2, initializer=tf.ones_initializer())
            self.loss += tf.reduce_sum(tf.nn.embedding_lookup(other, self.ids))
        optimizer = optimizer or tf.train.GradientDescentOptimizer(RATE)
        self.train = optimizer.minimize(self.loss, global_step=self.step)
        self.total = self.table.total_count()
        self.saver = tf.train.Saver()

    def _pooled(self, ids):
        """Looks up each key in a sample of its own."""
        size = tf.size(ids, out_type=tf.int64)
        places = tf.stack([tf.range(size), tf.zeros_like(ids)], 1)
        sparse = tf.SparseTensor(places, ids, tf.stack([size, 1]))
        return tf.nn.embedding_lookup_sparse(self.table, sparse, None, combiner="sum")

    def steps(self, session, *batches):
        """Trains; each rank has every so manieth of a batch's keys."""
        for keys in batches:
            session.run(self.train, {self.ids: keys[self.rank :: self.size]})

    def read(self, session, keys):
        return session.run(self.rows, {self.ids: keys})


def batches(count, seed=0, keys=KEYS, size=24):
    """Draws batches in which some keys are many times, some seldom."""
    rng = np.random.default_rng(seed)
    return [keys[np.minimum(rng.zipf(1.3, size) - 1, len(keys) - 1)] for _ in range(count)]


def compare(model, session, truth, keys=KEYS):
    """Compares what keys read outside of training, and the number of rows."""
    np.testing.assert_allclose(model.read(session, keys), truth.read(keys), rtol=1e-5, atol=1e-6)
    assert session.run(model.total) == len(truth.rows)
