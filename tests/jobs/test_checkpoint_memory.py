"""A rank holds no more than its shards and 300 MB while it saves and restores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '''
import sys, threading
import numpy as np, psutil, tensorflow.compat.v1 as tf
import collective
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
process = psutil.Process()
path, mode, kind = sys.argv[1:]


class Watch:
    """Prints how much more memory than before there was at most, in MB."""
    def __init__(self, what, session):
        self.what = what
        session.run(tf.constant(0))

    def __enter__(self):
        self.before = self.peak = process.memory_info().rss
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        while not self.done.wait(0.005):
            self.peak = max(self.peak, process.memory_info().rss)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        print(self.what, (self.peak - self.before) // 2 ** 20, flush=True)


def static():
    """4.8 million rows of 32 float32: 307 MB on each of two ranks. Two of its rows in each step."""
    rows = 4_800_000
    with strategy.embedding_scope():
        t = tf.get_variable('t', [rows, 32], initializer=tf.ones_initializer())
    return t, tf.train.GradientDescentOptimizer(0.1), [np.array([0, rows - 1])]


def dynamic():
    """4 million keys with rows of 16 float32 and a slot: 256 MB on each of two ranks, and 15 bytes of a key map a key."""
    t = collective.get_embedding_variable('t', 16, initializer=tf.ones_initializer())
    keys = np.random.default_rng(0).integers(-2 ** 63, 2 ** 63 - 1, [20, 200_000])
    return t, tf.train.MomentumOptimizer(0.1, 0.9), keys


with strategy.scope(), tf.Graph().as_default():
    table, optimizer, batches = {'static': static, 'dynamic': dynamic}[kind]()
    ids = tf.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    train, saver = optimizer.minimize(tf.reduce_sum(rows)), tf.train.Saver()
    with tf.Session() as session:
        if mode == 'save':
            session.run(tf.global_variables_initializer())
            for batch in batches:
                session.run(train, {ids: batch[rank::ranks]})
            with Watch('saved', session):           # a dense read would now copy the shard
                saver.save(session, path, write_meta_graph=False)
            with Watch('restored over', session):
                saver.restore(session, path)
        else:
            with Watch('restored', session):
                saver.restore(session, path)
                # The mean of the ranks' losses: a row that one rank looks up moves by 0.1 / N.
                assert abs(session.run(rows, {ids: batches[-1][-2:]}) - (1 - 0.1 / ranks)).max() < 1e-6
                session.run(train, {ids: batches[0][:2]})       # which would copy what TensorFlow doesn't own
'''


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, shard", [("static", 293), ("dynamic", 244 + 29)])
def test_saving_and_restoring_in_the_memory_of_a_shard(tmp_path: Path, kind: str, shard: int):
    (tmp_path / "script.py").write_text(SCRIPT)
    out = ""
    for mode in ("save", "restore"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "collective.launch",
                "-np",
                "2",
                "--device",
                "cpu",
                "--tee",
                "all",
                str(tmp_path / "script.py"),
                str(tmp_path / "m"),
                mode,
                kind,
            ],
            cwd=ROOT,
            text=True,
            timeout=140,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout[-3000:])
        assert done.returncode == 0
        out += done.stdout
    for what, most in (("saved", 300), ("restored over", 200), ("restored", shard + 100)):
        grown = [
            int(line.rpartition(" ")[2])
            for line in out.splitlines()
            if line.rpartition(" ")[0].endswith(f"] {what}")
        ]
        assert len(grown) == 2 and all(g < most for g in grown), (what, grown)
