"""A whole checkpoint and its increments restore the very state, on any number of ranks.

The truth is the live state when the increment was saved, and a whole checkpoint saved beside it.
"""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import TablePolicy, checkpoint
from collective.checkpoint import chain_names, table_reader, tensor_bundle
from collective.coordination import barrier
from collective.ops import collectives
from tests.ranks import reference
from tests.ranks.dynamic_tables import D, OPTIMIZERS, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

V = 60
KEYS = np.arange(120, dtype=np.int64) * 2**35 - 7


class Model:
    """Trains a static table, a dynamic one and a dense variable on the same ids."""

    def __init__(self, strategy, optimizer, policy=None):
        tf.set_random_seed(7)
        with strategy.embedding_scope():
            self.static = reference.table("s", V, D)
        self.dynamic = collective.get_embedding_variable(
            "d", D, initializer=normal(), ev_option=policy
        )
        w = tf.get_variable("w", initializer=reference.table_values(D, 1, 1))
        self.ids, self.keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(self.static, self.ids)
        others = tf.nn.embedding_lookup(self.dynamic, self.keys)
        loss = tf.reduce_mean(tf.matmul(rows, w) ** 2) + tf.reduce_mean(tf.matmul(others, w) ** 2)
        self.step = tf.train.get_or_create_global_step()
        self.train = OPTIMIZERS[optimizer]().minimize(loss, global_step=self.step)
        self.saver = tf.train.Saver(max_to_keep=2)

    def run(self, session, rank, seed, count=8):
        rng = np.random.default_rng(1000 * seed + rank)
        ids, keys = rng.integers(0, V, count), rng.choice(KEYS, count)
        session.run(self.train, {self.ids: ids, self.keys: keys})


def contents(prefix):
    """Returns all that a whole checkpoint has, tables by keys."""
    bundle = tensor_bundle.Bundle(prefix)
    found, inner = {}, bundle.layout.entries()
    for name, stored in bundle.layout.tables.items():
        if stored.slot_of is not None and stored.keys is not None and "refused" in name:
            blocks = list(table_reader.read_dynamic_tables(bundle, [stored], 1000))
            blocks = [(keys, values[0]) for keys, values in blocks]
        else:
            blocks = list(checkpoint.read_table(prefix, name))
        arrays = (
            [np.concatenate([np.atleast_1d(b[i]) for b in blocks]) for i in (0, 1)]
            if blocks
            else []
        )
        found[name] = [a.tobytes() for a in arrays]
    for name in bundle.entries:
        if name not in inner and not name.startswith("collective/"):
            found[name] = np.asarray(bundle.read_whole(name)).tobytes()
    return found


def check_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def restore_and_save(strategy, optimizer, policy, prefix, target):
    """Restores a state in a session of its own, and saves it as a whole checkpoint."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, optimizer, policy)
        with tf.Session() as session:
            model.saver.restore(session, prefix)
            tf.train.Saver().save(session, target, write_meta_graph=False, write_state=False)
    return contents(target)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl", "momentum", "rmsprop", "sgd"])
def test_base_and_increments_restore_the_state(strategy, rank, size, folder, optimizer):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, optimizer)
        checkpoint.enable_increments(folder)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for seed in range(3):
                model.run(session, rank, seed)
            base = model.saver.save(session, f"{folder}/m", global_step=model.step)
            whole = [f"{folder}/whole/w-0"]
            if rank == 0:
                os.mkdir(f"{folder}/whole")
            tf.train.Saver().save(session, whole[0], write_meta_graph=False)
            for number in range(1, 4):
                model.run(session, rank, 10 + number)
                model.dynamic.remove(session, KEYS[number::7])
                if number == 2:
                    model.run(session, rank, 20)
                    model.static.load(np.full([V, D], 0.25, np.float32), session)
                increment = checkpoint.save_increment(session, folder)
                assert increment == chain_names.increment_prefix(base, number)
                whole.append(f"{folder}/whole/w-{number}")
                tf.train.Saver().save(session, whole[-1], write_meta_graph=False)
            model.run(session, rank, 30)
    for number, wanted in enumerate(whole):
        named = chain_names.increment_prefix(base, number)
        found = restore_and_save(strategy, optimizer, None, named, f"{folder}/whole/r-{number}")
        check_same(found, contents(wanted))
    # The latest checkpoint's name is for its newest state.
    assert tf.train.latest_checkpoint(folder) == base
    found = restore_and_save(strategy, optimizer, None, base, f"{folder}/whole/latest")
    check_same(found, contents(whole[-1]))
