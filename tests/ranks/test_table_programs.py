"""Random programs of training, evaluation, saves, restores under other policies and removals leave
in tables what they leave in a dictionary, whatever their policies admit and evict, and wherever
rows are.
"""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.ops import placement
from tests.ranks.dynamic_tables import D, normal
from tests.ranks.table_programs import KEYS, OPTIMIZERS, TABLES, Reference, beginning, random_policy

SESSIONS, ACTIONS = 3, 8


def seeds():
    """Reads COLLECTIVE_TEST_PROGRAMS: first:last, of seeds first to last - 1."""
    first, _, last = os.environ.get("COLLECTIVE_TEST_PROGRAMS", "5").rpartition(":")
    return range(int(first or 0), int(last))


class Model:
    def __init__(self, policies, optimizer):
        tf.set_random_seed(7)
        step, losses = tf.train.get_or_create_global_step(), []
        self.tables, self.ids, self.rows = [], [], []
        for i, policy in enumerate(policies):
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


@pytest.mark.spread
@pytest.mark.double("all")
@pytest.mark.parametrize("seed", seeds())
def test_tables_have_what_dictionaries_have(strategy, rank, size, folder, seed):
    """All ranks train the same keys; a session ends with a save, and the next one restores it."""
    rng, optimizer = beginning(seed)
    rows_folder, on_device = f"{folder}/rows", placement.on_device(dynamic=True)
    policies = [random_policy(rng, optimizer, rows_folder, on_device) for _ in range(TABLES)]
    references = [Reference(f"t{i}", policies[i], optimizer, size) for i in range(TABLES)]
    for number in range(SESSIONS):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policies, optimizer)
            with tf.Session() as session:
                if number:
                    model.saver.restore(session, f"{folder}/m")
                    for reference, policy in zip(references, policies):
                        reference.restore(policy)
                else:
                    session.run(tf.global_variables_initializer())
                for _ in range(ACTIONS):
                    run_one(rng, model, session, references, f"{folder}/other")
                    check(model, session, references, rank)
                check_exports(model, session, references, rank)
                model.saver.save(session, f"{folder}/m")
                for reference in references:
                    reference.save()
        policies = [random_policy(rng, optimizer, rows_folder, on_device) for _ in range(TABLES)]


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
