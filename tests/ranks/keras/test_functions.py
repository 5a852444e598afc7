"""A loop of `tf.function` and `tf.GradientTape` on tables equals plain Keras in one process."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

from collective.errors import RankError, TableError
from collective.tables.traced_lookups import lookups_in
from tests.ranks import grouped
from tests.ranks.keras.models import (
    BATCH,
    USER_ROWS,
    batches,
    compare,
    data,
    dataset,
    keras,
    loss_of,
    make_model,
    part,
    train_step,
    weights_of,
)

pytestmark = pytest.mark.double

new, legacy = keras.optimizers, keras.optimizers.legacy
OPTIMIZERS = {
    "Adagrad": lambda: new.Adagrad(0.05),
    "Adam": lambda: new.Adam(0.003),
    "SGD": lambda: new.SGD(0.05, momentum=0.9),
    "Ftrl": lambda: new.Ftrl(0.05),
    "RMSprop": lambda: new.RMSprop(0.003, momentum=0.5),
    "AdamW": lambda: new.AdamW(0.003, use_ema=True, ema_overwrite_frequency=7),
    "Adamax": lambda: new.Adamax(0.01),
    # XLA, which Keras takes on a GPU, traces it less often, and with that its numbers change.
    "Nadam": lambda: new.Nadam(0.003, jit_compile=False),
    "Adadelta": lambda: new.Adadelta(0.5),
    "Lion": lambda: new.Lion(0.001),
    "legacy Adagrad": lambda: legacy.Adagrad(0.05),
    "legacy Adam": lambda: legacy.Adam(0.003, amsgrad=True),
    "legacy SGD": lambda: legacy.SGD(0.05, momentum=0.9),
    "legacy Ftrl": lambda: legacy.Ftrl(0.05),
}
CLIPPED = {
    "global_clipnorm": lambda: new.Adagrad(0.05, global_clipnorm=0.05),
    "clipnorm": lambda: new.SGD(0.5, clipnorm=0.02),
    "clipvalue": lambda: new.SGD(0.5, clipvalue=0.01),
    "legacy global_clipnorm": lambda: legacy.SGD(0.5, global_clipnorm=0.05),
}


def equals(strategy, rank, size, optimizer, dense=False):
    """Trains both; those of plain Keras may have gradients whose rows are summed up first."""
    arrays, plain = data(), make_model()
    step = train_step(plain, optimizer(), dense)
    for batch in batches(arrays):
        step(*batch)
    with strategy.scope():
        model, on_ranks = make_model(strategy.embedding_scope), optimizer()
        step = train_step(model, on_ranks)
        for batch in batches(part(arrays, rank, size), size):
            loss = step(*batch)
    assert np.isfinite(loss.numpy())
    assert int(on_ranks.iterations.numpy()) == len(batches(arrays))
    compare(model, plain, rank, size)


@pytest.mark.either_backend
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("optimizer", ["Adagrad", "legacy Adam"])
def test_a_loop_equals_one_process(strategy, rank, size, optimizer):
    equals(strategy, rank, size, OPTIMIZERS[optimizer])


@pytest.mark.matrix
@pytest.mark.either_backend
@pytest.mark.parametrize(
    "optimizer", [x for x in OPTIMIZERS if x not in ("Adagrad", "legacy Adam")]
)
def test_every_optimizer_equals_one_process(strategy, rank, size, optimizer):
    equals(strategy, rank, size, OPTIMIZERS[optimizer])


@pytest.mark.matrix
@pytest.mark.either_backend
@pytest.mark.parametrize("optimizer", CLIPPED)
def test_clipping_counts_every_row_once(strategy, rank, size, optimizer):
    equals(strategy, rank, size, CLIPPED[optimizer], dense=True)


def test_a_function_may_build_the_optimizer(strategy, rank, size):
    def trained(model, arrays, ranks=1):
        optimizer = new.Adam(0.003)
        train = train_step(model, optimizer)

        @tf2.function
        def step(*batch):
            optimizer.build(model.trainable_variables)
            return train(*batch)

        for batch in batches(arrays, ranks)[:3]:
            step(*batch)
        return model

    arrays = data()
    plain = trained(make_model(), arrays)
    with strategy.scope():
        own = part(arrays, rank, size)
        model = trained(make_model(strategy.embedding_scope), own, size)
    compare(model, plain, rank, size)


@pytest.mark.slow
def test_a_refused_call_changes_nothing(strategy, rank, size):
    """An id outside of its table, other functions, an end of data: on all ranks or on none."""
    mine = batches(part(data(), rank, size), size)
    with strategy.scope():
        model, optimizer = make_model(strategy.embedding_scope), new.Adam(0.01)
        step = train_step(model, optimizer)
        look_up = tf2.function(lambda users, words: model([users, words]))

        @tf2.function
        def step_from(iterator):
            users, words, labels = next(iterator)
            with tf2.GradientTape() as tape:
                loss = loss_of(model, users, words, labels)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for batch in mine[:3]:
            step(*batch)
        before = weights_of(model, rank, size)
        users, words, labels = mine[3]
        if rank == size - 1:
            users = users + 77
        with pytest.raises(
            tf2.errors.InvalidArgumentError,
            match=r"is not in \[0, 50\)" + (rf".*rank {size - 1}" if size > 1 else ""),
        ):
            step(users, words, labels)
        if size > 1:
            with pytest.raises(RankError, match="The ranks do not run the same.*function 'step'"):
                look_up(*mine[3][:2]) if rank == 0 else step(*mine[3])
        assert int(optimizer.iterations.numpy()) == 3
        for was, now in zip(before, weights_of(model, rank, size)):
            np.testing.assert_array_equal(now, was)

        own = mine[: 5 + rank]  # rank 0 has the fewest
        steps = iter(tf2.data.Dataset.from_tensor_slices(tuple(tf2.stack(x) for x in zip(*own))))
        taken = 0
        with pytest.raises(tf2.errors.OutOfRangeError):
            while True:
                step_from(steps)
                taken += 1
        assert (taken, int(optimizer.iterations.numpy())) == (5, 8)
        step(*mine[3])
        assert int(optimizer.iterations.numpy()) == 9


def test_several_tapes_and_gradients_of_tensors(strategy, rank, size):
    """A table that two losses use, and inputs' gradients, which are each rank's own."""
    mine, arrays = batches(part(data(), rank, size), size), batches(data())

    def trained(model, own):
        optimizer = new.SGD(0.1)

        @tf2.function
        def step(users, words, labels):
            with tf2.GradientTape(persistent=True) as tape:
                scores = model([users, words])
                first = tf2.reduce_mean(scores**2)
                second = tf2.reduce_mean((model([users, words[:, ::-1]])[:, 0] - labels) ** 2)
            one = tape.gradient(first, model.trainable_variables)
            two = tape.gradient(second, model.trainable_variables)
            optimizer.apply_gradients(zip(one, model.trainable_variables))
            optimizer.apply_gradients(zip(two, model.trainable_variables))
            with tf2.GradientTape() as other:
                other.watch(labels)
                penalty = tf2.reduce_sum(labels**2)
            return other.gradient(penalty, labels)

        for batch in own:
            np.testing.assert_array_equal(step(*batch), 2 * batch[2])
        return model

    plain = trained(make_model(), arrays[:5])
    with strategy.scope():
        model = trained(make_model(strategy.embedding_scope), mine[:5])
    compare(model, plain, rank, size)


REFUSED = {
    "in a branch": "in a branch, a loop or a function",
    "in another function": "The concrete function .* is called inside another tf.function",
    "in a nested branch": "in a branch, a loop or a function",
    "in a tape": "A tf.GradientTape outside of the function",
    "whole rows": "Adafactor may compute something of all rows",
    "levels": "Ids of a lookup depend on the rows of another lookup",
    "in a function": "is made inside a tf.function",
    "zeros": "leave the argument out",
}


def test_what_is_not_possible_is_refused_by_name(strategy, rank, size):
    """Each before anything has changed, on all ranks alike."""
    ids = tf2.constant([1, 2], tf2.int64)
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(5, 2)
            layer.build([None])
        table = layer.embeddings
        look_up = tf2.function(lambda: tf2.reduce_sum(tf2.nn.embedding_lookup(table, ids)))
        look_up()

        def branch():
            return tf2.cond(ids[0] > 0, lambda: layer(ids), lambda: layer(ids + 1))

        def in_tape():
            with tf2.GradientTape():
                look_up()

        def by_adafactor():
            optimizer = adafactor
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_sum(layer(ids))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        def zeros():
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_sum(layer(ids))
            return tape.gradient(loss, table, unconnected_gradients="zero")

        def two_levels():
            rows = layer(ids)
            return layer(tf2.cast(rows[:, 0] > 0, tf2.int64))

        def make():
            with strategy.embedding_scope():
                return tf2.compat.v1.get_variable("inside", [3, 2])

        adafactor = new.Adafactor(0.1)
        ways = {
            "in a branch": tf2.function(branch),
            "in another function": tf2.function(look_up.get_concrete_function()),
            "in a nested branch": tf2.function(lambda: tf2.function(branch)()),
            "in a tape": in_tape,
            "whole rows": tf2.function(by_adafactor),
            "levels": tf2.function(two_levels),
            "in a function": tf2.function(make),
            "zeros": tf2.function(zeros),
        }
        for name, way in ways.items():
            if size == 1 and name in ("in another function", "in a tape", "levels"):
                continue
            with pytest.raises(
                (NotImplementedError, RuntimeError, TableError), match=REFUSED[name]
            ):
                way()
        look_up()


def nested_step(model, optimizer):
    """Returns what has a step that calls functions, which AutoGraph converts, and call others."""

    @tf2.function
    def scores(users, words):
        total = model([users, words], training=True)[:, 0]
        for _ in range(2):
            total = total / 2
        if len(users.shape) > 3:
            total = None
        return total

    @tf2.function
    def loss_and_gradients(users, words, labels):
        with tf2.GradientTape() as tape:
            loss = tf2.reduce_mean((scores(users, words) - labels) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    class Trainer(tf2.Module):
        @tf2.function
        def inner(self, *batch):
            loss, gradients = loss_and_gradients(*batch)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        @tf2.function
        def step(self, *batch):
            return self.inner(*batch)

    return Trainer(), scores


@pytest.mark.slow
def test_functions_in_functions_and_lookups_without_one(strategy, rank, size):
    """What a layer's own tf.function computes; answers of a model that is called eagerly."""
    arrays, plain = data(), make_model()
    plain_trainer, _ = nested_step(plain, new.Adam(0.01))
    for batch in batches(arrays)[:6]:
        plain_trainer.step(*batch)
    mine = batches(part(arrays, rank, size), size)
    with strategy.scope():
        model = make_model(strategy.embedding_scope)
        trainer, scores = nested_step(model, new.Adam(0.01))
        for number, batch in enumerate(mine[:6]):
            trainer.step(*batch)
            if number == 2:
                scores(*batch[:2])  # called by eager code, too
        compare(model, plain, rank, size)
        users, words, _ = mine[7]
        users, words = users[: 2 + rank], words[: 2 + rank]
        want = plain([users, words])
        for _ in range(2):
            np.testing.assert_allclose(model([users, words]), want, rtol=0, atol=1e-6)
        table = model.trainable_variables[0]
        ids, rows = tf2.constant([[rank, 3]]), plain.trainable_variables[0].numpy()
        np.testing.assert_allclose(tf2.gather(table, ids), rows[[[rank, 3]]], atol=1e-6)
        bags, weights = tf2.sparse.from_dense([[rank + 1, 0], [2, 4]]), [1.0, 2.0, 4.0]
        pooled = tf2.nn.embedding_lookup_sparse(
            table, bags, tf2.SparseTensor(bags.indices, weights, bags.dense_shape), combiner="sum"
        )
        np.testing.assert_allclose(
            pooled, [rows[rank + 1], 2 * rows[2] + 4 * rows[4]], rtol=0, atol=1e-5
        )
        with pytest.raises(tf2.errors.InvalidArgumentError, match=r"id 50 is not in \[0, 30\)"):
            tf2.gather(table, tf2.constant([50 if rank == 0 else 1]))


def test_a_loss_sees_only_the_value_of_an_inner_function(strategy, rank, size):
    """Keras takes the logits of a sigmoid that it sees. Of a function it clips the probability."""

    def trained(embedding_scope, ids):
        with embedding_scope():
            layer = keras.layers.Embedding(
                4, 1, embeddings_initializer=keras.initializers.Constant(20.0)
            )
            layer.build([None])
        optimizer, loss_of = new.SGD(1.0), keras.losses.BinaryCrossentropy()

        @tf2.function
        def call(ids):
            return keras.activations.sigmoid(layer(ids)[:, 0])

        @tf2.function
        def step(ids):
            with tf2.GradientTape() as tape:
                loss = loss_of(tf2.zeros_like(ids), call(ids))
            optimizer.apply_gradients(zip(tape.gradient(loss, layer.weights), layer.weights))
            return loss

        return step(tf2.constant(ids)).numpy(), layer.get_weights()[0]

    want = trained(contextlib.nullcontext, [1, 2])
    with strategy.scope():
        got = trained(strategy.embedding_scope, [1, 2])
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_a_function_that_gets_gradients_and_applies_them(strategy, rank, size, dense):
    """It becomes a part of the function that calls it, as one that takes gradients does."""

    def trained(arrays, size, *scope):
        model, optimizer = make_model(*scope), new.Adam(0.003)

        @tf2.function
        def apply(gradients):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        @tf2.function
        def step(users, words, labels):
            with tf2.GradientTape() as tape:
                loss = loss_of(model, users, words, labels)
            gradients = tape.gradient(loss, model.trainable_variables)
            apply([tf2.convert_to_tensor(x) for x in gradients] if dense else gradients)

        for batch in batches(arrays, size):
            step(*batch)
        return model

    plain = trained(data(), 1)
    with strategy.scope():
        model = trained(part(data(), rank, size), size, strategy.embedding_scope)
        compare(model, plain, rank, size)


def test_a_table_as_one_value_without_a_function(strategy):
    """Operations of TensorFlow that read a variable by its handle get all rows, not a shard's."""
    values = np.arange(14, dtype=np.float32).reshape(7, 2)
    with strategy.scope():
        with strategy.embedding_scope():
            table = tf2.compat.v1.get_variable("as_one_value", initializer=values)
        np.testing.assert_array_equal(tf2.square(table), np.square(values))
        np.testing.assert_array_equal(tf2.reduce_sum(table, 0), values.sum(0))
        np.testing.assert_array_equal(tf2.matmul(table, table, transpose_b=True), values @ values.T)
        np.testing.assert_array_equal(table + 1.0, values + 1)
        np.testing.assert_allclose(tf2.nn.l2_loss(table), np.square(values).sum() / 2)


def test_rows_are_changed_by_their_ids_without_a_function(strategy, rank, size):
    """All ranks pass the same ids and rows; what differs, or is outside, changes nothing."""
    values = np.arange(14, dtype=np.float32).reshape(7, 2)
    ids, rows = tf2.constant([5, 0, 3]), tf2.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def change(variable):
        variable.scatter_update(tf2.IndexedSlices(rows, ids))
        variable.scatter_add(tf2.IndexedSlices(rows, ids))
        variable.scatter_nd_update(ids[:2, None], 3 * rows[:2])
        tf2.compat.v1.scatter_sub(variable, [[2, 2]], 1.5)
        variable.assign_add(2 * values)

    plain = tf2.Variable(values)
    change(plain)
    with strategy.scope():
        with strategy.embedding_scope():
            table = tf2.compat.v1.get_variable("scattered", initializer=values)
        change(table)
        np.testing.assert_array_equal(table.numpy(), plain.numpy())
        if size > 1:  # TensorFlow adds the first row before it finds the second id.
            with pytest.raises(tf2.errors.InvalidArgumentError, match=r"id 7 is not in \[0, 7\)"):
                table.scatter_add(tf2.IndexedSlices(rows, [1, 7, 2]))
            with pytest.raises(ValueError, match="ranks 0 and 1 give different ids or rows"):
                table.scatter_add(tf2.IndexedSlices(rows + rank, ids))
            with pytest.raises(NotImplementedError, match="assign in a tf.function returns"):
                tf2.function(lambda: table.assign(values))()
            with pytest.raises(TableError, match="or a function is not supported"):
                tf2.function(
                    lambda: table.scatter_add(tf2.IndexedSlices(rows, ids)), autograph=False
                )()

        @tf2.function
        def add():
            table.assign_add(values, read_value=False)

        add()
        np.testing.assert_array_equal(table.numpy(), plain.numpy() + values)


@pytest.mark.slow
@pytest.mark.either_backend
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "SGD"])
def test_squares_of_tables_move_no_rows(strategy, rank, size, optimizer):
    """A table is looked up and squared twice, another one squared only, by factors of the data."""
    (users, _), labels = data()

    def train(embedding_scope, arrays, batch):
        with embedding_scope():
            tables = [
                tf2.compat.v1.get_variable(f"squared{k}", initializer=USER_ROWS * k) for k in (1, 2)
            ]
        update, lookups = OPTIMIZERS[optimizer](), set()

        @tf2.function
        def step(users, labels):
            with tf2.GradientTape() as tape:
                squares = [tf2.nn.l2_loss(table) for table in (*tables, tables[0])]
                factor = tf2.reduce_mean(labels)
                loss = tf2.reduce_mean((tf2.gather(tables[0], users) - labels[:, None]) ** 2)
                loss += 0.01 * squares[0] + 0.02 * factor * squares[1] + 0.03 * factor * squares[2]
            update.apply_gradients(zip(tape.gradient(loss, tables), tables))
            lookups.add(len(lookups_in(tf2.compat.v1.get_default_graph())))
            return loss

        losses = [step(*each) for each in dataset(arrays, batch)]
        return lookups, tables, np.array(losses)

    _, want, losses = train(contextlib.nullcontext, (users, labels), BATCH)
    with strategy.scope():
        own = part((users, labels), rank, size)
        lookups, got, own_losses = train(strategy.embedding_scope, own, BATCH // size)
        assert lookups == {1}
        for table, plain in zip(got, want):
            np.testing.assert_allclose(table.numpy(), plain.numpy(), rtol=0, atol=1e-6)
    means = np.mean(grouped.everyone(own_losses.tolist()), axis=0)
    np.testing.assert_allclose(means, losses, rtol=1e-5)


def test_a_function_that_was_traced_outside_trains_nothing_in_the_scope(strategy, size):
    """Its gradients are of one rank; what updates no variable may be called."""
    weight, optimizer = tf2.Variable(2.0), new.SGD(0.1)
    optimizer.build([weight])

    @tf2.function
    def train():
        with tf2.GradientTape() as tape:
            loss = weight**2
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    double = tf2.function(lambda: 2 * weight)
    train()
    np.testing.assert_allclose(double(), 3.2, rtol=1e-6)
    with strategy.scope():
        if size == 1:
            train()
        else:
            with pytest.raises(NotImplementedError, match="was traced outside of .* 'Variable:0'"):
                train()
        np.testing.assert_allclose(double(), 2 * weight.numpy())
    np.testing.assert_allclose(weight.numpy(), 1.28 if size == 1 else 1.6, rtol=1e-6)
    train()


def test_a_lookup_in_a_datasets_function_is_refused(strategy, rank, size):
    """Of whatever kind it is; the dataset is no part of the function that trains with it."""
    ids = tf2.data.Dataset.range(6).batch(2)
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(20, 3, embeddings_initializer="ones")
            layer.build([None])
        table = layer.embeddings
        in_function = tf2.function(lambda x: tf2.reduce_sum(layer(x)))
        for look_up in (
            layer,
            in_function,
            lambda x: tf2.cond(x[0] > 0, lambda: in_function(x), lambda: 0.0),
            lambda x: tf2.gather(table, x),
        ):
            with pytest.raises(NotImplementedError, match=r"in a function of a tf.data.Dataset"):
                ids.map(look_up)

        # What it lifts out of its graph is none of it.
        def with_a_table_of_words(x):
            with tf2.init_scope():
                first = layer(tf2.constant([1]))
            return tf2.cast(x, tf2.float32) + first[0, 0]

        (batch,) = ids.map(with_a_table_of_words).take(1)
        np.testing.assert_array_equal(batch, [1, 2])
        mapped = iter(ids.map(lambda x: x + 1))
        assert float(tf2.function(lambda: tf2.reduce_sum(layer(next(mapped))))()) == 6
        assert float(in_function(tf2.constant([rank, 2]))) == 6


def test_a_lookup_in_a_datasets_function_of_a_graph_is_refused(strategy):
    v1 = tf2.compat.v1
    with strategy.scope(), v1.Graph().as_default():
        with strategy.embedding_scope():
            static = v1.get_variable("static", [20, 3])
            dynamic = v1.get_variable("dynamic", [None, 3])
        ids = v1.data.Dataset.range(6).batch(2)
        for look_up in (
            lambda x: tf2.gather(static, x),
            lambda x: tf2.nn.embedding_lookup(dynamic, x),
            lambda x: tf2.cond(x[0] > 0, lambda: tf2.gather(static, x), lambda: tf2.zeros([2, 3])),
        ):
            with pytest.raises(NotImplementedError, match=r"in a function of a tf.data.Dataset"):
                ids.map(look_up)
        batch = v1.data.make_one_shot_iterator(ids.map(lambda x: x + 1)).get_next()
        rows = tf2.gather(static, batch)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert session.run(rows).shape == (2, 3)


def test_a_lookup_in_a_py_function_is_refused(strategy, rank, size):
    """Its thread would wait for the call that waits for it."""
    ids = tf2.constant([1, 2])
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(20, 3, embeddings_initializer="ones")
            layer.build([None])

        @tf2.function
        def both(ids):
            inside = tf2.py_function(lambda x: tf2.reduce_sum(layer(x)), [ids], tf2.float32)
            return tf2.reduce_sum(layer(ids)) + inside

        if size == 1:
            assert float(both(ids)) == 12
        else:
            with pytest.raises(tf2.errors.UnimplementedError, match="in a tf.py_function"):
                both(ids)
        assert float(tf2.reduce_sum(layer(ids))) == 6


def test_what_ranks_assign_without_a_function_is_compared(strategy, rank):
    """Each rank keeps its own rows of a whole value."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    with strategy.scope():
        with strategy.embedding_scope():
            layer = keras.layers.Embedding(6, 2)
            layer.build([None])
        layer.set_weights([values])
        with pytest.raises(ValueError, match="ranks 0 and 1 give different values"):
            layer.set_weights([values + rank])
        with pytest.raises(ValueError, match="ranks 0 and 1 give different values"):
            layer.embeddings.assign(values.reshape(3, 4) if rank else values)
        with pytest.raises(RankError, match="Rank 1: assign_add of the table"):
            layer.embeddings.assign_add(values) if rank else layer.set_weights([values + 1])
        np.testing.assert_array_equal(layer(tf2.range(6)), values)
