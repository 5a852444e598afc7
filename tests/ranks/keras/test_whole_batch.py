"""What is computed of all ranks' batches has the numbers of plain TensorFlow's whole batch."""

from __future__ import annotations

import contextlib

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from collective.errors import RankError
from tests.ranks.keras.models import keras, part

USERS, ITEMS, BATCH = 40, 30, 24
_random = np.random.default_rng(7)
X = _random.normal(1, 2, (96, 3)).astype(np.float32)
Y = _random.normal(0, 1, (96, 1)).astype(np.float32)
PAIRS = _random.integers(0, [USERS, ITEMS], (96, 2))
USER_ROWS = _random.normal(0, 0.5, (USERS, 4)).astype(np.float32)
ITEM_ROWS = _random.normal(0, 0.5, (ITEMS, 4)).astype(np.float32)
SYNCHRONIZED = {
    "argument": lambda **options: keras.layers.BatchNormalization(synchronized=True, **options),
    "class": lambda **options: keras.layers.experimental.SyncBatchNormalization(**options),
    "horovod": lambda **options: hvd.SyncBatchNormalization(**options),
}
HOW = ["function", pytest.param("eager", marks=pytest.mark.slow)]


def parts(arrays, rank=0, size=1):
    """Returns the batches of a rank, and their size."""
    step = BATCH // size
    own = part(arrays, rank, size, BATCH)
    return [
        tf2.nest.map_structure(lambda x, i=i: tf2.constant(x[i : i + step]), own)
        for i in range(0, 96 // size, step)
    ]


def normalized(make=SYNCHRONIZED["argument"], **options):
    start = keras.initializers.GlorotUniform
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, kernel_initializer=start(1), name="hidden")(inputs)
    hidden = make(momentum=0.8, name="bn", **options)(hidden)
    out = keras.layers.Dense(1, kernel_initializer=start(2), name="out")(hidden)
    return keras.Model(inputs, out)


def assert_equal(got, want, atol=2e-6):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=atol)


def trained(model, batches, how, loss_of):
    """Trains a model by a loop of its own; returns its weights."""
    optimizer = keras.optimizers.SGD(0.1)

    def step(batch):
        with tf2.GradientTape() as tape:
            loss = loss_of(model, batch)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    if how == "function":
        step = tf2.function(step)
    for batch in batches:
        step(batch)
    return model.get_weights()


@pytest.mark.parametrize("make", SYNCHRONIZED)
@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batch_normalization_by_fit(strategy, rank, size, make, run_eagerly):
    """Statistics, moving averages, and the gradients through the statistics."""

    def fit(rank=0, size=1):
        model = normalized(SYNCHRONIZED[make])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        x, y = part((X, Y), rank, size, BATCH)
        model.fit(x, y, batch_size=BATCH // size, shuffle=False, verbose=0, epochs=2)
        return model

    plain = fit()
    assert np.abs(plain.get_layer("bn").moving_mean.numpy()).max() > 0.1
    with strategy.scope():
        model = fit(rank, size)
        assert_equal(model.get_weights(), plain.get_weights())
        assert_equal([model(X, training=False)], [plain(X, training=False)], 1e-5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("options", [{}, {"renorm": True}, {"dtype": "float64"}], ids=str)
def test_batch_normalization_in_a_loop(strategy, rank, size, how, options):
    def loss_of(model, batch):
        x, y = batch
        return tf2.reduce_mean((tf2.cast(model(x, training=True), tf2.float32) - y) ** 2)

    plain = trained(normalized(**options), parts((X, Y)), how, loss_of)
    with strategy.scope():
        got = trained(normalized(**options), parts((X, Y), rank, size), how, loss_of)
        assert_equal(got, plain)


@pytest.mark.parametrize("how", HOW)
def test_batches_of_different_sizes_with_masks(strategy, rank, size, how):
    """Each sample counts once; a rank without samples has the statistics of the others."""
    ends = [len(X) * r // max(1, size - 1) for r in range(size)] + [len(X)]  # the last has none
    present = np.arange(len(X)) % 3 > 0

    def forward(layer, x, mask):
        def call(x, mask):
            return layer(x, training=True, mask=mask)

        return (tf2.function(call) if how == "function" else call)(x, mask)

    plain = SYNCHRONIZED["argument"](momentum=0.5)
    want = forward(plain, X[:, None], present[:, None])[:, 0]
    with strategy.scope():
        layer = SYNCHRONIZED["argument"](momentum=0.5)
        first, last = ends[rank], ends[rank + 1]
        out = forward(layer, tf2.constant(X[first:last, None]), present[first:last, None])[:, 0]
        assert_equal([out], [want[first:last]], 1e-5)
        assert_equal(layer.get_weights(), plain.get_weights())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("masked", [False, True])
def test_every_layer_by_an_option(strategy, rank, size, how, masked):
    """scope(sync_batch_norm=True) is for layers that don't know of ranks; far from 0, too."""

    def loss_of(model, batch):
        x, y = batch
        x = model.get_layer("hidden")(x) + 100
        mask = y[:, 0] > -1 if masked else None
        x = model.get_layer("bn")(x, training=True, mask=mask)
        return tf2.reduce_mean((model.get_layer("out")(x) - y) ** 2)

    plain = trained(normalized(keras.layers.BatchNormalization), parts((X, Y)), how, loss_of)
    with strategy.scope(sync_batch_norm=True):
        model = normalized(keras.layers.BatchNormalization)
        got = trained(model, parts((X, Y), rank, size), how, loss_of)
        assert_equal(got, plain, 1e-4)  # of numbers around 100
        assert_equal(got[:2], plain[:2], 2e-5)


def test_layers_that_the_option_does_not_reach(strategy, size):
    images = tf2.ones([2, 4, 4, 3])
    with strategy.scope(sync_batch_norm=True):
        fused = keras.layers.BatchNormalization(name="fused")
        assert fused(images, training=False).shape == images.shape
        virtual = keras.layers.BatchNormalization(virtual_batch_size=1, name="virtual")
        if size > 1:
            with pytest.raises(NotImplementedError, match="'fused' is fused.*fused=False"):
                fused(images, training=True)
            with pytest.raises(NotImplementedError, match="'virtual' has virtual_batch_size=1"):
                virtual(images, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argument", "option"])
def test_batch_normalization_in_a_session(strategy, rank, size, kind):
    def session_of(rank=0, size=1, scope=contextlib.nullcontext, **options):
        with scope(**options), tf.Graph().as_default():
            x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
            hidden = tf.layers.dense(x, 4, kernel_initializer=tf.ones_initializer())
            hidden *= tf.constant([1.0, 2.0, 3.0, 4.0])
            if kind == "argument":
                layer = SYNCHRONIZED["argument"](momentum=0.8)
                hidden, updates = layer(hidden, training=True), layer.updates
            else:
                hidden = tf.layers.batch_normalization(hidden, momentum=0.8, training=True)
                updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            loss = tf.reduce_mean((tf.reduce_sum(hidden, 1, keepdims=True) - y) ** 2)
            train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
            own = part((X, Y), rank, size, BATCH)
            step = BATCH // size
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first in range(0, len(own[0]), step):
                    feeds = {x: own[0][first : first + step], y: own[1][first : first + step]}
                    session.run([train, updates], feeds)
                return session.run(tf.global_variables())

    options = {"sync_batch_norm": True} if kind == "option" else {}
    assert_equal(session_of(rank, size, strategy.scope, **options), session_of(), 1e-5)


def two_towers(embedding_scope=contextlib.nullcontext):
    user, item = (keras.Input([], dtype=tf2.int64) for _ in range(2))
    constant = keras.initializers.Constant
    with embedding_scope():
        user_rows = keras.layers.Embedding(USERS, 4, constant(USER_ROWS))(user)
        item_rows = keras.layers.Embedding(ITEMS, 4, constant(ITEM_ROWS))(item)
    start = keras.initializers.GlorotUniform(3)
    return keras.Model(
        [user, item], [user_rows, keras.layers.Dense(4, None, True, start)(item_rows)]
    )


def loss_against_all_items(model, pairs):
    """Has the items of the whole batch as candidates: the own one is the right one."""
    users, items = model([pairs[:, 0], pairs[:, 1]], training=True)
    context = tf2.distribute.get_replica_context()
    items = context.all_gather(items, axis=0)
    own = tf2.shape(users)[0]
    labels = context.replica_id_in_sync_group * own + tf2.range(own)
    logits = tf2.matmul(users, items, transpose_b=True)
    each = tf2.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf2.reduce_mean(each)


@pytest.mark.parametrize("how", HOW)
def test_candidates_of_all_ranks(strategy, rank, size, how):
    """Losses with in-batch negatives: gradients go to the ranks whose items are candidates."""
    plain = trained(two_towers(), parts(PAIRS), how, loss_against_all_items)
    with strategy.scope():
        model = two_towers(strategy.embedding_scope)
        got = trained(model, parts(PAIRS, rank, size), how, loss_against_all_items)
        assert_equal(got, plain)


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_candidates_of_all_ranks_by_fit(strategy, rank, size, run_eagerly):
    """In Keras's steps, which have a context of their own."""

    class Model(keras.Model):
        def __init__(self, towers):
            super().__init__()
            self.towers = towers

        def call(self, pairs, training=None):
            return self.towers([pairs[:, 0], pairs[:, 1]], training=training)

        def train_step(self, pairs):
            with tf2.GradientTape() as tape:
                loss = loss_against_all_items(self.towers, pairs)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": tf2.distribute.get_replica_context().all_reduce("mean", loss)}

    def fit(rank=0, size=1, scope=contextlib.nullcontext):
        model = Model(two_towers(scope))
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=run_eagerly)
        pairs = part(PAIRS, rank, size, BATCH)
        return model, model.fit(pairs, batch_size=BATCH // size, shuffle=False, verbose=0)

    plain, history = fit()
    with strategy.scope():
        model, logs = fit(rank, size, strategy.embedding_scope)
        assert_equal(model.get_weights(), plain.get_weights())
        assert_equal(logs.history["loss"], history.history["loss"])


@pytest.mark.slow
def test_an_eager_evaluation_in_which_a_rank_is_out_of_data(strategy, rank, size):
    """The step that it takes for the others adds nothing to their statistics."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.bn = SYNCHRONIZED["argument"]()

        def call(self, x, training=None):
            return self.bn(x, training=True)

    own = [X[r::size][: 8 + 4 * (r == 0)] for r in range(size)]  # rank 0 has a batch more
    with strategy.scope():
        model = Model()
        model.compile(run_eagerly=True)
        batches = tf2.data.Dataset.from_tensor_slices(own[rank]).batch(4)
        got = model.predict(batches, verbose=0)
    steps = [np.concatenate([x[k : k + 4] for x in own]) for k in (0, 4, 8)]
    for k, step in zip((0, 4, 8), steps):
        want = (own[rank][k : k + 4] - step.mean(0)) / np.sqrt(step.var(0) + 1e-3)
        np.testing.assert_allclose(got[k : k + 4], want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["argument", "option"])
def test_an_export_has_moving_averages(strategy, rank, size, folder, make):
    options = {"sync_batch_norm": True} if make == "option" else {}
    layer = keras.layers.BatchNormalization if make == "option" else SYNCHRONIZED["argument"]
    with strategy.scope(**options):
        model = normalized(layer)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = part((X, Y), rank, size, BATCH)
        model.fit(x, y, batch_size=BATCH // size, shuffle=False, verbose=0)
        path = strategy.export_saved_model(f"{folder}/export", model=model)
        want = model(X, training=False)
    loaded = tf2.saved_model.load(path).signatures["serving_default"]
    (name,) = loaded.structured_input_signature[1]
    (got,) = loaded(**{name: tf2.constant(X)}).values()
    assert_equal([got], [want], 1e-5)


@pytest.mark.parametrize("how", HOW)
def test_tensors_of_all_ranks(strategy, rank, size, how):
    context = tf2.distribute.get_replica_context()
    with strategy.scope():
        own = tf2.constant(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank)
        rows = tf2.fill([rank + 1, 2], rank)

        def call():
            return (
                context.all_reduce("mean", {"a": own, "b": [own[0, 0], tf2.cast(own, "float64")]}),
                context.all_gather(own, axis=-1),
                context.all_gather([rows, rows > 0], axis=0),
            )

        means, columns, (numbers, flags) = (tf2.function(call) if how == "function" else call)()
        mean = own.numpy() - 10 * rank + 5 * (size - 1)
        assert_equal([means["a"], *means["b"]], [mean, mean[0, 0], mean])
        assert means["b"][1].dtype == tf2.float64
        every = [own.numpy() + 10 * (r - rank) for r in range(size)]
        assert_equal([columns], [np.concatenate(every, 1)])
        want = np.repeat(np.arange(size), np.arange(size) + 1)
        assert numbers.numpy().tolist() == [[r, r] for r in want]
        assert flags.numpy().tolist() == [[bool(r)] * 2 for r in want]
        assert context.replica_id_in_sync_group == rank


def test_a_function_that_another_one_calls(strategy, rank, size):
    with strategy.scope():
        context = tf2.distribute.get_replica_context()
        inner = tf2.function(lambda x: context.all_reduce("mean", x))
        outer = tf2.function(lambda x: 2 * inner(x))
        assert outer(tf2.constant(rank + 1.0)) == size + 1


def test_gradients_of_means(strategy, rank, size):
    """A mean over ranks passes on the mean of the gradients."""
    with strategy.scope():
        context, own = tf2.distribute.get_replica_context(), tf2.constant([rank + 1.0])
        with tf2.GradientTape() as tape:
            tape.watch(own)
            loss = context.all_reduce(tf2.distribute.ReduceOp.MEAN, own) ** 2 * (rank + 1)
        (gradient,) = [tape.gradient(loss, own)]
        mean = (size + 1) / 2
        np.testing.assert_allclose(gradient, [2 * mean * mean])


def test_what_is_refused(strategy, rank, size):
    """By name, on all ranks, which go on."""
    context = tf2.distribute.get_replica_context()
    with strategy.scope():
        x = tf2.constant([1.0])
        if size == 1:
            assert context.all_reduce("sum", x) == 1.0
            return
        with pytest.raises(
            NotImplementedError, match="all_reduce would add up what the ranks have"
        ):
            context.all_reduce(tf2.distribute.ReduceOp.SUM, x)
        slices = tf2.IndexedSlices(x, tf2.constant([0]))
        with pytest.raises(NotImplementedError, match="all_reduce of tf.IndexedSlices"):
            context.all_reduce("MEAN", slices)
        with pytest.raises(ValueError, match="mean of int32"):
            context.all_reduce("mean", tf2.constant([1]))
        for axis, value in ((1, x), (0, x[0])):
            with pytest.raises(ValueError, match=f"all_gather.*axis={axis}"):
                context.all_gather(value, axis)
        layer = SYNCHRONIZED["argument"](name="bn")

        @tf2.function
        def inside(x):
            return tf2.map_fn(lambda row: layer(row[None], training=True)[0], x)

        with pytest.raises(NotImplementedError, match="bn/moments is of all ranks.*in a loop"):
            inside(tf2.ones([2, 3]))
        with pytest.raises(NotImplementedError, match="all_gather is of all ranks.* dataset"):
            tf2.data.Dataset.range(3).map(lambda i: context.all_gather(i[None], 0))
        with pytest.raises(TypeError, match="numbers and no string"):
            context.all_gather(tf2.constant(["a"]), 0)
        virtual = SYNCHRONIZED["argument"](virtual_batch_size=1, name="virtual")
        with pytest.raises(NotImplementedError, match="virtual_batch_size=1.*synchronized=True"):
            virtual(tf2.ones([2, 4, 4, 3]), training=True)

        def jacobian(x):
            with tf2.GradientTape() as tape:
                tape.watch(x)
                y = context.all_reduce("mean", x) ** 2
            return tape.jacobian(y, x)

        for take in (jacobian, tf2.function(jacobian)):
            with pytest.raises(NotImplementedError, match="jacobian"):
                take(tf2.constant([1.0, 2.0]))
        # Of other shapes, or called by one rank only: an error of all, which go on.
        with pytest.raises((ValueError, RankError)):
            SYNCHRONIZED["argument"]()(tf2.ones([2, 3 + rank]), training=True)
        reduced = tf2.function(lambda x: context.all_reduce("mean", x))
        with pytest.raises(RankError, match="all_reduce"):
            reduced(tf2.ones([3, 2] if rank else [2, 3]))
        with pytest.raises(RankError):
            context.all_gather(x, 0) if rank else context.all_reduce("mean", x)
        np.testing.assert_allclose(context.all_gather(x, 0), np.ones(size))


@pytest.mark.slow
def test_an_evaluation_in_which_a_rank_is_out_of_data(strategy, rank, size):
    """It adds nothing to the statistics of the batches that others still have."""
    whole = [np.arange(12.0).reshape(6, 2) ** 2 + r for r in range(size)]
    own = [x[: 4 + 2 * (r == 0)] for r, x in enumerate(whole)]  # rank 0 has a batch more
    with strategy.scope(sync_batch_norm=True, plan="quiet"), tf.Graph().as_default():
        batches = tf.data.Dataset.from_tensor_slices(own[rank].astype(np.float32)).batch(2)
        batch = tf.data.make_one_shot_iterator(batches).get_next()
        switch = tf.placeholder_with_default(True, [])
        out = tf.layers.batch_normalization(batch, training=switch, scale=False, epsilon=1.0)
        mean, update = tf.metrics.mean(tf.square(out))
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    session.run(update)
            got = session.run(mean)
    steps = [np.concatenate([x[k : k + 2] for x in own]) for k in (0, 2, 4)]
    squares = [np.square(x - x.mean(0)) / (x.var(0) + 1.0) for x in steps]
    np.testing.assert_allclose(got, np.concatenate(squares).mean(), rtol=1e-5)
