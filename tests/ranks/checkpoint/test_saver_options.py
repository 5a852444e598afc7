"""A Saver and an Estimator have options of saving of their own; scope()'s are the default."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint.files import commit
from collective.coordination.session_state import state_of_session
from collective.scope import SCOPES
from tests.ranks.checkpoints import model, steps
from tests.ranks.estimators import BATCH, records
from tests.ranks.estimators import model as model_fn

pytestmark = [pytest.mark.either_backend]


def test_a_saver_saves_during_training_where_the_scope_blocks(strategy, rank, folder):
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = checkpoint.Saver(checkpoint_blocking=False, checkpoint_buffer=1 << 20)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            steps(session, m, rank, 2)
            before = session.run(m["rows"])
            saver.save(session, f"{folder}/m")
            background = state_of_session(session).background_save
            steps(session, m, rank, 3)
            checkpoint.wait()
            assert background is not None
            assert background._part._followed, "rows were written at once"
            tf.train.Saver().save(session, f"{folder}/other")
            assert state_of_session(session).background_save is None
            saver.restore(session, f"{folder}/m")
            np.testing.assert_array_equal(session.run(m["rows"]), before)


def test_a_savers_hooks_stop_where_it_says_so(strategy, rank, size, folder, monkeypatch):
    fails, sync = [False], commit.sync_bundles

    def full(prefixes):
        if fails[0] and rank == size - 1:
            raise OSError(28, "No space left on device")
        sync(prefixes)

    monkeypatch.setattr(commit, "sync_bundles", full)
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        scaffold = tf.train.Scaffold(saver=checkpoint.Saver(checkpoint_on_error="stop"))
        options = {"save_checkpoint_steps": 2, "save_summaries_steps": 0, "log_step_count_steps": 0}
        with (
            pytest.raises(checkpoint.CheckpointStorageError, match="ckpt-2' was not written"),
            tf.train.MonitoredTrainingSession(
                checkpoint_dir=folder, scaffold=scaffold, **options
            ) as session,
        ):
            fails[0] = True
            steps(session, m, rank, 2)
            raise AssertionError("training went on")


@pytest.mark.slow
def test_an_estimator_has_options_of_its_own(strategy, size, folder):
    seen = []

    class Look(tf.train.SessionRunHook):
        def begin(self):
            seen.append(SCOPES.options)

    estimator = strategy.estimator(
        model_fn(strategy.embedding_scope),
        folder,
        params={},
        checkpoint_blocking=False,
        checkpoint_buffer=1 << 20,
        checkpoint_on_error="stop",
        save_code=True,
    )
    estimator.train(records(2 * BATCH * size), steps=2, hooks=[Look()])
    (found,) = seen
    assert (found.checkpoint_blocking, found.checkpoint_buffer) == (False, 1 << 20)
    assert (found.checkpoint_on_error, found.save_code) == ("stop", True)
    assert tf.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-2"
    with pytest.raises(ValueError, match="checkpoint_buffer"):
        strategy.estimator(model_fn(strategy.embedding_scope), folder, checkpoint_buffer=0)


@pytest.mark.slow
def test_the_best_is_kept_in_after_save_during_training(strategy, rank, folder):
    """A listener looks at the checkpoint, so this save is there when it is called."""

    class Keep(tf.train.CheckpointSaverListener):
        def after_save(self, session, step):
            checkpoint.keep_best(folder, {"auc": {0: 1, 2: 5, 4: 3}[step]}, ("auc", "max"))

    with strategy.scope(checkpoint_blocking=False), tf.Graph().as_default():
        m = model(strategy)
        hook = tf.train.CheckpointSaverHook(
            folder, save_steps=2, listeners=[Keep()], saver=tf.train.Saver(max_to_keep=1)
        )
        with tf.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=0) as session:
            steps(session, m, rank, 2)
            kept = session.run_step_fn(lambda step_context: step_context.session.run(m["rows"]))
            steps(session, m, rank, 2)
        best = tf.train.latest_checkpoint(f"{folder}/best")
        assert best == f"{folder}/best/model.ckpt-2"
        np.testing.assert_array_equal(np.asarray(checkpoint.load(best)["t"]), kept)


def test_a_wrong_option_is_named():
    with tf.Graph().as_default():
        tf.get_variable("v", [])
        with pytest.raises(ValueError, match="checkpoint_buffer"):
            checkpoint.Saver(checkpoint_buffer=0)
