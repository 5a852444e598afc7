"""PERSIA's adult-income job: a loader's batches, a slots file, two optimizers, the AUC.

What its page does in a data loader and in an NN worker, on any number of ranks; plain TensorFlow
with one process computes the truth. (The network normalises no batch: a rank has its own.)
"""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from census_income import click_log
from census_income.columns import CATEGORICAL, LABEL, NUMERIC
from collective import yaml_file
from collective.data import Batch
from collective.features import GlobalConfig, Slots
from tests.ranks.dynamic_tables import drawn

pytestmark = [pytest.mark.backends("hb", "sok"), pytest.mark.ranks(1, 2, 3)]
BATCH, TRAIN, TEST, DIM, SEED = 60, 1200, 600, 8, 7
EMBEDDINGS = """
feature_index_prefix_bit: 12
slots_config:
""" + "".join(f"  {name}: {{dim: {DIM}}}\n" for name in CATEGORICAL)
GLOBAL = """
common_config:
  metrics_config: {enable_metrics: false, push_interval_sec: 10}
  job_type: Train
embedding_parameter_server_config: {capacity: 1000000}
"""


def rows_of_log():
    """Returns ids by column, numbers and labels, of training and of test rows."""
    log = click_log.generate(3, TRAIN, TEST)
    names = {name: np.unique(log.train[name]) for name in CATEGORICAL}
    numbers = np.stack([log.train[name] for name in NUMERIC], axis=1)
    mean, deviation = numbers.mean(0), numbers.std(0)
    return [
        (
            {n: np.searchsorted(names[n], rows[n]).astype(np.uint64) for n in CATEGORICAL},
            ((np.stack([rows[n] for n in NUMERIC], axis=1) - mean) / deviation).astype(np.float32),
            rows[LABEL].astype(np.float32),
        )
        for rows in (log.train, log.test)
    ]


def loader(ids, numbers, labels):
    """Yields a loader's batches, as bytes."""
    for first in range(0, len(labels), BATCH):
        part = slice(first, first + BATCH)
        batch = Batch(
            ids={name: of_name[part] for name, of_name in ids.items()},
            dense={"numbers": numbers[part]},
            labels={"income": labels[part]},
            finite=True,
        )
        yield batch.to_bytes()


def network(embedded, numbers):
    """Returns the scores of samples, [B]."""
    rng = np.random.default_rng(5)
    x = tf.concat([*(embedded[name] for name in sorted(CATEGORICAL)), numbers], axis=1)
    for i, width in enumerate((16, 1)):
        size = (int(x.shape[1]), width)
        weights = (rng.normal(size=size) / np.sqrt(size[0])).astype(np.float32)
        x = tf.matmul(x, tf.get_variable(f"kernel_{i}", initializer=weights))
        x = tf.nn.relu(x) if i == 0 else x
    return x[:, 0]


def trained(score, labels, tables):
    """Returns the update: the embeddings' optimizer and the network's own, as in PERSIA."""
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=score))
    dense = [variable for variable in tf.trainable_variables() if "kernel" in variable.name]
    of_tables = tf.train.AdagradOptimizer(1e-2, initial_accumulator_value=1e-2)
    step = tf.train.get_or_create_global_step()
    return tf.group(
        of_tables.minimize(loss, var_list=tables),
        tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step, var_list=dense),
    )


def plain():
    """Returns the AUC of plain TensorFlow, with tables whose rows start alike."""
    (train_ids, *train), (test_ids, *test) = rows_of_log()
    with tf.Graph().as_default():
        bounds = tf.random_uniform_initializer(*collective.EmbeddingConfig().emb_initialization)
        tables = {
            name: tf.get_variable(
                name, initializer=drawn(np.arange(99), name, bounds, DIM), use_resource=True
            )
            for name in CATEGORICAL
        }
        ids = {name: tf.placeholder(tf.int64, [None]) for name in CATEGORICAL}
        numbers = tf.placeholder(tf.float32, [None, len(NUMERIC)])
        labels = tf.placeholder(tf.float32, [None])
        embedded = {name: tf.nn.embedding_lookup(tables[name], ids[name]) for name in ids}
        score = network(embedded, numbers)
        update = trained(score, labels, list(tables.values()))
        auc = tf.metrics.auc(labels, tf.sigmoid(score))

        def run(session, fetch, of_ids, rest, part):
            feed = {ids[name]: of_ids[name][part].astype(np.int64) for name in ids}
            values = [value[part] for value in rest]
            return session.run(fetch, {**feed, **dict(zip((numbers, labels), values))})

        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for first in range(0, TRAIN, BATCH):
                run(session, update, train_ids, train, slice(first, first + BATCH))
            for first in range(0, TEST, BATCH):
                run(session, auc[1], test_ids, test, slice(first, first + BATCH))
            return session.run(auc[0])


@pytest.mark.long
def test_its_auc_is_that_of_one_process(strategy):
    train, test = rows_of_log()
    slots = yaml_file.parse(EMBEDDINGS, "embedding_config.yml", Slots)
    config = yaml_file.parse(GLOBAL, "global_config.yml", GlobalConfig)
    policy = config.policy(collective.EmbeddingConfig())
    assert (policy.capacity, config.mode) == (1_000_000, tf.estimator.ModeKeys.TRAIN)

    def elements(rows):
        stored = list(loader(*rows))
        dataset = Batch.dataset(lambda: map(Batch.from_bytes, stored))
        return dataset.unbatch()

    def model(element):
        embedded = collective.features.embeddings(slots, element["ids"], policy)
        score = network(embedded, element["dense"]["numbers"])
        return score, element["labels"]["income"]

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(SEED)
        samples = collective.data.resumable(elements(train), batch_size=BATCH)
        of_training = tf.data.make_one_shot_iterator(samples).get_next()
        tests = collective.data.resumable(elements(test), batch_size=BATCH, name="test")
        of_test = tf.data.make_initializable_iterator(tests)
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            score, labels = model(of_training)
            update = trained(score, labels, list(collective.features.tables(slots).values()))
            score, labels = model(of_test.get_next())
        value, counted = tf.metrics.auc(labels, tf.sigmoid(score))
        steps = 0
        options = config.session_options()
        with tf.train.MonitoredTrainingSession(**options) as session:
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    session.run(update)
                    steps += 1
                    if steps == TRAIN // BATCH:
                        break
            session.run(of_test.initializer)
            for _ in range(TEST // BATCH):
                session.run(counted)
            auc = session.run(value)
    assert steps == TRAIN // BATCH
    expected = plain()
    assert expected > 0.6
    np.testing.assert_allclose(auc, expected, atol=2e-5)
