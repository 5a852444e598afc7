"""Draws policies of dynamic tables, and keeps in a dictionary what such a table has to hold."""

from __future__ import annotations

import collections
import functools

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from collective import TablePolicy
from collective.ops import placement
from collective.tables.rows import initializers
from tests.ranks.admitted_keys import MASK, hashed
from tests.ranks.dynamic_tables import D, drawn

KEYS = np.arange(24, dtype=np.int64) * 2**37 - 11
RATE, FIRST_ACCUMULATOR = 0.1, 0.1
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(RATE),
    "adagrad": lambda: tf.train.AdagradOptimizer(RATE),
    "adam": lambda: tf.train.AdamOptimizer(RATE),
    "ftrl": lambda: tf.train.FtrlOptimizer(RATE, l1_regularization_strength=0.01),
    "row_wise_adagrad": lambda: collective.train.RowWiseAdagradOptimizer(RATE),
}


# Tables of a session; each has a program of its own. Programs of a session share steps and saves.
TABLES = 4


def beginning(seed):
    """Returns what the programs of a seed draw with, and the name of their optimizer."""
    return np.random.default_rng([9, seed]), list(OPTIMIZERS)[seed % len(OPTIMIZERS)]


@functools.cache
def first_values(key, name):
    return drawn([key], name)[0]


def random_policy(rng, optimizer, folder, on_device):
    """Draws a policy; each of its options is there or not.

    Args:
        rng: draws.
        optimizer: trains the table. One that moves all rows doesn't go with a file.
        folder: has the table's file, if it has one.
        on_device: the table is in a GPU's memory, where it has neither a file nor an admission.
    """
    options = {}
    if rng.random() < 0.6:
        options["steps_to_live"] = int(rng.integers(1, 6))
        if rng.random() < 0.4:
            options["keep_at_least"] = int(rng.integers(1, 9))
    if rng.random() < 0.4:
        options["l2_weight_threshold"] = float(rng.uniform(0.01, 0.2))
    if rng.random() < 0.4:
        options["capacity"] = int(rng.integers(9, 20))
    if rng.random() < 0.3:
        options["weight_bound"] = float(rng.uniform(0.1, 0.6))
    if rng.random() < 0.5:
        every = collective.every_steps(int(rng.integers(1, 4)))
        if "steps_to_live" in options or "l2_weight_threshold" in options:
            options["evict"] = every
    if on_device:
        return TablePolicy(**options)
    if rng.random() < 0.35:
        options["filter_freq"] = int(rng.integers(2, 12))
    if rng.random() < 0.25:
        options["admit_probability"] = float(rng.uniform(0.3, 0.9))
    if rng.random() < 0.3:
        options["default_value_no_permission"] = float(rng.choice([-0.5, 0.25]))
    if rng.random() < 0.5 and optimizer != "adam":
        options.update(storage="dram_ssd", storage_path=folder)
        options["storage_size"] = int(rng.integers(1, 8 * 4 * D))  # Bytes: a few rows.
    return TablePolicy(**options)


class Row:
    """Holds what a table has of a key: values, slots, the step of its last use, its frequency."""

    def __init__(self, key, name, frequency):
        self.values = first_values(key, name).astype(np.float64)
        self.accumulator = np.full(D, FIRST_ACCUMULATOR)
        self.linear, self.m, self.v = np.zeros(D), np.zeros(D), np.zeros(D)
        self.used, self.frequency = 0, frequency

    def update(self, optimizer, gradient):
        """Updates by a gradient; Adam's rule has `decay` after it."""
        if optimizer == "sgd":
            self.values = self.values - RATE * gradient
        elif optimizer == "adagrad":
            self.accumulator = self.accumulator + gradient**2
            self.values = self.values - RATE * gradient / np.sqrt(self.accumulator)
        elif optimizer == "row_wise_adagrad":
            self.accumulator = self.accumulator + (gradient**2).mean()
            self.values = self.values - RATE * gradient / np.sqrt(self.accumulator)
        elif optimizer == "ftrl":
            before, self.accumulator = self.accumulator, self.accumulator + gradient**2
            grown = np.sqrt(self.accumulator) - np.sqrt(before)
            self.linear = self.linear + gradient - grown / RATE * self.values
            shrunk = np.sign(self.linear) * 0.01 - self.linear
            values = shrunk / (np.sqrt(self.accumulator) / RATE)
            self.values = np.where(np.abs(self.linear) > 0.01, values, 0.0)

    def adam(self, gradient, step):
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        self.values = self.values - rate * self.m / (np.sqrt(self.v) + 1e-8)


class Reference:
    """Keeps the rows of a table, on all ranks, in a dictionary.

    Args:
        only: the rank that has the table whole, modulo their number; None if ranks share it.

    Attributes:
        rows: by key.
        waiting: how often keys came that have no row, by key, of a policy that counts.
        counts: of each rank what `DynamicTable.statistics` counts.
    """

    def __init__(self, name, policy, optimizer, size, only=None):
        self.name, self.policy, self.optimizer, self.size = name, policy, optimizer, size
        self.only = only
        self.rows, self.step, self.knows_last_use = {}, 0, self._needs_last_use()
        self.waiting = collections.Counter()
        with tf.Graph().as_default():
            tf.set_random_seed(7)
            self._seed = initializers.table_seed(f"{name}/admission", None)
        self._start_counts()

    def _start_counts(self):
        self.counts = [collections.Counter() for _ in range(self.size)]
        self._evicted = set()

    def _needs_last_use(self):
        return self.policy.steps_to_live is not None or self.policy.capacity is not None

    def train(self, keys):
        """Makes a step with the loss Σ ‖row‖² over `keys`, which all ranks have."""
        self.step += 1
        occurrences = collections.Counter(keys.tolist())
        # A key that has come often enough is seen by later runs.
        seen = {key: self.rows[key].values for key in occurrences if key in self.rows}
        for key, n in occurrences.items():
            self._count(key, n * self.size)
        if not self.policy.counts_keys:
            seen = {key: self.rows[key].values for key in occurrences if key in self.rows}
        unseen = np.full(D, self.policy.default_value_no_permission)
        gradients = {
            key: 2 * seen.get(key, unseen) * n for key, n in occurrences.items() if key in self.rows
        }
        if self.optimizer == "adam":
            for key, row in self.rows.items():
                row.adam(gradients.get(key, np.zeros(D)), self.step)
        for key, gradient in gradients.items():
            row, bound = self.rows[key], self.policy.weight_bound
            row.update(self.optimizer, gradient)
            if bound is not None:
                row.values = np.clip(row.values, -bound, bound)
            row.used = self.step
        if self.policy.evict != "at_save" and self.step % self.policy.evict.steps == 0:
            self.evict()
        self.limit(self.step)

    def _count(self, key, occurrences):
        """Counts a key's occurrences on all ranks, and gives it a row if that is due."""
        counts_keys, draws_keys = self.policy.counts_keys, self.policy.draws_keys
        if key in self.rows:
            self.rows[key].frequency += occurrences
            return
        if counts_keys:
            self.waiting[key] += occurrences
        is_frequent = not counts_keys or self.waiting[key] >= self.policy.filter_freq
        if is_frequent and (not draws_keys or self._is_drawn(key)):
            self._admit(key)
        else:
            refused = occurrences if counts_keys else self.size
            self.counts[self._owner(key)]["refused"] += refused

    def _is_drawn(self, key):
        bits = hashed(hashed(self._seed, key & MASK), self.step)
        return (bits >> 11) * 2.0**-53 < self.policy.admit_probability

    def _admit(self, key):
        self.rows[key] = Row(key, self.name, self.waiting.pop(key, 0))
        counts = self.counts[self._owner(key)]
        counts["admitted"] += 1
        if key in self._evicted:
            self._evicted.discard(key)
            counts["returned"] += 1

    def save(self):
        self.evict()
        self.limit(self.step)

    def restore(self, policy, size, only=None):
        """Goes on with what was saved, under another policy and on `size` ranks."""
        if not (self.policy.counts_keys and policy.counts_keys):
            self.waiting.clear()
            for row in self.rows.values():
                row.frequency = 0
        self.policy, self.size, self.only = policy, size, only
        self._start_counts()
        if not self.knows_last_use:
            for row in self.rows.values():
                row.used = self.step
        self.knows_last_use = self._needs_last_use()
        self.limit(self.step + 1)

    def remove(self, keys):
        for key in keys:
            self.rows.pop(int(key), None)
            self.waiting.pop(int(key), None)

    def clear(self):
        self.remove([*self.rows, *self.waiting])

    def evict(self):
        for rank in range(self.size):
            owned = self._of_rank(rank)
            threshold = self.policy.l2_weight_threshold or 0
            small = [key for key in owned if (self.rows[key].values ** 2).sum() / 2 < threshold]
            last = self.step - (self.policy.steps_to_live or np.inf)
            old = [key for key in owned if self.rows[key].used <= last and key not in small]
            old.sort(key=lambda key: (self.rows[key].used, key))
            left = len(owned) - len(small) - len(old)
            spared = max(0, self._share(self.policy.keep_at_least or 0, rank) - left)
            self._let_go(rank, "l2_weight_threshold", small)
            self._let_go(rank, "steps_to_live", old[: max(0, len(old) - spared)])

    def limit(self, before):
        if self.policy.capacity is None:
            return
        for rank in range(self.size):
            owned = self._of_rank(rank)
            excess = max(0, len(owned) - self._share(self.policy.capacity, rank))
            unused = [key for key in owned if self.rows[key].used < before]
            unused.sort(key=lambda key: (self.rows[key].used, key))
            self._let_go(rank, "capacity", unused[:excess])

    def _let_go(self, rank, option, keys):
        self.counts[rank][f"evicted by {option}"] += len(keys)
        self._evicted.update(keys)
        self.remove(keys)

    def _owner(self, key):
        if self.only is not None:
            return self.only % self.size
        return int(placement.dynamic(self.size).owner(np.array([key], np.int64))[0])

    def _of_rank(self, rank):
        return [key for key in sorted(self.rows) if self._owner(key) == rank]

    def _share(self, rows, rank):
        if self.only is not None:
            return rows if rank == self.only % self.size else 0
        return len(range(rank, rows, self.size))

    def values(self):
        """Returns what evaluation reads of all keys."""
        unseen = np.full(D, self.policy.default_value_no_permission)
        return np.array([self.rows[k].values if k in self.rows else unseen for k in KEYS.tolist()])

    def exported(self, rank):
        """Returns keys, values, frequencies and last uses of the rows of a rank, by keys."""
        keys = self._of_rank(rank)
        rows = [self.rows[key] for key in keys]
        return (
            np.array(keys, np.int64),
            np.array([row.values for row in rows]).reshape(-1, D),
            np.array([row.frequency for row in rows], np.int64),
            np.array([row.used for row in rows], np.int64),
        )

    def statistics(self, rank):
        """Returns what `TableStatistics.counts` has except for bytes, zeros left out."""
        counts = {**self.counts[rank], "rows": len(self._of_rank(rank))}
        return {name: count for name, count in counts.items() if count}
