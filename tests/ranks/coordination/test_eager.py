"""Eager code inside scope(): what would train a rank alone is refused, all else works as outside.

What Keras's optimizers train, with and without a `tf.function`, is in tests/ranks/keras.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Callable

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

pytestmark = pytest.mark.either_backend

FOR_GRAPHS = (
    r"is for graphs, but .* (eagerly|in a tf\.function that is called eagerly)\. Build the model "
    r"inside `with strategy\.scope\(\), tf\.Graph\(\)\.as_default\(\):`"
)
legacy = tf2.keras.optimizers.legacy


def squared(v: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(v))


def by_tape(tape: Any, sources: Callable[[Any], Any] = lambda v: [v]) -> Callable[[Any], Any]:
    """Returns a way to take gradients of a variable with a tape that `tape` makes."""

    def train(v: Any) -> Any:
        with tape() as recorded:
            loss = squared(v)
        return recorded.gradient(loss, sources(v))

    return train


def by_gradients(optimizer: Callable[[], Any]) -> Callable[[Any], Any]:
    """Returns a way to update a variable by a gradient that is given."""

    def train(v: Any) -> Any:
        with tf.init_scope():
            made = optimizer()
        return made.apply_gradients([(tf.ones([2]), v)])

    return train


def jacobian(v: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.square(v)
    return tape.jacobian(loss, v)


# Everything that would train a variable of this rank's own.
WAYS: dict[str, Callable[[Any], Any]] = {
    "minimize": lambda v: tf.train.AdamOptimizer(0.1).minimize(lambda: squared(v)),
    "minimize a tensor": lambda v: tf.train.AdamOptimizer(0.1).minimize(squared(v)),
    "apply": by_gradients(lambda: tf.train.AdagradOptimizer(0.1)),
    "horovod": lambda v: hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1)).minimize(
        lambda: squared(v)
    ),
    "adasum": lambda v: hvd.DistributedOptimizer(
        tf.train.GradientDescentOptimizer(0.1), op=hvd.Adasum
    ).minimize(lambda: squared(v)),
    "legacy updates": lambda v: legacy.Adam(0.1).get_updates(squared(v), [v]),
    "keras horovod": by_gradients(
        lambda: hvd_keras.DistributedOptimizer(tf2.keras.optimizers.Adam(0.1))
    ),
    "legacy horovod": lambda v: hvd_keras.DistributedOptimizer(legacy.SGD(0.1)).minimize(
        lambda: squared(v), [v]
    ),
    "horovod tape": by_tape(lambda: hvd.DistributedGradientTape(tf.GradientTape())),
    "jacobian": jacobian,
}
BY_KERAS: dict[str, Callable[[Any], Any]] = {
    "minimize": lambda v: tf2.keras.optimizers.SGD(0.25).minimize(lambda: squared(v), [v]),
    "legacy minimize": lambda v: legacy.SGD(0.25).minimize(lambda: squared(v), [v]),
    "tape": lambda v: v.assign_sub(0.25 * by_tape(tf.GradientTape)(v)[0]),
    "tape of its own": lambda v: v.assign_sub(0.25 * by_tape(tf.GradientTape, lambda v: v)(v)),
}


# Those that a tf.function can't do either.
NOT_IN_FUNCTIONS = ("minimize", "minimize a tensor", "apply", "horovod", "adasum", "jacobian")


@pytest.mark.sample(8)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_refused(strategy, way):
    """Before anything has changed, at once; some also in a function."""
    v = tf.Variable([1.0, 2.0])
    function = tf.function(WAYS[way], autograph=False)
    with strategy.scope():
        with pytest.raises(RuntimeError, match=FOR_GRAPHS):
            WAYS[way](v)
        if way in NOT_IN_FUNCTIONS:
            why = "gradients in a loop" if way == "jacobian" else FOR_GRAPHS
            with pytest.raises(RuntimeError, match=why):
                function(v)
        assert v.numpy().tolist() == [1.0, 2.0]
    if "adasum" not in way:
        BY_KERAS["legacy minimize"](v)
        assert v.numpy().tolist() != [1.0, 2.0]


@pytest.mark.slow
def test_what_trains_without_a_function(strategy, rank, size):
    """From rank 0's first values on, by the gradients of all ranks; on one rank by whatever."""
    for way in BY_KERAS.values():
        outside = tf.Variable([1.0 + rank, 2.0])
        with strategy.scope():
            v = tf.Variable([1.0 + rank, 2.0])
            if size > 1:
                with pytest.raises(ValueError, match=f"'{outside.name}' was made outside of"):
                    way(outside)
            way(v)
            np.testing.assert_allclose(v, [0.5, 1.0])
            with tf.GradientTape() as tape:
                loss = (rank + 1) * squared(v)
            np.testing.assert_allclose(tape.gradient(loss, v), np.multiply([1, 2], (size + 1) / 2))


def test_gradients_in_a_function_are_refused(strategy):
    v = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        v.assign_sub(tf.gradients(squared(v), [v])[0])

    with strategy.scope():
        with pytest.raises(RuntimeError, match=f"variable '{v.name[:-2]}' is taken in a tf.func"):
            step()
        assert v.numpy().tolist() == [1.0, 2.0]


def a_model(optimizer: Any = "sgd") -> Any:
    model = tf2.keras.Sequential([tf2.keras.layers.Dense(1, input_shape=(2,))])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [lambda: "sgd", lambda: legacy.SGD(0.1)], ids=["", "legacy"])
def test_a_keras_model_that_was_trained_outside_is_of_all_ranks_inside(
    strategy, rank, size, optimizer
):
    """A step that was traced outside of scope() has the gradients of one rank: it is traced again.

    Without a function it is refused, before anything has changed.
    """
    model = a_model(optimizer())
    x, y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
    model.fit(x, y, verbose=0)
    with strategy.scope():
        for _ in range(2):
            model.fit(x * (rank + 1), y, verbose=0)
        ours = model.get_weights()
        model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)
        for gathered in (hvd.allgather(weight[None]).numpy() for weight in ours):
            np.testing.assert_array_equal(gathered, np.repeat(gathered[:1], size, 0))


def test_tables_and_sessions_are_refused(strategy):
    with strategy.scope():
        with strategy.embedding_scope():
            with pytest.raises(RuntimeError, match="'t' is made inside a tf.function"):
                tf.function(lambda: tf.get_variable("t", [3, 3]))()
        with pytest.raises(RuntimeError, match=FOR_GRAPHS):
            tf.train.MonitoredTrainingSession("")


@pytest.mark.slow
def test_a_graph_trains_next_to_eager_code(strategy, rank, size):
    """Also in a function that the graph calls, and with an eager error just before."""
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
        with pytest.raises(RuntimeError, match=FOR_GRAPHS):
            WAYS["horovod tape"](v)
        with tf.Graph().as_default():
            w = tf.get_variable("w", initializer=[1.0, 2.0])
            loss = tf.function(lambda: squared(w) * (rank + 1.0))()
            train = tf.train.GradientDescentOptimizer(0.25).minimize(loss)
            with tf.train.MonitoredTrainingSession("") as session:
                session.run(train)
                mean = (size + 1) / 2
                np.testing.assert_allclose(session.run(w), [1 - 0.5 * mean, 2 - mean], rtol=1e-6)


# What needs nothing of the library: each returns something that NumPy compares.


def arithmetic() -> Any:
    x = tf.reshape(tf.range(6.0), [2, 3])
    ragged = tf2.ragged.constant([[1, 2], [3]])
    distinct, _ = tf.unique(tf.constant([3, 3, 1]))
    return [tf.matmul(x, x, transpose_b=True), tf.gather(x, [1]), ragged.to_tensor(), distinct]


def gradients_of_tensors() -> Any:
    x, w = tf.constant([1.0, 2.0]), tf.Variable([3.0, 4.0])
    table = tf.reshape(tf.range(6.0), [3, 2])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, table])
        y = tf.function(lambda x: tf.reduce_sum(x * x * w))(x)
        z = tf.reduce_sum(tf.gather(table, [1, 1, 0]) ** 2)
    slices = tape.gradient(z, table)
    assert isinstance(slices, tf.IndexedSlices)
    clipped, norm = tf.clip_by_global_norm([slices, tape.gradient(y, x)], 1.0)
    by_norm = [tf.clip_by_norm(slices, 1.0), tf.clip_by_value(slices, 0.0, 1.0)]
    other = tf.function(lambda x: tf.gradients(tf.reduce_sum(x**3), [x])[0])(x)
    with tf.GradientTape() as second:
        second.watch(x)
        cubes = x**3
    matrix = second.jacobian(cubes, x)
    return [tf.convert_to_tensor(clipped[0]), clipped[1], norm, other, matrix] + [
        tf.convert_to_tensor(x) for x in by_norm
    ]


def variables() -> Any:
    v, count = tf.Variable([1.0, 2.0]), tf.Variable(0)

    @tf.function
    def step(x):
        for _ in tf.range(3):
            v.assign_add(x)
            if tf.reduce_sum(v) > 4.0:
                count.assign_add(1)
        return v.read_value()

    average = tf.train.ExponentialMovingAverage(0.5)
    average.apply([v])
    got = step(tf.constant([0.5, 0.5]))
    average.apply([v])
    v.assign_sub([1.0, 1.0])
    v.scatter_update(tf.IndexedSlices([9.0], [1]))
    return [got, v, count, average.average(v), tf.get_variable("v", initializer=[1.0])]


def layers() -> Any:
    normalize = tf2.keras.layers.BatchNormalization()
    x = tf.reshape(tf.range(6.0), [2, 3])
    out = [normalize(x, training=True), tf.function(normalize)(x, training=True)]
    mean = tf2.keras.metrics.Mean()
    mean.update_state(x)
    auc = tf2.keras.metrics.AUC()
    tf.function(lambda: auc([1.0, 0.0], [0.7, 0.2]))()
    table = tf2.keras.layers.Embedding(3, 2, "ones")
    words = tf2.keras.layers.StringLookup()
    words.adapt(["a", "b", "b"])
    model = tf2.keras.Sequential([tf2.keras.layers.Dense(1, kernel_initializer="ones")])
    return [
        *out,
        normalize.moving_mean,
        mean.result(),
        auc.result(),
        table(tf.constant([1])),
        words(tf.constant(["a"])),
        model.predict(x, verbose=0),
    ]


def data() -> Any:
    rows = tf2.data.Dataset.range(10).map(lambda i: i * 2, num_parallel_calls=2)
    rows = rows.filter(lambda i: i > 2).shuffle(5, seed=1).batch(3)
    return [tf.concat(list(rows), 0), tf.concat(list(rows.as_numpy_iterator()), 0)]


def saved_models() -> Any:
    class Scale(tf.Module):
        def __init__(self):
            self.factor = tf.Variable(3.0)

        @tf.function(input_signature=[tf.TensorSpec([None])])
        def __call__(self, x):
            return x * self.factor

    with tempfile.TemporaryDirectory() as folder:
        tf2.saved_model.save(Scale(), folder)
        loaded = tf2.saved_model.load(folder)
        x = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loaded(x)
        return [y, tape.gradient(y, x), loaded.factor]


def summaries() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        with tf2.summary.create_file_writer(folder).as_default():
            tf2.summary.scalar("loss", 0.5, step=1)
        (name,) = os.listdir(folder)
        events = list(tf.train.summary_iterator(os.path.join(folder, name)))
    return [len(events), tf.make_ndarray(events[1].summary.value[0].tensor)]


def python_functions_of_a_graph() -> Any:
    """What `tf.py_function` calls is executed eagerly, and so are its gradients."""
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        y = tf2.py_function(lambda x: x * x, [x], tf.float32)
        with tf.Session() as session:
            return session.run([y, tf.gradients(y, x)[0]])


def savers():
    variable = tf.Variable([1.0, 2.0], use_resource=True, name="saved_eagerly")
    with tempfile.TemporaryDirectory() as folder:
        saver = tf.train.Saver([variable])
        prefix = saver.save(None, f"{folder}/saved", global_step=3)
        variable.assign([5.0, 5.0])
        saver.restore(None, prefix)
    return [variable]


WORKS = [
    arithmetic,
    gradients_of_tensors,
    variables,
    layers,
    data,
    saved_models,
    savers,
    summaries,
    python_functions_of_a_graph,
]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what is logged, except that functions are traced often, of all tests together."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: "triggered tf.function retracing" not in record.getMessage())
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore
    logger, level = tf.get_logger(), tf.get_logger().level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_what_needs_no_other_rank_works_as_outside(strategy, work):
    with logged() as outside:
        want = [np.asarray(x) for x in work()]
    with strategy.scope(), logged() as inside:
        got = [np.asarray(x) for x in work()]
    assert len(got) == len(want)
    for mine, plain in zip(got, want):
        np.testing.assert_array_equal(mine, plain)
    assert len(inside) <= len(outside), inside


def test_an_exported_model_is_loaded_inside_scope(strategy, folder):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            tf.get_variable("t", [5, 2], initializer=tf.ones_initializer())
        tf.train.get_or_create_global_step()
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=f"{folder}/model", save_checkpoint_steps=1
        ):
            pass

    def serving():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [5, 2])
        ids = tf.placeholder(tf.int64, [None])
        return tf.saved_model.predict_signature_def(
            {"ids": ids}, {"rows": tf.nn.embedding_lookup(t, ids)}
        )

    path = strategy.export_saved_model(f"{folder}/export", f"{folder}/model", serving)
    with strategy.scope():
        served = tf2.saved_model.load(path).signatures["serving_default"]
        rows = served(ids=tf.constant([0, 4], tf.int64))["rows"]
    np.testing.assert_array_equal(rows, np.ones([2, 2]))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("within", [lambda f: f, tf.function], ids=["at once", "function"])
def test_horovods_functions_keep_their_meaning(strategy, rank, size, within):
    """Reductions reduce, broadcasts broadcast; tapes reduce gradients with respect to tensors."""
    mean = (size + 1) / 2
    with strategy.scope(), logged() as warnings:
        own = tf.constant([rank + 1.0, 2.0])
        # Horovod takes no name from a tensor that a function captures.
        name = "eager" if within is tf.function else "now"
        reduced = within(lambda: hvd.allreduce(own, name=f"{name}.a"))()
        assert reduced.numpy().tolist() == [mean, 2.0]
        if size == 1:
            return
        total = within(lambda: hvd.allreduce(own, op=hvd.Sum, name=f"{name}.s"))()
        assert total.numpy().tolist() == [size * mean, 2.0 * size]
        gathered = within(lambda: hvd.allgather(own[:1], name=f"{name}.g"))()
        assert gathered.numpy().tolist() == [r + 1.0 for r in range(size)]
        of_last = within(lambda: hvd.broadcast(own, size - 1, name=f"{name}.b"))()
        assert of_last.numpy().tolist() == [size, 2.0]
        v = tf.Variable([float(rank)])
        within(lambda: [hvd.broadcast_variables([v], root_rank=size - 1)] and None)()
        assert v.numpy().tolist() == [size - 1]
        assert hvd.allgather_object(rank, name=f"{name}.o") == list(range(size))
        assert hvd.broadcast_object(rank, root_rank=size - 1, name=f"{name}.p") == size - 1

        if within is tf.function:
            return  # there a wrapper leaves all reductions to scope(), as in a graph

        def by_tape():
            x = tf.constant([1.0])
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                tape.watch(x)
                y = x * (rank + 1.0)
            return tape.gradient(y, [x])[0]

        assert by_tape().numpy().tolist() == [mean]
    assert not warnings
