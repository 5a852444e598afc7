"""embedding_scope(placement='auto'): all ranks choose alike, and numbers are plain TensorFlow's."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError, TablePolicy
from collective.coordination import barrier
from collective.plan import job_machines, machine_rates
from collective.planner.published import CPU
from collective.tables.automatic_placement import AUTOMATIC
from collective.tables.table import Table
from tests.ranks import exports, reference
from tests.ranks.checkpoints import wait

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(2, 3), pytest.mark.backends("hb")]

D = 4
ROWS = {"fixed": 9, "alone": 11, "unknown": 7, "hot": 13, "hotter": 13}
FILE = """
batch: 16
tables:
  fixed: {rows: 9, dimension: 4, placement: replicated}
  alone: {rows: 11, dimension: 4}
"""
# By rows, one rank would be asked for nearly everything.
UNEVEN = """
tables:
  hot: {rows: 13, dimension: 4, imbalance: 3}
  hotter: {rows: 13, dimension: 4, imbalance: 3}
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Lets ranks agree again in each case, on figures that aren't measured."""
    AUTOMATIC._bases.clear()
    AUTOMATIC._of_file.clear()
    monkeypatch.setattr(job_machines, "_MEASURED", {"memory_rate": CPU.memory_rate})


@pytest.fixture
def file(folder, rank):
    """Makes a file of tables that only rank 0 sees as it is; the name is the same on all ranks."""
    path = Path(folder) / "tables.yml"
    if rank == 0:
        path.write_text(FILE)
    return str(path)


def ids_of(rank):
    return np.random.default_rng([5, rank]).integers(0, 7, 7 - 2 * rank)


def loss_of(tables, ids):
    weight = tf.get_variable("w", [D, 1], initializer=tf.constant_initializer(0.3))
    rows = [tf.nn.embedding_lookup(table, ids) for table in tables]
    return tf.add_n([tf.reduce_mean(tf.square(tf.matmul(x, weight) - 0.5)) for x in rows])


def build(strategy, placement, seed=0):
    with strategy.embedding_scope(placement=placement):
        return [reference.table(name, rows, D, seed) for name, rows in ROWS.items()]


def trained(tables, parts):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        losses = [loss_of(tables, tf.constant(part)) for part in parts]
    train = tf.train.AdamOptimizer(0.1).minimize(tf.add_n(losses) / len(losses))
    every = [tf.nn.embedding_lookup(t, tf.range(r)) for t, r in zip(tables, ROWS.values())]
    return train, every


@pytest.mark.slow
def test_training_and_restart_are_plain_tensorflows(strategy, rank, size, file, folder):
    """A first start without a file; the next ones, by files, have tables elsewhere."""
    uneven = Path(folder) / "uneven.yml"
    if rank == 0:
        uneven.write_text(UNEVEN)
    with tf.Graph().as_default():
        tables = [reference.table(n, r, D, use_resource=True) for n, r in ROWS.items()]
        train, every = trained(tables, [ids_of(r) for r in range(size)])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            expected = []
            for _ in range(6):
                session.run(train)
                expected.append(session.run(every))
    starts = {
        "auto": [True] * 5,
        f"auto:{file}": [False, False] + [True] * 3,
        f"auto:{uneven}": [True] * 5,
    }
    plans = []
    for start, (placement, sharded) in enumerate(starts.items()):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            tables = build(strategy, placement, seed=start)
            assert [isinstance(table, Table) for table in tables] == sharded
            with strategy.embedding_scope(placement=placement), tf.variable_scope("", reuse=True):
                assert tf.get_variable("alone", [11, D]) is tables[1]
            train, every = trained(tables, [ids_of(rank)])
            saver = tf.train.Saver()
            with tf.Session() as session:
                if start == 0:
                    session.run(tf.global_variables_initializer())
                else:
                    saver.restore(session, f"{folder}/m")
                for step in (0, 1):
                    session.run(train)
                    for got, want in zip(session.run(every), expected[2 * start + step]):
                        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
                saver.save(session, f"{folder}/m")
            plans.append(strategy.plan())
        wait()
    _, plan, of_uneven = plans
    chosen = {table.name: (table.placement, table.why) for table in plan.tables}
    assert chosen["fixed"] == ("replicated", "placement: replicated is given")
    assert chosen["alone"][0] == "replicated"
    assert chosen["unknown"][0] == "rows" and chosen["unknown"][1].endswith(f"(not in {file})")
    note = plan.notes["placement='auto'"]
    assert note.startswith(f"replicates 2 of 5 tables, the others are by rows; by {file}; for ")
    assert note.endswith(f"{size} x CPU on 1 host")
    assert f"auto: {chosen['alone'][1]}" in plan.to_text(full=True)
    chosen = {table.name: (table.placement, table.why) for table in of_uneven.tables}
    assert (chosen["hot"][0], chosen["hotter"][0]) == ("whole:0", "whole:1")
    assert chosen["hot"][1].startswith("'rows': ") and " ms more for " in chosen["hot"][1]
    assert {chosen[name][0] for name in ("fixed", "alone", "unknown")} == {"rows"}
    note = of_uneven.notes["placement='auto'"]
    assert note.startswith("replicates 0 of 5 tables, 2 are whole on one rank, the others are by ")
    assert f"whole on rank 0; auto: {chosen['hot'][1]}" in of_uneven.to_text(full=True)


def test_rank_0_decides(strategy, rank, folder, monkeypatch):
    """Also if the others have another file of this name, or none, and hosts without memory."""
    if rank > 0:
        monkeypatch.setattr(job_machines, "memory_bytes", lambda: 1)
    own = {0: FILE, 1: "tables: {alone: {rows: 3, dimension: 4}}"}
    home = Path(folder) / f"of rank {rank}"
    home.mkdir()
    monkeypatch.chdir(home)
    if rank in own:
        Path("common.yml").write_text(own[rank])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tables = build(strategy, "auto:common.yml")
    assert [isinstance(table, Table) for table in tables] == [False, False] + [True] * 3


def test_machines_are_measured_once(strategy, rank, size, folder, monkeypatch):
    """All ranks get the same figures: rank 0's host keeps them, whatever the others keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}/of rank {rank}")
    agreed = []
    for origin in ("measured", "kept"):
        monkeypatch.setattr(job_machines, "_MEASURED", {})
        figures = job_machines.agree("").machines.device.figures()
        assert {name for name, figure in figures.items() if figure.source.endswith("started")} == (
            {"memory_rate", "flops", "within_wait", "within_rate"}
            if origin == "measured"
            else set()
        )
        assert {figures[name].origin for name in ("memory_rate", "within_rate")} == {origin}
        assert machine_rates.file().exists() == (rank == 0)
        agreed.append({name: figure.value for name, figure in figures.items()})
        # A later start measures nothing.
        monkeypatch.setattr(machine_rates, "_measure", lambda: pytest.fail("measures again"))
    everyones = barrier.exchange(None, "compares figures", {"agreed": agreed})
    assert all(each == everyones[0] for each in everyones) and agreed[0] == agreed[1]
    assert 1e7 < agreed[0]["within_rate"] < 1e12 and 1e-7 < agreed[0]["within_wait"] < 0.1
    assert 1e7 < agreed[0]["memory_rate"] < 1e12 and 1e8 < agreed[0]["flops"] < 1e14


def test_what_cannot_be_chosen(strategy, rank, folder):
    bad = Path(folder) / "bad.yml"
    if rank == 0:
        bad.write_text("tables: {t: {row: 3}}")
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(placement=f"auto:{bad}"):
            for rows in (3, None):
                with pytest.raises(ValueError, match="tables.t.row: there is no such key"):
                    tf.get_variable("t", [rows, D])
        with strategy.embedding_scope(placement="auto", replicate_below=100):
            assert not isinstance(tf.get_variable("small", [3, D]), Table)
            assert isinstance(tf.get_variable("d", [None, D]), Table)
            with strategy.embedding_scope(policy=TablePolicy(weight_bound=2.0)):
                assert isinstance(tf.get_variable("bounded", [3, D]), Table)
        AUTOMATIC._bases.clear()
        with strategy.embedding_scope(placement=f"auto:{rank}.yml"):
            with pytest.raises(RankError, match="chooses the placements of tables by 0.yml"):
                tf.get_variable("e", [30, D])


@pytest.mark.matrix
def test_a_served_model_has_tables_where_training_had_them(strategy, rank, file, folder):
    def model():
        tables = build(strategy, f"auto:{file}")
        ids = tf.placeholder(tf.int64, [None], "ids")
        rows = [tf.nn.embedding_lookup(table, ids) for table in tables]
        return {"ids": ids}, {"rows": tf.concat(rows, 1)}

    prefix = exports.trained(strategy, model, folder)
    path = strategy.export_saved_model(
        f"{folder}/served", prefix, exports.signature(strategy, model)
    )
    got = exports.served(path, {"ids": [3, 6]})["rows"]
    expected = [reference.table_values(rows, D)[[3, 6]] for rows in ROWS.values()]
    np.testing.assert_array_equal(got, np.concatenate(expected, 1))
    wait()


@pytest.mark.matrix
def test_a_profile_is_the_next_starts_file(strategy, rank, size, folder):
    """What is measured is what the file says; columns and Keras's layers are placed by it, too."""
    column = tf.feature_column.embedding_column(
        tf.feature_column.categorical_column_with_identity("ids", 30), D
    )
    for placement in ("auto", f"auto:{folder}/tables.yml"):
        options = {"profile": folder, "profile_steps": (3, 4)}
        with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
            batch = tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensors(ids_of(rank)).repeat()
            ).get_next()
            with strategy.embedding_scope(placement=placement):
                rows = [tf.compat.v1.feature_column.input_layer({"ids": batch[:, None]}, [column])]
                rows.append(tf.keras.layers.Embedding(20, D)(batch))
            opened = collective.get_embedding_variable("opened", D)
            rows.append(tf.nn.embedding_lookup(opened, batch))
            loss = tf.add_n([tf.reduce_mean(tf.square(1 - x)) for x in rows])
            train = tf.train.AdagradOptimizer(0.5).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for _ in range(5):
                    session.run(train)
            plan = strategy.plan()
            workload = strategy.plan(devices="this job").forecast.workload
    why = {table.name: table.why for table in plan.tables}
    assert not any("not in" in text for text in why.values()), why
    assert sum(bool(text) for text in why.values()) == 2
    assert {table.ids for table in workload.tables} == {1.0}
