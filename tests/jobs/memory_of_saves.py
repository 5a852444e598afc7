"""Trains a table and saves it, blocking and during training; each rank says what memory that took.

    memory_of_saves.py FOLDER MEGABYTES BUFFER_MEGABYTES

MEGABYTES are the table's with its slot, of all ranks. Each rank prints, as JSON, the most anonymous
memory (RssAnon: files that are mapped don't count) while it trained, in either save, and in a
restore, beyond its shards.
"""

import json
import os
import sys
import threading

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, checkpoint

DIM = 32


def anonymous():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Peak:
    """Looks at the memory every 5 ms, from `with` to its end; `bytes` is the most."""

    def __enter__(self):
        self.bytes, self._over = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, anonymous())

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def main():
    folder, megabytes, buffer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) << 20
    tf.logging.set_verbosity(tf.logging.ERROR)
    strategy = CollectiveStrategy()
    rows = (megabytes << 20) // (2 * DIM * 4)
    shards = -(-rows // strategy.world_size()) * 2 * DIM * 4
    options = {"checkpoint_blocking": False, "checkpoint_buffer": buffer, "plan": "quiet"}
    peaks = {}
    with strategy.scope(**options), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [rows, DIM], initializer=tf.zeros_initializer())
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        saver, random = tf.train.Saver(max_to_keep=1), np.random.RandomState(strategy.rank())

        def step():
            session.run(train, {ids: random.randint(0, rows, 4096)})

        with tf.Session() as session:
            with Peak() as peak:
                session.run(tf.global_variables_initializer())
                for _ in range(20):
                    step()
            peaks["training"] = peak.bytes
            with Peak() as peak, strategy.scope(checkpoint_blocking=True):
                saver.save(session, f"{folder}/m")
            peaks["blocking"] = peak.bytes
            with Peak() as peak:
                saver.save(session, f"{folder}/m")
                for _ in range(20):
                    step()
                checkpoint.wait()
            peaks["background"] = peak.bytes
            with Peak() as peak:
                saver.restore(session, f"{folder}/m")
            peaks["restore"] = peak.bytes
    beyond = {name: (size - shards) >> 20 for name, size in peaks.items()}
    print("beyond", json.dumps({"rank": strategy.rank(), "pid": os.getpid(), **beyond}), flush=True)


if __name__ == "__main__":
    main()
