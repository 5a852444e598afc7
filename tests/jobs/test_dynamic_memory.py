"""A dynamic table takes memory as its rows come: 2 × rows in use × (1 + slots) + 64 MB at the most,
at any moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import numpy as np, psutil, threading, tensorflow.compat.v1 as tf
import collective
from collective import CollectiveStrategy

optimizer, slots, dim, adds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
strategy, batch = CollectiveStrategy(), 50_000
with strategy.scope(), tf.Graph().as_default():
    t = collective.get_embedding_variable('t', dim)
    ids = tf.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(t, ids)
    train = getattr(tf.train, optimizer)(0.1).minimize(tf.reduce_sum(rows))
    with tf.Session() as session:
        process, peak, done = psutil.Process(), [0], threading.Event()
        session.run(tf.global_variables_initializer())
        keys = np.random.default_rng(0)

        def step():
            session.run(train, {ids: keys.integers(-2 ** 63, 2 ** 63 - 1, batch)})

        for _ in range(5):                  # what steps of this size take, whatever the table holds
            step()
        session.run(tf.global_variables_initializer())
        before = process.memory_info().rss

        def watch():
            while not done.wait(0.002):
                peak[0] = max(peak[0], process.memory_info().rss)
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(adds):
            step()
        done.set()
        watcher.join()
        session.run(tf.global_variables_initializer())  # running it again frees the memory
        after = process.memory_info().rss
        count = adds * batch
        bound = 2 * count * dim * 4 * (1 + slots) + (64 << 20)
        print('grew', peak[0] - before, 'bound', bound, 'kept', after - before, flush=True)
"""


@pytest.mark.sample(1)
@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "optimizer, slots, dim, adds",
    [
        ("AdagradOptimizer", 1, 16, 60),
        ("GradientDescentOptimizer", 0, 16, 60),
        ("AdamOptimizer", 2, 8, 40),
    ],
)
def test_memory_grows_with_the_rows(
    tmp_path: Path, optimizer: str, slots: int, dim: int, adds: int
):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", optimizer, str(slots), str(dim), str(adds)],
        timeout=280,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    line = next(
        (line.split() for line in done.stdout.splitlines() if line.startswith("grew")), None
    )
    assert done.returncode == 0 and line is not None, done.stdout[-3000:]
    grew, bound, kept = int(line[1]), int(line[3]), int(line[5])
    rows = adds * 50_000 * dim * 4 * (1 + slots)
    assert rows < grew < bound, (rows, grew, bound)
    assert kept < 64 << 20, kept
