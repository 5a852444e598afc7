"""The planner's answer for a graph: its step is what the graph and a profile say, and no more."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.plan import job_machines
from collective.plan.__main__ import main as plan_command
from collective.plan.forecast import text
from collective.planner import tables_file
from collective.planner.step_model import StepModel
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2)]

SAMPLES = 24  # of a rank


def ids_of(rank):
    """Returns [SAMPLES, 2] ids below 40 that repeat."""
    return np.random.default_rng([8, rank]).integers(0, 40, [SAMPLES, 2]) // (1 + rank)


def build(strategy, rank):
    """Builds tables that are sharded, replicated and dynamic, each with one or two ids a sample."""
    batches = tf.data.Dataset.from_tensors(ids_of(rank)).repeat()
    ids = tf.data.make_one_shot_iterator(batches).get_next()
    sparse = tf.sparse.from_dense(ids + 1)
    with strategy.embedding_scope():
        sharded, first = reference.table("sharded", 41, 4), reference.table("first", 50, 4)
        opened = collective.get_embedding_variable("opened", 4)
    with strategy.embedding_scope(placement="replicated"):
        copied, plain = reference.table("copied", 41, 4), reference.table("plain", 42, 4)
    rows = [
        tf.nn.embedding_lookup_sparse(sharded, sparse, None, combiner="sum"),
        tf.nn.embedding_lookup(first, ids[:, 0]),
        tf.nn.embedding_lookup(opened, ids[:, 1]),
        tf.nn.embedding_lookup_sparse(copied, sparse, None, combiner="sum"),
        tf.nn.embedding_lookup(plain, ids[:, 0]),
    ]
    weight = tf.get_variable("w", [20, 1], initializer=tf.constant_initializer(0.1))
    return tf.reduce_mean(tf.square(tf.matmul(tf.concat(rows, 1), weight) - 1))


def test_a_step_is_what_was_measured(strategy, rank, size, folder, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setattr(job_machines, "_MEASURED", {})
    options = {"profile": folder, "profile_steps": (3, 4)}
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        train = collective.train.LazyAdamOptimizer(0.1).minimize(build(strategy, rank))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(5):
                session.run(train)
            plan = strategy.plan(session=session, devices="64 x H100-80GB", batch=65536)
        here = strategy.plan(devices="16 x A100", hosts=4)
        here_now, described = strategy.plan(devices="this job"), strategy.plan()
    assert here_now.forecast.machines.ranks == size
    origin = here_now.forecast.machines.device.flops.origin
    assert ("when this job started" in str(here_now)) == (size == 1) and origin == "measured"
    known = StepModel(here_now.described.workload, here_now.forecast.machines)
    placed = {table.name: table.placement for table in described.tables}
    predicted = text.milliseconds(known.step(placed).seconds)
    note = described.notes["planner"]
    assert note.startswith(f"predicts {predicted} ms a step for {size} x CPU on 1 host; measured: ")
    assert note.endswith(" ms (steps 3 to 4)") and f"planner: {note}" in str(described)
    batches = [ids_of(r) for r in range(size)]

    def distinct(column=slice(None)):
        return sum(np.unique(batch[:, column]).size for batch in batches)

    workload = here.described.workload
    assert (workload.batch, workload.parameters) == (SAMPLES * size, 20)
    tables = {table.name: table for table in workload.tables}
    pooled = (
        os.environ.get("COLLECTIVE_STRATEGY") == "sok"
    )  # its owners are asked for each id, whether it repeats or not
    expected = {
        "sharded": (2, None if pooled else distinct()),
        "first": (1, distinct(0)),
        "opened": (1, distinct(1)),
        "copied": (2, distinct()),
        "plain": (1, None),
    }
    for name, (ids, keys) in expected.items():
        table = tables[name]
        assert table.ids == ids, name
        assert table.optimizer == "lazy_adam", name
        if keys is None:
            assert table.distinct is None and table.distinct_at is None, name
        else:
            assert table.distinct == pytest.approx(keys / (SAMPLES * ids * size)), name
            assert table.distinct_at == SAMPLES * ids, name
    in_all = np.unique(np.concatenate([batch[:, 1] for batch in batches])).size
    assert (tables["opened"].rows, tables["opened"].dynamic) == (in_all, True)
    assert (plan.forecast.workload.batch, plan.forecast.machines.hosts) == (65536, 8)
    assert (here.forecast.machines.ranks, here.forecast.machines.hosts) == (16, 4)
    assert "ids of a sample" in str(here) and "measured" in str(here)
    if rank > 0:
        return
    written = tables_file.load(Path(folder) / "tables.yml").workload()
    saved = Path(folder) / "saved.yml"
    here.save_tables(saved)
    for read in (written, tables_file.load(saved).workload()):
        assert {t.name: (t.rows, t.ids, t.optimizer, t.dynamic) for t in read.tables} == {
            t.name: (t.rows, t.ids, t.optimizer, t.dynamic) for t in workload.tables
        }
    assert saved.read_text().count("# measured: ids of a sample, distinct ids") >= 3
    capsys.readouterr()
    devices = ["--devices", "16 x A100", "--hosts", "4"]
    assert plan_command(["--tables", str(saved), *devices]) == 0
    title, *_ = capsys.readouterr().out.splitlines()
    assert title == str(here).splitlines()[0]


def test_what_nobody_has_measured_is_assumed(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with pytest.raises(ValueError, match="the graph has no tables"):
            strategy.plan(devices="8 x H100")
        loss = build(strategy, rank)
        with pytest.raises(ValueError, match="no device 'X9'"):
            strategy.plan(devices="8 x X9")
        with pytest.raises(ValueError, match="needs devices="):
            strategy.plan(batch=3)
        with pytest.raises(ValueError, match="leave fetches out"):
            strategy.plan(fetches=loss, devices="8 x H100")
        with pytest.raises(ValueError, match="hosts of 'this job' are known"):
            strategy.plan(devices="this job", hosts=1)
        assert "planner" not in strategy.plan().notes
        before = strategy.plan(devices="8 x H100")
        tf.train.AdamOptimizer(0.1).minimize(loss)
        after = strategy.plan(devices="8 x H100")
    assert {table.optimizer for table in before.described.workload.tables} == {"adagrad"}
    assert {table.optimizer for table in after.described.workload.tables} == {"adam"}
    (opened,) = (t for t in after.described.workload.tables if t.dynamic)
    assert opened.rows == 1_000_000
    by_name = {source.what: source for source in after.described.sources}
    assert by_name["rows of dynamic tables of 1 of 5 tables"].origin == "assumed"
    assert by_name["ids of a sample of 3 of 5 tables"].origin == "assumed"
    assert "the graph has none yet" in str(before) and "the graph has none yet" not in str(after)
    assert set(after.placements.values()) <= {"rows", "replicated"}
