"""Rows that the policy of a table doesn't keep go when it is saved, on any number of ranks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import GlobalStepEvict, L2WeightEvict, TableError, TablePolicy, checkpoint
from collective.ops import placement
from collective.tables.rows import row_store
from collective.train import GroupLassoFtrlOptimizer
from tests.ranks.dynamic_tables import D, drawn, normal

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]

KEYS = np.arange(30, dtype=np.int64) * 2**35 - 7
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.train.AdamOptimizer(0.1),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}


class Model:
    """Trains table 't' towards 0; every rank asks for the same keys."""

    def __init__(self, policy=None, optimizer="adagrad", scale=1.0):
        tf.set_random_seed(7)
        step = tf.train.get_or_create_global_step()
        self.table = collective.get_embedding_variable(
            "t", D, initializer=normal(), ev_option=policy
        )
        self.ids = tf.placeholder(tf.int64, [None])
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        loss = tf.reduce_sum(self.rows**2) * scale
        self.train = OPTIMIZERS[optimizer]().minimize(loss, global_step=step)
        self.saver = tf.train.Saver()

    def steps(self, session, *batches):
        for keys in batches:
            session.run(self.train, {self.ids: keys})

    def save(self, session, path):
        """Saves; returns all keys and rows of all ranks, which the checkpoint and `read` have."""
        self.saver.save(session, path)
        return read(path)


def read(path):
    """Returns the rows in a checkpoint, by key."""
    return {
        int(key): row
        for keys, rows in checkpoint.read_table(path, "t")
        for key, row in zip(keys, rows)
    }


def has(rows, keys):
    assert sorted(rows) == sorted(keys.tolist())


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_live_for_so_many_steps(strategy, folder, optimizer, compiled, monkeypatch):
    """Rows that stay have what they would have without a policy, slots and all."""
    if not compiled:
        monkeypatch.setattr(row_store, "is_compiled", lambda: False)
    old, rare, new = KEYS[:10], KEYS[10:20], KEYS[20:]
    batches = [KEYS[:20], rare, old, rare, new, rare[::2], new[:3]]  # 6 steps more after `old`
    kept = {}
    for policy in (None, collective.EmbeddingVariableOption(evict_option=GlobalStepEvict(4))):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy, optimizer)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, *batches[:6])
                has(model.save(session, f"{folder}/early"), KEYS)
                model.steps(session, *batches[6:])
                session.run(model.rows, {model.ids: old})  # no training
                rows = model.save(session, f"{folder}/late")
                if policy is None:
                    has(rows, KEYS)
                    kept = rows
                    continue
                stay = np.concatenate([rare, new])  # `old` was used in step 3 of 7
                has(rows, stay)
                for key, row in rows.items():
                    np.testing.assert_array_equal(row, kept[key])
                np.testing.assert_array_equal(session.run(model.rows, {model.ids: old}), 0)
                # A key that comes back is new; slots of those that stay are theirs.
                model.steps(session, KEYS[:1])
                model.saver.restore(session, f"{folder}/late")
                model.steps(session, old)
                if optimizer == "sgd":
                    np.testing.assert_allclose(
                        session.run(model.rows, {model.ids: old}),
                        drawn(old) * (1 - 0.2),
                        rtol=1e-5,
                    )


def test_rows_of_small_weights_go(strategy, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(l2_weight_threshold=0.1), "sgd")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, KEYS, KEYS[::2])
            sizes = strategy.world_size()
            rows = drawn(KEYS).astype(np.float64) * (1 - 0.2)
            rows[::2] *= 1 - 0.2
            del sizes
            kept = KEYS[(rows**2).sum(1) / 2 >= 0.1]
            assert 5 < len(kept) < 25
            has(model.save(session, f"{folder}/m"), kept)


@pytest.mark.slow
def test_deeprecs_published_case(strategy, folder):
    """Group-lasso FTRL makes the row of key 2 small: it goes with the save, and comes back new."""
    option = collective.EmbeddingVariableOption(evict_option=L2WeightEvict(0.9))
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable(
            "var_1", 3, initializer=tf.ones_initializer(), ev_option=option
        )
        rows = tf.nn.embedding_lookup(table, tf.constant([0, 0, 0, 1, 1, 2], tf.int64))
        train = GroupLassoFtrlOptimizer(
            0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.00001
        ).minimize(tf.reduce_sum(rows * 2.0))
        # A run that trains, but doesn't move rows, gives keys rows.
        still = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows))
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            before = session.run(rows)
            saver.save(session, f"{folder}/m")
            session.run(still)
            after = session.run(rows)
    want = [0.8282884] * 3 + [0.7927219] * 2
    for found, last in ((before, 0.6880260), (after, 1.0)):
        wanted = np.repeat([*want, last], 3).reshape(6, 3)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-7)


@pytest.mark.matrix
def test_last_use_is_restored_and_starts_with_the_policy(strategy, folder):
    """Restored with a policy that is new, all rows count as used at the checkpoint's step."""
    policies = {"none": None, "short": TablePolicy(steps_to_live=3)}

    def run(policy, restored, saved, *batches):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policies[policy])
            with tf.Session() as session:
                if restored:
                    model.saver.restore(session, f"{folder}/{restored}")
                else:
                    session.run(tf.global_variables_initializer())
                model.steps(session, *batches)
                return model.save(session, f"{folder}/{saved}")

    new = KEYS[10:]
    has(run("short", None, "a", KEYS, new, new), KEYS)  # the others were used two steps ago
    has(run("short", "a", "b", new), new)  # and now three
    has(run("none", "a", "c", new, new), KEYS)
    has(run("short", "c", "d", new, new), KEYS)  # as if used at the step of "c"
    has(run("short", "d", "e", new), new)
    names = [name for name, _ in tf.train.list_variables(f"{folder}/d")]
    assert "t/last_used/part_0" in names
    assert not any("last_used" in name for name, _ in tf.train.list_variables(f"{folder}/c"))


@pytest.mark.slow
def test_rows_go_between_saves(strategy, folder):
    """After runs that lead to multiples of three steps, also in a session that was restored."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(steps_to_live=2, evict=collective.every_steps(3)))

        def left(session):
            found = session.run(model.rows, {model.ids: KEYS})
            return KEYS[found.any(1)].tolist()

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, KEYS[:10])
            assert left(session) == KEYS[:10].tolist()
            has(model.save(session, f"{folder}/one"), KEYS[:10])
            model.steps(session, KEYS[5:15])
            assert left(session) == KEYS[:15].tolist()
            model.steps(session, KEYS[10:20])  # step 3; the first five were used in step 1
            assert left(session) == KEYS[5:20].tolist()
            model.steps(session, KEYS[20:], KEYS[20:])
            assert left(session) == KEYS[5:].tolist()
            model.steps(session, KEYS[20:])
            assert left(session) == KEYS[20:].tolist()
            model.saver.restore(session, f"{folder}/one")
            model.steps(session, KEYS[10:11])
            assert left(session) == KEYS[:11].tolist()
            model.steps(session, KEYS[10:11])
            assert left(session) == KEYS[10:11].tolist()


def by_assigning(step):
    return step.assign(step + 2)


def by_a_loop(step):
    def body(i):
        with tf.control_dependencies([step.assign_add(1)]):
            return i + 1

    return tf.while_loop(lambda i: i < 2, body, [0])


@pytest.mark.matrix
@pytest.mark.parametrize("count", [lambda step: step.assign_add(2), by_assigning, by_a_loop])
def test_rows_go_between_saves_where_a_run_counts_several_steps(strategy, folder, count):
    """After the first run that leads to a multiple of five steps, or beyond."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(steps_to_live=4, evict=collective.every_steps(5)))
        step = tf.train.get_global_step()
        with tf.control_dependencies([model.train]):  # It counts one of three.
            train = count(step)

        def left(session):
            found = session.run(model.rows, {model.ids: KEYS})
            return KEYS[found.any(1)].tolist()

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {model.ids: KEYS[:10]})
            model.saver.save(session, f"{folder}/m")
            assert left(session) == KEYS[:10].tolist()
            for restored in (False, True):
                if restored:
                    model.saver.restore(session, f"{folder}/m")
                session.run(train, {model.ids: KEYS[10:20]})  # Steps 4 to 6.
                assert left(session) == KEYS[10:20].tolist()
                session.run(train, {model.ids: KEYS[20:]})  # To 9.
                assert left(session) == KEYS[10:].tolist()
                session.run(train, {model.ids: KEYS[:1]})  # To 12.
                assert left(session) == KEYS[:1].tolist()


def share(total, rank, size):
    return len(range(rank, total, size))


class Reference:
    """Holds the keys of this rank with the steps of their last uses."""

    def __init__(self, capacity, rank, size):
        self.share, self.rank, self.size = share(capacity, rank, size), rank, size
        self.used, self.step, self.evicted = {}, 0, 0

    def train(self, keys):
        self.step += 1
        owned = keys[placement.dynamic(self.size).owner(keys) == self.rank]
        self.used.update((key, self.step) for key in owned.tolist())
        self.limit(self.step)

    def limit(self, before):
        by_age = sorted((step, key) for key, step in self.used.items() if step < before)
        for _, key in by_age[: max(0, len(self.used) - self.share)]:
            del self.used[key]
            self.evicted += 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_the_least_recent_rows_go_where_there_are_too_many(
    strategy, rank, size, folder, optimizer, monkeypatch
):
    """Also in a restore with a smaller capacity."""
    said = []
    monkeypatch.setattr(tf.logging, "warning", said.append)
    wanted = Reference(20, rank, size)
    rng = np.random.default_rng(5)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(capacity=20), optimizer)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(25):
                # Some batches alone are more than a rank may have.
                keys = np.unique(rng.choice(KEYS, 60 if step % 6 == 5 else 8))
                model.steps(session, keys)
                wanted.train(keys)
                found = model.table.lookup_keys(session, KEYS)[0]
                assert sorted(found.tolist()) == sorted(wanted.used)
            model.saver.save(session, f"{folder}/m")
            counted = model.table.statistics(session)
            assert counted.rows == len(wanted.used)
            assert counted.evicted.get("capacity", 0) == wanted.evicted
            assert wanted.evicted > 0 or size > 1
            assert counted.bytes >= counted.rows * (4 * D + 8 + 8)
            rows_saved = session.run(model.table.total_count())
    assert not said
    wanted.share, wanted.evicted = share(7, rank, size), 0
    wanted.limit(wanted.step + 1)  # no batch is in flight
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(capacity=7), optimizer)
        with tf.Session() as session:
            model.saver.restore(session, f"{folder}/m")
            found = model.table.lookup_keys(session, KEYS)[0]
            assert sorted(found.tolist()) == sorted(wanted.used)
            assert model.table.statistics(session).evicted.get("capacity", 0) == wanted.evicted
            if rank == 0:
                rows_left_out = rows_saved - session.run(model.table.total_count())
                assert "table 't' than capacity=7 allows" in said[0]
                assert f"left out: {rows_left_out} rows" in said[0]
            else:
                session.run(model.table.total_count())
                assert not said
            wanted.train(KEYS)
            model.steps(session, KEYS)
            assert model.table.statistics(session).rows == len(wanted.used)


@pytest.mark.slow
def test_what_came_and_went_is_counted(strategy, rank, size, folder):
    """Neither imports nor restores nor removals count as keys that came or were evicted."""
    policy = TablePolicy(
        steps_to_live=1, l2_weight_threshold=1e-30, evict=collective.every_steps(1)
    )
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(policy)

        def counts(session, owned):
            """Returns the statistics, for an expectation of the same form: keys to be owned."""
            found = model.table.statistics(session)
            owners = placement.dynamic(size).owner(owned)
            return found, np.count_nonzero(owners == rank)

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, KEYS[:20])
            model.table.import_(session, KEYS[20:25], np.ones((5, D)))
            found, own = counts(session, KEYS[:20])
            assert (found.admitted, found.evicted, found.returned) == (own, {}, 0)
            model.steps(session, KEYS[:4])  # The imported rows came at step 1, too.
            found, own = counts(session, KEYS[4:25])
            assert found.evicted == ({"steps_to_live": own} if own else {})
            model.steps(session, KEYS[:10])
            found, own = counts(session, KEYS[4:10])
            assert found.returned == own
            model.table.remove(session, KEYS[:10])
            model.steps(session, KEYS[:12])
            found, own = counts(session, KEYS[10:12])
            assert found.returned == own + counts(session, KEYS[4:10])[1]
            assert found.rows == counts(session, KEYS[:12])[1]
            assert found.refused == 0
            model.saver.save(session, f"{folder}/m")
            model.saver.restore(session, f"{folder}/m")
            found, own = counts(session, KEYS[:12])
            assert (found.rows, found.admitted, found.evicted) == (own, 0, {})


def test_some_rows_stay_however_old(strategy, rank, size, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(steps_to_live=1, keep_at_least=18))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, KEYS[:10], KEYS[10:20], KEYS[20:])
            rows = model.save(session, f"{folder}/m")
            statistics = model.table.statistics(session)
    kept = []
    for owner in range(size):
        keys = KEYS[placement.dynamic(size).owner(KEYS) == owner]  # the later ones used later
        count = max(np.count_nonzero(keys >= KEYS[20]), share(18, owner, size))
        kept += keys[-count:].tolist()
        if owner == rank:
            assert statistics.rows == len(keys[-count:])
            assert statistics.evicted.get("steps_to_live", 0) == len(keys) - len(keys[-count:])
    has(rows, np.array(kept))


def test_steps_to_live_is_an_argument_of_variables_too(strategy):
    """As DeepRec's first versions had it; 0 is for ever."""
    with strategy.scope(), tf.Graph().as_default():
        old = collective.get_embedding_variable("old", 4, steps_to_live=4000)
        assert old.policy == TablePolicy(steps_to_live=4000)
        kept = collective.get_embedding_variable("kept", 4, steps_to_live=0)
        assert kept.policy == TablePolicy()


@pytest.mark.matrix
def test_imported_rows_count_as_used(strategy, rank, size, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(steps_to_live=2))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.steps(session, *[KEYS[:2]] * 3)
            model.table.import_(session, KEYS[2:5], np.ones((3, D)))
            model.steps(session, KEYS[:2])
            has(model.save(session, f"{folder}/m"), KEYS[:5])
            exported = {
                int(key): int(step)
                for keys, _, steps in model.table.export(session, block=2, last_used=True)
                for key, step in zip(keys, steps)
            }
            owned = KEYS[:5][placement.dynamic(size).owner(KEYS[:5]) == rank]
            assert exported == {int(key): 4 if key in KEYS[:2] else 3 for key in owned}
            blocks = list(checkpoint.read_table(f"{folder}/m", "t", 2, last_used=True))
            keys, rows, steps = (np.concatenate(x) for x in zip(*blocks))
            assert keys.tolist() == sorted(KEYS[:5].tolist()) and rows.shape == (5, D)
            assert steps.tolist() == [4 if key in KEYS[:2] else 3 for key in keys]
            with pytest.raises(ValueError, match="doesn't tell when rows of table 't/Adagrad'"):
                checkpoint.read_table(f"{folder}/m", "t/Adagrad", last_used=True)
            model.steps(session, KEYS[:2])
            has(model.save(session, f"{folder}/m"), KEYS[:2])


def test_rows_imported_before_the_first_step_get_older(strategy, rank, size, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(TablePolicy(steps_to_live=2))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.table.import_(session, KEYS[2:5], np.ones((3, D)))
            steps = [step for *_, step in model.table.export(session, last_used=True)]
            assert set(np.concatenate([[1], *steps]).tolist()) == {1}
            model.steps(session, KEYS[:2], KEYS[:2])
            has(model.save(session, f"{folder}/m"), KEYS[:5])
            model.steps(session, KEYS[:2])
            has(model.save(session, f"{folder}/m"), KEYS[:2])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_policy_that_never_acts_changes_nothing(strategy, folder, optimizer):
    found = []
    options = {"steps_to_live": 100, "l2_weight_threshold": 1e-30, "keep_at_least": 9}
    for policy in (None, TablePolicy(**options, capacity=200, evict=collective.every_steps(1))):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(policy, optimizer)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                model.steps(session, KEYS, KEYS[:5])
                model.save(session, f"{folder}/m")
                model.steps(session, KEYS[::3])
                found.append(session.run(model.rows, {model.ids: KEYS}))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_rows_stay_in_place_while_gradients_wait(strategy, folder):
    """An update of several batches is that of their union, also with a save between the batches."""
    a, b, c = KEYS[:10], KEYS[10:20], KEYS[20:]
    found = []
    for steps in (2, 1):
        with strategy.scope(plan="quiet", local_steps=steps), tf.Graph().as_default():
            model = Model(TablePolicy(steps_to_live=1), scale=steps / 2)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first, second in ((a, b), (b, b[:3]), (c, b), (b[:5], b)):
                    if steps == 1:
                        model.steps(session, np.concatenate([first, second]))
                        continue
                    model.steps(session, first)
                    if first is c:
                        has(model.save(session, f"{folder}/waits"), KEYS)
                        with pytest.raises(TableError, match="wait for the update"):
                            model.table.clear(session)
                        with pytest.raises(TableError, match="wait for the update"):
                            model.table.remove(session, a)
                    model.steps(session, second)
                has(model.save(session, f"{folder}/m"), b)
                found.append(session.run(model.rows, {model.ids: KEYS}))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)


def small_table(policy):
    """Builds a table whose lookup comes before any optimizer and global step."""
    table = collective.get_embedding_variable("t", D, initializer=normal(), ev_option=policy)
    return table, tf.nn.embedding_lookup(table, tf.constant(KEYS))


@pytest.mark.parametrize("policy", [GlobalStepEvict(1), TablePolicy(steps_to_live=1)])
def test_the_global_step_can_be_made_after_the_lookups(strategy, rank, folder, policy):
    if isinstance(policy, GlobalStepEvict):
        policy = collective.EmbeddingVariableOption(evict_option=policy)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows = small_table(policy)[1]
        other = tf.get_variable("x", [], initializer=tf.zeros_initializer())
        step = tf.train.get_or_create_global_step()
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train = optimizer.minimize(tf.reduce_sum(rows), global_step=step)
        train_other = optimizer.minimize(other, var_list=[other], global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([train])
            saver = tf.train.Saver()
            saver.save(session, f"{folder}/a")
            has(read(f"{folder}/a"), KEYS)
            session.run(train_other)
            saver.save(session, f"{folder}/b")
            has(read(f"{folder}/b"), KEYS[:0])


@pytest.mark.parametrize(
    "policy, option",
    [
        (TablePolicy(steps_to_live=3), "steps_to_live=3"),
        (TablePolicy(capacity=30), "capacity=30"),
        (TablePolicy(l2_weight_threshold=1, evict=collective.every_steps(2)), r"every_steps\(2\)"),
    ],
    ids=["age", "capacity", "weights"],
)
def test_training_without_a_global_step_is_refused(strategy, policy, option):
    """Before anything is exchanged, on all ranks: later runs go on."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, rows = small_table(policy)
        other = tf.get_variable("x", [], initializer=tf.zeros_initializer())
        assign = other.assign(2.0)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(rows) + other)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                with pytest.raises(TableError, match=f"'t' .*{option}.* no global step.* Call tf"):
                    session.run(train)
                assert not session.run(rows).any()  # evaluation needs none
                assert session.run(assign) == 2
            assert session.run(table.total_count()) == 0
            if table.last_used is None:
                return
            # What a session has seen can't be changed.
            step = tf.train.get_or_create_global_step()
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(rows), step)
            session.run(step.initializer)
            with pytest.raises(TableError, match="when a session ran it first"):
                session.run(train)


def test_a_global_step_that_nothing_counts_is_said(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows = small_table(TablePolicy(steps_to_live=3))[1]
        tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(rows))
        tf.train.Saver()  # It has an assignment of the step.
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.warns(UserWarning, match="nothing in the graph counts the global step"):
                session.run(train)


def test_static_tables_keep_all_rows(strategy):
    policy = TablePolicy(steps_to_live=3)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(policy=policy):
            static = tf.get_variable("s", [10, D])
        assert static.policy == policy
