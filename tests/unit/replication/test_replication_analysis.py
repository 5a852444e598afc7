"""Which values of a graph are the same on all ranks, and which are one rank's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.replication.analysis import ReplicationAnalysis, is_fed, replicated_variables


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def is_rank_local(*values: tf.Tensor, **known: set[tf.Operation]) -> bool:
    sets = {"synced": set(), "drifting": set(), "averaged": set(), **known}
    return ReplicationAnalysis(tf.get_default_graph(), **sets).is_rank_local(values)


def is_per_sample(value: tf.Tensor) -> bool:
    analysis = ReplicationAnalysis(tf.get_default_graph(), set(), set(), set())
    return analysis.is_per_sample([value])


def batch() -> tf.Tensor:
    return tf.placeholder(tf.float32, [None, 3])


def weights(name: str = "w", **options) -> tf.Variable:
    return tf.get_variable(name, [3], initializer=tf.ones_initializer(), **options)


def test_what_comes_of_a_batch_is_rank_local():
    assert is_rank_local(tf.reduce_mean(batch() * weights()))


def test_constants_and_weights_are_the_same_everywhere():
    assert not is_rank_local(2.0 * tf.identity(weights()), tf.constant(1.0))


def test_one_rank_local_value_of_several_is_enough():
    assert is_rank_local(tf.constant(1.0), batch())


def test_a_batch_comes_of_an_iterator_or_a_queue():
    data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(3))
    assert is_rank_local(data.get_next())
    assert is_rank_local(tf.queue.FIFOQueue(1, [tf.float32]).dequeue())


def test_a_placeholder_of_a_single_number_is_a_setting():
    assert not is_rank_local(tf.placeholder(tf.float32, []))
    assert not is_rank_local(tf.placeholder(tf.float32))


def test_random_numbers_are_the_same_with_a_seed_only():
    assert is_rank_local(tf.random.normal([2]))
    assert not is_rank_local(tf.random.normal([2], seed=3))


@pytest.mark.parametrize(
    "options",
    [
        {"collections": [tf.GraphKeys.LOCAL_VARIABLES]},
        {"synchronization": tf.VariableSynchronization.ON_READ},
    ],
)
def test_variables_that_a_script_keeps_for_itself_are_rank_local(graph: tf.Graph, options: dict):
    own, shared = weights("own", trainable=False, **options), weights("shared")
    assert is_rank_local(tf.identity(own)) and not is_rank_local(tf.identity(shared))
    assert replicated_variables(graph) == [shared]


def test_a_variable_that_drifted_is_rank_local_and_one_of_averages_is_not():
    drifted = weights("drifted")
    assert is_rank_local(tf.identity(drifted), drifting={drifted.handle.op})
    average = weights("average", collections=[tf.GraphKeys.LOCAL_VARIABLES])
    assert not is_rank_local(tf.identity(average), averaged={average.handle.op})


def test_results_of_collectives_are_the_same_everywhere(graph: tf.Graph):
    mean, noted = tf.identity(batch()), tf.identity(batch())
    assert not is_rank_local(2.0 * mean, synced={mean.op})
    collectives.note_replicated([noted])
    assert not is_rank_local(2.0 * noted)


def test_a_function_is_asked_what_it_captured():
    own, shared = batch(), tf.identity(weights())
    answers = {}

    @tf.function
    def compute(argument: tf.Tensor) -> tf.Tensor:
        analysis = ReplicationAnalysis(tf.get_default_graph().outer_graph, set(), set(), set())
        answers["captured batch"] = analysis.is_rank_local([2.0 * own])
        answers["captured weights"] = analysis.is_rank_local([2.0 * shared])
        answers["argument"] = analysis.is_rank_local([2.0 * argument])
        return argument

    compute(tf.constant([1.0, 2.0]))
    assert answers == {"captured batch": True, "captured weights": False, "argument": True}


def test_an_analysis_remembers_what_it_has_seen():
    shared = tf.identity(weights())
    analysis = ReplicationAnalysis(tf.get_default_graph(), set(), set(), set())
    assert not analysis.is_rank_local([shared])
    assert not analysis.is_rank_local([2.0 * shared])
    assert analysis.is_rank_local([shared * batch()])
    assert not analysis.is_rank_local([shared + 1.0])


@pytest.mark.parametrize("axis, per_sample", [(None, False), (0, False), (1, True)])
def test_a_reduction_over_the_batch_leaves_no_samples(axis: int | None, per_sample: bool):
    assert is_per_sample(tf.nn.relu(tf.reduce_mean(batch(), axis))[..., None]) == per_sample


def test_samples_survive_elementwise_operations_and_second_moments_do_not():
    x = batch()
    assert is_per_sample(tf.tanh(x))
    assert not is_per_sample(tf.matmul(x, x, transpose_a=True))
    assert is_per_sample(tf.matmul(x, tf.ones([3, 3])))


def test_what_a_script_feeds_may_change_its_form_only():
    x = batch()
    assert is_fed(x) and is_fed(tf.reshape(2.0 * tf.cast(x, tf.float64), [-1]))
    assert not is_fed(tf.reduce_mean(x))
    assert not is_fed(tf.constant([1.0, 2.0]))
    assert not is_fed(x * tf.reduce_max(x))
