"""Checkpoints on every rank: what is saved is what is restored, and what doesn't fit is refused on
all ranks alike.
"""

import os
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective.checkpoint import __main__ as command
from collective.checkpoint import tensor_bundle as bundles
from collective.coordination import barrier
from tests.ranks import reference

pytestmark = [
    pytest.mark.ranks(1, 3),
    pytest.mark.backends("hb"),
    pytest.mark.ungrouped,
    pytest.mark.double,
]


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see: rank 0's."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def wait():
    barrier.exchange(None, "wait", {})


def model(strategy, rows=9, dim=3, optimizer=None, name="t", values=0):
    """A table with slots and a dense weight; `session.run(train, {ids: …})` changes all of them."""
    with strategy.embedding_scope():
        t = reference.table(name, rows, dim, values)
    w = tf.get_variable("w", initializer=reference.table_values(dim, 1, 1))
    ids = tf.placeholder(tf.int64, [None], "ids")
    loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, ids), w)))
    step = tf.train.get_or_create_global_step()
    train = (optimizer or tf.train.AdamOptimizer(0.01)).minimize(loss, global_step=step)
    return {
        "t": t,
        "w": w,
        "ids": ids,
        "loss": loss,
        "train": train,
        "step": step,
        "several": rows,
        "rows": tf.nn.embedding_lookup(t, tf.range(rows)),
    }


def steps(session, m, rank, count, start=0):
    return [
        session.run(
            [m["loss"], m["train"]], {m["ids"]: [(rank + i) % m["several"], i % m["several"]]}
        )[0]
        for i in range(start, start + count)
    ]


def saved(strategy, rank, path, count=3, **options):
    """Trains and saves; the table's rows then."""
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy, **options)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            steps(session, m, rank, count)
            saver.save(session, path)
            return session.run(m["rows"])


def restored(strategy, path, scope=None, initialize=False, **options):
    """Builds a model, restores `path` into it; its table's rows."""
    with strategy.scope(**(scope or {})), tf.Graph().as_default():
        m = model(strategy, **options)
        saver = tf.train.Saver()
        with tf.Session() as session:
            if initialize:
                session.run(tf.global_variables_initializer())
            try:
                saver.restore(session, path)
            finally:
                if initialize:
                    after = session.run([m["rows"], m["w"]])
                    barrier.exchange(session, "looked", {})
                    restored.after = after
            return session.run(m["rows"])


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


# -- what doesn't fit

MISFITS = {
    "shape": (
        {"rows": 8},
        tf.errors.InvalidArgumentError,
        r"'t' has the shape \[8, 3\] here, \[9, 3\] in the checkpoint",
    ),
    "dense": (
        {"dim": 4},
        tf.errors.InvalidArgumentError,
        r"'w' has the shape \[4, 1\] here, \[3, 1\] in the checkpoint",
    ),
    "name": ({"name": "other"}, tf.errors.NotFoundError, r"no table 'other' \(its tables: t\)"),
    "optimizer": (
        {"optimizer": lambda: tf.train.AdagradOptimizer(0.1)},
        tf.errors.NotFoundError,
        r"no 't/Adagrad', a slot of table 't'; it was written with Adam, Adam_1 .*missing_slots='fresh'",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(strategy, rank, folder, case):
    options, error, message = MISFITS[case]
    saved(strategy, rank, f"{folder}/m")
    options = {k: v() if callable(v) else v for k, v in options.items()}
    with pytest.raises(error, match=message):
        restored(strategy, f"{folder}/m", initialize=True, **options)
    rows, w = restored.after
    np.testing.assert_array_equal(
        rows, reference.table_values(options.get("rows", 9), options.get("dim", 3))
    )
    np.testing.assert_array_equal(w, reference.table_values(options.get("dim", 3), 1, 1))


def test_missing_slots_start_fresh_if_asked(strategy, rank, folder):
    want = saved(strategy, rank, f"{folder}/m", optimizer=tf.train.AdagradOptimizer(0.1))
    with strategy.scope(missing_slots="fresh"), tf.Graph().as_default():
        m = model(strategy)
        with tf.Session() as session:
            tf.train.Saver().restore(session, f"{folder}/m")
            assert session.run(tf.report_uninitialized_variables()).size == 0
            np.testing.assert_array_equal(session.run(m["rows"]), want)
            powers = [v for v in tf.global_variables() if "beta" in v.name]
            np.testing.assert_allclose(session.run(powers), [0.9, 0.999])
            steps(session, m, rank, 1)
    with pytest.raises(ValueError, match="'error' or 'fresh', not 'some'"):
        strategy.scope(missing_slots="some")


def damage(folder, how, size):
    data = sorted(n for n in os.listdir(folder) if ".data-" in n)[0]
    path = f"{folder}/{data}"
    if how == "missing":
        os.remove(path)
    elif how == "short":
        os.truncate(path, os.path.getsize(path) - 1)
    else:
        with open(path, "r+b") as file:  # the first bytes of the first file: rank 0's rows
            file.write(b"\xff\xff")


@pytest.mark.parametrize(
    "how, spare", [("missing", 1 << 30), ("short", 0), ("flipped", 1 << 30), ("flipped", 0)]
)
def test_damage_is_an_error_on_every_rank(strategy, rank, size, folder, how, spare, monkeypatch):
    """Also on ranks that don't read the damaged part; the old values stay, also where there is no
    room for both.
    """
    from collective.checkpoint import table_io

    monkeypatch.setattr(table_io, "SPARE_BYTES", spare)
    saved(strategy, rank, f"{folder}/m")
    wait()
    if rank == 0:
        damage(folder, how, size)
    wait()
    with pytest.raises((tf.errors.DataLossError, RankError)) as error:
        restored(strategy, f"{folder}/m", initialize=True)
    assert f"{folder}/m" in str(error.value)
    np.testing.assert_array_equal(restored.after[0], reference.table_values(9, 3))


def test_restoring_over_values_without_room_for_both(strategy, rank, folder, monkeypatch):
    from collective.checkpoint import table_io

    monkeypatch.setattr(table_io, "SPARE_BYTES", 0)
    want = saved(strategy, rank, f"{folder}/m")
    np.testing.assert_array_equal(restored(strategy, f"{folder}/m", initialize=True), want)


def test_ranks_that_name_different_checkpoints(strategy, rank, size, folder):
    if size == 1:
        pytest.skip("one rank")
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(ValueError, match="rank 0 names '.*/m', rank 1 '.*/other'"):
                saver.save(session, f"{folder}/{'m' if rank != 1 else 'other'}")
            saver.save(session, f"{folder}/m")
            with pytest.raises(ValueError, match="rank 0 names '.*/m', rank 1 '.*/other'"):
                saver.restore(session, f"{folder}/{'m' if rank != 1 else 'other'}")
            with pytest.raises(RankError):
                saver.save(session, f"{folder}/m") if rank != 1 else steps(session, m, rank, 1)


def test_a_failure_of_one_rank_is_everyones(strategy, rank, size, folder, monkeypatch):
    """A full disk on the last rank: the checkpoint before stays the latest, and nothing is left of
    this one.
    """
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, f"{folder}/m", global_step=0)
            wait()
            before = sorted(os.listdir(folder))
            with monkeypatch.context() as patch:
                if rank == size - 1:

                    def full(*_):
                        raise OSError(28, "No space left on device")

                    patch.setattr(bundles.BundleWriter, "close", full)
                with pytest.raises(
                    RankError if rank < size - 1 else OSError, match="No space left on device"
                ):
                    saver.save(session, f"{folder}/m", global_step=1)
            wait()
            assert sorted(os.listdir(folder)) == before and saver.last_checkpoints == [
                f"{folder}/m-0"
            ]
            with pytest.raises((ValueError, RankError), match="doesn't exist, can't save"):
                saver.save(session, f"{folder}/no/such/folder/m")
            steps(session, m, rank, 1)
            assert saver.save(session, f"{folder}/m", global_step=1) == f"{folder}/m-1"


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


def test_an_exported_graph(strategy, rank, size, folder):
    """The graph beside a checkpoint: one rank's static tables are ordinary variables in it; others
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
                    ValueError, match=r"tables \('t'\) can't be: build the model by its code"
                ):
                    saver.restore(session, f"{folder}/m")


def test_a_file_system_of_tensorflows_own(strategy, rank, size, monkeypatch):
    """ram:// is each process's own: one rank can use it, several are told what is wrong."""
    from collective.checkpoint import commit

    monkeypatch.setattr(commit, "VISIBILITY_TIMEOUT", 0.5)
    if size == 1:
        want = saved(strategy, rank, "ram://checkpoints/m")
        np.testing.assert_array_equal(restored(strategy, "ram://checkpoints/m"), want)
    else:
        with pytest.raises((OSError, RankError), match="common file system"):
            saved(strategy, rank, "ram://checkpoints/m")
    assert threading.active_count() < 50
