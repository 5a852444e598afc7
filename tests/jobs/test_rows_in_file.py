"""Jobs whose tables have files: what is left of them, and what other numbers of ranks restore."""

import textwrap
import time

import numpy as np
import pytest

from collective import checkpoint
from tests.jobs import pool

pytestmark = pytest.mark.matrix

SCRIPT = """
import os, resource, signal, sys
import numpy as np
import tensorflow.compat.v1 as tf
import collective

folder, how = sys.argv[1:]
tf.logging.set_verbosity(tf.logging.ERROR)
strategy = collective.CollectiveStrategy()
policy = collective.TablePolicy(
    storage="dram_ssd", storage_path=f"{folder}/rows", storage_size=50_000
)
with strategy.scope(), tf.Graph().as_default():
    table = collective.get_embedding_variable("open", 4, ev_option=policy)
    ids = tf.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
    train = tf.train.AdagradOptimizer(0.1).minimize(loss)
    saver = tf.train.Saver()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step in range(5):
            session.run(train, {ids: np.arange(step * 4000, step * 4000 + 4000)})
        saver.save(session, f"{folder}/model")
        print("ready", flush=True)
        if strategy.rank() == 1:
            names = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
            (file,) = [n for n in names if os.path.exists(n) and f"{folder}/rows" in os.readlink(n)]
            if how == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(file).st_size,) * 2)
            if how == "unreadable":
                os.truncate(file, 0)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        for step in range(20):
            session.run(train, {ids: np.arange(step * 4000, step * 4000 + 4000)})
        print("went on", flush=True)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "how, words",
    [("full", "can not be written"), ("unreadable", "can not be read"), ("killed", "SIGKILL")],
)
def test_a_rank_whose_file_fails_ends_the_job(tmp_path, how, words):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = pool.start("-np", 2, "--device", "cpu", script, tmp_path, how)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ready" in line:
                ready = time.monotonic()
        code = process.wait(90)
    finally:
        process.kill()
    out = "".join(lines)
    print(out)
    assert code != 0 and time.monotonic() - ready < 60 and "went on" not in out
    assert "root cause: rank" in out and words in out
    if how != "killed":  # With a full disk both ranks raise it.
        assert f"dynamic table 'open': its file in '{tmp_path}/rows' {words}" in out
    assert list((tmp_path / "rows").iterdir()) == []  # The file had no name.
    assert (tmp_path / "model.index").exists()


RESIZED = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
import collective

folder, restored, saved, memory = sys.argv[1:]
tf.logging.set_verbosity(tf.logging.ERROR)
strategy = collective.CollectiveStrategy()
policy = collective.TablePolicy(
    filter_freq=3,
    capacity=10_000,  # It never acts: which rows go would depend on the number of ranks.
    steps_to_live=50,
    storage="dram_ssd",
    storage_path=f"{folder}/rows",
    storage_size=int(memory),
)
with strategy.scope(), tf.Graph().as_default():
    tf.set_random_seed(7)
    step = tf.train.get_or_create_global_step()
    table = collective.get_embedding_variable("open", 4, ev_option=policy)
    ids = tf.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    saver = tf.train.Saver()
    with tf.Session() as session:
        if restored == "-":
            session.run(tf.global_variables_initializer())
            for i in range(6):
                rng = np.random.default_rng([i, strategy.rank()])
                session.run(train, {ids: rng.zipf(1.1, 4000) % 5000 * 2**40})
        else:
            saver.restore(session, f"{folder}/{restored}")
        store = table.store(session)
        assert (store.count_in_memory < len(store)) == (int(memory) < 10**6), len(store)
        saver.save(session, f"{folder}/{saved}")
"""


@pytest.mark.timeout(300)
def test_rows_in_files_are_restored_on_other_numbers_of_ranks(tmp_path):
    """Rows, slots, last uses, frequencies and counts of refused keys: whole, whatever is in memory.

    1 rank and 3 restore what 2 have saved, into files of other sizes and into memory.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RESIZED))
    found = []
    for ranks, restored, saved, memory in (
        (2, "-", "a", 5000),
        (3, "a", "b", 2000),
        (1, "b", "c", 20_000),
        (2, "c", "d", 10**7),
    ):
        done = pool.launch(
            "-np", ranks, "--device", "cpu", script, tmp_path, restored, saved, memory
        )
        print(done.stdout)
        assert done.returncode == 0
        found.append({})
        for name in ("open", "open/Adagrad", "open/last_used", "open/frequency", "open/refused"):
            blocks = list(checkpoint.read_table(str(tmp_path / saved), name))
            keys, rows = (np.concatenate(parts) for parts in zip(*blocks))
            order = np.argsort(keys)
            found[-1][name] = keys[order], rows[order]
    assert len(found[0]["open"][0]) > 1000 and len(found[0]["open/refused"][0]) > 100
    for other in found[1:]:
        for name, arrays in found[0].items():
            for one, again in zip(arrays, other[name]):
                np.testing.assert_array_equal(one, again, name)
