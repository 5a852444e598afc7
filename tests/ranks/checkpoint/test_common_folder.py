"""A script that gives a folder to rank 0 alone, as Horovod's do, or one to each rank."""

import os
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective import estimator as tf_estimator
from tests.ranks import estimators
from tests.ranks.checkpoints import model, steps, wait

pytestmark = pytest.mark.either_backend


def caught(function, *args):
    """Returns what `function` returns, and the warnings of folders on this rank."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = function(*args)
    return out, [w for w in found if "use rank 0's folder" in str(w.message)]


def trained(strategy, rank, checkpoint_dir, until, positional=False):
    """Trains until step `until`; returns the step at which it began, and the table's rows."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        m = model(strategy)
        given = ["", rank == 0, checkpoint_dir] if positional else []
        named = {} if positional else {"checkpoint_dir": checkpoint_dir}
        with tf.train.MonitoredTrainingSession(
            *given,
            **named,
            hooks=[tf.train.StopAtStepHook(last_step=until)],
            save_checkpoint_steps=3,
            save_checkpoint_secs=None,
            log_step_count_steps=None,
        ) as session:
            raw = session.run_step_fn(lambda step_context: step_context.session)
            began = raw.run(m["step"])
            while not session.should_stop():
                steps(session, m, rank, 1)
                rows = raw.run(m["rows"])
    return began, rows


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("others", ["none", "empty", "their own", "positional"])
def test_rank_0s_folder_is_everyones(strategy, rank, size, folder, others):
    """It saves there and goes on from there, and one rank says so."""
    of_rank_0 = f"{folder}/saved"
    mine = {"none": None, "empty": "", "their own": f"{folder}/{rank}", "positional": None}[others]
    given = of_rank_0 if rank == 0 else mine
    began = 0
    for until in (4, 7):
        (start, rows), found = caught(trained, strategy, rank, given, until, others == "positional")
        assert start == began
        began = until
        assert len(found) == (rank == 0 and size > 1)
        if found:
            assert f"checkpoint_dir is '{of_rank_0}' on rank 0 and" in str(found[0].message)
            assert found[0].filename == __file__
        wait()
        assert tf.train.latest_checkpoint(of_rank_0).endswith(f"-{until}")
    assert sorted(os.listdir(folder)) == ["saved"]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        m = model(strategy)
        with tf.Session() as session:
            tf.train.Saver().restore(session, f"{of_rank_0}/model.ckpt-7")
            np.testing.assert_array_equal(session.run(m["rows"]), rows)


@pytest.mark.slow
def test_an_evaluation_takes_rank_0s_checkpoint(strategy, rank, size, folder):
    """Also where a script names its folder by the time, which is another second on each rank."""
    mine = f"{folder}/{rank}"
    (_, want), _ = caught(trained, strategy, rank, mine, 4)

    def evaluated():
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            m = model(strategy)
            creator = tf.train.ChiefSessionCreator(checkpoint_dir=mine)
            with tf.train.MonitoredSession(creator) as session:
                return session.run(m["rows"])

    rows, found = caught(evaluated)
    np.testing.assert_array_equal(rows, want)
    assert len(found) == (rank == 0 and size > 1)
    wait()
    assert os.listdir(folder) == ["0"]


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(strategy, rank, size, folder):
    """Not on rank 0 alone, which would leave the others in the middle of a meeting."""
    os.makedirs(folder, exist_ok=True)
    name = f"{folder}/file"
    if rank == 0:
        open(name, "w").close()
    wait()
    kind = tf.errors.FailedPreconditionError if rank == 0 or size == 1 else RankError
    with pytest.raises(kind, match=r"(?s)/file is not a directory"):
        trained(strategy, rank, name, 2)


@pytest.mark.slow
def test_one_folder_for_all_is_no_matter(strategy, rank, folder):
    assert not caught(trained, strategy, rank, f"{folder}/saved", 2)[1]
    assert not caught(trained, strategy, rank, None, 2)[1]


def test_a_folder_of_another_rank_alone_is_refused(strategy, rank, size, folder):
    if size == 1:
        return
    with pytest.raises(
        RankError,
        match="checkpoint_dir is None on rank 0 and '.*' on rank 1.*name it on every rank",
    ):
        trained(strategy, rank, f"{folder}/saved" if rank else None, 2)
    wait()
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_a_checkpoint_in_another_ranks_folder_alone_is_not_passed_over(
    strategy, rank, size, folder
):
    """Training would start again without a word."""
    if size == 1:
        return
    trained(strategy, rank, f"{folder}/1", 2)
    with pytest.raises(RankError, match="no checkpoint, and that of rank 1, '.*/1', has one"):
        trained(strategy, rank, f"{folder}/{rank}", 4)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["argument", "config"])
def test_an_estimators_model_dir(strategy, rank, size, folder, where):
    """By rank 0 alone, as an argument or in the RunConfig."""
    given = f"{folder}/model" if rank == 0 else None

    def make():
        if where == "argument":
            return estimators.made(strategy, given)
        return estimators.made(strategy, None, config=tf_estimator.RunConfig(model_dir=given))

    estimator, found = caught(make)
    assert estimator.model_dir == estimator.config.model_dir == f"{folder}/model"
    assert len(found) == (rank == 0 and size > 1)
    if found:
        assert found[0].filename == estimators.__file__
    estimator.train(estimators.records(20), steps=2)
    assert estimator.latest_checkpoint().startswith(f"{folder}/model/")
    assert estimator.evaluate(estimators.records(9))["loss"] > 0
    wait()
    assert os.listdir(folder) == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["argument", "config"])
def test_a_canned_estimators_model_dir(strategy, rank, size, folder, where):
    """Of TensorFlow's ready-made ones, given by rank 0 alone: it goes where its config goes."""
    given = f"{folder}/model" if rank == 0 else None
    config = tf_estimator.RunConfig(model_dir=given if where == "config" else None)
    ready = tf_estimator.LinearRegressor(
        [tf.feature_column.numeric_column("number")],
        model_dir=given if where == "argument" else None,
        config=config,
        optimizer=lambda: tf.train.GradientDescentOptimizer(1e-4),
        loss_reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE,
    )
    estimator, found = caught(
        lambda: strategy.estimator(ready.model_fn, ready.model_dir, ready.config)
    )
    assert estimator.model_dir == f"{folder}/model" and len(found) == (rank == 0 and size > 1)
    estimator.train(estimators.records(20), steps=2)
    wait()
    assert os.listdir(folder) == ["model"]
