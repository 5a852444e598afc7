"""One rank alone wants a table: the errors name it, and the way; which works."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.tools import freeze_graph

import collective
from collective.coordination import barrier
from collective.errors import RankError, TableError
from tests.ranks import reference

IDS = np.array([3, 0, 3, 8])


def model(strategy, with_dynamic=False):
    """Builds the training of a table, and of a dynamic one."""
    with strategy.embedding_scope():
        table = reference.table("users", 9, 3)
    ids = tf.placeholder(tf.int64, [None], "ids")
    rows = tf.nn.embedding_lookup(table, ids)
    if with_dynamic:
        rows += tf.nn.embedding_lookup(collective.get_embedding_variable("words", 3), ids)
    kernel = tf.get_variable("kernel", [3, 1], initializer=tf.ones_initializer())
    out = tf.identity(tf.matmul(rows, kernel), name="out")
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_mean(out), step)
    return table, ids, rows, out, train


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.sample(2)
@pytest.mark.parametrize("with_dynamic", [False, True])
def test_freezing_is_refused(strategy, folder, rank, size, with_dynamic):
    """From the session, from the graph that a Saver has written; on one rank alone, too."""
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default() as graph:
        table, ids, rows, out, train = model(strategy, with_dynamic)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: IDS})
            for freeze in (
                tf.graph_util.convert_variables_to_constants,
                tf.compat.v1.graph_util.convert_variables_to_constants,
            ):
                if rank == 0 or freeze is tf.graph_util.convert_variables_to_constants:
                    with pytest.raises(TableError) as raised:
                        freeze(session, graph.as_graph_def(), ["out"])
                    said = str(raised.value)
                    assert "'users'" in said and "strategy.export_saved_model" in said
                    assert ("'words'" in said) == with_dynamic
            # What has nothing of a table is frozen.
            frozen = tf.graph_util.convert_variables_to_constants(
                session, graph.as_graph_def(), ["kernel/Read/ReadVariableOp"]
            )
            assert "Const" in {node.op for node in frozen.node}
            saver.save(session, f"{folder}/m")
    with strategy.scope(), tf.Graph().as_default():
        with pytest.raises(ValueError, match="users.*freeze.*strategy.export_saved_model"):
            freeze_graph.freeze_graph(
                None,
                None,
                True,
                f"{folder}/m",
                "out",
                "",
                "",
                f"{folder}/frozen-{rank}",
                True,
                "",
                input_meta_graph=f"{folder}/m.meta",
            )


@pytest.mark.matrix
def test_a_saved_model_can_be_frozen(strategy, folder, rank):
    """By plain TensorFlow alone."""
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, out, train = model(strategy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: IDS})
            want = session.run(out, {ids: IDS})
            tf.train.Saver().save(session, f"{folder}/m")

    def serving():
        with strategy.embedding_scope():
            table = reference.table("users", 9, 3)
        ids = tf.placeholder(tf.int64, [None], "ids")
        kernel = tf.get_variable("kernel", [3, 1])
        out = tf.matmul(tf.nn.embedding_lookup(table, ids), kernel, name="out")
        return tf.saved_model.predict_signature_def({"ids": ids}, {"out": out})

    path = strategy.export_saved_model(f"{folder}/export", f"{folder}/m", serving)
    if rank == 0:
        freeze_graph.freeze_graph(
            None,
            None,
            True,
            None,
            "out",
            "",
            "",
            f"{folder}/frozen",
            True,
            "",
            input_saved_model_dir=path,
            saved_model_tags="serve",
        )
        with tf.Graph().as_default(), tf.Session() as session:
            definition = tf.GraphDef()
            with open(f"{folder}/frozen", "rb") as file:
                definition.ParseFromString(file.read())
            assert not any("Collective" in node.op for node in definition.node)
            tf.import_graph_def(definition, name="")
            np.testing.assert_allclose(session.run("out:0", {"ids:0": IDS}), want, rtol=1e-6)
    barrier.exchange(None, "frozen", {})


class Histogram(tf.train.SessionRunHook):
    """Fetches a summary in each run, and writes it on rank 0."""

    def __init__(self, summary, fetches, rank, folder):
        self.summary = summary
        self.fetches = fetches
        self.writer = tf.summary.FileWriter(folder) if rank == 0 else None

    def before_run(self, context):
        return tf.train.SessionRunArgs(self.summary) if self.fetches else None

    def after_run(self, context, values):
        if self.writer is not None and values.results is not None:
            self.writer.add_summary(values.results)
            self.writer.flush()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("of", ["a table", "rows"])
def test_a_histogram_on_one_rank_is_refused_by_the_tables_name(strategy, folder, rank, size, of):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, out, train = model(strategy)
        looked_up = tf.nn.embedding_lookup(table, [1, 2])
        summary = tf.summary.histogram("values", table if of == "a table" else looked_up)
        hook = Histogram(summary, rank == 0, rank, folder)
        with pytest.raises(RankError) as raised:
            with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
                session.run(train, {ids: IDS})
    told = str(raised.value).partition("First difference: ")[2]
    difference, _, rest = told.partition(" is used by ")
    assert "table 'users'" in difference and "keys" not in difference, told
    assert rest.startswith("rank 0 only") and "`if strategy.rank() == 0` around the writing" in rest


def test_a_histogram_that_all_ranks_fetch_and_one_writes(strategy, folder, rank):
    with strategy.scope(), tf.Graph().as_default():
        table, ids, rows, out, train = model(strategy)
        hook = Histogram(tf.summary.histogram("values", table), True, rank, folder)
        with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(train, {ids: IDS})
    if rank == 0:
        files = tf.io.gfile.glob(f"{folder}/events*")
        values = [
            value.histo.num
            for file in files
            for event in tf.train.summary_iterator(file)
            for value in event.summary.value
        ]
        assert values == [27.0]
    barrier.exchange(None, "written", {})
