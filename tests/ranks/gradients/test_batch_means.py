"""Steps of sessions in which ranks have different numbers of records are those of one process."""

import contextlib

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import agreement
from collective.gradients import batch_means
from collective.ops.graph import graph_state
from tests.ranks import reference
from tests.ranks.assignments import warnings

pytestmark = [pytest.mark.either_backend, pytest.mark.carriers]

ROWS, DIM, CLASSES, STEPS, RECORDS = 50, 4, 3, 4, 29
_random = np.random.default_rng(3)
DATA = {
    "ids": _random.integers(0, ROWS, (STEPS, RECORDS, 2)),
    "labels": _random.normal(size=(STEPS, RECORDS)).astype(np.float32),
    "classes": _random.integers(0, CLASSES, (STEPS, RECORDS)),
    "dense": _random.normal(size=(STEPS, RECORDS, 3)).astype(np.float32),
}
KERNEL = _random.normal(0, 0.3, (DIM + 3, CLASSES)).astype(np.float32)
# A rank's share of a step's records: rank 0 has the most; in the last step rank N - 1 has none.
SHARES = (1.0, 0.6, 0.4, None)


def own(step, rank, size):
    share = SHARES[step]
    parts = size - 1 if share is None and size > 1 else size
    ends = np.linspace(0, 1, parts + 1) ** (share or 0.7) * RECORDS
    ends = [*ends.astype(int), RECORDS]
    return {name: x[step, ends[rank] : ends[rank + 1]] for name, x in DATA.items()}


def click(m):
    return tf.cast(m["labels"] > 0, tf.float32)


def log_loss(m):
    p = tf.sigmoid(m["out"])
    return -(click(m) * tf.log(p + 1e-7) + (1 - click(m)) * tf.log(1 - p + 1e-7))


def size_of(kernel):
    return 1.0 + tf.reduce_sum(tf.square(kernel))


def twice(mean, m):
    return mean + tf.reduce_mean(log_loss(m) * 0.5 + mean)


LOSSES = {
    "the mean of squares, and a penalty": lambda m: (
        tf.reduce_mean(tf.square(m["out"] - m["labels"])) + 0.01 * tf.nn.l2_loss(m["kernel"])
    ),
    "cross entropies of two tasks": lambda m: (
        tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=click(m), logits=m["out"]))
        + 0.5
        * tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=m["classes"], logits=m["logits"])
        )
    ),
    "one-hot labels": lambda m: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(
            labels=tf.one_hot(m["classes"], CLASSES), logits=m["logits"]
        )
    ),
    "written by hand": lambda m: tf.reduce_mean(log_loss(m)),
    "a sum divided by its number": lambda m: (
        tf.reduce_sum(tf.squared_difference(m["out"], m["labels"]))
        / tf.cast(tf.shape(m["labels"])[0], tf.float32)
    ),
    "tf.losses": lambda m: (
        tf.losses.sigmoid_cross_entropy(click(m), m["out"])
        + tf.losses.huber_loss(m["labels"], m["out"], weights=2.0)
    ),
    "the total of tf.losses": lambda m: (
        tf.losses.sparse_softmax_cross_entropy(m["classes"], m["logits"]),
        tf.losses.get_total_loss(),
    )[1],
    "means of columns": lambda m: tf.reduce_sum(
        tf.reduce_mean(tf.square(m["logits"] - tf.one_hot(m["classes"], CLASSES)), 0)
    ),
    "pairs, without labels": lambda m: (
        -tf.reduce_mean(tf.log_sigmoid(m["out"] - m["logits"][:, 1]))
    ),
    "a stack of two losses": lambda m: tf.reduce_mean(
        tf.stack([log_loss(m), tf.square(m["logits"][:, 1] - m["labels"])])
    ),
    "positives and negatives in one": lambda m: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.concat([tf.ones_like(m["out"]), tf.zeros_like(m["out"])], 0),
            logits=tf.concat([m["out"], m["logits"][:, 2]], 0),
        )
    ),
    "classes first": lambda m: tf.reduce_mean(
        tf.transpose(tf.square(m["logits"])) * tf.transpose(tf.one_hot(m["classes"], CLASSES))
    ),
    "a product by letters": lambda m: tf.reduce_mean(
        tf.square(tf.einsum("bc,dc->bd", m["logits"], m["kernel"]))
    ),
    "all numbers in a row": lambda m: tf.reduce_mean(tf.reshape(tf.square(m["logits"]), [-1])),
    "halves of a batch twice as long": lambda m: tf.add_n(
        [tf.reduce_mean(tf.square(half)) for half in tf.split(tf.tile(m["logits"], [2, 1]), 2)]
    ),
    "printed, and its shape ensured": lambda m: tf.ensure_shape(
        tf.Print(tf.reduce_mean(log_loss(m)), [m["out"]], first_n=0), []
    ),
    "minus a sum, half of it, by its number": lambda m: (
        -0.5 * tf.reduce_sum(-log_loss(m)) / tf.cast(tf.shape(m["labels"])[0], tf.float32)
    ),
    "labels of unknown rank": lambda m: tf.reduce_mean(
        tf.square(m["out"] - tf.placeholder_with_default(m["labels"], None))
    ),
    "squeezed": lambda m: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.placeholder_with_default(click(m), None), logits=tf.squeeze(m["out"][:, None])
        )
    ),
    "squares of the batch, by its number": lambda m: (
        (tf.nn.l2_loss(m["logits"]) + 0.5 * tf.reduce_sum(log_loss(m)))
        / tf.cast(tf.shape(m["dense"])[0], tf.float32)
    ),
    "factors that are trained": lambda m: (
        tf.exp(-size_of(m["kernel"])) * tf.reduce_mean(log_loss(m))
        + tf.reduce_mean(tf.square(m["logits"])) / (2 * size_of(m["kernel"]))
        + tf.log(size_of(m["kernel"]))
    ),
    "losses in a stack": lambda m: tf.reduce_sum(
        tf.stack([tf.reduce_mean(log_loss(m)), tf.reduce_mean(tf.square(m["logits"]))])[1:] * 0.5
    ),
    "means of columns, one by one": lambda m: tf.add_n(
        [each * 0.5 for each in tf.unstack(tf.reduce_mean(tf.square(m["logits"]), 0))]
    ),
    "means of columns, by weights": lambda m: tf.tensordot(
        tf.reduce_mean(tf.square(m["logits"]), 0), tf.constant([1.0, 0.5, 0.2]), 1
    ),
    "of one dimension": lambda m: tf.reduce_mean(log_loss(m), keepdims=True),
    "within bounds, if it is a number": lambda m: tf.clip_by_value(
        tf.where(tf.is_nan(tf.reduce_mean(log_loss(m))), tf.zeros([]), tf.reduce_mean(log_loss(m))),
        0.0,
        1e6,
    ),
    "a sum, times one by its number": lambda m: (
        tf.reduce_sum(log_loss(m)) * (1.0 / tf.cast(tf.shape(m["out"])[0], tf.float32))
    ),
    "a sum of what is divided by its number": lambda m: tf.reduce_sum(
        log_loss(m) / tf.cast(tf.shape(m["out"])[0], tf.float32)
    ),
    "candidates of all ranks first": lambda m: tf.reduce_mean(
        tf.square(
            tf.placeholder_with_default(tf.constant([1.0, 2.0, 3.0]), [None])[:, None]
            * m["out"][None]
        )
    ),
    "a mean in another one": lambda m: (
        tf.reduce_mean(log_loss(m) + 0.5 * tf.reduce_mean(tf.square(m["logits"])))
        + tf.reduce_mean(tf.square(m["logits"]))
    ),
    "the same mean in another one": lambda m: twice(tf.reduce_mean(tf.square(m["logits"])), m),
    "a sum by the number of other data": lambda m: (
        tf.reduce_sum(tf.square(m["logits"]))
        / (tf.cast(tf.unstack(tf.shape(m["ids"]))[0], tf.float32) + 1e-8)
    ),
    "the largest": lambda m: tf.reduce_mean(tf.nn.top_k(tf.square(m["logits"]), 2)[0][:, :1]),
    "a product of three dimensions": lambda m: tf.reduce_mean(
        tf.square(tf.tensordot(m["logits"][:, None, :] * tf.ones([1, 2, 1]), m["kernel"][:3], 1))
    ),
    "a sum of classes first, by its number": lambda m: (
        tf.reduce_sum(tf.transpose(tf.square(m["logits"])))
        / tf.cast(tf.shape(m["dense"])[0], tf.float32)
    ),
}


def slopes(m):
    """A penalty of how steep the prediction is, as of a critic."""
    steep = tf.square(tf.gradients(tf.tanh(m["out"]) + m["out"] ** 2, [m["dense"]])[0])
    return tf.reduce_mean(tf.square(tf.reduce_sum(steep, 1) - 1))


# Functions that eager code calls refuse tf.gradients.
IN_GRAPHS = {**LOSSES, "slopes": lambda m: tf.reduce_mean(log_loss(m)) + slopes(m)}


def model(embedding_scope, batch):
    with embedding_scope():
        table = reference.table("t", ROWS, DIM)
    kernel = tf.get_variable("kernel", initializer=KERNEL)
    rows = tf.reduce_sum(tf.nn.embedding_lookup(table, batch["ids"]), 1)
    logits = tf.matmul(tf.concat([rows, batch["dense"]], 1), kernel)
    return {**batch, "table": table, "kernel": kernel, "logits": logits, "out": logits[:, 0]}


def trained(embedding_scope, steps, make_loss, is_fed, is_taped=False):
    """Returns the table and the kernel after `steps`, one batch each."""
    types = {name: (x.dtype, [None, *x.shape[1:]]) for name, x in steps[0].items()}
    if is_fed:
        batch = {name: tf.placeholder(*each) for name, each in types.items()}
    else:
        data = tf.data.Dataset.from_generator(
            lambda: iter(steps),
            {name: each[0] for name, each in types.items()},
            {name: each[1] for name, each in types.items()},
        )
        batch = tf.data.make_one_shot_iterator(data).get_next()
    optimizer = tf.train.AdagradOptimizer(0.3)
    with tf2.GradientTape() as tape:
        m = model(embedding_scope, batch)
        loss = make_loss(m)
    if is_taped:
        variables = [m["table"], m["kernel"]]
        train = optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    else:
        train = optimizer.minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step in steps:
            session.run(train, {batch[name]: x for name, x in step.items()} if is_fed else {})
        return session.run([tf.nn.embedding_lookup(m["table"], tf.range(ROWS)), m["kernel"]])


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_taped", [False, True])
@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("loss", IN_GRAPHS)
def test_a_mean_over_the_batch_is_that_of_all_records(strategy, rank, size, loss, is_fed, is_taped):
    whole = [{name: x[step] for name, x in DATA.items()} for step in range(STEPS)]
    with tf.Graph().as_default():
        want = trained(contextlib.nullcontext, whole, IN_GRAPHS[loss], is_fed)
    steps = [own(step, rank, size) for step in range(STEPS)]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        got = trained(strategy.embedding_scope, steps, IN_GRAPHS[loss], is_fed, is_taped)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_shapes_of_tensorflow_1(strategy, rank, size):
    """After tf.disable_v2_behavior() a dimension of unknown size equals no other one."""
    name = "a stack of two losses"
    whole = [{key: x[step] for key, x in DATA.items()} for step in range(STEPS)]
    steps = [own(step, rank, size) for step in range(STEPS)]
    tf.disable_v2_tensorshape()
    try:
        with tf.Graph().as_default():
            want = trained(contextlib.nullcontext, whole, LOSSES[name], True)
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            got = trained(strategy.embedding_scope, steps, LOSSES[name], True)
    finally:
        tf.enable_v2_tensorshape()
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_taped", [False, True])
def test_so_it_is_if_the_gradient_of_the_loss_is_given(strategy, rank, size, is_taped):
    """By `minimize(grad_loss=…)`, or a tape's `output_gradients`."""

    def trained(embedding_scope, dense):
        x = tf.placeholder(tf.float32, [None, 3])
        with embedding_scope():
            table = reference.table("t", ROWS, 3)
        with tf2.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * tf.nn.embedding_lookup(table, [1])))
        optimizer, two = tf.train.GradientDescentOptimizer(0.1), tf.constant(2.0)
        if is_taped:
            train = optimizer.apply_gradients([(tape.gradient(loss, table, two), table)])
        else:
            train = optimizer.minimize(loss, grad_loss=two)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: dense})
            return session.run(tf.nn.embedding_lookup(table, [1]))

    with tf.Graph().as_default():
        want = trained(contextlib.nullcontext, DATA["dense"][0])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        got = trained(strategy.embedding_scope, own(0, rank, size)["dense"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# What counts alike on all ranks, and what is said of it.
UNWEIGHED = {
    "a root": (lambda m: tf.sqrt(tf.reduce_mean(log_loss(m))), "'Sqrt'"),
    "a product of two": (
        lambda m: (
            tf.reduce_mean(log_loss(m)) * tf.stop_gradient(tf.reduce_mean(tf.square(m["logits"])))
        ),
        "'mul",
    ),
    "a number by a mean": (lambda m: 1.0 / (1.0 + tf.reduce_mean(log_loss(m))), "'truediv"),
    "in a loop": (
        lambda m: tf.while_loop(
            lambda i, _: i < 2,
            lambda i, total: (i + 1, total + tf.reduce_mean(log_loss(m))),
            [0, 0.0],
        )[1],
        "'while",
    ),
    "a part with another, that is weighed": (
        lambda m: tf.reduce_mean(log_loss(m)) + tf.norm(tf.reduce_mean(tf.square(m["logits"]), 0)),
        "'norm",
    ),
}


def said_of(steps_of_runs, run):
    """Returns, for each of some lists of steps, what rank 0 says of what counts alike in them."""
    agreement._warned.clear()
    said = []
    for steps in steps_of_runs:
        with warnings("counts alike on all ranks") as of_run:
            run(steps)
        said.append(hvd.broadcast_object(of_run))
    return said


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_taped", [False, True])
@pytest.mark.parametrize("loss", UNWEIGHED)
def test_what_counts_alike_is_warned_of(strategy, rank, size, loss, is_taped):
    """In a run in which ranks have other numbers of records, once, by rank 0."""
    make_loss, name = UNWEIGHED[loss]

    def run(steps):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            trained(strategy.embedding_scope, steps, make_loss, True, is_taped)

    equal = [{name: x[0, :6] for name, x in DATA.items()}] * 2
    unequal = [{name: x[0, : 3 + rank] for name, x in DATA.items()}] * 2
    first, second, third = said_of([equal, unequal, unequal], run)
    assert not first and not third and len(second) == 1
    assert f"have {', '.join(str(3 + r) for r in range(size))} records" in second[0]
    assert name in second[0]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loss", LOSSES)
def test_means_are_not_warned_of(strategy, rank, size, loss):
    def run(steps):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            trained(strategy.embedding_scope, steps, LOSSES[loss], True)

    assert said_of([[own(0, rank, size)]], run) == [[]]


def test_it_takes_no_exchange(strategy, rank, size):
    """Ranks say how many records they have when they agree on the run."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        batch = {name: tf.placeholder(x.dtype, [None, *x.shape[2:]]) for name, x in DATA.items()}
        m = model(strategy.embedding_scope, batch)
        loss = LOSSES["cross entropies of two tasks"](m)
        with tf.control_dependencies([m["out"]]):  # as updates wait for moving averages
            tf.train.AdagradOptimizer(0.3).minimize(loss)
        names = [op.name for op in graph.get_operations()]
    assert not any("records_of_a_batch" in name for name in names)
    weighed = graph_state.of(graph, batch_means.BatchMeans).weights
    assert sorted(op.type for op in weighed) == ["Mean"] * 2 * (size > 1)
    # A copy of the graph has TensorFlow's gradients.
    assert not any("_gradient_op_type" in op.node_def.attr for op in weighed)


def test_what_is_fetched_is_the_ranks_own(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        with strategy.embedding_scope():
            table = reference.table("t", ROWS, DIM)
        loss = tf.reduce_mean(x * tf.nn.embedding_lookup(table, tf.cast(x, tf.int64))[:, 0])
        tf.train.AdagradOptimizer(0.3).minimize(loss)
        (of_x,) = tf.gradients(loss, [x])
        mine = np.arange(rank + 1, dtype=np.float32)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            got, gradient = session.run([loss, of_x], {x: mine})
    rows = reference.table_values(ROWS, DIM)[mine.astype(int), 0]
    np.testing.assert_allclose(got, np.mean(mine * rows), rtol=1e-5, atol=1e-7)
    assert gradient.shape == mine.shape


# Sums over what isn't the batch, divided by its number: right with equal batches as they are.
OTHERS = {
    "positions": lambda z, ids, rows: (
        tf.reduce_sum(tf.reshape(z, [-1])) / tf.cast(tf.shape(ids)[0], tf.float32)
    ),
    "positions of time": lambda z, ids, rows: (
        tf.reduce_sum(tf.transpose(z)) / tf.cast(tf.shape(tf.transpose(ids))[1], tf.float32)
    ),
    "chosen ones": lambda z, ids, rows: (
        tf.reduce_sum(tf.boolean_mask(z, ids > 2)) / tf.cast(tf.shape(ids)[0], tf.float32)
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_sum_of_another_length_is_left_alone(strategy, rank, size, kind):
    """Ranks have as many records, and sequences padded to another length."""
    lengths = [3 + r % 2 for r in range(size)]
    ids = [np.arange(4 * n).reshape(4, n) % 7 for n in lengths]

    def trained(embedding_scope, own, scale):
        with embedding_scope():
            table = reference.table("t", 10, 1)
        given = [tf.placeholder(tf.int64, [None, None]) for _ in own]
        losses = []
        for x in given:
            z = tf.square(tf.nn.embedding_lookup(table, x)[:, :, 0])
            losses.append(OTHERS[kind](z, x, table))
        loss = tf.add_n(losses) / scale
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, dict(zip(given, own)))
            return session.run(tf.nn.embedding_lookup(table, tf.range(10)))

    with tf.Graph().as_default():
        want = trained(contextlib.nullcontext, ids, size)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        got = trained(strategy.embedding_scope, [ids[rank]], 1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_fed_what_comes_of_data_takes_none(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 2])
        logs = tf.log1p(tf.abs(x))
        with strategy.embedding_scope():
            table = reference.table("t", 2, 1)
        loss = tf.reduce_mean(tf.square(tf.matmul(logs, tf.nn.embedding_lookup(table, [0, 1]))))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {logs: np.ones([3, 2])})
            session.run(train, {x: np.ones([3, 2])})


def test_a_queue_that_the_run_fills_from_rows(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 10, 2)
        queue = tf.queue.FIFOQueue(4, [tf.float32])
        rows = tf.stop_gradient(tf.nn.embedding_lookup(table, [1, 2]))
        fill = queue.enqueue(rows)
        taken = queue.dequeue()
        taken.set_shape([None, 2])
        w = tf.get_variable("w", [2, 1], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(taken, w)))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([fill, train])
