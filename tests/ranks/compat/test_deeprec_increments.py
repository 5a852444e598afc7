"""DeepRec's incremental saver leads to increments of the library's own."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.compat.names.deeprec import DEEPREC

pytestmark = pytest.mark.either_backend
MAKE = next(n for n in DEEPREC.names if n.theirs.endswith("_get_incremental_saver")).resolve()


@pytest.mark.ranks(1, 3)
def test_increments_of_a_saver(strategy, folder):
    """The state when an increment was saved is restored, not that of the whole checkpoint."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", 2, initializer=tf.ones_initializer())
        keys = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table, keys)
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(rows))
        saver = tf.train.Saver()
        increments = MAKE(True, saver)
        assert MAKE(False, saver) is None
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {keys: [1, 2]})
            with pytest.raises(ValueError, match="saved no whole checkpoint.*call its save"):
                increments.incremental_save(session, f"{folder}/other/incr.ckpt")
            saver.save(session, f"{folder}/model.ckpt", global_step=1)
            session.run(train, {keys: [2, 3]})
            path = increments.incremental_save(session, f"{folder}/other/incr.ckpt", 2)
            assert path.startswith(f"{folder}/model.ckpt-1.increment-")
            session.run(train, {keys: [1, 2, 3]})
            increments.recover_incr_checkpoints(session, folder)
            increments.incremental_restore(session, f"{folder}/model.ckpt-1", path)
            found = session.run(rows, {keys: [1, 2, 3]})
    np.testing.assert_allclose(found, [[0.5] * 2, [0] * 2, [0.5] * 2], atol=1e-6)
