"""Checkpoints restore on every rank what was saved there, by any way of saving."""

import os
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective import estimator as tf_estimator
from collective.checkpoint import __main__ as command
from collective.checkpoint.files import tensor_bundle as bundles
from tests.ranks import estimators
from tests.ranks.checkpoints import model, restored, saved, steps, wait

pytestmark = [
    pytest.mark.either_backend,
    pytest.mark.ranks(1, 3),
    pytest.mark.backends("hb"),
    pytest.mark.double,
]


@pytest.mark.ungrouped
def test_going_on_is_as_if_there_had_been_no_restart(strategy, rank, folder):
    with strategy.scope():
        with tf.Graph().as_default():
            m = model(strategy)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                steps(session, m, rank, 3)
                assert saver.save(session, f"{folder}/m", global_step=m["step"]) == f"{folder}/m-3"
                want = steps(session, m, rank, 3, 3)
                want_rows = session.run(m["rows"])
        assert tf.train.latest_checkpoint(folder) == f"{folder}/m-3"
        with tf.Graph().as_default():
            m = model(strategy)
            saver = tf.train.Saver(sharded=True)
            with tf.Session() as session:
                saver.restore(session, f"{folder}/m-3")
                assert session.run(tf.report_uninitialized_variables()).size == 0
                assert steps(session, m, rank, 3, 3) == want
                np.testing.assert_array_equal(session.run(m["rows"]), want_rows)


@pytest.mark.parametrize("rows", [2, 1000])
def test_stock_tensorflow_reads_it_and_so_does_read_table(strategy, rank, size, folder, rows):
    """Parts are r, r + N, …, whatever V: also where some ranks have none."""
    want = saved(strategy, rank, f"{folder}/m", rows=rows)
    reader = tf.train.load_checkpoint(folder)
    shapes = reader.get_variable_to_shape_map()
    for r in range(size):
        entry = "t" if size == 1 else f"t/part_{r}"
        np.testing.assert_array_equal(reader.get_tensor(entry), want[r::size])
        slot = "t/Adam" if size == 1 else f"t/Adam/part_{r}"
        assert shapes[slot] == [len(want[r::size]), 3]
    assert reader.get_tensor("global_step") == 3
    for block in (1, 3, 400, 1 << 16):
        firsts, blocks = zip(*checkpoint.read_table(folder, "t", block=block))
        assert list(firsts) == list(range(0, rows, block)) and all(len(b) <= block for b in blocks)
        np.testing.assert_array_equal(np.concatenate(blocks), want)


def test_parts_of_many_slices(strategy, rank, size, folder, monkeypatch):
    """Small slices and files stand for large ones: 10 rows a slice, 3 slices a file."""
    monkeypatch.setattr(bundles, "SLICE_BYTES", 10 * 12)
    monkeypatch.setattr(bundles, "FILE_BYTES", 3 * 10 * 12)
    want = saved(strategy, rank, f"{folder}/m", rows=250)
    wait()
    assert len(tf.io.gfile.glob(f"{folder}/m.data-*")) > 10
    np.testing.assert_array_equal(restored(strategy, f"{folder}/m", rows=250), want)
    np.testing.assert_array_equal(
        np.concatenate([b for _, b in checkpoint.read_table(folder, "t", block=7)]), want
    )
    if rank == 0:
        assert command.main(["consolidate", folder, f"{folder}/whole"]) == 0
    wait()
    np.testing.assert_array_equal(tf.train.load_checkpoint(f"{folder}/whole").get_tensor("t"), want)
    np.testing.assert_array_equal(restored(strategy, f"{folder}/whole", rows=250), want)


def test_a_plain_checkpoint_is_a_start(strategy, rank, folder, monkeypatch):
    """Whole tables and slots, written by TensorFlow alone; small numbers stand for entries too
    large to be read whole.
    """
    import contextlib

    class Plain:
        embedding_scope = staticmethod(contextlib.nullcontext)

    if rank == 0:
        with tf.Graph().as_default():
            m = model(Plain, rows=101)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                steps(session, m, 0, 3)
                saver.save(session, f"{folder}/plain")
    wait()
    reader = tf.train.load_checkpoint(f"{folder}/plain")
    for whole in (bundles.WHOLE_READ_BYTES, 50):
        monkeypatch.setattr(bundles, "WHOLE_READ_BYTES", whole)
        monkeypatch.setattr(bundles, "SLICE_BYTES", bundles.SLICE_BYTES if whole > 50 else 130)
        with strategy.scope(), tf.Graph().as_default():
            m = model(strategy, rows=101, optimizer=(optimizer := tf.train.AdamOptimizer(0.01)))
            slot = optimizer.get_slot(m["t"], "v")
            with tf.Session() as session:
                tf.train.Saver().restore(session, f"{folder}/plain")
                np.testing.assert_array_equal(session.run(m["rows"]), reader.get_tensor("t"))
                np.testing.assert_array_equal(session.run(slot), reader.get_tensor("t/Adam_1"))


def test_names_of_var_list(strategy, rank, folder):
    """A dictionary renames tables, too; a list may leave out what it likes."""
    want = saved(strategy, rank, f"{folder}/all")
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        renamed, part = (
            tf.train.Saver({"other/name": m["t"], "w": m["w"]}),
            tf.train.Saver([[m["t"]]]),
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            part.restore(session, f"{folder}/all")
            np.testing.assert_array_equal(session.run(m["rows"]), want)
            assert session.run(m["step"]) == 0
            renamed.save(session, f"{folder}/renamed", write_state=False, write_meta_graph=False)
            steps(session, m, rank, 1)
            renamed.restore(session, f"{folder}/renamed")
            np.testing.assert_array_equal(session.run(m["rows"]), want)
            with pytest.raises(
                tf.errors.NotFoundError, match=r"no table 't' \(its tables: other/name\)"
            ):
                part.restore(session, f"{folder}/renamed")
            with pytest.raises(ValueError, match="two names"):
                tf.train.Saver({"a": m["t"], "b": m["t"]})
    assert tf.train.latest_checkpoint(folder) == f"{folder}/all" and not os.path.exists(
        f"{folder}/renamed.meta"
    )
    ((_, rows),) = checkpoint.read_table(f"{folder}/renamed", "other/name")
    np.testing.assert_array_equal(rows, want)


def test_max_to_keep(strategy, rank, folder):
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver(max_to_keep=2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(4):
                steps(session, m, rank, 1)
                saver.save(session, f"{folder}/m", global_step=m["step"])
            assert saver.last_checkpoints == [f"{folder}/m-3", f"{folder}/m-4"]
    state = tf.train.get_checkpoint_state(folder)
    assert list(state.all_model_checkpoint_paths) == [f"{folder}/m-3", f"{folder}/m-4"]
    wait()
    assert {name.split(".")[0] for name in os.listdir(folder)} == {"m-3", "m-4", "checkpoint"}


def test_saving_over_the_checkpoint_that_is_there(strategy, rank, folder):
    """CheckpointSaverHook does so at its start, with the step that was restored."""
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i in range(3):
                steps(session, m, rank, 1, i)
                saver.save(session, f"{folder}/m")
                wait()
                shards = {
                    name.rpartition("-of-")[2] for name in os.listdir(folder) if ".data-" in name
                }
                assert len(shards) == 1 and not [n for n in os.listdir(folder) if "_temp_" in n]
            want = session.run(m["rows"])
    np.testing.assert_array_equal(restored(strategy, f"{folder}/m"), want)


@pytest.mark.slow
def test_a_monitored_session_goes_on(strategy, rank, folder):
    """Stopped after 4 steps and started again: the losses of the steps after it are those of a
    session that wasn't.
    """

    def run(path, until):
        losses = []
        with strategy.scope(), tf.Graph().as_default():
            m = model(strategy)
            i = 0
            hooks = [tf.train.StopAtStepHook(last_step=until)]
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=path,
                hooks=hooks,
                save_checkpoint_steps=3,
                save_checkpoint_secs=None,
                log_step_count_steps=None,
            ) as session:
                i = session.run_step_fn(lambda step_context: step_context.session.run(m["step"]))
                while not session.should_stop():
                    losses.append(
                        session.run([m["loss"], m["train"]], {m["ids"]: [(rank + i) % 9, i % 9]})[0]
                    )
                    i += 1
        return losses

    whole = run(f"{folder}/whole", 8)
    assert run(f"{folder}/parts", 4) + run(f"{folder}/parts", 8) == whole
    assert tf.train.latest_checkpoint(f"{folder}/parts").endswith("model.ckpt-8")
    wait()
    assert sorted(n for n in os.listdir(f"{folder}/parts") if n.endswith(".index")) == [
        f"model.ckpt-{i}.index" for i in (0, 3, 4, 7, 8)
    ]


@pytest.mark.slow
def test_init_from_checkpoint(strategy, rank, folder):
    want = saved(strategy, rank, f"{folder}/m", name="old/t")
    forms = {
        "name": {"old/t": "new/t"},
        "variable": lambda v: {"old/t": v},
        "list": lambda v: [("old/t", [v])],
        "scope": {"old/": "new/"},
        "part": {"old/t/part_0": "new/t"},
    }
    for form, given in forms.items():
        if form == "part" and strategy.world_size() == 1:
            continue
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                t = tf.get_variable("new/t", [9, 3])
            w = tf.get_variable("w", [3, 1])
            rows = tf.nn.embedding_lookup(t, tf.range(9))
            tf.train.init_from_checkpoint(folder, given(t) if callable(given) else given)
            tf.train.init_from_checkpoint(f"{folder}/m", {"w": w})
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                np.testing.assert_array_equal(session.run(rows), want, err_msg=form)
                np.testing.assert_array_equal(
                    session.run(w), tf.train.load_checkpoint(folder).get_tensor("w")
                )
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [8, 3])
        with pytest.raises(
            ValueError,
            match=r"'t' \(there 'old/t'\) has the shape \[8, 3\] here, \[9, 3\] in the checkpoint",
        ):
            tf.train.init_from_checkpoint(folder, {"old/t": t})
        with pytest.raises(ValueError, match="nothing is not found"):
            tf.train.init_from_checkpoint(folder, {"nothing": t})


def test_restoring_over_values_without_room_for_both(strategy, rank, folder, monkeypatch):
    from collective.checkpoint.rows import table_io

    monkeypatch.setattr(table_io, "SPARE_BYTES", 0)
    want = saved(strategy, rank, f"{folder}/m")
    np.testing.assert_array_equal(restored(strategy, f"{folder}/m", initialize=True), want)


def test_a_graph_without_tables(strategy, rank, folder):
    """Rank 0 alone writes; every rank gets the path."""
    with strategy.scope(), tf.Graph().as_default():
        v = tf.get_variable("v", [3], initializer=tf.ones_initializer())
        more = tf.assign_add(v, [1.0, 2.0, 3.0])
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert saver.save(session, f"{folder}/m") == f"{folder}/m"
            session.run(more)
            saver.restore(session, f"{folder}/m")
            np.testing.assert_array_equal(session.run(v), [1, 1, 1])


def test_show(strategy, rank, size, folder, capsys):
    saved(strategy, rank, f"{folder}/m")
    assert command.main(["show", folder]) == 0
    out = capsys.readouterr().out
    parts = ", ".join(str(len(range(r, 9, size))) for r in range(size))
    assert (
        f"saved by {size} rank" in out
        and f"table t: static, 9 rows of 3 float32 in {size} part" in out
    )
    assert (
        f"({parts}), 108 bytes" in out
        and "slot t/Adam_1: 9 rows" in out
        and "  w: float32 [3, 1], 12 bytes" in out
    )
    assert (
        command.main(["show", f"{folder}/none"]) == 1 and "no checkpoint" in capsys.readouterr().err
    )


@pytest.mark.ungrouped
def test_an_exported_graph(strategy, rank, size, folder):
    """The graph next to a checkpoint: one rank's static tables are ordinary variables in it; others
    can't be imported.
    """
    want = saved(strategy, rank, f"{folder}/m")
    wait()
    with strategy.scope(), tf.Graph().as_default():
        saver = tf.train.import_meta_graph(f"{folder}/m.meta")
        with tf.Session() as session:
            if size == 1:
                saver.restore(session, f"{folder}/m")
                table = next(v for v in tf.global_variables() if v.name == "t:0")
                np.testing.assert_array_equal(session.run(table), want)
            else:
                with pytest.raises(
                    ValueError, match=r"tables \('t'\) cannot be: build the model by its code"
                ):
                    saver.restore(session, f"{folder}/m")


@pytest.mark.ungrouped
def test_a_training_graph_that_was_imported(strategy, rank, size, folder):
    """Without its devices, too: several ranks are told that it can't be run, and none waits."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [10, 3])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
        exported = tf.train.export_meta_graph(f"{folder}/{rank}.meta")
    for clear in (True, False):
        with strategy.scope(), tf.Graph().as_default():
            tf.train.import_meta_graph(exported, clear_devices=clear)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if size == 1:
                    session.run("train")
                else:
                    with pytest.raises(
                        tf.errors.InvalidArgumentError, match="build the model by its code"
                    ):
                        session.run("train")


def test_a_file_system_of_tensorflows_own(strategy, rank, size, monkeypatch):
    """ram:// is each process's own: one rank can use it, several are told what is wrong."""
    from collective.checkpoint.files import commit

    monkeypatch.setattr(commit, "VISIBILITY_TIMEOUT", 0.5)
    others = threading.active_count()  # of earlier tests
    if size == 1:
        want = saved(strategy, rank, "ram://checkpoints/m")
        np.testing.assert_array_equal(restored(strategy, "ram://checkpoints/m"), want)
    else:
        with pytest.raises((OSError, RankError), match="common file system"):
            saved(strategy, rank, "ram://checkpoints/m")
    assert threading.active_count() < others + 20


def owned(folder):
    """Returns the names of the marks of owners, once no rank saves."""
    wait()
    names = sorted(name for name in os.listdir(folder) if name.endswith(".owner"))
    wait()
    return names


def test_a_session_that_saves_owns_the_name_until_it_is_closed(strategy, rank, folder):
    """One after the other, two at a time, and one that only restores, which owns nothing."""
    saved(strategy, rank, f"{folder}/m")
    assert owned(folder) == []
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as first:
            saver.restore(first, f"{folder}/m")
            assert owned(folder) == []
            saver.save(first, f"{folder}/m", global_step=m["step"])
            with tf.Session() as second:
                saver.restore(second, f"{folder}/m")
                saver.save(second, f"{folder}/m", global_step=m["step"])
                saver.save(second, f"{folder}/other")
                assert owned(folder) == ["m.owner", "other.owner"]
            assert owned(folder) == ["m.owner"]
            steps(first, m, rank, 1)
            saver.save(first, f"{folder}/m", global_step=m["step"])
        assert owned(folder) == []
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=2, log_step_count_steps=None
        ) as session:
            steps(session, m, rank, 3)
            assert owned(folder) == ["model.ckpt.owner"]
    assert owned(folder) == []


@pytest.mark.matrix
def test_an_estimator_that_trains_and_evaluates_owns_its_folder_in_between_only(
    strategy, rank, folder
):
    config = tf_estimator.RunConfig(save_checkpoints_steps=3)
    estimator = estimators.made(strategy, folder, config=config)
    for until in (4, 8):
        estimator.train_and_evaluate(
            tf_estimator.TrainSpec(estimators.records(40), max_steps=until),
            tf_estimator.EvalSpec(estimators.records(9), steps=None, throttle_secs=0),
        )
        assert owned(folder) == []
    assert estimator.latest_checkpoint().endswith("-8")
