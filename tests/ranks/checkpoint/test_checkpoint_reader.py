"""Inside scope(), what TensorFlow reads from a checkpoint by name has whole tables."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.checkpoint import __main__ as command
from tests.ranks import checkpoints


def names_of(path):
    return {name: tuple(shape) for name, shape in tf.train.list_variables(path)}


@pytest.mark.ranks(2, 3)
def test_readers_know_whole_tables(strategy, rank, folder):
    """They show what plain TensorFlow shows of the same model's checkpoint."""
    want = checkpoints.saved(strategy, rank, f"{folder}/m")
    shapes = {"t": (9, 3), "t/Adam": (9, 3), "t/Adam_1": (9, 3)}
    shapes |= {"w": (3, 1), "w/Adam": (3, 1), "w/Adam_1": (3, 1)}
    shapes |= {"global_step": (), "beta1_power": (), "beta2_power": ()}
    made_before = tf.train.NewCheckpointReader(f"{folder}/m")
    with strategy.scope():
        assert names_of(folder) == names_of(f"{folder}/m") == shapes
        for reader in (
            tf.train.load_checkpoint(folder),
            tf.train.NewCheckpointReader(f"{folder}/m"),
            made_before,
        ):
            np.testing.assert_array_equal(reader.get_tensor("t"), want)
            assert reader.get_tensor("t").dtype == np.float32
            assert reader.get_tensor("t/Adam").shape == (9, 3)
            assert reader.has_tensor("t") and reader.has_tensor("t/Adam_1")
            assert not reader.has_tensor("nothing") and not reader.has_tensor("t/nothing")
            assert reader.get_variable_to_dtype_map()["t"] == tf.float32
            assert set(reader.get_variable_to_shape_map()) == set(shapes)
            assert reader.get_variable_to_shape_map()["t"] == [9, 3]
            with pytest.raises(tf.errors.NotFoundError, match="nothing"):
                reader.get_tensor("nothing")
        np.testing.assert_array_equal(tf.train.load_variable(folder, "t"), want)
        np.testing.assert_array_equal(tf.train.load_variable(folder, "t:0"), want)


def test_readers_of_plain_checkpoints(strategy, rank, folder):
    """What TensorFlow saved without this library is read as ever, also what is missing."""
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    if rank == 0:
        with tf.Graph().as_default(), tf.Session() as session:
            table = tf.get_variable("t", initializer=rows)
            session.run(table.initializer)
            tf.train.Saver().save(session, f"{folder}/m", write_meta_graph=False)
    checkpoints.wait()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        reader = tf.train.NewCheckpointReader(f"{folder}/m")
        assert reader.has_tensor("t") and not reader.has_tensor("nothing")
        assert reader.get_variable_to_shape_map() == {"t": [6, 2]}
        np.testing.assert_array_equal(reader.get_tensor("t"), rows)
        for name in ("nothing", b"nothing"):
            with pytest.raises(tf.errors.NotFoundError, match="nothing"):
                reader.get_tensor(name)
        with strategy.embedding_scope():
            table = tf.get_variable("t", [6, 2])
        tf.train.init_from_checkpoint(folder, {"/": "/"})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(table), rows)


@pytest.mark.matrix
def test_readers_of_dynamic_tables_say_how(strategy, folder):
    with strategy.scope(), tf.Graph().as_default():
        e = collective.get_embedding_variable("e", 2)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(e, [5, 6]))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            tf.train.Saver().save(session, f"{folder}/m")
        for name in ("e", "e/Adagrad"):
            assert not tf.train.load_checkpoint(folder).has_tensor(name)
            with pytest.raises(tf.errors.NotFoundError, match=rf"'{name}'.*dynamic.*read_table"):
                tf.train.load_variable(folder, name)
            w = tf.get_variable(f"w/{name}", [2, 2])
            with pytest.raises(ValueError, match=f"Tensor {name} is not found"):
                tf.train.init_from_checkpoint(folder, {name: w})
        with pytest.raises(ValueError, match="'e'.*dynamic.*read_table"):
            tf.raw_ops.RestoreV2(
                prefix=f"{folder}/m",
                tensor_names=["e"],
                shape_and_slices=[""],
                dtypes=[tf.float32],
            )


@pytest.mark.matrix
def test_plain_variables_start_from_tables(strategy, rank, folder):
    """Of one part and of several, of a table and of a slot."""
    want = checkpoints.saved(strategy, rank, f"{folder}/m")
    with strategy.scope(), tf.Graph().as_default():
        slot = tf.train.load_variable(folder, "t/Adam")
        whole = tf.get_variable("whole", [9, 3])
        tf.get_variable("parts", [9, 3], partitioner=tf.fixed_size_partitioner(2))
        by_columns = tf.get_variable("by_columns", [9, 3], partitioner=lambda shape, dtype: [1, 3])
        w = tf.get_variable("other", [3, 1])
        with tf.variable_scope("x"):
            tf.get_variable("Adam", [9, 3])
        tf.train.init_from_checkpoint(folder, {"t": whole, "w": w})
        tf.train.init_from_checkpoint(folder, {"t": "parts"})
        tf.train.init_from_checkpoint(folder, {"t": list(by_columns)})
        tf.train.init_from_checkpoint(folder, {"t/": "x/"})
        parts = [v for v in tf.global_variables() if v.op.name.startswith("parts/")]
        moved = next(v for v in tf.global_variables() if v.op.name == "x/Adam")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(whole), want)
            np.testing.assert_array_equal(np.concatenate(session.run(parts)), want)
            np.testing.assert_array_equal(np.concatenate(session.run(list(by_columns)), 1), want)
            np.testing.assert_array_equal(session.run(moved), slot)
            np.testing.assert_array_equal(session.run(w), tf.train.load_variable(folder, "w"))
        with pytest.raises(ValueError, match=r"\[8, 3\].*\[9, 3\]|\(8, 3\).*\[9, 3\]"):
            tf.train.init_from_checkpoint(folder, {"t": tf.get_variable("other_shape", [8, 3])})


@pytest.mark.ranks(2, 3)
def test_operations_that_read_by_name(strategy, rank, folder):
    want = checkpoints.saved(strategy, rank, f"{folder}/m")
    if rank == 0:
        command.main(["consolidate", f"{folder}/m", f"{folder}/whole"])
    checkpoints.wait()
    rows, columns = [8, -1, 0, 3], [2, -1, 0]
    remapped = {
        "ckpt_path": f"{folder}/m",
        "old_tensor_name": "t",
        "row_remapping": rows,
        "col_remapping": columns,
        "initializing_values": np.arange(6.0),
        "num_rows": 4,
        "num_cols": 3,
    }

    def results(path):
        ops = [
            tf.raw_ops.LoadAndRemapMatrix(**remapped | {"ckpt_path": path}),
            tf.raw_ops.LoadAndRemapMatrix(
                **remapped
                | {"ckpt_path": path, "col_remapping": [], "initializing_values": [7.0, 8.0, 9.0]}
            ),
            *tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=["w", "t", "global_step", "t"],
                shape_and_slices=["", "", "", "9 3 2,4:1,2"],
                dtypes=[tf.float32, tf.float32, tf.int64, tf.float32],
            ),
        ]
        with tf.Session() as session:
            return session.run(ops)

    def problem(**changes):
        kinds = tf.errors.InvalidArgumentError, tf.errors.InternalError
        with pytest.raises(kinds), tf.Session() as session:
            session.run(tf.raw_ops.LoadAndRemapMatrix(**remapped | changes))

    with tf.Graph().as_default():
        plain = results(f"{folder}/whole")
    with strategy.scope(), tf.Graph().as_default():
        for got, wanted in zip(results(f"{folder}/m"), plain):
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(got, want[2:6, 1:])
    for path in (f"{folder}/whole", f"{folder}/m"):
        with strategy.scope(), tf.Graph().as_default():
            problem(ckpt_path=path, row_remapping=[9, -1, 0, 3])
            problem(ckpt_path=path, initializing_values=np.arange(5.0))
            problem(ckpt_path=path, initializing_values=np.arange(7.0))
            problem(ckpt_path=path, col_remapping=[], num_cols=2)
            problem(ckpt_path=path, num_rows=5)
