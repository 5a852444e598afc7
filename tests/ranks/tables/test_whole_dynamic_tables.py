"""A dynamic table that one rank has whole has the numbers of one that all ranks share.

Random programs of tables (`test_table_programs.py`) and random models draw such tables, too.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import TablePolicy, checkpoint
from tests.ranks import exports, reference
from tests.ranks.admitted_keys import KEYS as OFTEN_KEYS
from tests.ranks.admitted_keys import Model as CountingModel
from tests.ranks.admitted_keys import Truth, batches, compare
from tests.ranks.checkpoints import wait
from tests.ranks.dynamic_tables import EXTREME, D, drawn, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

KEYS = np.unique([*EXTREME, *np.arange(3, 30, 3)])
MOVES = pytest.mark.parametrize(
    "there, here", [("rows", "whole"), ("whole:5", "rows"), ("whole", "whole:1")]
)
COUNT = TablePolicy(filter_freq=3, steps_to_live=1000)
COUNTS = pytest.mark.parametrize(
    "policy",
    [COUNT, dataclasses.replace(COUNT, max_element_size=999, false_positive_probability=0.01)],
    ids=["exact", "bloom"],
)


def keys_of(rank):
    """Returns a batch: ranks have different numbers of keys, and keys repeat."""
    return np.random.default_rng([3, rank]).choice(KEYS, 9 - 2 * rank)


class Model:
    """Trains tables `t` and `u` of a placement, and a static one in the same exchange."""

    def __init__(self, strategy, rank, placement="rows", optimizer=None, seed=7):
        tf.set_random_seed(seed)
        with strategy.embedding_scope(placement=placement):
            self.table = tf.get_variable("t", [None, D], initializer=normal())
            other = collective.get_embedding_variable("u", 2, initializer=normal())
            static = reference.table("s", 11, D)
        self.ids = tf.placeholder_with_default(keys_of(rank), [None])
        count = tf.size(self.ids, out_type=tf.int64)
        places = tf.stack([tf.range(count) // 2, tf.range(count) % 2], 1)  # Two keys a sample.
        pooled = tf.SparseTensor(places, self.ids, tf.stack([(count + 1) // 2, 2]))
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        features = [
            self.rows,
            tf.nn.embedding_lookup(static, tf.math.floormod(self.ids, 11)),
            tf.nn.embedding_lookup(other, self.ids + 1),
        ]
        loss = tf.add_n([tf.reduce_mean((x - 0.5) ** 2) for x in features])
        mean = tf.nn.embedding_lookup_sparse(self.table, pooled, None, combiner="mean")
        loss += tf.reduce_mean(mean**2)
        step = tf.train.get_or_create_global_step()
        optimizer = optimizer or tf.train.AdamOptimizer(0.1)
        self.train = optimizer.minimize(loss, global_step=step)
        self.sizes = collective.embedding_sizes()
        self.saver = tf.train.Saver()

    def all_rows(self, session):
        return session.run(self.rows, {self.ids: KEYS})


@pytest.mark.double
@MOVES
def test_a_checkpoint_goes_on_in_another_placement(strategy, rank, size, folder, there, here):
    """By a Saver, a monitored session, and as another job's checkpoint to start from."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, there)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(model.train)
            model.saver.save(session, f"{folder}/m", global_step=1)
            saved = model.all_rows(session)
            session.run(model.train)
            wanted = model.all_rows(session)
    wait()
    keys, rows = (
        np.concatenate(x) for x in zip(*checkpoint.read_table(f"{folder}/m-1", "t", block=3))
    )
    has_row = saved.any(1)
    assert 0 < np.count_nonzero(has_row) == len(keys)
    np.testing.assert_array_equal(keys, KEYS[has_row])
    loaded = checkpoint.load(folder).table("t")
    np.testing.assert_array_equal(loaded[KEYS[has_row]], saved[has_row])
    parts = 1 if there.startswith("whole") else size
    names = {name for name, _ in tf.train.list_variables(f"{folder}/m-1")}
    for entry in ("t", "t/keys", "t/Adam"):
        assert f"{entry}/part_{parts - 1}" in names and f"{entry}/part_{parts}" not in names

    def goes_on(session, model):
        np.testing.assert_array_equal(model.all_rows(session), saved)
        session.run(model.train)
        np.testing.assert_allclose(model.all_rows(session), wanted, rtol=1e-5, atol=1e-6)

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, here, seed=8)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(model.train)
            model.saver.restore(session, f"{folder}/m-1")
            goes_on(session, model)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, here, seed=8)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=100
        ) as session:
            goes_on(session, model)
    start = collective.checkpoint.WarmStart(f"{folder}/m-1", slots=True)
    with strategy.scope(plan="quiet", warm_start=start), tf.Graph().as_default():
        model = Model(strategy, rank, here, seed=8)
        with tf.train.MonitoredTrainingSession() as session:
            goes_on(session, model)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, here, seed=8)
        tf.train.init_from_checkpoint(f"{folder}/m-1", {"t": model.table})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(model.all_rows(session), saved)


@pytest.mark.double
@MOVES
@pytest.mark.parametrize("way", ["increments", "in the background"])
def test_saves_in_training_go_on_in_another_placement(strategy, rank, folder, there, here, way):
    """Keys are added and removed between a checkpoint and its increments."""
    options = {} if way == "increments" else {"checkpoint_blocking": False}
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        model = Model(strategy, rank, there, tf.train.AdagradOptimizer(0.1))
        if way == "increments":
            checkpoint.enable_increments(folder)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.saver.save(session, f"{folder}/m", global_step=0)
            for step in range(2):
                session.run(model.train)
                model.table.remove(session, KEYS[step : step + 3])
                if way == "increments":
                    checkpoint.save_increment(session, folder)
                else:
                    model.saver.save(session, f"{folder}/m", global_step=1 + step)
            saved = model.all_rows(session)
            session.run(model.train)
            wanted = model.all_rows(session)
    wait()
    latest = tf.train.latest_checkpoint(folder)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, here, tf.train.AdagradOptimizer(0.1), seed=7)
        with tf.Session() as session:
            model.saver.restore(session, latest)
            np.testing.assert_array_equal(model.all_rows(session), saved)
            session.run(model.train)
            np.testing.assert_allclose(model.all_rows(session), wanted, rtol=1e-5, atol=1e-6)
    has_row = saved.any(1)
    loaded = checkpoint.load(folder).table("t")
    np.testing.assert_array_equal(loaded[KEYS[has_row]], saved[has_row])


@MOVES
@COUNTS
def test_counts_and_last_uses_move(strategy, rank, folder, there, here, policy):
    """What came before a restore and after it counts together, wherever it was counted."""
    truth, last_uses = Truth(policy), []
    for place, given in ((there, batches(4)), (here, batches(4, seed=5)), (there, batches(2))):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            with strategy.embedding_scope(placement=place):
                model = CountingModel(strategy, policy)
            with tf.Session() as session:
                if truth.step:
                    model.saver.restore(session, f"{folder}/m")
                else:
                    session.run(tf.global_variables_initializer())
                compare(model, session, truth)
                for keys in given:
                    model.steps(session, keys)
                    truth.train(keys)
                    compare(model, session, truth)
                model.saver.save(session, f"{folder}/m")
                holder = model.table.placement.holder
                assert holder in (None, rank) or not list(model.table.export(session))
        wait()
        of_keys = checkpoint.read_table(f"{folder}/m", "t", frequencies=True, last_used=True)
        keys, _, counts, used = (np.concatenate(x) for x in zip(*of_keys))
        assert dict(zip(keys.tolist(), counts.tolist())) == {
            key: truth.frequencies[key] for key in truth.rows
        }
        last_uses.append(dict(zip(keys.tolist(), used.tolist())))
    for before, after in zip(last_uses, last_uses[1:]):
        assert all(after[key] >= step for key, step in before.items())
    assert max(last_uses[2].values()) == 10


@pytest.mark.double
def test_keys_are_on_the_rank_that_has_the_table(strategy, rank, size):
    """Ranks without a row take part in everything, and may be asked for anything."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, rank, placement="whole:5")
        owner, table = 5 % size, model.table
        assert table.placement.holder == owner
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(model.train, {model.ids: KEYS[rank::size]})
            count = len(KEYS)
            sizes = session.run(model.sizes)["t"]
            assert sizes.tolist() == [count * (r == owner) for r in range(size)]
            assert session.run(table.total_count()) == count
            found, rows = table.lookup_keys(session, KEYS)
            assert found.tolist() == (KEYS if rank == owner else KEYS[:0]).tolist()
            np.testing.assert_array_equal(rows, model.all_rows(session)[: len(found)])
            assert table.statistics(session).counts()["rows"] == sizes[rank]
            table.import_(session, np.array([77, 78]), np.ones([2, D]))
            assert session.run(table.total_count()) == count + 2
            assert table.remove(session, KEYS[:4]) == (4 if rank == owner else 0)
            assert collective.clear_embeddings(session)["t"] == (count - 2 if rank == owner else 0)
        plan = strategy.plan()
    (described,) = (each for each in plan.tables if each.name == "t")
    assert described.placement == f"whole:{owner}"
    assert f"whole on rank {owner}" in plan.to_text(full=True)


@pytest.mark.double
def test_dynamic_tables_are_dealt_by_the_bytes_of_a_row(strategy, size):
    """Nobody knows how many rows they will have; static tables are dealt by themselves."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(placement="whole"):
            tables = [
                tf.get_variable(f"t{i}", [rows, dim], initializer=tf.ones_initializer())
                for i, (rows, dim) in enumerate(
                    [(None, 8), (1000, 4), (None, 3), (None, 4), (10, 4), (None, 2)]
                )
            ]
            reused = tf.get_variable_scope()
        with tf.variable_scope(reused, reuse=True), strategy.embedding_scope(placement="rows"):
            assert tf.get_variable("t0", [None, 8]) is tables[0]
    owners = {
        1: [0] * 6,
        2: [0, 0, 1, 1, 1, 1],
        3: [0, 0, 1, 2, 1, 1],
    }[size]
    assert [table.placement.holder for table in tables] == owners


@pytest.mark.double
@MOVES
def test_a_model_is_served_in_another_placement(strategy, rank, folder, there, here):
    def build(placement):
        with strategy.embedding_scope(placement=placement):
            table = tf.get_variable("t", [None, D], initializer=normal())
        ids = tf.placeholder(tf.int64, [None], "ids")
        return table, ids, tf.nn.embedding_lookup(table, ids)

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(7)
        _, ids, rows = build(there)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: KEYS[rank:]})
            prefix = tf.train.Saver().save(session, f"{folder}/m")

    def signature(placement):
        _, ids, rows = build(placement)
        return {"ids": ids}, {"rows": rows}

    for place in (there, here):
        path = strategy.export_saved_model(
            f"{folder}/{place}",
            prefix,
            exports.signature(strategy, functools.partial(signature, place)),
        )
        got = exports.served(path, {"ids": [*KEYS, 1234]})["rows"]
        np.testing.assert_allclose(got[:-1], drawn(KEYS), rtol=1e-6)
        np.testing.assert_array_equal(got[-1], 0)
        wait()


@pytest.mark.double
def test_a_capacity_is_that_of_the_table(strategy, rank, size):
    """Its rank may have all of the rows, and evicts the least recently used ones."""
    policy = TablePolicy(capacity=12)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(placement=f"whole:{size - 1}"):
            model = CountingModel(strategy, policy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for first in range(0, 24, 4):
                model.steps(session, OFTEN_KEYS[first : first + 6])
            kept = model.read(session, OFTEN_KEYS).any(1)
    assert np.flatnonzero(kept).tolist() == list(range(14, 26))
