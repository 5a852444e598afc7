"""A checkpoint that doesn't fit, is damaged or fails on one rank is refused on all ranks alike."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.checkpoint import CheckpointStorageError
from collective.checkpoint.files import tensor_bundle as bundles
from collective.checkpoint.saving import ownership
from tests.ranks import reference
from tests.ranks.checkpoints import model, restored, saved, steps, wait

pytestmark = [
    pytest.mark.either_backend,
    pytest.mark.ranks(1, 3),
    pytest.mark.backends("hb"),
    pytest.mark.double,
]

MISFITS = {
    "shape": (
        {"rows": 8},
        tf.errors.InvalidArgumentError,
        r"'t' has the shape \[8, 3\] here, \[9, 3\] in the checkpoint",
    ),
    "dense": (
        {"dim": 4},
        tf.errors.InvalidArgumentError,
        r"'w' has the shape \[4, 1\] here, \[3, 1\] in the checkpoint",
    ),
    "name": ({"name": "other"}, tf.errors.NotFoundError, r"no table 'other' \(its tables: t\)"),
    "optimizer": (
        {"optimizer": lambda: tf.train.AdagradOptimizer(0.1)},
        tf.errors.NotFoundError,
        r"no 't/Adagrad', a slot of table 't'; it was written with Adam, Adam_1 "
        r".*missing_slots='fresh'",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(strategy, rank, folder, case):
    options, error, message = MISFITS[case]
    saved(strategy, rank, f"{folder}/m")
    options = {k: v() if callable(v) else v for k, v in options.items()}
    with pytest.raises(error, match=message):
        restored(strategy, f"{folder}/m", initialize=True, **options)
    rows, w = restored.after
    np.testing.assert_array_equal(
        rows, reference.table_values(options.get("rows", 9), options.get("dim", 3))
    )
    np.testing.assert_array_equal(w, reference.table_values(options.get("dim", 3), 1, 1))


def test_missing_slots_start_fresh_if_asked(strategy, rank, folder):
    want = saved(strategy, rank, f"{folder}/m", optimizer=tf.train.AdagradOptimizer(0.1))
    with strategy.scope(missing_slots="fresh"), tf.Graph().as_default():
        m = model(strategy)
        with tf.Session() as session:
            tf.train.Saver().restore(session, f"{folder}/m")
            assert session.run(tf.report_uninitialized_variables()).size == 0
            np.testing.assert_array_equal(session.run(m["rows"]), want)
            powers = [v for v in tf.global_variables() if "beta" in v.name]
            np.testing.assert_allclose(session.run(powers), [0.9, 0.999])
            steps(session, m, rank, 1)
    with pytest.raises(ValueError, match="'error' or 'fresh', not 'some'"):
        strategy.scope(missing_slots="some")


def damage(folder, how, size):
    data = sorted(n for n in os.listdir(folder) if ".data-" in n)[0]
    path = f"{folder}/{data}"
    if how == "missing":
        os.remove(path)
    elif how == "short":
        os.truncate(path, os.path.getsize(path) - 1)
    else:
        with open(path, "r+b") as file:  # the first bytes of the first file: rank 0's rows
            file.write(b"\xff\xff")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "how, spare", [("missing", 1 << 30), ("short", 0), ("flipped", 1 << 30), ("flipped", 0)]
)
def test_damage_is_an_error_on_every_rank(strategy, rank, size, folder, how, spare, monkeypatch):
    """Also on ranks that don't read the damaged part; the old values stay, also where there is no
    room for both.
    """
    from collective.checkpoint.rows import table_io

    monkeypatch.setattr(table_io, "SPARE_BYTES", spare)
    saved(strategy, rank, f"{folder}/m")
    wait()
    if rank == 0:
        damage(folder, how, size)
    wait()
    with pytest.raises((tf.errors.DataLossError, RankError)) as error:
        restored(strategy, f"{folder}/m", initialize=True)
    assert f"{folder}/m" in str(error.value)
    np.testing.assert_array_equal(restored.after[0], reference.table_values(9, 3))


def test_ranks_that_name_different_checkpoints(strategy, rank, size, folder):
    if size == 1:
        pytest.skip("one rank")
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(ValueError, match="rank 0 names '.*/m', rank 1 '.*/other'"):
                saver.save(session, f"{folder}/{'m' if rank != 1 else 'other'}")
            saver.save(session, f"{folder}/m")
            with pytest.raises(ValueError, match="rank 0 names '.*/m', rank 1 '.*/other'"):
                saver.restore(session, f"{folder}/{'m' if rank != 1 else 'other'}")
            with pytest.raises(RankError):
                saver.save(session, f"{folder}/m") if rank != 1 else steps(session, m, rank, 1)


def test_ranks_that_name_folders_of_their_own_use_rank_0s(strategy, rank, size, folder, recwarn):
    """A script has made a folder on every rank, by `tempfile`."""
    own = f"{folder}/of_rank_{rank}"
    os.makedirs(own)
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(m["rows"])
            assert saver.save(session, f"{own}/m") == f"{folder}/of_rank_0/m"
            steps(session, m, rank, 1)
            assert np.any(session.run(m["rows"]) != before)
            saver.restore(session, f"{own}/m")
            np.testing.assert_array_equal(session.run(m["rows"]), before)
    assert rank == 0 or os.listdir(own) == []
    warned = [w for w in recwarn if "use rank 0's folder" in str(w.message)]
    assert len(warned) == (2 if rank == 0 and size > 1 else 0)


def test_a_failure_of_one_rank_is_everyones(strategy, rank, size, folder, monkeypatch):
    """A full disk on the last rank: the checkpoint before stays the latest, and nothing is left of
    this one.
    """
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, f"{folder}/m", global_step=0)
            wait()
            before = sorted(os.listdir(folder))
            with monkeypatch.context() as patch:
                if rank == size - 1:

                    def full(*_):
                        raise OSError(28, "No space left on device")

                    patch.setattr(bundles.BundleWriter, "close", full)
                with pytest.raises(CheckpointStorageError, match="No space left on device"):
                    saver.save(session, f"{folder}/m", global_step=1)
            wait()
            assert sorted(os.listdir(folder)) == before and saver.last_checkpoints == [
                f"{folder}/m-0"
            ]
            with pytest.raises((ValueError, RankError), match="doesn't exist, can't save"):
                saver.save(session, f"{folder}/no/such/folder/m")
            steps(session, m, rank, 1)
            assert saver.save(session, f"{folder}/m", global_step=1) == f"{folder}/m-1"


@pytest.mark.slow
def test_a_name_that_another_job_owns_is_left_alone(strategy, rank, size, folder, monkeypatch):
    """Every rank is told, nothing is written, and saving elsewhere goes on."""
    monkeypatch.setattr(ownership, "_PATIENCE", 0.1)
    saved(strategy, rank, f"{folder}/model.ckpt")
    other = ownership.OwnerMarks()
    if rank == 0:
        other.hold(SimpleNamespace(), f"{folder}/model.ckpt")
    wait()
    before = {name: os.path.getsize(f"{folder}/{name}") for name in os.listdir(folder)}
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            saver.restore(session, f"{folder}/model.ckpt")
            with pytest.raises(
                RankError if rank else ownership.OwnedError, match="another job saves its check.*"
            ):
                saver.save(session, f"{folder}/model.ckpt", global_step=7)
            steps(session, m, rank, 1)
            os.makedirs(f"{folder}/elsewhere", exist_ok=True)
            saver.save(session, f"{folder}/elsewhere/model.ckpt")
        wait()
        with pytest.raises(RankError if rank else ownership.OwnedError, match="process .* on host"):
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                pass
    wait()
    assert {n: os.path.getsize(f"{folder}/{n}") for n in before} == before
    others = {name for name in os.listdir(folder) if name not in before}
    assert all("tfevents" in name for name in others - {"elsewhere"}), "no graph, no checkpoint"
    wait()  # all have looked
    other.release_all()
    saved(strategy, rank, f"{folder}/model.ckpt")
