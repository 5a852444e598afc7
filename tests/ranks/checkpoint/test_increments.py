"""A whole checkpoint and its increments restore the very state, on any number of ranks.

The truth is the live state when the increment was saved, and a whole checkpoint saved next to it.
"""

import glob
import os
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import TablePolicy, checkpoint
from collective.checkpoint.files import chain_names, tensor_bundle
from collective.checkpoint.reading import consolidate, opening
from collective.coordination import barrier
from collective.ops.communication import collectives
from tests.ranks import reference
from tests.ranks.dynamic_tables import OPTIMIZERS, D, normal

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


def contents(path):
    """Returns all that a checkpoint has, its increments included: tables by keys."""
    chain = opening.open_checkpoint(path)
    found, inner = {}, chain.base.layout.entries()
    for name, stored in chain.base.layout.tables.items():
        if name.endswith("/refused"):
            blocks = [(k, v[0]) for k, v in opening.read_dynamic_tables(chain, [stored], 1000)]
        else:
            blocks = list(checkpoint.read_table(path, name, block=50))
        columns = zip(*blocks) if blocks else [[np.zeros(0)]] * 2
        found[name] = [np.concatenate([np.atleast_1d(x) for x in c]).tobytes() for c in columns]
        if stored.kind == "static":
            del found[name][0]  # the numbers of the blocks' first rows
    for name in chain.base.entries:
        if name not in inner and not name.startswith("collective/"):
            found[name] = np.asarray(chain.last.read_whole(name)).tobytes()
    return found


def check_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def wait():
    barrier.exchange(None, "wait", {})


def on_rank_0(function):
    """Calls a function on rank 0; its error is one on all ranks."""
    barrier.run_on_all_ranks(None, "a step of rank 0", lambda: collectives.rank() or function())


def check_chain(folder, base, wanted):
    assert consolidate.verify(folder) == f"{base} and 2 increments: whole"
    described = consolidate.description(folder).splitlines()
    assert described[0] == f"{base}.increment-2: a whole checkpoint and 2 increments, at step 6"
    assert described[1].startswith(f"{base}: saved by ") and described[1].endswith(", at step 3")
    assert any(line.startswith("  increment 1, ") and "step 4" in line for line in described)
    first = consolidate.description(f"{base}.increment-1").splitlines()
    assert first[0] == f"{base}.increment-1: a whole checkpoint and 1 increment, at step 4"
    with pytest.raises(tf.errors.DataLossError) as missing:
        consolidate.consolidate(f"{base}.increment-9", f"{folder}/none")
    assert missing.value.message == (
        f"checkpoint '{base}' has 2 increments, and no increment 9: there is no file "
        f"{base}.increment-9.index. '{base}.increment-2' names the newest state that can be "
        "restored."
    )
    check_same(contents(folder), wanted)
    consolidate.consolidate(folder, f"{folder}/whole/c")
    check_same(contents(f"{folder}/whole/c"), wanted)


def restore_and_save(strategy, optimizer, policy, prefix, target):
    """Restores a state in a session of its own, and saves it as a whole checkpoint."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, optimizer, policy)
        with tf.Session() as session:
            model.saver.restore(session, prefix)
            tf.train.Saver().save(session, target, write_meta_graph=False, write_state=False)
    return contents(target)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl", "momentum", "rmsprop", "sgd"])
def test_base_and_increments_restore_the_state(strategy, rank, folder, optimizer):
    whole = f"{folder}/whole"
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, optimizer)
        checkpoint.enable_increments(folder)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for seed in range(3):
                model.run(session, rank, seed)
            base = model.saver.save(session, f"{folder}/m", global_step=model.step)
            on_rank_0(lambda: os.mkdir(whole))
            for number in (1, 2):
                model.run(session, rank, 10 + number)
                model.dynamic.remove(session, KEYS[number::7])
                if number == 2:
                    model.run(session, rank, 20)
                    model.static.load(np.full([V, D], 0.25, np.float32), session)
                increment = checkpoint.save_increment(session, folder)
                assert increment == chain_names.increment_prefix(base, number)
                tf.train.Saver().save(session, f"{whole}/w-{number}", write_meta_graph=False)
            model.run(session, rank, 30)
    assert tf.train.latest_checkpoint(folder) == base
    # The latest checkpoint's name is for its newest state.
    for number, prefix in ((1, chain_names.increment_prefix(base, 1)), (2, base)):
        found = restore_and_save(strategy, optimizer, None, prefix, f"{whole}/r-{number}")
        wanted = contents(f"{whole}/w-{number}")
        check_same(found, wanted)
    on_rank_0(lambda: check_chain(folder, base, wanted))


POLICIES = {
    "evicted": {"capacity": 60, "steps_to_live": 6, "evict": collective.every_steps(2)},
    "admitted": {"filter_freq": 2},
    "bloom": {"filter_freq": 2, "max_element_size": 500, "false_positive_probability": 0.01},
    "in_file": {"storage": "dram_ssd", "storage_size": 1024, "steps_to_live": 5},
}


def policy_of(name, folder):
    options = dict(POLICIES[name])
    if "storage" in options:
        options["storage_path"] = f"{folder}/rows"
    return TablePolicy(**options)  # type: ignore[arg-type]


def state(model, session):
    """Returns this rank's part of the dynamic table in a session, by keys, and what it counts."""
    table, found = model.dynamic, {}
    store = table.store(session)
    columns = [store.values, *(slot.column(session) for slot in table.slots)]
    table.initialize_slot_rows(session, table.slots)
    for keys, local in store.ascending(1000):
        values = store.read(columns, keys, local)
        for i, key in enumerate(keys.tolist()):
            found[key] = b"".join(np.ascontiguousarray(v[i]).tobytes() for v in values)
    if table.admission is None:
        return found, None
    if table.admission.filter is not None:
        return found, store.keys.cells().tobytes()
    return found, dict(zip(*(x.tolist() for x in store.keys.counts())))


@pytest.mark.matrix
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", POLICIES)
def test_what_policies_keep(strategy, rank, folder, name):
    """Keys that are evicted between saves are gone, counts of keys without rows are kept."""
    states, policy = [], policy_of(name, folder)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, "adagrad", policy)
        checkpoint.enable_increments(folder)
        with tf.train.MonitoredTrainingSession("") as session:
            raw = session._tf_sess()
            for seed in range(4):
                model.run(session, rank, seed, 30)
            base = model.saver.save(raw, f"{folder}/m", global_step=model.step)
            for number in range(1, 4):
                for seed in range(3):
                    model.run(session, rank, 10 * number + seed, 12)
                checkpoint.save_increment(session, folder)
                states.append(state(model, raw))
            gone = sum(bundle_removed(chain_names.increment_prefix(base, n)) for n in (1, 2, 3))
            assert (gone > 0) == ("steps_to_live" in POLICIES[name] and name != "in_file")
    for number, wanted in enumerate(states, 1):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            model = Model(strategy, "adagrad", policy)
            with tf.Session() as session:
                model.saver.restore(session, chain_names.increment_prefix(base, number))
                found = state(model, session)
        assert found[0] == wanted[0]
        assert found[1] == wanted[1]


def bundle_removed(prefix):
    tables = tensor_bundle.Bundle(prefix).layout.tables
    return sum(tables["d"].removed)


def chain_of_three(strategy, rank, folder, then=None):
    """Saves a base and three increments; returns the base's prefix and the states of a row."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, "adagrad")
        checkpoint.enable_increments(folder)
        row, rows = tf.nn.embedding_lookup(model.static, [3]), []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            model.run(session, rank, 0)
            base = model.saver.save(session, f"{folder}/m", global_step=model.step)
            rows.append(session.run(row))
            for number in range(3):
                session.run(model.train, {model.ids: [3], model.keys: [number]})
                checkpoint.save_increment(session, folder)
                rows.append(session.run(row))
            if then is not None:
                then(model, session, base)
    return base, rows


def restored_row(strategy, prefix):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, "adagrad")
        row = tf.nn.embedding_lookup(model.static, [3])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(row)
            try:
                model.saver.restore(session, prefix)
            except BaseException:
                np.testing.assert_array_equal(session.run(row), before)
                raise
            return session.run(row)


def files_of(prefix):
    return glob.glob(glob.escape(prefix) + ".index") + glob.glob(glob.escape(prefix) + ".data-*")


def damage(kind, base):
    """Damages increment 2 of three."""
    second = chain_names.increment_prefix(base, 2)
    if kind == "missing":
        for path in files_of(second):
            os.remove(path)
    elif kind == "index":
        with open(f"{second}.index", "r+b") as file:
            file.truncate(20)
    elif kind == "cut":
        with open(max(files_of(second), key=os.path.getsize), "r+b") as file:
            file.truncate(3)
    elif kind == "flipped":
        path = max((p for p in files_of(second) if ".data-" in p), key=os.path.getsize)
        content = bytearray(open(path, "rb").read())
        content[len(content) // 2] ^= 1
        with open(path, "wb") as file:
            file.write(content)
    elif kind == "swapped":
        third = chain_names.increment_prefix(base, 3)
        for path in files_of(second):
            os.remove(path)
        for path in files_of(third):
            shutil.copy(path, second + path[len(third) :])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["missing", "index", "cut", "flipped", "swapped"])
def test_a_broken_chain_is_refused_by_name(strategy, rank, folder, kind):
    base, rows = chain_of_three(strategy, rank, folder)
    second = chain_names.increment_prefix(base, 2)
    on_rank_0(lambda: damage(kind, base))
    for prefix in (base, chain_names.increment_prefix(base, 3), second):
        with pytest.raises(Exception, match="increment-1' names the newest state") as raised:
            restored_row(strategy, prefix)
        assert "increment 2" in str(raised.value) or second in str(raised.value)
    first = chain_names.increment_prefix(base, 1)
    np.testing.assert_array_equal(restored_row(strategy, first), rows[1])
    none = chain_names.increment_prefix(base, 0)
    np.testing.assert_array_equal(restored_row(strategy, none), rows[0])
    with pytest.raises(Exception, match="increment-1' names the newest state") as raised:
        consolidate.verify(folder)
    assert "\n" not in raised.value.message  # TensorFlow's stacks say nothing of a file.


@pytest.mark.matrix
def test_an_increment_of_another_base_is_refused(strategy, rank, folder):
    """It lies next to a checkpoint that was copied over its base."""
    if rank == 0:
        os.mkdir(f"{folder}/a")
        os.mkdir(f"{folder}/b")
    wait()
    base, _ = chain_of_three(strategy, rank, f"{folder}/a")
    other, rows = chain_of_three(strategy, rank, f"{folder}/b")
    if rank == 0:
        for path in files_of(base):
            os.remove(path)
        for path in files_of(other):
            shutil.copy(path, base + path[len(other) :])
    wait()
    with pytest.raises(Exception, match=r"increment of another checkpoint.*increment-0' names"):
        restored_row(strategy, base)
    none = chain_names.increment_prefix(base, 0)
    np.testing.assert_array_equal(restored_row(strategy, none), rows[0])


@pytest.mark.slow
def test_a_checkpoint_takes_its_increments_with_it(strategy, rank, folder):
    """max_to_keep counts chains; a checkpoint of the same name begins a new one."""

    def save_more(model, session, first):
        for _ in range(2):
            model.run(session, rank, 1)
            prefixes.append(model.saver.save(session, f"{folder}/m", global_step=model.step))
            checkpoint.save_increment(session, folder)
        wait()
        names = set(os.listdir(folder))
        assert not [name for name in names if name.startswith(f"{os.path.basename(first)}.")]
        for prefix in prefixes:
            assert chain_names.increments_of(prefix)
        wait()
        # Saved over itself, as a session's first save may be.
        model.saver.save(session, f"{folder}/m", global_step=model.step)
        assert chain_names.increments_of(prefixes[-1]) == []
        assert chain_names.increments_of(prefixes[0])
        wait()
        checkpoint.save_increment(session, folder)
        assert len(chain_names.increments_of(prefixes[-1])) == 1

    prefixes = []
    chain_of_three(strategy, rank, folder, save_more)


def test_what_can_not_be_followed_says_so(strategy, rank, folder):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, "sgd")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(ValueError, match="enable_increments"):
                checkpoint.save_increment(session, folder)
            checkpoint.enable_increments(folder)
            with pytest.raises(ValueError, match="no whole checkpoint"):
                checkpoint.save_increment(session, folder)
            model.run(session, rank, 1)
