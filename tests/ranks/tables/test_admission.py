"""Keys get rows by how often they came, or by chance, as a dictionary in NumPy says."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import CBFFilter, CounterFilter, EmbeddingVariableOption, TableError, TablePolicy
from collective.plan import builder
from collective.tables.policies import admission
from tests.ranks.admitted_keys import KEYS, RATE, Model, Truth, batches, compare
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, D, drawn
from tests.ranks.exports import served, signature

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

BLOOM = {"max_element_size": 30, "false_positive_probability": 0.3}
POLICIES = {
    "count": TablePolicy(filter_freq=3),
    "bloom": TablePolicy(filter_freq=3, **BLOOM),
    "chance": TablePolicy(admit_probability=0.3),
    "both": TablePolicy(filter_freq=2, admit_probability=0.5, default_value_no_permission=-0.75),
    "bloom and chance": TablePolicy(
        filter_freq=2,
        admit_probability=0.5,
        counter_type="uint8",
        default_value_no_permission=0.5,
        **BLOOM,
    ),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("grouping", [True, False], ids=["grouped", "single"])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_are_those_of_numpy(strategy, name, grouping, crowded):
    """Every occurrence counts, in every lookup, on every rank; refused keys change nothing."""
    policy, truth = POLICIES[name], Truth(POLICIES[name])
    scope = strategy.scope(plan="quiet", grouping=grouping)
    with scope, tf.Graph().as_default():
        model = Model(strategy, policy, pooled=grouping)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for keys in batches(7):
                model.steps(session, keys)
                truth.train(keys)
                model.read(session, KEYS[::-1])  # counts nothing
                compare(model, session, truth)
            assert 0 < len(truth.rows) < len(KEYS)
            mine, seen = KEYS[model.table._is_owned(KEYS)], model.table.statistics(session)
            assert seen.admitted == seen.rows == sum(int(key) in truth.rows for key in mine)
            if policy.counts_keys:
                assert seen.refused == sum(truth.refused[int(key)] for key in mine)
            assert seen.refused > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *MORE_OPTIMIZERS])
def test_deeprecs_published_counter(strategy, optimizer):
    """In the run that counts a key's third occurrence it reads zeros, and its row is updated."""
    option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3))
    keys = np.array([1, 1, 1, 1, 2, 2, 2, 3, 3, 4])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        size, rank = strategy.world_size(), strategy.rank()
        table = collective.get_embedding_variable(
            "var_1", 3, initializer=tf.ones_initializer(), ev_option=option
        )
        rows = tf.nn.embedding_lookup(table, tf.constant(keys[rank::size], tf.int64))
        step = tf.train.get_or_create_global_step()
        made = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer]()
        # (1 - lr * 1.5 * occurrences is zero for no count of ranks.)
        train = made.minimize(tf.reduce_sum(rows * 3.0), global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert not session.run([rows, train])[0].any()
            second = session.run([rows, train])[0]
            is_admitted = keys[rank::size] <= 2
            assert not second[~is_admitted].any()
            assert (second[is_admitted] != 1).all()
            if optimizer not in ("proximal_sgd", "proximal_adagrad"):
                assert second[is_admitted].all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("counter", [tf.uint64, tf.uint32, tf.uint8, tf.uint16])
def test_deeprecs_published_bloom_filter(strategy, counter):
    option = EmbeddingVariableOption(
        filter_option=CBFFilter(
            filter_freq=3,
            max_element_size=5,
            false_positive_probability=0.01,
            counter_type=counter,
        )
    )
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable(
            "var_1", 3, initializer=tf.ones_initializer(), ev_option=option
        )
        # One rank asks for the key.
        ids = tf.constant([1] if strategy.rank() == strategy.world_size() - 1 else [], tf.int64)
        rows = tf.nn.embedding_lookup(table, ids)
        step = tf.train.get_or_create_global_step()
        optimizer = collective.train.AdagradDecayOptimizer(0.1, step)
        train = optimizer.minimize(tf.reduce_sum(rows * 2.0), global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                assert not session.run([rows, train])[0].any()
            fourth = session.run([rows, train])[0]
            assert fourth.all() and (fourth != 1).all()


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *MORE_OPTIMIZERS])
def test_a_refused_keys_gradient_is_dropped(strategy, optimizer):
    """Rows and slots of the others are those of a table without refused keys, in every step."""
    known, refused, found = KEYS[:12], KEYS[12:24], {}
    for policy in (None, TablePolicy(filter_freq=1000)):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            made = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer]()
            model = Model(strategy, policy, made, pooled=True)
            batch = known if policy is None else np.stack([known, refused], 1).reshape(-1)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.table.import_(session, known, drawn(known))
                for keys in (batch, batch[: len(batch) // 2], batch):
                    # A key and its refused neighbour are on one rank.
                    width = 1 if policy is None else 2
                    parts = keys.reshape(-1, width)[model.rank :: model.size]
                    session.run(model.train, {model.ids: parts.reshape(-1)})
                found[policy] = model.read(session, known)
                assert session.run(model.total) == len(known)
    np.testing.assert_allclose(*found.values(), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_no_occurrence_is_lost_where_lookups_do_not_meet(strategy):
    """Lookups with exchanges of their own count one after the other: the sum is the same."""
    with strategy.scope(plan="quiet", grouping=False), tf.Graph().as_default():
        model = Model(strategy, TablePolicy(filter_freq=4), pooled=True)
        batch = np.repeat(KEYS[:6], [1, 2, 3, 4, 5, 6])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, batch)
            assert session.run(model.total) == 3
            model.steps(session, KEYS[:1], KEYS[:1])
            assert session.run(model.total) == 3
            model.steps(session, KEYS[:1])
            assert session.run(model.total) == 4


def test_a_branch_counts_too(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", D, ev_option=TablePolicy(filter_freq=2))
        ids, is_taken = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.bool, [])
        rows = tf.cond(
            is_taken,
            lambda: tf.nn.embedding_lookup(table, ids),
            lambda: tf.zeros([tf.size(ids), D]),
        )
        other = tf.get_variable("x", [], initializer=tf.zeros_initializer())
        train = other.assign_add(tf.reduce_sum(tf.stop_gradient(rows)) * 0)
        total = table.total_count()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            # Every rank takes the branch for the first key; one each.
            session.run(train, {ids: KEYS[:1], is_taken: True})
            assert session.run(total) == int(strategy.world_size() >= 2)
            session.run(train, {ids: KEYS[:2], is_taken: False})
            session.run(rows, {ids: KEYS[:2], is_taken: True})
            session.run(train, {ids: KEYS[:1], is_taken: True})
            assert session.run(total) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [TablePolicy(filter_freq=1), TablePolicy(admit_probability=1)])
def test_a_filter_that_admits_all_changes_no_bit(strategy, policy):
    found = []
    for given in (None, policy):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(strategy, given, tf.train.AdagradOptimizer(0.1), pooled=True)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, *batches(3))
                found.append(model.read(session, KEYS))
    np.testing.assert_array_equal(*found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ahead", [{"prefetch_keys": True}, {}], ids=["ahead", "plain"])
def test_keys_are_counted_in_their_steps(strategy, ahead):
    """Also where the keys of the next batch are exchanged before this one is trained."""
    policy, given = TablePolicy(filter_freq=3), batches(6, size=18)
    truth, found = Truth(policy), []
    with strategy.scope(plan="quiet", **ahead), tf.Graph().as_default():
        rank, size = strategy.rank(), strategy.world_size()
        data = tf.data.Dataset.from_tensor_slices(np.stack([b[rank::size] for b in given]))
        ids = tf.data.make_one_shot_iterator(data).get_next()
        model = Model(strategy, policy, ids=ids)
        with tf.train.MonitoredTrainingSession("") as session:
            while not session.should_stop():
                found.append(session.run([model.rows, model.train])[0])
                if len(found) == len(given):
                    break
    for rows, keys in zip(found, given):
        np.testing.assert_allclose(rows, truth.read(keys[rank::size]), rtol=1e-5, atol=1e-6)
        truth.train(keys)
    assert len(truth.rows) > 2


@pytest.mark.parametrize("name", ["count", "chance"])
def test_batches_of_one_update_count(strategy, name):
    """With local_steps every batch counts; what is drawn in one holds in all of an update."""
    policy = POLICIES[name]
    with strategy.scope(plan="quiet", local_steps=2), tf.Graph().as_default():
        model = Model(strategy, policy)
        first, second = KEYS[:10], np.concatenate([KEYS[:6], KEYS[:6]])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, first, second)
            if name == "count":  # the others came once
                assert session.run(model.total) == 6
                want = drawn(KEYS[:6])  # no gradient of the first batch, in which none had a row
                want -= RATE * 2 * 2 * (0 - 1) / 2
                np.testing.assert_allclose(model.read(session, KEYS[:6]), want, rtol=1e-5)
            else:
                truth = Truth(policy)
                truth.train(first)
                assert session.run(model.total) == len(truth.rows)


def test_a_served_model_has_admitted_rows_alone(strategy, folder):
    policy = TablePolicy(filter_freq=3, default_value_no_permission=0.25)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, policy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, *batches(4))
            rows, count = model.read(session, KEYS), session.run(model.total)
            model.saver.save(session, f"{folder}/m")

    def build():
        ids = tf.placeholder(tf.int64, [None])
        table = collective.get_embedding_variable("t", D, ev_option=policy)
        return {"p": ids}, {"rows": tf.nn.embedding_lookup(table, ids)}

    with strategy.scope(plan="quiet"):
        path = strategy.export_saved_model(
            f"{folder}/served", f"{folder}/m", signature(strategy, build)
        )
    np.testing.assert_array_equal(served(path, {"p": KEYS})["rows"], rows)
    saved = tf.train.list_variables(f"{path}/variables/variables")
    names = [name for name, _ in saved if "refused" in name or "frequency" in name]
    assert not names
    assert sum(shape[0] for name, shape in saved if "keys" in name) == count


def test_the_plan_says_where_keys_are_refused(strategy, monkeypatch):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        collective.get_embedding_variable("t", D, ev_option=TablePolicy(filter_freq=3))
        collective.get_embedding_variable("u", D, ev_option=TablePolicy(weight_bound=3))
        plan = str(strategy.plan())
        assert "filter_freq=3" in plan and "admission=" not in plan
        monkeypatch.setattr(builder.kernel_device, "on_device", lambda dynamic: not dynamic)
        policies = [table["policy"] for table in json.loads(strategy.plan().to_json())["tables"]]
        assert policies == [{"filter_freq": 3, "admission": "host"}, {"weight_bound": 3.0}]


def test_what_can_not_be_refused_is_an_error(strategy, monkeypatch):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", D)
        for policy, words in (
            (TablePolicy(filter_freq=3), "filter_freq=3"),
            (TablePolicy(admit_probability=0.5), "admit_probability=0.5"),
            (TablePolicy(default_value_no_permission=1), "default_value_no_permission=1.0"),
        ):
            table.policy = policy
            with monkeypatch.context() as patched:
                patched.setattr(table, "bridge", object())
                with pytest.raises(TableError, match=f"{words}.*COLLECTIVE_DYNAMIC_TABLES=host"):
                    admission.prepare(table, None)
            if "default" in words:
                continue
            with monkeypatch.context() as patched:
                patched.setattr(table, "compiled", False)
                with pytest.raises(TableError, match=f"{words}.*setup.py build_ext"):
                    admission.prepare(table, None)
