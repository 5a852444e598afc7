"""A save during training holds exactly the step at which it was asked for.

The truth is a blocking save of the same step. Each save's thread is held up until training has gone
on, so that rows change before, while and after they are read.
"""

import contextlib
import json
import os
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError, TablePolicy, checkpoint
from collective.checkpoint.files import commit, tensor_bundle
from collective.checkpoint.files.layout import LAYOUT_ENTRY
from collective.checkpoint.saving import background
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, normal

pytestmark = [pytest.mark.either_backend]

ROWS = 300
KEYS = np.arange(150, dtype=np.int64) * 2**35 - 7
ALL_OPTIMIZERS = {**OPTIMIZERS, **MORE_OPTIMIZERS}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(tensor_bundle, "SLICE_BYTES", 480)
    monkeypatch.setattr(tensor_bundle, "FILE_BYTES", 1400)


@pytest.fixture
def held(monkeypatch):
    """Holds up the threads of saves before each file until `go` is set; returns it."""
    go, flush = threading.Event(), tensor_bundle.BundleWriter._flush

    def held_flush(writer):
        if threading.current_thread().name.startswith("checkpoint "):
            assert go.wait(60), "the test never let the save go on"
        flush(writer)

    monkeypatch.setattr(tensor_bundle.BundleWriter, "_flush", held_flush)
    yield go
    go.set()


def static_model(strategy, optimizer):
    with strategy.embedding_scope():
        table = tf.get_variable("t", [ROWS, 3], initializer=normal())
        other = tf.get_variable("u", [7, 2], initializer=normal())
    return _train(table, other, optimizer)


def dynamic_model(strategy, optimizer, policy=None):
    with strategy.embedding_scope(policy=policy):
        table = collective.get_embedding_variable("t", 3, initializer=normal())
        other = tf.get_variable("u", [7, 2], initializer=normal())
    return _train(table, other, optimizer)


def _train(table, other, optimizer):
    ids, weight = tf.placeholder(tf.int64, [None]), tf.get_variable("w", [3], initializer=normal())
    loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, ids)) * weight)
    loss += tf.reduce_sum(tf.square(tf.nn.embedding_lookup(other, ids % 7)))
    step = tf.train.get_or_create_global_step()
    return table, ids, optimizer.minimize(loss, global_step=step)


def entries(prefix):
    """Returns all values of a checkpoint as bytes, with what describes them, but not its id."""
    opened = tensor_bundle.Bundle(prefix)
    found = {
        name: (str(dtype), shape, opened.read_whole(name).tobytes())
        for name, (dtype, shape) in opened.entries.items()
        if name != LAYOUT_ENTRY
    }
    layout = json.loads(opened.read_whole(LAYOUT_ENTRY).item())
    del layout["id"]
    return {**found, LAYOUT_ENTRY: layout}


def same(left, right):
    left, right = entries(left), entries(right)
    assert left.keys() == right.keys()
    different = [name for name in left if left[name] != right[name]]
    assert not different, different


@contextlib.contextmanager
def training(strategy, build, **options):
    """Gives (session, step, saver, model) of a model that was trained for two steps."""
    options = {"checkpoint_blocking": False, "checkpoint_buffer": 1 << 20, **options}
    with strategy.scope(**options), tf.Graph().as_default():
        tf.set_random_seed(3)
        model = build()
        saver, random = tf.train.Saver(), np.random.RandomState(strategy.rank())
        keys = np.arange(ROWS) if getattr(model[0], "rows", None) else KEYS

        def step(count=1, keys=keys):
            for _ in range(count):
                session.run(model[2], {model[1]: random.choice(keys, 20)})

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            step(2)
            yield session, step, saver, model


def both(strategy, session, saver, folder):
    """Saves the same step twice, first while training waits, then in the background."""
    with strategy.scope(checkpoint_blocking=True):
        saver.save(session, f"{folder}/blocking")
    assert saver.save(session, f"{folder}/background") == f"{folder}/background"
    assert not tf.io.gfile.exists(f"{folder}/background.index")


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", *sorted({*ALL_OPTIMIZERS} - {"adam"})])
def test_static_tables(strategy, rank, folder, held, optimizer):
    make = ALL_OPTIMIZERS[optimizer]
    with training(strategy, lambda: static_model(strategy, make())) as (session, step, saver, _):
        both(strategy, session, saver, folder)
        step(4)
        work = state_of_session(session).background_save
        assert work.room.peak > 0, "rows were copied before they changed"
        held.set()
        step(4)
        checkpoint.wait()
        same(f"{folder}/blocking", f"{folder}/background")
        assert saver.last_checkpoints[-1] == f"{folder}/background"
    assert sorted({name.partition(".")[0] for name in os.listdir(folder)}) == [
        *("background", "blocking", "checkpoint")
    ]


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "optimizer", ["adagrad", "adam", "ftrl", *sorted({*ALL_OPTIMIZERS} - {"adagrad"})]
)
@pytest.mark.parametrize("policy", [None, "counted", "last used"])
def test_dynamic_tables(strategy, rank, folder, held, optimizer, policy):
    """Keys come and go meanwhile: rows move, and other keys take their places."""
    make = ALL_OPTIMIZERS[optimizer]
    policy = {
        None: None,
        "counted": TablePolicy(filter_freq=2),
        "last used": TablePolicy(steps_to_live=50),
    }[policy]

    def build():
        return dynamic_model(strategy, make(), policy)

    with training(strategy, build) as (session, step, saver, (table, ids, _)):
        both(strategy, session, saver, folder)
        step(2)
        gone = table.remove(session, KEYS[::3])
        assert policy is not None or gone > 0
        step(2)
        step(2, KEYS + 1)
        held.set()
        table.remove(session, KEYS[1::3])
        step(2, KEYS + 2)
        checkpoint.wait()
        same(f"{folder}/blocking", f"{folder}/background")


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_the_buffer_bounds_what_is_copied(strategy, folder, held, optimizer):
    """All rows change, and there is room for few: training waits for the thread to go on."""

    def build():
        return static_model(strategy, ALL_OPTIMIZERS[optimizer]())

    with training(strategy, build, checkpoint_buffer=3000) as (session, _, saver, (_, ids, train)):
        both(strategy, session, saver, folder)
        room, most = state_of_session(session).background_save.room, 3000 // 2

        def let_go_when_full():
            deadline = time.monotonic() + 30
            while room.peak < most // 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            held.set()

        helper = threading.Thread(target=let_go_when_full)
        helper.start()
        for _ in range(2):
            session.run(train, {ids: np.arange(ROWS)})
        helper.join()
        checkpoint.wait()
        same(f"{folder}/blocking", f"{folder}/background")
        assert most // 2 <= room.peak <= most and room.waited > 0


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
def test_an_error_is_everyones_where_ranks_meet_next(
    strategy, rank, size, folder, monkeypatch, held
):
    """The disk is full on the last rank: nothing is left, and the next save works."""
    sync = commit.sync_bundles

    def full(prefixes):
        if rank == size - 1 and fails:
            raise OSError(28, "No space left on device")
        sync(prefixes)

    monkeypatch.setattr(commit, "sync_bundles", full)
    words = rf"rank {size - 1} on host .*No space left on device.*needs [\d,]+ bytes.*are free"

    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    held.set()
    with training(strategy, build) as (session, step, saver, _):
        fails = False
        saver.save(session, f"{folder}/m", global_step=1)
        checkpoint.wait()
        fails, before = True, sorted(os.listdir(folder))
        barrier.exchange(None, "looked", {})
        for where in (
            checkpoint.wait,
            lambda: saver.save(session, f"{folder}/m", global_step=3),
            lambda: saver.restore(session, f"{folder}/m-1"),
        ):
            saver.save(session, f"{folder}/m", global_step=2)
            step(2)
            with pytest.raises(checkpoint.CheckpointStorageError, match=words) as error:
                where()
            assert f"The latest checkpoint is '{folder}/m-1'" in str(error.value)
            assert sorted(os.listdir(folder)) == before
            step(1)
        fails = False
        saver.save(session, f"{folder}/m", global_step=4)
        checkpoint.wait()
        assert saver.last_checkpoints == [f"{folder}/m-1", f"{folder}/m-4"]
        fails = True
        saver.save(session, f"{folder}/m", global_step=5)
        with pytest.raises(checkpoint.CheckpointStorageError, match=words):
            session.close()


@pytest.mark.ranks(1, 3)
def test_a_mistake_is_no_failure_of_the_storage(strategy, rank, size, folder, monkeypatch):
    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    with training(strategy, build) as (session, step, saver, _):

        def wrong(prefixes):
            raise KeyError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(commit, "sync_bundles", wrong)
            saver.save(session, f"{folder}/m")
            with pytest.raises(RuntimeError, match="was not written: rank 0 .*a bug"):
                checkpoint.wait()
        assert [name for name in os.listdir(folder) if not name.endswith(".owner")] == []
        step(1)


def test_a_thread_that_ends_by_a_mistake_is_not_awaited(strategy, folder, monkeypatch):
    from collective.checkpoint.saving import snapshot

    end = snapshot.PartSnapshot.end

    def wrong(part):
        end(part)
        raise KeyError("a bug")

    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    with training(strategy, build) as (session, step, saver, _):
        with monkeypatch.context() as patch:
            patch.setattr(snapshot.PartSnapshot, "end", wrong)
            saver.save(session, f"{folder}/m")
            with pytest.raises(RuntimeError, match="was not written: rank 0 .*a bug"):
                checkpoint.wait()
        step(1)
        saver.save(session, f"{folder}/m")
        checkpoint.wait()
    assert not any("_temp_" in name for name in os.listdir(folder))


@pytest.mark.ranks(1, 3)
def test_slow_storage_is_given_up_and_training_goes_on(strategy, folder, monkeypatch, held):
    """Training needs room for rows that the thread, which stands still, never reads."""
    from collective.checkpoint.saving import snapshot

    monkeypatch.setattr(snapshot, "PATIENCE", 0.2)

    def build():
        return static_model(strategy, tf.train.AdamOptimizer(0.1))

    with training(strategy, build, checkpoint_buffer=3000) as (session, step, saver, _):
        saver.save(session, f"{folder}/m")
        step(2)
        held.set()
        with pytest.raises(
            checkpoint.CheckpointStorageError, match="nothing was written meanwhile"
        ):
            checkpoint.wait()
        step(1)
        saver.save(session, f"{folder}/m")
        checkpoint.wait()
        assert checkpoint.wait() is None


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_finish_is_named(strategy, rank, size, folder, monkeypatch, held):
    if size == 1:
        pytest.skip("one rank")
    patience = background.MOST_SECONDS
    monkeypatch.setattr(background, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(background, "MOST_TIMES", 0)
    if rank == 0:
        held.set()

    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    with training(strategy, build) as (session, step, saver, _):
        saver.save(session, f"{folder}/m")
        if rank == 0:
            state_of_session(session).background_save._thread.join()
        barrier.exchange(session, "rank 0 has given it up", {})
        held.set()
        with pytest.raises(
            checkpoint.CheckpointStorageError, match="rank 1 did not finish its part"
        ):
            checkpoint.wait()
        step(1)
        monkeypatch.setattr(background, "MOST_SECONDS", patience)
        saver.save(session, f"{folder}/m")


@pytest.mark.ranks(1, 3)
def test_the_end_of_a_session_waits(strategy, folder):
    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    with training(strategy, build) as (session, step, saver, _):
        saver.save(session, f"{folder}/m")
        step(1)
    assert tf.train.latest_checkpoint(folder) == f"{folder}/m"
    assert not background._running


@pytest.mark.ranks(3)
def test_a_session_that_is_left_with_an_error_waits(strategy, rank, folder, held):
    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    held.set()
    with pytest.raises(KeyError, match="mine"):
        with training(strategy, build) as (session, step, saver, _):
            saver.save(session, f"{folder}/m")
            raise KeyError("mine")
    barrier.exchange(None, "all have left", {})
    assert tf.train.latest_checkpoint(folder) == f"{folder}/m"


@pytest.mark.ranks(3)
def test_ranks_that_save_in_different_ways(strategy, rank, size, folder):
    if size == 1:
        pytest.skip("one rank")

    def build():
        return static_model(strategy, tf.train.AdagradOptimizer(0.1))

    with training(strategy, build, checkpoint_blocking=rank > 0) as (session, step, saver, _):
        with pytest.raises(RankError, match="saving a checkpoint during training"):
            saver.save(session, f"{folder}/m")


@pytest.mark.ranks(1, 3)
def test_a_monitored_session_saves_during_training(strategy, folder):
    """Its last checkpoint is there when it is closed; the ones before follow each other."""
    with strategy.scope(checkpoint_blocking=False), tf.Graph().as_default():
        _, ids, train = static_model(strategy, tf.train.AdagradOptimizer(0.1))
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder,
            save_checkpoint_steps=2,
            save_summaries_steps=0,
            log_step_count_steps=0,
        ) as session:
            for _ in range(5):
                session.run(train, {ids: [1, 2, 3]})
    state = tf.train.get_checkpoint_state(folder)
    steps = [path.rpartition("-")[2] for path in state.all_model_checkpoint_paths]
    assert steps[-1] == "5" and steps[0] == "0"
    for path in state.all_model_checkpoint_paths:
        step = tensor_bundle.Bundle(path).read_whole("global_step")
        assert int(step) == int(path.rpartition("-")[2])
