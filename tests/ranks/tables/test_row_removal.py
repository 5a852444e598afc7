"""Rows of dynamic tables are removed on the ranks that own them, and come back as new ones."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.ops import key_hashing, placement
from collective.tables.rows import row_store
from tests.ranks.dynamic_tables import D, drawn, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]

KEYS = np.arange(40, dtype=np.int64) * 2**35 - 7


class Model:
    """Trains table 't', and also 'u', on keys that every rank asks for."""

    def __init__(self, optimizer):
        tf.set_random_seed(7)
        self.table, self.other = (
            collective.get_embedding_variable(name, D, initializer=normal()) for name in "tu"
        )
        self.ids = tf.placeholder(tf.int64, [None])
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        others = tf.nn.embedding_lookup(self.other, self.ids)
        self.train = optimizer.minimize(
            tf.reduce_mean(tf.reduce_sum(self.rows**2 + others, 1)),
            global_step=tf.train.get_or_create_global_step(),
        )

    def owned(self, keys, rank, size):
        return keys[placement.dynamic(size).owner(keys) == rank]


@pytest.mark.sample(2)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_a_removed_key_comes_back_as_a_new_one(
    strategy, rank, size, optimizer, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(row_store, "is_compiled", lambda: False)
    makes = {
        "sgd": lambda: tf.train.GradientDescentOptimizer(0.5),
        "adagrad": lambda: tf.train.AdagradOptimizer(0.5),
        "adam": lambda: tf.train.AdamOptimizer(0.1),
    }
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(makes[optimizer]())
        with tf.train.MonitoredTrainingSession("") as session:

            def rows(keys):
                return model.table.lookup_keys(session, keys)[1]

            mine = model.owned(KEYS, rank, size)
            session.run(model.train, {model.ids: KEYS})
            first = rows(mine)
            session.run(model.train, {model.ids: KEYS})
            moved = rows(mine)
            assert (moved != first).all()
            gone, kept = KEYS[::3], np.setdiff1d(KEYS, KEYS[::3])
            slots = [slot.column(session) for slot in model.table.slots]
            before = model.table.store(session).rows(model.owned(kept, rank, size), False)
            of_kept = [slot.read(before) for slot in slots]
            removed = model.table.remove(session, np.concatenate([gone, gone, [123, 456]]))
            assert removed == len(model.owned(gone, rank, size))
            kept_rows = rows(kept)
            np.testing.assert_array_equal(kept_rows, moved[np.isin(mine, kept)])
            after = model.table.store(session).rows(model.owned(kept, rank, size), False)
            for slot, wanted in zip(slots, of_kept):
                np.testing.assert_array_equal(slot.read(after), wanted)
            found, _ = model.table.lookup_keys(session, KEYS)
            np.testing.assert_array_equal(found, model.owned(kept, rank, size))
            np.testing.assert_array_equal(session.run(model.rows, {model.ids: gone}), 0)
            assert model.table.local_count(session._tf_sess()) == len(found)
            assert len(model.other.store(session._tf_sess())) == len(mine)
            if optimizer != "adam":  # whose rate depends on the step
                session.run(model.train, {model.ids: KEYS})
                np.testing.assert_allclose(
                    rows(model.owned(gone, rank, size)), first[np.isin(mine, gone)], rtol=1e-6
                )


def test_cleared_tables_start_again(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(tf.train.AdagradOptimizer(0.5))
        dense = tf.get_variable("dense", [2], initializer=tf.ones_initializer())
        with tf.train.MonitoredTrainingSession("") as session:
            mine = model.owned(KEYS, rank, size)
            session.run(model.train, {model.ids: KEYS})
            once = model.table.lookup_keys(session, KEYS)[1]
            assert model.table.clear(session) == len(mine) and model.table.clear(session) == 0
            session.run(model.train, {model.ids: KEYS})
            np.testing.assert_array_equal(model.table.lookup_keys(session, KEYS)[1], once)
            assert collective.clear_embeddings(session) == {"t": len(mine), "u": len(mine)}
            assert [len(list(table.export(session))) for table in (model.table, model.other)] == [
                0,
                0,
            ]
            assert session.run(dense).tolist() == [1, 1]
            model.table.import_(session, KEYS[:5], np.ones((5, D)))
            assert (session.run(model.rows, {model.ids: KEYS[:5]}) == 1).all()
            with pytest.raises(ValueError, match=r"table 't': keys are \[b\], not \[2, 1\]"):
                model.table.remove(session, [[1], [2]])


def test_only_looked_up_keys_are_not_inserted(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(tf.train.GradientDescentOptimizer(0.0))
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(model.train, {model.ids: KEYS[:10]})
            keys, rows = model.table.lookup_keys(session, KEYS[::-1])
            wanted = model.owned(KEYS[:10], rank, size)[::-1]
            np.testing.assert_array_equal(keys, wanted)
            np.testing.assert_array_equal(rows, drawn(wanted))
            assert model.table.local_count(session._tf_sess()) == len(wanted)


def test_keys_that_are_no_whole_numbers_are_refused(strategy, rank, size):
    """They would be rounded, or read as numbers, and be other keys than those of lookups."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(tf.train.GradientDescentOptimizer(0.0))
        hashed = key_hashing.of_strings(tf.constant(["12", "b"]))
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(model.train, {model.ids: KEYS[:10]})
            methods = [
                model.table.lookup_keys,
                model.table.remove,
                lambda session, keys: model.table.import_(session, keys, np.ones((len(keys), D))),
            ]
            for method in methods:
                for keys, words in (
                    (KEYS[:2] + 0.5, "not float64. Give whole numbers"),
                    (["12", "b"], "not <U2. Hash strings as .*of_strings"),
                    (np.array([2**63], np.uint64), "not 9223372036854775808 of uint64"),
                ):
                    with pytest.raises(ValueError, match=f"table 't': keys are .*{words}"):
                        method(session, keys)
            assert model.table.local_count(session._tf_sess()) == len(
                model.owned(KEYS[:10], rank, size)
            )
            keys = session.run(hashed)
            model.table.import_(session, keys, np.ones((2, D)))
            found, rows = model.table.lookup_keys(session, keys.tolist())
            np.testing.assert_array_equal(found, model.owned(keys, rank, size))
            assert (rows == 1).all()
            assert model.table.remove(session, keys) == len(found)
            assert model.table.remove(session, []) == 0
