"""scope(mixed_precision=…) computes the dense part in half precision, and all ranks skip a step if
a gradient overflows on one.
"""

import contextlib
import os
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.ops import half_precision, kernel_device
from tests.ranks import reference

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped, pytest.mark.double("matrix")]

B, FIRST = 12, 2.0**15
IDS = np.random.default_rng(0).integers(0, 9, B)
X = np.random.default_rng(1).normal(size=(B, 8)).astype(np.float32)
STATE = ["t", "w", "slots", "slots_of_w", "global_step"]


def model(embedding_scope, train, planted=False, dynamic=False):
    """Multiplies rows of a table by a matrix.

    Args:
        embedding_scope: of the strategy, or none.
        train: train(loss, variables, global_step) returns the training operation.
        planted: whether the gradient of row 3 is infinite where `poison` is fed with 1.
        dynamic: whether the table is a dynamic one.
    """
    with embedding_scope():
        t = reference.table("t", 9, 8) if not dynamic else tf.get_variable("t", [None, 8])
    w = tf.get_variable("w", initializer=reference.table_values(8, 8, 1) / 4)
    ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 8])
    poison = tf.placeholder_with_default(0.0, [])
    rows = tf.nn.embedding_lookup(t, ids)
    hidden = tf.nn.relu(tf.matmul(rows * x, w))
    loss = tf.reduce_mean(tf.square(tf.matmul(hidden, w)))
    if planted:

        @tf.custom_gradient
        def overflowing(rows):
            largest = tf.where_v2(tf.equal(poison, 1), np.float32(np.inf), 0.0)
            return 0 * tf.reduce_sum(rows), lambda _: largest + tf.zeros_like(rows)

        loss += overflowing(tf.nn.embedding_lookup(t, [3]))
    step = tf.train.get_or_create_global_step()
    fetches = {"loss": loss, "global_step": step, "w": w.read_value(), "train": train(loss, t, w)}
    fetches["t"] = tf.nn.embedding_lookup(t, tf.range(9, dtype=tf.int64))
    return fetches, {"ids": ids, "x": x, "poison": poison}, (t, w)


def adagrad(loss, t, w):
    optimizer = tf.train.AdagradOptimizer(0.3)
    return optimizer.minimize(loss, tf.train.get_or_create_global_step(), var_list=[t, w])


def scale_variables():
    return [v for v in tf.global_variables() if "loss_scale" in v.name]


def mine(rank, size):
    return {"ids": reference.part(IDS, rank, size), "x": reference.part(X, rank, size)}


def run(build, runs, scope=None, embedding_scope=contextlib.nullcontext, prepare=None):
    """Returns what each run fetches: `runs` lists (names, values to feed by name)."""
    with scope or contextlib.nullcontext(), tf.Graph().as_default():
        fetches, feeds = build(embedding_scope)[:2]
        if prepare is not None:
            fetches.update(prepare())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return [
                session.run(
                    {name: fetches[name] for name in names},
                    {feeds[name]: value for name, value in values.items()},
                )
                for names, values in runs
            ]


def matrix_products(session, fetches, feed):
    """Returns the types in which a run casts what it multiplies."""
    ran = tf.RunMetadata()
    session.run(fetches, feed, tf.RunOptions(output_partition_graphs=True), ran)
    return {
        tf.as_dtype(node.attr["DstT"].type).name
        for part in ran.partition_graphs
        for node in part.node
        if node.op == "Cast"
    } & {"float16", "bfloat16"}


@pytest.mark.parametrize("precision", [None, "float16", "bfloat16"])
def test_what_computes_in_half_precision(strategy, rank, size, precision):
    with (
        strategy.scope(mixed_precision=precision),
        tf.Graph().as_default(),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        half_precision._TRIED.clear()
        fetches, feeds, (t, w) = model(strategy.embedding_scope, adagrad)
        config = tf.ConfigProto()
        config.graph_options.rewrite_options.min_graph_nodes = -1
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            feed = {feeds[name]: value for name, value in mine(rank, size).items()}
            found = matrix_products(session, [fetches["train"], fetches["loss"]], feed)
    possible = {
        None: [set()],
        "float16": [{"float16"} if kernel_device.chosen() == "gpu" else set()],
        # Some processors have instructions for bfloat16.
        "bfloat16": [set(), {"bfloat16"}],
    }
    assert found in possible[precision]
    said = [str(w.message) for w in warned if "has no effect on the speed" in str(w.message)]
    # Once in a process, at the first session.
    half_precision._TRIED.clear()
    assert bool(said) == (precision is not None and not found), said
    assert t.dtype.base_dtype == w.dtype.base_dtype == tf.float32


def of_tensorflow(loss, t, w):
    """Trains with TensorFlow's own loss scale."""
    optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
        tf.train.AdagradOptimizer(0.3), "dynamic"
    )
    return optimizer.minimize(loss, tf.train.get_or_create_global_step(), var_list=[t, w])


@pytest.mark.either_backend
def test_training_equals_tensorflows_own_loss_scale(strategy, rank, size):
    """The scale, the skipped steps and the numbers are those of one process of TensorFlow."""

    def runs(feed):
        state = (["scale", "good", "global_step", "t", "w"], {})
        steps = [False, True, False, True, True, False]
        return [
            each
            for poisoned in steps
            for each in ((["train"], {**feed, "poison": float(poisoned)}), state)
        ]

    def scale():
        return {"scale": scale_variables()[0], "good": good_steps()}

    def good_steps():
        return next(v for v in tf.global_variables() if "good_steps" in v.name)

    want = run(
        lambda scope: model(scope, of_tensorflow, planted=True),
        runs({"ids": IDS, "x": X}),
        prepare=lambda: {
            "scale": next(v for v in tf.global_variables() if "current_loss_scale" in v.name),
            "good": good_steps(),
        },
    )
    got = run(
        lambda scope: model(scope, adagrad, planted=True),
        runs(mine(rank, size)),
        strategy.scope(mixed_precision="float16"),
        strategy.embedding_scope,
        prepare=scale,
    )
    for expected, found in zip(want[1::2], got[1::2]):
        assert found["scale"] == expected["scale"]
        assert found["good"] == expected["good"]
        assert found["global_step"] == expected["global_step"]
        for name in ("t", "w"):
            # TensorFlow's own loss scale alone computes in float32: 2**-11 is a float16's rounding,
            # of updates of some 1e-2, also where their sum is near 0.
            rtol, atol = (2.0**-10, 1e-5) if kernel_device.chosen() == "gpu" else (2e-5, 1e-6)
            np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol)
    assert want[-1]["global_step"] == 3


def two_optimizers(loss, t, w):
    step = tf.train.get_or_create_global_step()
    first = tf.train.AdagradOptimizer(0.3).minimize(loss, step, var_list=[w])
    return tf.group(first, tf.train.AdamOptimizer(0.1).minimize(loss, var_list=[t]))


def clipped(loss, t, w):
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, [t, w]), 1e6)
    return tf.train.AdamOptimizer(0.1).apply_gradients(
        zip(gradients, [t, w]), tf.train.get_or_create_global_step()
    )


def of_keras(loss, t, w):
    counted = tf.assign_add(tf.train.get_or_create_global_step(), 0)
    optimizer = tf.keras.optimizers.Adagrad(0.3)
    with tf.control_dependencies([counted]):
        return tf.group(*optimizer.get_updates(loss, [t, w]))


WAYS = {"one": adagrad, "two": two_optimizers, "clipped": clipped, "keras": of_keras}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.sample(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_overflows_on_one_rank_changes_nothing(strategy, rank, size, way, dynamic):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        fetches, feeds, _ = model(
            strategy.embedding_scope, WAYS[way], planted=True, dynamic=dynamic
        )
        scale, good = scale_variables()
        state = {
            v.name: v.read_value() if v.shape.rank != 2 else tf.reduce_sum(v.read_value())
            for v in tf.global_variables()
            if "loss_scale" not in v.name and v.name.partition("/")[0] not in ("t:0", "t")
        }
        state["rows"] = fetches["t"]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())

            def step(poisoned):
                values = {**mine(rank, size), "poison": float(poisoned)}
                session.run(fetches["train"], {feeds[name]: v for name, v in values.items()})
                return session.run((state, scale, good))

            before = step(False)
            # Every rank computes the overflow of row 3 here, and one rank there.
            skipped = step(rank == size - 1)
            after = step(False)
    assert before[1:] == (FIRST, 1)
    assert skipped[1:] == (FIRST / 2, 0)
    assert after[1:] == (FIRST / 2, 1)
    for name, value in before[0].items():
        np.testing.assert_array_equal(skipped[0][name], value, err_msg=name)
    assert np.any(after[0]["rows"] != before[0]["rows"])
    assert np.all(np.isfinite(after[0]["rows"]))


def test_the_flag_of_all_ranks_needs_no_exchange_of_its_own(strategy, rank, size):
    """The number of exchanges of the plan is that without a scale."""
    counts = []
    for precision in (None, "float16"):
        with strategy.scope(mixed_precision=precision), tf.Graph().as_default():
            model(strategy.embedding_scope, adagrad)
            with tf.Session():
                counts.append(len(strategy.plan().exchanges))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_checkpoint_has_the_scale(strategy, rank, size, folder):
    """One without it, of float32, starts with the first scale."""

    def trained(precision, steps, save=None, restore=None):
        with strategy.scope(mixed_precision=precision), tf.Graph().as_default():
            fetches, feeds, _ = model(strategy.embedding_scope, adagrad, planted=True)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if restore:
                    saver.restore(session, restore)
                for poisoned in steps:
                    values = {**mine(rank, size), "poison": float(poisoned)}
                    session.run(fetches["train"], {feeds[name]: v for name, v in values.items()})
                if save:
                    saver.save(session, save)
                return session.run(scale_variables() + [fetches["t"], fetches["w"]])

    path = os.path.join(folder, "model")
    whole = trained("float16", [False, True, False, False])
    first = trained("float16", [False, True], save=path)
    rest = trained("float16", [False, False], restore=path)
    assert list(first[:2]) == [FIRST / 2, 0] and list(rest[:2]) == [FIRST / 2, 2]
    for got, want in zip(rest, whole):
        np.testing.assert_array_equal(got, want)
    trained(None, [False], save=path + "32")
    assert list(trained("float16", [], restore=path + "32")[:2]) == [FIRST, 0]


def test_a_gradient_with_respect_to_inputs_is_not_scaled(strategy, rank, size):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        x = tf.constant([[1.0, 2.0]])
        y = tf.reduce_sum(tf.square(x))
        penalty = tf.gradients(y, x)[0]
        assert not scale_variables()
        with tf.Session() as session:
            np.testing.assert_array_equal(session.run(penalty), [[2.0, 4.0]])


@pytest.mark.ranks(2, 3)
def test_an_overflow_of_an_inputs_gradient_is_its_ranks_own(strategy, rank, size):
    """The step doesn't apply it: all ranks take the step, though one rank sees it."""

    def with_inputs(loss, t, w):
        poison = tf.get_default_graph().get_tensor_by_name("PlaceholderWithDefault:0")
        x = tf.ones([2, 8])

        @tf.custom_gradient
        def overflowing(x):
            return 0 * tf.reduce_sum(x), lambda _: tf.where_v2(poison > 0, np.inf, 1.0) + 0 * x

        gradients = tf.gradients(loss + overflowing(x), [t, w, x])
        with tf.control_dependencies([gradients[2]]):
            step = tf.train.get_or_create_global_step()
            return tf.train.AdagradOptimizer(0.3).apply_gradients(zip(gradients, [t, w]), step)

    feed = {**mine(rank, size), "poison": float(rank == 0)}
    got = run(
        lambda scope: model(scope, with_inputs),
        [(["train"], feed), (["scale", "global_step", "t"], {})],
        strategy.scope(mixed_precision="float16"),
        strategy.embedding_scope,
        prepare=lambda: {"scale": scale_variables()[0]},
    )
    assert (got[1]["scale"], got[1]["global_step"]) == (FIRST, 1)
    assert np.all(np.isfinite(got[1]["t"]))


@pytest.mark.ranks(2)
def test_an_open_variable_scope_does_not_change_the_scale(strategy):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        w = tf.get_variable("w", [4])
        partitioned = tf.fixed_size_partitioner(2)
        with tf.variable_scope("model", partitioner=partitioned, reuse=True):
            tf.gradients(tf.reduce_sum(w * w), w)
        assert [v.op.name for v in scale_variables()] == [
            "loss_scale/scale",
            "loss_scale/good_steps",
        ]


@pytest.mark.ranks(2)
def test_applying_inside_a_branch_is_refused(strategy):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        w = tf.get_variable("w", initializer=1.0)
        gradient = tf.gradients(w * w, w)[0]
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        with pytest.raises(NotImplementedError, match="Apply them outside"):
            tf.cond(tf.constant(True), lambda: optimizer.apply_gradients([(gradient, w)]), tf.no_op)


@pytest.mark.ranks(2)
def test_a_forward_pass_may_have_branches(strategy):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        w = tf.get_variable("w", initializer=3.0)
        y = tf.cond(tf.placeholder_with_default(True, []), lambda: w * w, lambda: w)
        gradient = tf.gradients(y, w)[0]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert session.run(gradient) == 6


@pytest.mark.ranks(2)
def test_a_second_scale_is_refused(strategy):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        with pytest.raises(NotImplementedError, match="scales the loss, and so does"):
            model(strategy.embedding_scope, of_tensorflow)


@pytest.mark.ranks(2)
def test_sums_over_batches_are_refused(strategy):
    with strategy.scope(mixed_precision="float16", local_steps=2), tf.Graph().as_default():
        with pytest.raises(NotImplementedError, match="local_steps=2"):
            model(strategy.embedding_scope, adagrad)


@pytest.mark.ranks(2)
def test_gradients_inside_a_branch_are_refused(strategy):
    with strategy.scope(mixed_precision="float16"), tf.Graph().as_default():
        w = tf.get_variable("w", initializer=1.0)
        with pytest.raises(NotImplementedError, match="inside one"):
            tf.cond(tf.constant(True), lambda: tf.gradients(w * w, w)[0], lambda: 0.0)


@pytest.mark.ranks(2)
def test_an_unknown_precision_is_refused(strategy):
    with pytest.raises(ValueError, match="mixed_precision=…. is None or 'float16' or 'bfloat16'"):
        CollectiveStrategy().scope(mixed_precision="float8")
