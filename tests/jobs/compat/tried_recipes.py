"""A script of another framework that does instead of each refused name what its error says.

    collective launch -np 2 --as deeprec|horovod tests/jobs/compat/tried_recipes.py FOLDER

It prints "tried NAME" for each name: that the name is refused, and that what is done instead gives
the numbers that are written here.
"""

import os
import sys

import numpy as np
import tensorflow as tf

from collective import CollectiveStrategy
from collective.train import LazyAdamOptimizer

RECIPES = {}  # From the recipe to (the names that are refused, the use that is refused or None).
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def instead_of(*names, use=None):
    """Registers what is done instead of names; `use` is a use that isn't a plain call."""

    def register(recipe):
        RECIPES[recipe] = (names, use)
        return recipe

    return register


def ran(fetches, feed=None):
    """Returns what a new session fetches from initialized variables."""
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        return session.run(fetches, feed)


def trained(loss, optimizer, steps=2):
    """Returns the losses of a few steps."""
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=steps)]
    losses = []
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        while not session.should_stop():
            losses.append(session.run([loss, train])[0])
    return losses


def ones(name="v", dim=2):
    return tf.get_embedding_variable(name, dim, initializer=tf.ones_initializer())


def mean_of_rows(table):
    return tf.reduce_mean(tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64)))


def check(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5)


@instead_of("tf.contrib.layers.sequence_input_from_feature_columns")
def a_sequence_input_layer():
    column = tf.feature_column.sequence_categorical_column_with_identity("a", 5)
    columns = [tf.feature_column.embedding_column(column, 2, initializer=tf.ones_initializer())]
    features = {"a": tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, 2], tf.int64), [1, 2])}
    layer, lengths = tf.contrib.feature_column.sequence_input_layer(features, columns)
    check(ran(layer), np.ones([1, 2, 2]))
    check(ran(lengths), [2])


if sys.argv[2] == "horovod":

    @instead_of("tf.enable_eager_execution")
    def a_session():
        check(ran(tf.constant(1.0) + 1.0), 2.0)

else:
    import horovod.tensorflow as hvd
    import hybridbackend.tensorflow as hb
    import sparse_operation_kit as sok

    @instead_of(
        "tf.hash_table.DistributedHashTable",
        "tf.hash_table.FixedSizeHashTablePartitioner",
        "tf.get_dynamic_dimension_embedding_variable",
        "tf.get_multihash_variable",
    )
    def an_embedding_variable():
        first, second = trained(mean_of_rows(ones()), tf.train.GradientDescentOptimizer(1.0))
        check([first, second], [1.0, 1.0 - 1 / 4])

    @instead_of()
    def two_tables_of_the_quotient_and_the_remainder():
        """The other thing that the error of get_multihash_variable names."""
        with hb.embedding_scope():
            tables = [
                tf.get_variable(name, [4, 2], initializer=tf.constant_initializer(value))
                for name, value in (("q", 1.0), ("r", 2.0))
            ]
        ids = tf.constant([7, 13], tf.int64)
        rows = [
            tf.nn.embedding_lookup(table, part) for table, part in zip(tables, (ids // 4, ids % 4))
        ]
        check(ran(rows[0] + rows[1]), np.full([2, 2], 3.0))

    @instead_of(
        "tf.feature_column.categorical_column_with_multihash",
        "tensorflow.python.feature_column.feature_column_v2.categorical_column_with_multihash",
        "tf.feature_column.categorical_column_with_adaptive_embedding",
    )
    def a_column_with_a_row_for_each_key():
        for column in (
            tf.feature_column.categorical_column_with_embedding("a"),
            tf.feature_column.categorical_column_with_hash_bucket("a", 10),
        ):
            with tf.Graph().as_default():
                columns = [
                    tf.feature_column.embedding_column(column, 2, initializer=tf.ones_initializer())
                ]
                features = {"a": tf.constant([["x"], ["y"]])}
                loss = tf.reduce_mean(tf.feature_column.input_layer(features, columns))
                losses = trained(loss, tf.train.GradientDescentOptimizer(1.0))
                assert losses[0] == 1.0 and losses[1] < 1.0

    def _masked():
        tf.feature_column.input_layer({}, [], adaptive_mask_tensors={"a": tf.ones([2], tf.int32)})

    @instead_of("tf.feature_column.input_layer(adaptive_mask_tensors=)", use=_masked)
    def an_input_layer_without_masks():
        columns = [tf.feature_column.numeric_column("a")]
        check(
            ran(tf.feature_column.input_layer({"a": tf.constant([1.0, 2.0])}, columns)),
            [[1], [2]],
        )

    def _blocks():
        tf.nn.embedding_lookup(ones(), tf.constant([1], tf.int64), blocknums=[1])

    def _sparse_blocks():
        ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
        tf.nn.embedding_lookup_sparse(ones(), ids, None, blocknums=[1])

    @instead_of("tf.nn.embedding_lookup(blocknums=)", use=_blocks)
    def a_lookup_without_blocks():
        check(ran(mean_of_rows(ones())), 0.0)  # A key of no row, outside of training.

    @instead_of("tf.nn.embedding_lookup_sparse(blocknums=)", use=_sparse_blocks)
    def a_sparse_lookup_without_blocks():
        a_sparse_lookup_on_a_table_of_either_kind()

    @instead_of("tf.nn.adaptive_embedding_lookup_sparse")
    def a_sparse_lookup_on_a_table_of_either_kind():
        with hb.embedding_scope():
            static = tf.get_variable("static", [4, 2], initializer=tf.ones_initializer())
        ids = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, 2], tf.int64), [1, 2])
        rows = [tf.nn.embedding_lookup_sparse(table, ids, None) for table in (static, ones())]
        losses = trained(tf.reduce_mean(rows), tf.train.GradientDescentOptimizer(1.0))
        assert losses[0] == 1.0 and losses[1] < 1.0

    def _micro_batches():
        config = tf.ConfigProto()
        config.graph_options.optimizer_options.micro_batch_num = 2

    @instead_of("tf.OptimizerOptions.micro_batch_num", use=_micro_batches)
    def local_steps():
        """In `steps_of_two_batches`, outside of the scope of the others."""

    def _dense_layers():
        tf.estimator.DNNLinearCombinedClassifier(dnn_dtype=tf.bfloat16)

    @instead_of("tf.estimator.DNNLinearCombinedClassifier(dnn_dtype=)", use=_dense_layers)
    def mixed_precision():
        """In `layers_in_bfloat16`, outside of the scope of the others."""

    @instead_of("tf.graph_optimizer.enable_sample_awared_graph_compression")
    def a_users_features_for_each_item():
        check(ran(tf.repeat([[1.0], [2.0]], [1, 2], axis=0)), [[1], [2], [2]])

    @instead_of("tf.data.KafkaDataset", "tf.data.KafkaGroupIODataset")
    def messages_from_a_generator():
        data = tf.data.Dataset.from_generator(lambda: iter([b"1", b"2"]), tf.string)
        batch = tf.data.make_one_shot_iterator(data.batch(2)).get_next()
        assert ran(batch).tolist() == [b"1", b"2"]

    @instead_of("tf.TableRecordReader")
    def files():
        path = f"{sys.argv[1]}/{RANK}.txt"
        with open(path, "w") as file:
            file.write("a\nb\n")
        batch = tf.data.make_one_shot_iterator(tf.data.TextLineDataset(path).batch(2)).get_next()
        assert ran(batch).tolist() == [b"a", b"b"]

    @instead_of("hb.data.RebatchDataset")
    def rebatch():
        data = tf.data.Dataset.range(6).batch(2).map(lambda x: {"x": x})
        batch = hb.data.make_one_shot_iterator(data.apply(hb.data.rebatch(3))).get_next()
        check(ran(batch)["x"], [0, 1, 2])

    @instead_of("hb.data.SyncReplicasDataset")
    def the_dataset():
        data = tf.data.Dataset.from_tensors([1.0]).repeat(3 if RANK else 2)
        x = tf.data.make_one_shot_iterator(data).get_next()
        w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
        losses = trained(tf.reduce_mean(w * x), tf.train.GradientDescentOptimizer(0.5), 9)
        check(losses, [1.0, 0.5])

    @instead_of("hb.data.unbatch_and_to_sparse")
    def parse_and_unbatch():
        values = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
        data = tf.data.Dataset.from_tensors({"x": values})
        data = data.apply(hb.data.parse()).unbatch()
        record = tf.data.make_one_shot_iterator(data.skip(1)).get_next()
        check(ran(record)["x"].values, [2, 3])

    @instead_of(
        *(f"hb.distribute.{name}" for name in "Collective allgather allreduce alltoall".split()),
        "hb.distribute.broadcast",
    )
    def functions_of_horovod():
        mine = tf.constant([float(RANK), 5.0])
        check(ran(hvd.allgather(mine)), [x for rank in range(SIZE) for x in (rank, 5)])
        check(ran(hvd.allreduce(mine, op=hvd.Sum)), [SIZE * (SIZE - 1) / 2, 5 * SIZE])
        check(ran(hvd.broadcast(mine, root_rank=SIZE - 1)), [SIZE - 1, 5])
        sent = tf.constant([10.0 * RANK + i for i in range(SIZE)])
        got = hvd.alltoall(sent)
        got = got[0] if isinstance(got, (list, tuple)) else got
        check(ran(got), [10.0 * i + RANK for i in range(SIZE)])

    @instead_of(
        *(f"hb.distribute.partition{name}" for name in ("", "_by_modulo")),
        *(f"hb.distribute.partition_by_dual_modulo_stage_{name}" for name in ("one", "two")),
    )
    def a_table():
        with hb.embedding_scope():
            table = tf.get_variable(
                "t", [5, 1], initializer=tf.constant_initializer(np.arange(5.0).reshape(5, 1))
            )
        check(ran(tf.nn.embedding_lookup(table, [4, 0, 3])), [[4], [0], [3]])

    @instead_of("hb.keras.layers.dense_features")
    def the_input_layer_of_columns():
        an_input_layer_without_masks()

    def _model(features, labels, mode):
        y = tf.layers.dense(features["x"], 1, kernel_initializer=tf.ones_initializer())
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
        loss = tf.reduce_mean(tf.square(y - labels))
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss, global_step=step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    def _data():
        x = np.arange(1, 6, dtype=np.float32)[:, np.newaxis]
        return tf.data.Dataset.from_tensor_slices(({"x": x}, x)).batch(1)

    @instead_of("hb.metrics.gauc")
    def all_predictions_on_rank_0():
        made = hb.estimator.Estimator(_model, f"{sys.argv[1]}/gauc")
        made.train(_data, max_steps=1)
        got = sorted(float(one["y"][0]) for one in made.predict(_data, gather=True))
        assert got == [1, 2, 3, 4, 5] or RANK > 0, got

    @instead_of("hb.train.EvaluationSpec")
    def arguments_of_the_hook():
        def evaluation():
            batch = hb.data.make_one_shot_iterator(tf.data.Dataset.range(1, 4).batch(1)).get_next()
            return {"mean": tf.metrics.mean(batch)}

        history = []
        w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_mean(w), global_step=tf.train.get_or_create_global_step()
        )
        hooks = [
            hb.train.EvaluationHook(evaluation, every_n_iter=1, history=history),
            tf.train.StopAtStepHook(2),
        ]
        with tf.train.MonitoredTrainingSession("", hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
        assert [values["mean"] for values in history] == [2.0, 2.0]

    @instead_of("hb.train.Policy")
    def a_hook():
        class Counts(tf.train.SessionRunHook):
            runs = 0

            def after_run(self, run_context, run_values):
                self.runs += 1

        hook = Counts()
        step = tf.train.get_or_create_global_step()
        with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(step)
        assert hook.runs == 1

    @instead_of(
        "hb.train.Server",
        "hb.train.target",
        "hb.train.wraps_server",
        "hb.train.SyncReplicasOptimizer",
        "hybridbackend.run",
    )
    def a_session_of_synchronous_ranks():
        w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
        losses = trained(tf.reduce_mean(w * RANK), tf.train.GradientDescentOptimizer(1.0))
        check(losses, [RANK, RANK * (1 - (SIZE - 1) / 2)])

    @instead_of("hb.train.export_all")
    def each_signature():
        folder = f"{sys.argv[1]}/signatures"
        made = hb.estimator.Estimator(_model, folder)
        made.train(_data, max_steps=1)
        checkpoint = tf.train.latest_checkpoint(folder)

        def signature(factor):
            x = tf.placeholder(tf.float32, [None, 1])
            y = factor * tf.layers.dense(x, 1, name="dense")
            return tf.saved_model.predict_signature_def({"x": x}, {"y": y})

        for factor in (1.0, 2.0):
            path = hb.train.export(
                f"{sys.argv[1]}/of_{factor}", checkpoint, lambda factor=factor: signature(factor)
            )
            assert path and os.path.exists(os.path.join(path, "saved_model.pb"))

    def _sok():
        return sok.Variable(np.ones([4, 2], np.float32))

    @instead_of("sok.TFDistributedEmbedding", "sok.raw_ops")
    def a_variable_of_sok():
        check(ran(sok.all2all_dense_embedding(_sok(), tf.constant([1, 3]))), np.ones([2, 2]))

    @instead_of("sok.Saver")
    def dump_and_load():
        variable, folder = _sok(), f"{sys.argv[1]}/sok"
        rows = sok.all2all_dense_embedding(variable, tf.constant([1]))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_mean(rows))
        saver = tf.train.Saver()
        with tf.Session().as_default() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            want = session.run(rows)
            sok.dump(folder, [variable])
            path = saver.save(session, folder + "/saver")
            for restore in (
                lambda: sok.load(folder, [variable]),
                lambda: saver.restore(session, path),
            ):
                session.run(tf.global_variables_initializer())
                check(session.run(rows), np.ones([1, 2]))
                restore()
                check(session.run(rows), want)

    @instead_of("sok.optimizers.Adam", "sok.tf.keras.optimizers.Adam")
    def adam():
        rows = sok.all2all_dense_embedding(_sok(), tf.constant([1]))
        check(trained(tf.reduce_mean(rows), tf.train.AdamOptimizer(0.1)), [1.0, 0.9])

    @instead_of("sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer")
    def lazy_adam():
        rows = sok.all2all_dense_embedding(_sok(), tf.constant([1]))
        optimizer = LazyAdamOptimizer(0.1)
        check(trained(tf.reduce_mean(rows), optimizer), [1.0, 0.9])

    @instead_of("sok.tf.keras.mixed_precision.LossScaleOptimizer")
    def a_loss_scale():
        rows = sok.all2all_dense_embedding(_sok(), tf.constant([1]))
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.legacy.SGD(1.0), dynamic=False, initial_scale=8.0
        )
        variables = tf.trainable_variables()
        gradients = tf.gradients(optimizer.get_scaled_loss(tf.reduce_mean(rows)), variables)
        train = optimizer.apply_gradients(
            zip(optimizer.get_unscaled_gradients(gradients), variables)
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            check(session.run(rows), [[0.5, 0.5]])


def steps_of_two_batches(strategy):
    """Trains with local_steps=2: every second run updates."""
    with strategy.scope(local_steps=2, plan="quiet"), tf.Graph().as_default():
        w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_mean(w))
        with tf.train.MonitoredTrainingSession() as session:
            seen = []
            for _ in range(4):
                session.run(train)
                seen.extend(session.run(w))
            check(seen, [1.0, 0.5, 0.5, 0.0])


def layers_in_bfloat16(strategy):
    """Trains a ready-made Estimator of DeepRec's example, whose layers round to 8 bits."""
    column = tf.feature_column.numeric_column("x")

    def data():
        x = [[1.0], [2.0], [3.0], [4.0]]
        return tf.data.Dataset.from_tensors(({"x": x}, [[0], [1], [0], [1]])).repeat(2 * SIZE)

    with strategy.scope(mixed_precision="bfloat16", plan="quiet"):
        made = tf.estimator.DNNLinearCombinedClassifier(
            f"{sys.argv[1]}/bfloat16", [column], dnn_feature_columns=[column], dnn_hidden_units=[4]
        )
        made.train(data, max_steps=2)
        assert made.get_variable_value("global_step") == 2
        assert made.get_variable_value("dnn/logits/kernel").dtype == np.float32


def found(theirs):
    """Returns the object of a name, from its module."""
    short = {"tf": "tensorflow", "sok": "sparse_operation_kit", "hb": "hybridbackend.tensorflow"}
    head, _, rest = theirs.partition(".")
    module, _, name = f"{short.get(head, head)}.{rest}".rpartition(".")
    exec(f"from {module} import {name} as theirs", globals())  # As a script imports it.
    return globals()["theirs"]


def main():
    strategy = CollectiveStrategy()
    for recipe, (names, use) in RECIPES.items():
        for theirs in names:
            try:
                with strategy.scope(plan="quiet"), tf.Graph().as_default():
                    (use or found(theirs))()
                raise AssertionError(f"{theirs} isn't refused")
            except NotImplementedError as error:
                assert str(error).startswith(f"{theirs} is not supported: "), error
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            recipe()
        for theirs in names:
            print("tried", theirs, flush=True)
    if sys.argv[2] == "deeprec":
        steps_of_two_batches(strategy)
        layers_in_bfloat16(strategy)


if __name__ == "__main__":
    main()
