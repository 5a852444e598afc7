"""A rank holds no more than its shard and 300 MB while it saves and restores."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = '''
import sys, threading
import psutil, tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
rows = 4_800_000                                    # times 32 float32: 614 MB whole, 307 MB on each of two ranks
process = psutil.Process()


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


def build():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [rows, 32], initializer=tf.ones_initializer())
    some = tf.nn.embedding_lookup(t, tf.constant([0, 1, rows - 1], tf.int64))
    return some, tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(some)), tf.train.Saver()


with strategy.scope(), tf.Graph().as_default():
    some, train, saver = build()
    with tf.Session() as session:
        if sys.argv[2] == 'save':
            session.run(tf.global_variables_initializer())
            session.run(train)                      # from now on a dense read would copy the shard
            with Watch('saved', session):
                saver.save(session, sys.argv[1], write_meta_graph=False)
            with Watch('restored over', session):
                saver.restore(session, sys.argv[1])
        else:
            with Watch('restored', session):
                saver.restore(session, sys.argv[1])
                assert abs(session.run(some) - 0.9).max() < 1e-6
                session.run(train)                  # which would copy what TensorFlow doesn't own
'''


@pytest.mark.timeout(200)
def test_saving_and_restoring_in_the_memory_of_a_shard(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    out = ''
    for mode in ('save', 'restore'):
        done = subprocess.run([sys.executable, '-m', 'collective.launch', '-np', '2', '--device', 'cpu', '--tee', 'all',
                               str(tmp_path / 'script.py'), str(tmp_path / 'm'), mode], cwd=ROOT, text=True, timeout=100,
                              env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(done.stdout[-3000:])
        assert done.returncode == 0
        out += done.stdout
    for what, most in (('saved', 300), ('restored over', 300), ('restored', 293 + 100)):
        grown = [int(line.rpartition(' ')[2]) for line in out.splitlines() if line.rpartition(' ')[0].endswith(f'] {what}')]
        assert len(grown) == 2 and all(g < most for g in grown), (what, grown)
