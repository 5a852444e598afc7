"""Lookups, reads, updates and assignments of a table in a `tf.function`, in the order written."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf2

import collective
from collective.errors import RankError
from collective.ops.graph import graph_state
from collective.strategies.grouped_exchange import GraphGroups
from tests.ranks.keras.models import keras

ROWS, DIM, IDS = 7, 2, 4
START = np.random.default_rng(5).normal(0, 1, (ROWS, DIM)).astype(np.float32)
SOME = np.array([1, 4, 6, 1])


class Program:
    """Has the statements of a function; plain TensorFlow's tables are variables.

    A statement's results are the same on all ranks: rows of ids that all have, and whole tables.
    """

    def __init__(self, embedding_scope=contextlib.nullcontext):
        constant = keras.initializers.Constant
        with embedding_scope():
            self.layer = keras.layers.Embedding(ROWS, DIM, constant(START))
            self.layer.build(None)
            self.averaged = keras.layers.Embedding(ROWS, DIM, "ones")
            self.averaged.build(None)
        self.table, self.average = self.layer.embeddings, self.averaged.embeddings
        self.weight = tf2.Variable([1.5, -0.5])
        self.trained = [self.table, self.weight]
        self.optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        self.optimizer.build(self.trained)
        self.inner = tf2.function(self.shrink)
        self.tape, self.loss = None, None

    def forward(self):
        with tf2.GradientTape() as self.tape:
            self.loss = tf2.reduce_mean((self.layer(self.ids) * self.weight) ** 2)

    def update(self):
        if self.tape is None:
            self.forward()
        gradients = self.tape.gradient(self.loss, self.trained)
        self.optimizer.apply_gradients(zip(gradients, self.trained))
        self.tape = None

    def train(self):
        self.forward()
        self.update()

    def shrink(self):
        self.table.assign(0.5 * self.table, read_value=False)

    def subtract(self):
        self.table.assign_sub(0.25 * self.table, read_value=False)

    def add(self):
        self.table.assign_add(tf2.ones([ROWS, DIM]), read_value=False)

    def clip(self):
        self.table.assign(tf2.clip_by_value(self.table, -0.5, 0.5), read_value=False)

    def move_average(self):
        self.average.assign(0.75 * self.average + 0.25 * self.table, read_value=False)

    def take_average(self):
        self.table.assign(self.average, read_value=False)

    def assign_rows(self):
        """A value that comes of a lookup."""
        rows = tf2.tile(tf2.nn.embedding_lookup(self.table, SOME[:1]), [ROWS, 1])
        self.average.assign(rows, read_value=False)

    def shrink_in_branch(self):
        value = 0.5 * self.table
        if self.chosen > 0:
            self.table.assign(value, read_value=False)

    def shrink_in_function(self):
        self.inner()

    def set_weight(self):
        self.weight.assign(0.5 * self.weight + tf2.reduce_mean(self.table, 0))

    def look_up(self):
        return tf2.nn.embedding_lookup(self.table, SOME)

    def look_up_average(self):
        return self.averaged(SOME)

    def look_up_bags(self):
        bags = tf2.sparse.from_dense(SOME.reshape(2, 2))
        return tf2.nn.embedding_lookup_sparse(self.table, bags, None, combiner="sum")

    def read(self):
        return tf2.convert_to_tensor(self.table)

    def read_average(self):
        return tf2.reduce_sum(self.average, 0)

    def square(self):
        return tf2.nn.l2_loss(self.table)

    def read_weight(self):
        return self.weight.read_value()

    def function(self, statements):
        """Returns a `tf.function` of statements: their results by their places."""

        @tf2.function
        def run(ids, chosen):
            self.ids, self.chosen, self.tape = ids, chosen, None
            results = {}
            for place, name in enumerate(statements.split()):
                result = getattr(self, name)()
                if result is not None:
                    results[f"{place} {name}"] = result
            return results

        return run


def check(strategy, rank, size, programs, steps=2):
    """Holds that functions of statements give what plain TensorFlow gives."""
    random, chosen = np.random.default_rng(1), tf2.constant(1)
    for statements in programs:
        batches = random.integers(0, ROWS, (steps, size, IDS))
        plain = Program()
        run = plain.function(statements)
        want = [run(tf2.constant(batch.reshape(-1)), chosen) for batch in batches]
        with strategy.scope():
            mine = Program(strategy.embedding_scope)
            run = mine.function(statements)
            got = [run(tf2.constant(batch[rank]), chosen) for batch in batches]
            for step, (own, plains) in enumerate(zip(got, want)):
                for place, result in plains.items():
                    name = f"'{statements}', step {step}: {place}"
                    np.testing.assert_allclose(own[place], result, rtol=0, atol=1e-5, err_msg=name)
            for name in ("table", "average", "weight"):
                own, plains = getattr(mine, name).numpy(), getattr(plain, name).numpy()
                title = f"'{statements}': {name}"
                np.testing.assert_allclose(own, plains, rtol=0, atol=1e-5, err_msg=title)


ORDERS = {
    "decay": ["train shrink", "train subtract read", "train shrink look_up look_up_bags"],
    "decay before the update": ["forward shrink update look_up", "forward add update clip read"],
    "box": ["train clip", "clip train look_up"],
    "lookups first": [
        "look_up shrink",
        "look_up_bags add look_up",
        "look_up look_up_bags subtract",
    ],
    "assigned first": [
        "shrink look_up",
        "shrink read",
        "add look_up_bags",
        "subtract train square",
    ],
    "averages": [
        "train move_average look_up_average read_average",
        "look_up_average train move_average take_average look_up",
        "train assign_rows look_up_average shrink",
    ],
    "branches": ["look_up shrink_in_branch look_up", "train shrink_in_branch read"],
    "functions": ["look_up shrink_in_function look_up", "train shrink_in_function read"],
    "replicated": ["train shrink set_weight read_weight look_up", "read set_weight add train"],
    "again": ["train train shrink train look_up", "shrink shrink read train read"],
}
STATEMENTS = sorted(
    name
    for name in vars(Program)
    if not name.startswith("_") and name not in ("function", "forward", "update")
)


@pytest.mark.ranks(1, 3)
@pytest.mark.backends("hb", "sok")
@pytest.mark.parametrize("order", ORDERS)
def test_statements_take_effect_in_the_order_they_are_written(strategy, rank, size, order):
    check(strategy, rank, size, ORDERS[order])


@pytest.mark.slow
@pytest.mark.spread
@pytest.mark.parametrize("seed", range(4))
def test_statements_in_any_order(strategy, rank, size, seed):
    random = np.random.default_rng(seed)
    programs = [" ".join(random.choice(STATEMENTS, 7)) for _ in range(4)]
    check(strategy, rank, size, programs)


def groups_made(function, *args):
    return len(graph_state.of(function.get_concrete_function(*args).graph, GraphGroups).groups)


def test_lookups_that_nothing_lies_between_share_an_exchange(strategy, rank, size):
    ids, chosen = tf2.constant([1, 2, 3, 4]), tf2.constant(1)
    with strategy.scope():
        program = Program(strategy.embedding_scope)
        for statements, exchanges in {
            "look_up look_up_bags look_up_average": 1,
            "look_up shrink look_up look_up_bags": 2,
            "look_up train look_up look_up_average": 2,
        }.items():
            assert groups_made(program.function(statements), ids, chosen) == exchanges, statements


def clipped(embedding_scope):
    """Trains with rows that a lookup clips, after they were written."""
    with embedding_scope():
        table = tf2.compat.v1.get_variable("clipped_then_written", initializer=START)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table])

    @tf2.function
    def step():
        with tf2.GradientTape() as tape:
            rows = tf2.compat.v1.nn.embedding_lookup(table, SOME, max_norm=0.5)
            loss = tf2.reduce_sum(rows * [1.0, 2.0])
        table.assign_add(tf2.ones([ROWS, DIM]), read_value=False)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return rows

    return step(), table.numpy()


def test_a_gradient_is_of_the_rows_that_were_looked_up(strategy, rank, size):
    rows, plain = clipped(contextlib.nullcontext)
    with strategy.scope():
        own_rows, table = clipped(strategy.embedding_scope)
    np.testing.assert_allclose(own_rows, rows, rtol=0, atol=1e-6)
    np.testing.assert_allclose(table, plain, rtol=0, atol=1e-6)


def test_rows_of_open_keys_are_those_of_a_table(strategy, rank, size):
    """Updates and lookups of a dynamic table equal those of a variable."""
    batches = np.random.default_rng(2).integers(0, ROWS, (3, size, IDS))

    def results(layer, own, look_up):
        optimizer = keras.optimizers.SGD(1.0)

        @tf2.function
        def step(ids):
            found = [look_up()]
            for _ in range(2):
                with tf2.GradientTape() as tape:
                    loss = tf2.reduce_mean((layer(ids) + 1.0) ** 2)
                gradients = tape.gradient(loss, layer.trainable_variables)
                optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
                found.append(look_up())
            return found

        return [step(tf2.constant(ids)) for ids in own]

    plain = keras.layers.Embedding(ROWS, DIM, "zeros")
    plain.build(None)
    wanted = results(plain, batches.reshape(3, -1), lambda: plain(SOME))
    with strategy.scope():
        layer = collective.keras.layers.Embedding(DIM, embeddings_initializer="zeros")
        layer.build(None)
        got = results(layer, batches[:, rank], lambda: layer(SOME))
        for own, want in zip(got, wanted):
            np.testing.assert_allclose(np.array(own), np.array(want), rtol=0, atol=1e-5)


class Decaying(keras.Model):
    """Shrinks its table after each update, and returns what it then finds there."""

    def __init__(self, embedding_scope=contextlib.nullcontext):
        super().__init__()
        with embedding_scope():
            self.rows = keras.layers.Embedding(ROWS, DIM, keras.initializers.Constant(START))
            self.rows.build(None)
        self.top = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, ids):
        return self.top(self.rows(ids))

    def train_step(self, batch):
        ids, labels = batch
        with tf2.GradientTape() as tape:
            loss = tf2.reduce_mean((self(ids)[:, 0] - labels) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        table = self.rows.embeddings
        table.assign(0.5 * table, read_value=False)
        return {"loss": loss, "left": tf2.reduce_sum(self.rows(SOME) ** 2)}


def test_fit_of_a_step_that_assigns(strategy, rank, size):
    random = np.random.default_rng(4)
    ids = random.integers(0, ROWS, (5, size, IDS))
    labels = random.normal(0, 1, ids.shape).astype(np.float32)

    def fitted(model, own):
        model.compile(keras.optimizers.Adam(0.1))
        dataset = tf2.data.Dataset.from_tensor_slices(own)
        history = model.fit(dataset, epochs=2, verbose=0).history
        return history, model.get_weights()

    want, weights = fitted(Decaying(), (ids.reshape(5, -1), labels.reshape(5, -1)))
    with strategy.scope():
        model = Decaying(strategy.embedding_scope)
        got, own_weights = fitted(model, (ids[:, rank], labels[:, rank]))
    for name, losses in want.items():
        np.testing.assert_allclose(got[name], losses, rtol=0, atol=1e-5, err_msg=name)
    for own, plain in zip(own_weights, weights):
        np.testing.assert_allclose(own, plain, rtol=0, atol=1e-5)


def test_what_can_not_keep_its_order_is_refused_by_the_tables_name(strategy, rank, size):
    ids = tf2.constant([1, 2])
    with strategy.scope():
        program = Program(strategy.embedding_scope)
        table = program.table
        start = table.numpy()

        @tf2.function
        def by_its_memory():
            rows = tf2.nn.embedding_lookup(table, ids)
            tf2.raw_ops.AssignVariableOp(resource=table.handle, value=tf2.zeros(table.shard_shape))
            return rows

        @tf2.function
        def ids_that_are_written():
            table.assign(0.5 * table, read_value=False)
            return tf2.nn.embedding_lookup(table, tf2.cast(tf2.nn.relu(table[:2, 0]), tf2.int64))

        with pytest.raises(
            NotImplementedError, match="writes the table 'embedding.* two functions"
        ):
            by_its_memory()
        if size > 1:
            with pytest.raises(
                NotImplementedError, match="table 'embedding.*: Ids of a lookup .* two functions"
            ):
                ids_that_are_written()
        np.testing.assert_array_equal(table.numpy(), start)


def test_branches_that_assign_are_those_of_all_ranks(strategy, rank, size):
    ones = tf2.ones([ROWS, DIM])
    with strategy.scope():
        program = Program(strategy.embedding_scope)
        table = program.table

        @tf2.function
        def in_branch(chosen):
            if chosen > 0:
                table.assign_add(ones, read_value=False)

        @tf2.function
        def in_loop(turns):
            for _ in tf2.range(turns):
                table.assign_add(ones, read_value=False)

        @tf2.function
        def update_in_branch(chosen):
            program.ids = tf2.constant([1, 2])
            program.forward()
            gradient = program.tape.gradient(program.loss, table)
            if chosen > 0:
                program.optimizer.apply_gradients([(gradient, table)])

        for function in (in_branch, in_loop):
            for turns in (0, 1):
                function(tf2.constant(turns))
            if size > 1:
                with pytest.raises(RankError, match="depends on .*; rank 1: "):
                    function(tf2.constant(rank))
        np.testing.assert_allclose(table.numpy(), START + 2, rtol=0, atol=1e-6)
        with pytest.raises(NotImplementedError, match="updates the table .* in a branch or a loop"):
            update_in_branch(tf2.constant(1))


@pytest.mark.ranks(1)
def test_rows_are_scattered_in_their_order_on_one_rank(strategy, size):
    """Several ranks refuse a scatter in a function."""
    if size > 1:
        return
    ids, ones = tf2.constant([1, 6]), tf2.ones([2, DIM])

    def results(embedding_scope):
        table = Program(embedding_scope).table

        @tf2.function
        def run():
            found = [tf2.nn.embedding_lookup(table, SOME)]
            table.scatter_add(tf2.IndexedSlices(ones, ids))
            found.append(tf2.nn.embedding_lookup(table, SOME))
            tf2.compat.v1.scatter_update(table, ids, ones)
            found.append(tf2.nn.embedding_lookup(table, SOME))
            table.batch_scatter_update(tf2.IndexedSlices(2 * ones, ids))
            return [*found, table.read_value()]

        return run()

    want = results(contextlib.nullcontext)
    with strategy.scope():
        for own, plain in zip(results(strategy.embedding_scope), want):
            np.testing.assert_array_equal(own, plain)
