"""Compares random programs of tables, session by session, with dictionaries of rows."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from tests.ranks.dynamic_tables import D, normal
from tests.ranks.table_programs import KEYS, OPTIMIZERS, TABLES, Reference, beginning, random_policy

ACTIONS = 8


class Program:
    """Runs the sessions of a seed; another process, of any number of ranks, can go on with it.

    Pickled between two sessions, it has what the tables must have, and what it draws with.

    Attributes:
        references: what each table must have.
    """

    def __init__(self, seed, folder, size, on_device=False):
        self._rng, self._optimizer = beginning(seed)
        self._folder, self._on_device, self._is_begun = folder, on_device, False
        self._ranks = np.random.default_rng([10, seed])  # that have tables whole
        self._draw_policies()
        self.references = [
            Reference(f"t{i}", policy, self._optimizer, size, only)
            for i, (policy, only) in enumerate(zip(self._policies, self._only))
        ]

    def _draw_policies(self):
        self._policies = [
            random_policy(self._rng, self._optimizer, f"{self._folder}/rows", self._on_device)
            for _ in range(TABLES)
        ]
        drawn = self._ranks.integers(-3, 3, TABLES).tolist()
        self._only = [None if rank < 0 else rank for rank in drawn]

    def run_session(self, strategy, rank):
        """Goes on where the last session saved, with all ranks, and saves."""
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(strategy, self._policies, self._only, self._optimizer)
            with tf.Session() as session:
                if self._is_begun:
                    model.saver.restore(session, f"{self._folder}/m")
                    for reference, policy, only in zip(self.references, self._policies, self._only):
                        reference.restore(policy, strategy.world_size(), only)
                else:
                    session.run(tf.global_variables_initializer())
                check(model, session, self.references, rank)
                for _ in range(ACTIONS):
                    run_one(self._rng, model, session, self.references, f"{self._folder}/other")
                    check(model, session, self.references, rank)
                check_exports(model, session, self.references, rank)
                model.saver.save(session, f"{self._folder}/m")
                for reference in self.references:
                    reference.save()
        self._is_begun = True
        self._draw_policies()


class Model:
    def __init__(self, strategy, policies, only, optimizer):
        tf.set_random_seed(7)
        step, losses = tf.train.get_or_create_global_step(), []
        self.tables, self.ids, self.rows = [], [], []
        for i, (policy, rank) in enumerate(zip(policies, only)):
            where = "rows" if rank is None else f"whole:{rank}"
            with strategy.embedding_scope(placement=where):
                table = collective.get_embedding_variable(
                    f"t{i}", D, initializer=normal(), ev_option=policy
                )
            self.tables.append(table)
            self.ids.append(tf.placeholder(tf.int64, [None]))
            self.rows.append(tf.nn.embedding_lookup(table, self.ids[i]))
            losses.append(tf.reduce_sum(self.rows[i] ** 2))
        self.train = OPTIMIZERS[optimizer]().minimize(tf.add_n(losses), global_step=step)
        self.saver = tf.train.Saver()

    def feeds(self, keys_by_table):
        return dict(zip(self.ids, keys_by_table))


def check(model, session, references, rank):
    found = session.run(model.rows, model.feeds([KEYS] * TABLES))
    for table, rows, reference in zip(model.tables, found, references):
        words = f"table {reference.name} with {reference.policy}"
        np.testing.assert_allclose(rows, reference.values(), 1e-4, 2e-6, err_msg=words)
        counts = table.statistics(session).counts()
        counts = {name: count for name, count in counts.items() if count and name != "bytes"}
        assert counts == reference.statistics(rank), words


def check_exports(model, session, references, rank):
    for table, reference in zip(model.tables, references):
        has = [True, True, reference.policy.counts_keys, reference.knows_last_use]
        blocks = list(table.export(session, 5, frequencies=has[2], last_used=has[3]))
        found = [np.concatenate(parts) for parts in zip(*blocks)]
        wanted = [array for array, is_there in zip(reference.exported(rank), has) if is_there]
        for one, other in zip(found, wanted):
            np.testing.assert_allclose(one, other, 1e-4, 2e-6, err_msg=reference.name)
        assert found or not len(wanted[0])


def run_one(rng, model, session, references, path):
    """Does something drawn at random, most often a step of training."""
    keys_by_table = [rng.choice(KEYS, rng.integers(1, 10)) for _ in range(TABLES)]
    one, action = rng.integers(TABLES), rng.random()
    if action < 0.75:
        session.run(model.train, model.feeds(keys_by_table))
        for reference, keys in zip(references, keys_by_table):
            reference.train(keys)
    elif action < 0.85:
        model.tables[one].remove(session, keys_by_table[one])
        references[one].remove(keys_by_table[one])
    elif action < 0.88:
        model.tables[one].clear(session)
        references[one].clear()
    elif action < 0.94:
        model.saver.save(session, path)
        for reference in references:
            reference.save()
    else:  # Neither an evaluation nor looking at rows is a use.
        session.run(model.rows, model.feeds(keys_by_table))
        model.tables[one].lookup_keys(session, keys_by_table[one])
