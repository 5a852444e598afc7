"""The metrics that a job serves are those of all ranks; few steps pay anything for them."""

import os
import urllib.request

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from prometheus_client.parser import text_string_to_metric_families

import collective
from collective.coordination import milestones
from collective.job.metrics_address import VARIABLE
from collective.monitoring import job_metrics, metrics_endpoint, step_meter
from tests.ranks import reference
from tests.ranks.estimators import few_metrics, made, plain, records, told

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
B = 8


@pytest.fixture
def scrape(monkeypatch, capfd, rank):
    """Returns a function that reads what rank 0 serves: {name: {labels: value}}; {} elsewhere."""
    monkeypatch.setenv(VARIABLE, "127.0.0.1:0")
    monkeypatch.setattr(step_meter, "_meters", {})
    monkeypatch.setattr(job_metrics, "_metrics", {})
    monkeypatch.setattr(metrics_endpoint, "_served", {})
    monkeypatch.setattr(milestones, "_posters", {os.getpid(): milestones.MilestonePoster({})})
    monkeypatch.setattr(step_meter, "FIRST", 3)
    address = []

    def scrape():
        said = capfd.readouterr().err
        if "metrics are at " in said:
            address[:] = [said.partition("metrics are at ")[2].split()[0]]
        if rank > 0:
            assert not address
            return {}
        text = urllib.request.urlopen(address[0], timeout=20).read().decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = {}
        for sample in samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found

    return scrape


def ids_of(rank):
    return np.random.default_rng(rank).integers(0, 50, (B, 3))


def train(strategy, rank, steps, **options):
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", 50, 4)
            dynamic = tf.get_variable("d", [None, 2], initializer=tf.ones_initializer())
        ids = tf.constant(ids_of(rank))
        rows = [tf.nn.embedding_lookup(x, tf.identity(ids)) for x in (table, dynamic)]
        loss = sum(tf.reduce_mean(tf.square(tf.reduce_sum(x, [1, 2]) - 1)) for x in rows)
        step = tf.train.get_or_create_global_step()
        op = tf.train.AdagradOptimizer(0.1).minimize(loss, step)
        with tf.train.MonitoredTrainingSession() as session:
            for _ in range(steps):
                session.run(op)


@pytest.mark.grouped
def test_the_numbers_of_a_step_are_those_of_all_ranks(strategy, rank, size, scrape, monkeypatch):
    monkeypatch.setattr(step_meter, "PERIOD", 0.0)
    train(strategy, rank, 7)
    found = scrape()
    if rank > 0:
        return
    assert found["collective_ranks"] == {(): size}
    assert found["collective_steps_total"] == found["collective_global_step"] == {(): 7}
    assert found["collective_samples_total"] == {(): 7 * B * size}
    assert found["collective_samples_per_second"][()] > 0
    distinct = len(np.unique([ids_of(r) for r in range(size)]))
    assert found["collective_table_rows"] == {("t",): 50, ("d",): distinct}
    phases = found["collective_phase_seconds"]
    assert sum(phases.values()) == pytest.approx(found["collective_step_seconds"][()], rel=1e-4)
    assert {("dense",), ("lookup",), ("between runs",)} <= set(phases)
    if size > 1:
        keys = sum(len(np.unique(ids_of(r))) for r in range(size))
        sent = found["collective_exchanged_bytes"]
        # Each distinct key of a rank brings a row of 4 and one of 2 numbers, in 4 bytes each.
        if os.environ.get("COLLECTIVE_STRATEGY", "hb") == "hb":
            assert sent[("rows",)] == sent[("gradients",)] == keys * 6 * 4


def test_most_steps_exchange_nothing_more(strategy, rank, size, scrape, monkeypatch):
    """Of 30 runs, one is measured: the others meet as often as without metrics."""
    measured = []
    exchange = step_meter.barrier.exchange
    monkeypatch.setattr(
        step_meter.barrier,
        "exchange",
        lambda session, name, payload: measured.append(name) or exchange(session, name, payload),
    )
    train(strategy, rank, 30)
    assert [n for n in measured if "metrics" in n] == ["puts together the metrics of step 3"]
    scrape()


def test_a_profile_and_metrics_measure_the_same_run(strategy, rank, size, scrape, folder):
    train(strategy, rank, 5, profile=folder, profile_steps=(2, 4))
    found = scrape()
    told()
    assert os.path.exists(os.path.join(folder, f"rank_{rank}.trace.json"))
    if rank == 0:
        assert found["collective_samples_total"] == {(): 3 * B * size}


@pytest.mark.slow
def test_an_estimator_tells_its_loss_and_metrics(strategy, rank, size, folder, scrape, monkeypatch):
    """The loss is the mean of the steps that were not told yet, on all ranks."""
    monkeypatch.setattr(step_meter, "PERIOD", 1e9)
    batch = 12 // size
    config = collective.RunConfig(tf_random_seed=1, save_checkpoints_steps=2)
    estimator = made(strategy, folder, config=config, metrics=few_metrics)
    estimator.train(records(60, batch), max_steps=4)
    metrics = estimator.evaluate(records(40), name="test")
    found = scrape()
    losses = []

    class Losses(tf.train.SessionRunHook):
        def before_run(self, context):
            return tf.train.SessionRunArgs(tf.get_collection(tf.GraphKeys.LOSSES)[-1])

        def after_run(self, context, values):
            losses.append(values.results)

    plain(folder).train(records(60, 12), hooks=[Losses()], max_steps=3)
    if rank > 0:
        return
    # The third run is measured before hooks see it.
    np.testing.assert_allclose(found["collective_loss"][()], np.mean(losses[:2]), rtol=1e-5)
    of_test = {name: value for (test, name), value in found["collective_metric"].items()}
    assert of_test == {name: pytest.approx(float(value)) for name, value in metrics.items()}
    # The first checkpoint, and those after 2 and 4 steps.
    assert found["collective_saves_total"] == {(): 3}
    assert found["collective_last_save_global_step"] == {(): 4}


def test_a_table_whose_keys_are_on_one_rank_is_named(
    strategy, rank, size, scrape, monkeypatch, recwarn
):
    """Rank 0 says so once, of three ranks and more; tables whose keys are even aren't named."""
    monkeypatch.setattr(step_meter, "PERIOD", 0.0)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [tf.get_variable(name, [60, 4]) for name in ("uneven", "even")]
        ids = tf.constant(np.arange(12) * size), tf.constant(np.arange(12))
        rows = [tf.nn.embedding_lookup(t, tf.identity(x)) for t, x in zip(tables, ids)]
        loss = sum(tf.reduce_mean(tf.square(x)) for x in rows)
        op = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession() as session:
            for _ in range(7):
                session.run(op)
    found = scrape()
    said = [str(w.message) for w in recwarn if "all ranks wait for it" in str(w.message)]
    if size > 2 and rank == 0:
        assert len(said) == 1 and "table 'uneven': 100% of the keys" in said[0]
    else:
        assert not said
    if size > 1 and rank == 0:
        ratios = found["collective_table_keys_max_by_mean"]
        assert ratios == {("uneven",): size, ("even",): 1}
