"""scope() and embedding_scope() nest, take options and leave TensorFlow as it was."""

import warnings

import horovod.tensorflow as hvd
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from horovod.tensorflow import functions as hvd_functions
from horovod.tensorflow import mpi_ops
from tensorflow.python.client import session as session_lib
from tensorflow.python.ops import clip_ops, gradients_util, variable_scope
from tensorflow.python.summary.writer import writer
from tensorflow.python.training import (
    basic_session_run_hooks,
    monitored_session,
    optimizer,
    saver,
    session_manager,
)

from collective import CollectiveStrategy, Table
from collective.tensorflow_internals import keras

pytestmark = pytest.mark.either_backend

OWNERS = [
    session_lib.BaseSession,
    session_lib.Session,
    variable_scope.VariableScope,
    optimizer.Optimizer,
    gradients_util,
    clip_ops,
    tf,
    tf.linalg,
    tf2.linalg,
    writer,
    saver.Saver,
    basic_session_run_hooks.CheckpointSaverHook,
    monitored_session,
    session_manager.SessionManager,
    tf.train,
    hvd,
    hvd._DistributedOptimizer,
    hvd_functions,
    mpi_ops.MPI_LIB,
    keras.Embedding,
    keras.OptimizerV2,
]


def everything():
    return [dict(vars(owner)) for owner in OWNERS], list(tf.get_logger().filters)


def test_leaving_restores_everything(strategy):
    # the lazily loaded parts of the API are there from the start
    assert tf.nn and tf.train.Saver and tf.logging
    with strategy.scope():
        pass
    before = everything()
    with strategy.scope():
        assert everything() != before
        with strategy.scope():
            pass
        assert everything() != before
    assert everything() == before
    with pytest.raises(ZeroDivisionError):
        with strategy.scope(), strategy.embedding_scope():
            raise ZeroDivisionError
    assert everything() == before
    with tf.Graph().as_default():
        assert not isinstance(tf.get_variable("t", [3, 3]), Table)


def test_scopes_can_be_entered_again(strategy):
    scope, embedding = strategy.scope(), strategy.embedding_scope()
    for i in range(2):
        with scope as entered, scope, tf.Graph().as_default():
            assert entered is strategy
            with embedding, embedding:
                assert isinstance(tf.get_variable(f"t{i}", [3, 3]), Table)
            assert not isinstance(tf.get_variable(f"u{i}", [3, 3]), Table)


def test_two_strategies_are_one(strategy, rank, size):
    """Opened inside each other by parts of a program that know nothing of each other: gradients are
    still reduced once.
    """
    with strategy.scope(), CollectiveStrategy().scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 1], initializer=tf.zeros_initializer())
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, [1])) + w * (rank + 1.0)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        row = tf.nn.embedding_lookup(t, [1])
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train)
            assert session.run([row, w]) == [[[-1.0]], -(size + 1) / 2]


def test_embedding_scope_needs_scope(strategy):
    with pytest.raises(RuntimeError, match=r"inside scope\(\)"):
        with strategy.embedding_scope():
            pass
    # an error on the way in leaves nothing
    with strategy.scope(), tf.Graph().as_default():
        assert not isinstance(tf.get_variable("t", [3, 3]), Table)


def test_options(strategy):
    with pytest.raises(TypeError, match="no option colour.*embedding_gradients"):
        strategy.scope(colour="red")
    with pytest.raises(TypeError, match="no option rows"):
        strategy.embedding_scope(rows=3)
    with pytest.raises(ValueError, match="'mean' or 'sum', not 'max'"):
        strategy.scope(embedding_gradients="max")
    with pytest.warns(
        UserWarning, match="emb_num_groups, use_hierarchical_embedding_lookup tune another library"
    ):
        strategy.scope(emb_num_groups=2, use_hierarchical_embedding_lookup=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.scope(embedding_gradients="sum")
        strategy.embedding_scope()


def test_the_counts(strategy, rank, size):
    assert 0 <= strategy.local_rank() <= strategy.rank() == rank < strategy.world_size() == size


def test_a_session_grows_into_the_gpu_and_keeps_the_users_settings(strategy):
    with strategy.scope(), tf.Graph().as_default():
        assert tf.Session()._config.gpu_options.allow_growth
        mine = tf.ConfigProto(log_device_placement=False, operation_timeout_in_ms=77)
        config = tf.Session(config=mine)._config
        assert config.operation_timeout_in_ms == 77 and config.gpu_options.allow_growth
    assert not mine.gpu_options.allow_growth


def test_a_session_keeps_what_tf_config_says(strategy):
    """TensorFlow gives it to a session that is opened without a ConfigProto."""
    tf2.config.optimizer.set_experimental_options({"min_graph_nodes": -1})
    placement = tf2.config.get_soft_device_placement()
    tf2.config.set_soft_device_placement(not placement)
    try:
        with tf.Graph().as_default():
            outside = tf.Session()._config
            with strategy.scope():
                config = tf.Session()._config
    finally:
        tf2.config.optimizer.set_experimental_options({"min_graph_nodes": 0})
        tf2.config.set_soft_device_placement(placement)
    assert config.graph_options.rewrite_options.min_graph_nodes == -1
    assert config.allow_soft_placement is not placement and config.gpu_options.allow_growth
    outside.ClearField("gpu_options")
    config.ClearField("gpu_options")
    assert config == outside
