"""Slots of PERSIA's file become embeddings, and train, as NumPy computes them in float64."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import yaml_file
from collective.features import Slots
from tests.ranks import reference
from tests.ranks.exports import served, signature

B, RATE, FIRST = 12, 0.5, 0.25
FILE = """
feature_index_prefix_bit: 12
slots_config:
  user:
    dim: 4
  history:
    dim: 4
    sqrt_scaling: true
  clicked:
    dim: 3
  seen:
    dim: 3
    embedding_summation: false
    sample_fixed_size: 3
  bought:
    dim: 2
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 2, embedding_size: 5}
  words:
    dim: 2
    embedding_summation: false
    sample_fixed_size: 2
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 3, embedding_size: 4}
feature_groups:
  items: [seen, clicked]
"""
# The same slots in another order.
REORDERED = """
feature_groups:
  items: [clicked, seen]
slot_configs:
  words:
    dim: 2
    embedding_summation: false
    sample_fixed_size: 2
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 3, embedding_size: 4}
  seen:
    dim: 3
    embedding_summation: false
    sample_fixed_size: 3
  bought:
    dim: 2
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 2, embedding_size: 5}
  clicked:
    dim: 3
  user:
    dim: 4
  history:
    dim: 4
    sqrt_scaling: true
"""
# Ids at both ends of 64 bits, and few, so that they occur again.
IDS = np.array([0, 1, 2, 3, 2**40, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)


def slots(text=FILE):
    return yaml_file.parse(text, "embedding_config.yml", Slots)


def batch(step):
    """Returns the ids of each slot, a list of lists for the samples, and targets in float64."""
    rng = np.random.default_rng([3, step])
    ids = {}
    for name, longest in (("user", 1), ("history", 4), ("clicked", 2), ("seen", 5)):
        ids[name] = [rng.choice(IDS, rng.integers(0, longest + 1)) for _ in range(B)]
    for name in ("bought", "words"):
        ids[name] = [rng.choice(IDS, rng.integers(0, 4)) for _ in range(B)]
    ids["user"] = [rng.choice(IDS, 1) for _ in range(B)]
    targets = {
        name: rng.normal(size=(B, slot.sample_fixed_size, slot.dim))
        if not slot.embedding_summation
        else rng.normal(size=(B, slot.dim))
        for name, slot in slots().slots_config.items()
    }
    return ids, targets


def splitmix(seed, number):
    """Returns the number-th output, from 1, of Steele, Lea and Flood's generator, in integers."""
    x = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


class Model:
    """Computes the embeddings and their training as one process does, in float64."""

    def __init__(self):
        self.rows = collections.defaultdict(dict)

    def parts(self, name, slot, ids):
        """Yields (sample, column or None, table, key, factor) of each row in an embedding."""
        table = "items" if name in ("clicked", "seen") else name
        stack = slot.hash_stack_config
        for sample, of_sample in enumerate(ids):
            raw = not slot.embedding_summation
            of_sample = of_sample[: slot.sample_fixed_size] if raw else of_sample
            rounds = max(1, stack.hash_stack_rounds)
            count = rounds if raw else rounds * len(of_sample)
            factor = max(1, count) ** -0.5 if slot.sqrt_scaling else 1.0
            for column, key in enumerate(map(int, of_sample)):
                for i in range(rounds):
                    row = key
                    if stack.hash_stack_rounds:
                        row = splitmix(key, i + 1) // 2 % stack.embedding_size
                        row += i * stack.embedding_size
                    yield sample, column if raw else None, table, row, factor

    def embeddings(self, ids, config):
        found = {}
        for name, slot in config.slots_config.items():
            length = () if slot.embedding_summation else (slot.sample_fixed_size,)
            found[name] = np.zeros((len(ids[name]), *length, slot.dim))
            for sample, column, table, key, factor in self.parts(name, slot, ids[name]):
                row = self.rows[table].get(key, np.full(slot.dim, FIRST))
                found[name][sample if column is None else (sample, column)] += factor * row
        return found

    def train(self, ids, targets, config):
        """Takes a step of gradient descent on the mean over samples of the squared errors."""
        found = self.embeddings(ids, config)
        gradients = collections.defaultdict(dict)
        for name, slot in config.slots_config.items():
            of_embedding = 2 * (found[name] - targets[name]) / B
            for sample, column, table, key, factor in self.parts(name, slot, ids[name]):
                place = sample if column is None else (sample, column)
                sofar = gradients[table].get(key, 0.0)
                gradients[table][key] = sofar + factor * of_embedding[place]
        for table, of_table in gradients.items():
            for key, gradient in of_table.items():
                row = self.rows[table].get(key, np.full(len(gradient), FIRST))
                self.rows[table][key] = row - RATE * gradient
        return found


def placeholders(config):
    ids = {
        name: tf.ragged.placeholder(tf.uint64, 1, value_shape=[]) for name in config.slots_config
    }
    return ids, {name: tf.placeholder(tf.float32) for name in config.slots_config}


def ragged(rows):
    values = np.concatenate([*rows, np.zeros(0, np.uint64)]).astype(np.uint64)
    return tf.ragged.RaggedTensorValue(values, np.cumsum([0, *map(len, rows)]).astype(np.int64))


def fed(places, values, rank, size):
    feeds = {}
    for place, value in zip(places, values):
        for name, of_name in value.items():
            mine = reference.part(of_name, rank, size)
            feeds[place[name]] = ragged(mine) if isinstance(of_name, list) else mine
    return feeds


def graph(config):
    """Returns placeholders, embeddings, the update and tables."""
    places = placeholders(config)
    policy = collective.TablePolicy(initializer=tf.constant_initializer(FIRST))
    found = collective.features.embeddings(config, places[0], policy)
    loss = 0.0
    for name, slot in config.slots_config.items():
        rows = found[name] if slot.embedding_summation else found[name].rows
        squares = tf.reduce_sum(tf.square(rows - places[1][name]))
        loss += squares / tf.cast(tf.shape(rows)[0], tf.float32)
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(RATE).minimize(loss, global_step=step)
    return places, found, train, collective.features.tables(config)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.backends("hb", "sok")
def test_embeddings_and_their_training_are_those_of_one_process(strategy, rank, size):
    config, model = slots(), Model()
    with strategy.scope(), tf.Graph().as_default():
        places, found, train, tables = graph(config)
        assert list(tables) == ["bought", "history", "items", "user", "words"]
        assert list(found) == sorted(config.slots_config)
        with tf.train.MonitoredTrainingSession() as session:
            for step in range(4):
                ids, targets = batch(step)
                feeds = fed(places, (ids, targets), rank, size)
                got, _ = session.run([found, train], feeds)
                compare(got, model.train(ids, targets, config), ids, rank, size, config)
            ids, targets = batch(9)
            got = session.run(found, fed(places, (ids, targets), rank, size))
            kept = {name: dict(rows) for name, rows in model.rows.items()}
            assert all(kept.values())
            compare(got, model.embeddings(ids, config), ids, rank, size, config)


def compare(got, want, ids, rank, size, config):
    for name, slot in config.slots_config.items():
        expected = reference.part(want[name], rank, size)
        rows = got[name]
        if not slot.embedding_summation:
            rows, mask = got[name]
            lengths = [len(of) for of in reference.part(ids[name], rank, size)]
            expected_mask = np.arange(slot.sample_fixed_size) < np.array(lengths)[:, None]
            np.testing.assert_array_equal(mask, expected_mask, err_msg=name)
            assert mask.dtype == bool
        assert rows.dtype == np.float32 and rows.shape == expected.shape
        np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.ranks(1, 2)
@pytest.mark.either_backend
def test_the_order_of_the_file_changes_nothing(strategy, rank, size, folder):
    """A checkpoint of one order is restored with the other one, and the numbers are the same."""
    results = []
    for text, steps in ((FILE, range(3)), (REORDERED, ())):
        config = slots(text)
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            places, found, train, tables = graph(config)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for step in steps:
                    session.run(train, fed(places, batch(step), rank, size))
                if steps:
                    saver.save(session, f"{folder}/model", global_step=3)
                else:
                    saver.restore(session, f"{folder}/model-3")
                results.append(session.run(found, fed(places, batch(2), rank, size)))
    assert list(results[0]) == list(results[1])
    for name in results[0]:
        tf.nest.map_structure(np.testing.assert_array_equal, results[0][name], results[1][name])


@pytest.mark.slow
@pytest.mark.ranks(1, 2)
@pytest.mark.either_backend
def test_tensorflow_alone_serves_them(strategy, rank, size, folder):
    """An export looks up and hashes as training does; all slots, of uint64 ids."""
    config, model = slots(), Model()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        places, _, train, _ = graph(config)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(4):
                ids, targets = batch(step)
                session.run(train, fed(places, (ids, targets), rank, size))
                model.train(ids, targets, config)
            prefix = tf.train.Saver().save(session, f"{folder}/model")

    def build():
        inputs, features = {}, {}
        for name in config.slots_config:
            values = tf.placeholder(tf.uint64, [None])
            splits = tf.placeholder(tf.int64, [None])
            inputs |= {f"{name}/values": values, f"{name}/splits": splits}
            features[name] = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        outputs = {}
        for name, found in collective.features.embeddings(config, features).items():
            outputs[name] = found if config.slots_config[name].embedding_summation else found.rows
        return inputs, outputs

    with strategy.scope(plan="quiet"):
        path = strategy.export_saved_model(f"{folder}/served", prefix, signature(strategy, build))
    ids, _ = batch(9)
    feeds = {}
    for name, rows in ids.items():
        value = ragged(rows)
        feeds |= {f"{name}/values": value.values, f"{name}/splits": value.row_splits}
    got, want = served(path, feeds), model.embeddings(ids, config)
    assert set(got) == set(want)
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.ranks(1, 2)
@pytest.mark.either_backend
def test_ids_come_in_any_form(strategy, rank, size):
    """Tensors, ragged and sparse ones, of any integer type: the same ids are the same rows."""
    text = "slots_config:\n" + "".join(f"  {name}: {{dim: 3}}\n" for name in "abcdef")
    config = slots(text + "feature_groups: {all: [a, b, c, d, e, f]}")
    ids = np.array([[7, 8], [9, 7]])
    with strategy.scope(), tf.Graph().as_default():
        forms = {
            "a": tf.constant(ids, tf.int64),
            "b": tf.constant(ids, tf.int32),
            "c": tf.ragged.constant(ids.tolist(), dtype=tf.uint64),
            "d": tf.sparse.from_dense(tf.constant(ids, tf.int64)),
            "e": tf.ragged.constant(ids.tolist(), dtype=tf.int32, row_splits_dtype=tf.int32),
            "f": tf.SparseTensorValue([[0, 1], [0, 5], [1, 0], [1, 3]], ids.ravel(), [2, 9]),
        }
        found = collective.features.embeddings(config, forms)
        singles = slots("slots_config: {all: {dim: 3}}")
        single = collective.features.embeddings(singles, {"all": tf.constant([7, 8, 9, -1])})["all"]
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(single[:3]))
        with tf.train.MonitoredTrainingSession("") as session:
            rows, _ = session.run([single, train])
            got = session.run(found)
    assert len(np.unique(rows[:3])) == 9
    for name, value in got.items():
        expected = [rows[0] + rows[1], rows[2] + rows[0]]
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)
