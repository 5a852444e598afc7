"""Every row that a run changes has been announced before: of tables and slots, by whatever writes.

The truth is a copy of all rows before and after.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import control_flow_util

import collective
from collective import TablePolicy
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows import row_changes
from collective.tables.updates import write_announcements
from tests.ranks import reference
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, D, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1)]

V = 400
ALL_OPTIMIZERS = {**OPTIMIZERS, **MORE_OPTIMIZERS}
MOVES_ALL_ROWS = {"adam", "adam_w"}
KEYS = np.arange(200, dtype=np.int64) * 2**35 - 7


class Followed:
    """Follows tables and slots in a session, each by a change set of its own."""

    def __init__(self, session, variables):
        self.session, self.variables = session, list(variables)
        for variable in self.variables:
            if not hasattr(variable, "test_rows"):
                variable.test_rows = tf.placeholder(tf.int64, [None])
                variable.test_read = tf.raw_ops.ResourceGather(
                    resource=variable.handle, indices=variable.test_rows, dtype=variable.dtype
                )
        numbers = write_announcements.watch(session, self.variables)
        self.sets = [row_changes.ChangeSet(1 << 20) for _ in numbers]
        for changes, number in zip(self.sets, numbers):
            assert not changes.listen([number])
        self.values = self.read()

    def read(self):
        values = []
        for variable in self.variables:
            store = variable
            if getattr(variable, "test_table", None) is not None:
                store = variable.test_table
            count = getattr(store, "test_count", None)
            rows = np.arange(count() if count else self.rows(variable))
            values.append(
                run_unpatched(self.session, variable.test_read, {variable.test_rows: rows})
            )
        return values

    @staticmethod
    def rows(variable):
        return int(variable.shard_shape[0])

    def changed(self):
        """Returns for each variable the rows that differ, and what was announced since."""
        before, self.values = self.values, self.read()
        found = []
        for changes, old, new in zip(self.sets, before, self.values):
            count = min(len(old), len(new))
            differ = np.flatnonzero((old[:count] != new[:count]).any(1))
            changes.begin()
            found.append((np.append(differ, np.arange(count, len(new))), changes.changes()))
            changes.done()
        return found

    def check(self, exact=None):
        """Checks that all rows that differ were announced; `exact`: these, and no others."""
        for variable, (differ, announced) in zip(self.variables, self.changed()):
            if exact is None:
                assert announced.all or set(differ) <= set(announced.rows), variable.op.name
            else:
                assert not announced.all, variable.op.name
                assert set(differ) <= set(announced.rows), variable.op.name
                assert set(announced.rows) <= set(exact), variable.op.name


def static_model(strategy, optimizer):
    with strategy.embedding_scope():
        table = reference.table("t", V, D)
    ids = tf.placeholder(tf.int64, [None])
    step = tf.train.get_or_create_global_step()
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
    train = ALL_OPTIMIZERS[optimizer]().minimize(loss, global_step=step)
    slots = [v for v in tf.global_variables() if getattr(v, "_collective_shard", None) is table]
    return table, ids, train, slots


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_updates_of_a_static_table_announce_its_rows(strategy, rank, size, optimizer):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        table, ids, train, slots = static_model(strategy, optimizer)
        write_announcements.want(graph)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            followed = Followed(session, [table, *slots])
            keys = np.array([3, 4, 5, 8, 9, 3])
            rows = None if optimizer in MOVES_ALL_ROWS else set(keys[keys % size == rank] // size)
            for _ in range(2):
                session.run(train, {ids: keys})
                followed.check(rows)
            session.run(train, {ids: [7]})
            followed.check(None if rows is None else {7 // size} if 7 % size == rank else set())
            assert write_announcements.is_announced(table)


def test_other_writes_of_a_static_table_are_announced(strategy, monkeypatch):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        table, _, _, slots = static_model(strategy, "adagrad")
        whole = tf.placeholder(tf.float32, [V, D])
        assign, add = table.assign(whole), table.assign_add(whole)
        go = tf.placeholder(tf.bool, [])
        handle, rows = table.handle, tf.constant([1, 2], tf.int32)

        def scattered(number):
            with tf.control_dependencies(
                [
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=handle, indices=rows, updates=tf.fill([2, D], number)
                    )
                ]
            ):
                return tf.constant(0)

        monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", False)
        in_branch = tf.cond(go, lambda: scattered(5.0), lambda: tf.constant(1))
        monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", True)
        in_function = tf.cond(go, lambda: scattered(6.0), lambda: tf.constant(1))
        write_announcements.want(graph)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            followed = Followed(session, [table, *slots])
            value = np.arange(V * D, dtype=np.float32).reshape(V, D)
            session.run(assign, {whole: value})
            followed.check()
            session.run(add, {whole: value})
            followed.check()
            table.load(value, session)
            followed.check()
            run_unpatched(session, in_branch, {go: True})
            followed.check({1, 2})
            run_unpatched(session, in_function, {go: True})
            followed.check()
            session.run(table.initializer)
            followed.check()


def test_reads_announce_nothing(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        table, ids, _, slots = static_model(strategy, "adagrad")
        rows = tf.nn.embedding_lookup(table, ids)
        write_announcements.want(graph)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            followed = Followed(session, [table, *slots])
            session.run(rows, {ids: [1, 2]})
            session.run(table)
            followed.check(set())


def test_a_write_that_a_session_has_seen_before_counts_as_unannounced(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        table, ids, train, _ = static_model(strategy, "rmsprop")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: [1]})
            write_announcements.want(graph)
            assert not tf.train.latest_checkpoint("/nowhere")  # a run is what prepares the graph
            session.run(train, {ids: [1]})
            assert not write_announcements.is_announced(table)


def test_consumers_have_cursors_of_their_own(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        table, ids, train, _ = static_model(strategy, "adagrad")
        write_announcements.want(graph)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            one, other = Followed(session, [table]), Followed(session, [table])

            def rows(followed):
                return followed.changed()[0][1].rows.tolist()

            def local(keys):
                return [key // size for key in keys if key % size == rank]

            session.run(train, {ids: [1, 2]})
            assert rows(one) == local([1, 2])
            session.run(train, {ids: [4, 5]})
            assert rows(one) == local([4, 5])
            assert rows(other) == local([1, 2, 4, 5])
            session.run(train, {ids: [6, 7]})
            one.sets[0].begin()
            session.run(train, {ids: [8, 9]})
            one.sets[0].undo()
            assert rows(one) == local([6, 7, 8, 9])


class DynamicModel:
    """Trains dynamic table 't', and copies what this rank has of it, by keys."""

    def __init__(self, optimizer, policy=None):
        tf.set_random_seed(7)
        self.table = collective.get_embedding_variable(
            "t", D, initializer=normal(), ev_option=policy
        )
        self.ids = tf.placeholder(tf.int64, [None])
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        step = tf.train.get_or_create_global_step()
        self.train = ALL_OPTIMIZERS[optimizer]().minimize(
            tf.reduce_sum(self.rows**2), global_step=step
        )
        write_announcements.want(tf.get_default_graph())

    def follow(self, session):
        self.session, self.changes = session, row_changes.ChangeSet(1 << 30)
        variables = [self.table, *self.table.slots]
        self.changes.listen(write_announcements.watch(session, variables))
        self.before = self.state()

    def state(self):
        """Returns {key: bytes of its row and slots}."""
        store, state = self.table.store(self.session), {}
        columns = [store.values, *self.table.columns_of_slots(self.session)]
        self.table.initialize_slot_rows(self.session, self.table.slots)
        for keys, local in store.ascending(1000):
            values = store.read(columns, keys, local)
            for i, key in enumerate(keys.tolist()):
                state[key] = b"".join(np.ascontiguousarray(v[i]).tobytes() for v in values)
        return state

    def check(self, at_most=None):
        before, self.before = self.before, self.state()
        now = self.before
        self.changes.begin()
        changes = self.changes.changes()
        self.changes.done()
        if changes.all:
            assert at_most is None
            return
        store = self.table.store(self.session)
        by_row = store.keys.keys(1, len(store.keys) + 1)
        announced = set(by_row[changes.rows[changes.rows > 0] - 1].tolist())
        announced |= {key for key in changes.in_file.tolist() if key in now}
        assert {key for key in now if now[key] != before.get(key)} <= announced
        gone = set(before) - set(now)
        assert gone <= set(changes.removed.tolist())
        if at_most is not None:
            assert announced <= set(at_most)


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_updates_inserts_and_removals_of_a_dynamic_table(strategy, optimizer):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = DynamicModel(optimizer)
        exact = (lambda keys: None) if optimizer in MOVES_ALL_ROWS else (lambda keys: keys)
        with tf.train.MonitoredTrainingSession("") as monitored:
            session = monitored._tf_sess()
            monitored.run(model.train, {model.ids: KEYS[:50]})
            model.follow(session)
            monitored.run(model.train, {model.ids: KEYS[40:60]})
            model.check(exact(KEYS[40:60]))
            monitored.run(model.train, {model.ids: KEYS[10:20]})
            model.table.remove(monitored, KEYS[::3])
            model.check(exact(KEYS[10:20]))
            model.table.import_(monitored, KEYS[5:9], np.ones([4, D], np.float32))
            monitored.run(model.rows, {model.ids: KEYS[100:]})
            model.check(KEYS[5:9])
            model.table.remove(monitored, KEYS[:30])
            monitored.run(model.train, {model.ids: KEYS[20:25]})
            model.check(exact(KEYS[20:25]))
            model.table.clear(monitored)
            model.check([])
            session.run(model.table.initializer)
            model.changes.begin()
            assert model.changes.changes().all


@pytest.mark.parametrize("optimizer", ["adagrad", "ftrl"])
def test_rows_that_go_to_a_file_and_come_back(strategy, optimizer, tmp_path):
    policy = TablePolicy(storage="dram_ssd", storage_path=str(tmp_path), storage_size=4096)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = DynamicModel(optimizer, policy)
        with tf.train.MonitoredTrainingSession("") as monitored:
            keys = np.arange(1500, dtype=np.int64) * 2**35 - 7
            monitored.run(model.train, {model.ids: keys})
            model.follow(monitored._tf_sess())
            rng = np.random.default_rng(5)
            for _ in range(6):
                trained = []
                for _ in range(3):
                    trained.append(rng.choice(keys, 100))
                    monitored.run(model.train, {model.ids: trained[-1]})
                    monitored.run(model.rows, {model.ids: rng.choice(keys, 100)})
                removed = rng.choice(keys, 40)
                model.table.remove(monitored, removed)
                model.check(np.concatenate(trained))


def test_last_uses_are_announced(strategy):
    policy = TablePolicy(steps_to_live=3)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = DynamicModel("adagrad", policy)
        with tf.train.MonitoredTrainingSession("") as monitored:
            monitored.run(model.train, {model.ids: KEYS})
            model.follow(monitored._tf_sess())
            monitored.run(model.train, {model.ids: KEYS[:5]})
            model.check(KEYS[:5])
            model.table.import_(monitored, KEYS[5:9] + 1, np.ones([4, D], np.float32))
            model.check(KEYS[5:9] + 1)
