"""Trains with everything that a long job uses: for tests that kill it, time and again.

    long_job.py FOLDER LAUNCH KILLED

Data go on where they stopped, checkpoints are written during training, with increments between
them. The first KILLED attempts of a launch end by a kill of one of the ranks, at a moment that
LAUNCH and the attempt decide.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time

import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, data

tf.logging.set_verbosity(tf.logging.ERROR)
RECORDS, EPOCHS, BATCH = 120, 40, 12
STEPS = RECORDS * EPOCHS // BATCH


def be_killed_soon(launch, attempt, rank, size):
    draw = random.Random(1000 * launch + attempt)
    victim, seconds = draw.randrange(size), draw.uniform(0, 0.3)
    if rank == victim:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def main(folder, launch, killed):
    strategy = CollectiveStrategy()
    rank, size = strategy.rank(), strategy.world_size()
    attempt = int(os.environ.get("COLLECTIVE_RESTART_COUNT") or 0)
    options = {"plan": "quiet", "deterministic": True, "checkpoint_blocking": False}
    with strategy.scope(**options), tf.Graph().as_default():
        tf.set_random_seed(5)
        records = data.records(
            f"{folder}/records", format="lines", shuffle=True, seed=5, epochs=EPOCHS
        )
        batches = data.resumable(records, batch_size=BATCH)
        batches = batches.map(lambda lines: tf.strings.to_number(lines, tf.int64)).prefetch(2)
        ids = tf.data.make_one_shot_iterator(batches).get_next()
        step = tf.train.get_or_create_global_step()
        used = open(f"{folder}/used_{launch}_{attempt}_{rank}", "w")

        def noted(ids, step):
            """Writes down what a step uses before it can be in a checkpoint."""
            print(json.dumps([int(step), ids.tolist()]), file=used, flush=True)
            return ids

        ids = tf.numpy_function(noted, [ids, step.read_value()], tf.int64)
        ids.set_shape([None])
        with strategy.embedding_scope():
            static = tf.get_variable("static", [RECORDS, 4])
            # No rows are evicted: that happens at saves, which come at other steps where a job has
            # started again.
            dynamic = tf.get_variable("dynamic", [None, 4])
        rows = [tf.nn.embedding_lookup(table, ids) for table in (static, dynamic)]
        hidden = tf.layers.dense(tf.concat(rows, 1), 8, tf.nn.relu)
        target = tf.sin(tf.cast(ids, tf.float32))[:, None]
        loss = tf.reduce_mean(tf.square(tf.layers.dense(hidden, 1) - target))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        kernels = [v for v in tf.trainable_variables() if v.op.name.startswith("dense")]
        state = [tf.nn.embedding_lookup(static, tf.range(RECORDS, dtype=tf.int64)), *kernels]
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=f"{folder}/saved",
            save_checkpoint_steps=10,
            save_incremental_checkpoint_steps=3,
            save_summaries_steps=None,
            log_step_count_steps=None,
        ) as session:
            at = session.run_step_fn(lambda step_context: int(step_context.session.run(step)))
            first = at
            while not session.should_stop() and at < STEPS:
                session.run(train)
                # Not before there is a new checkpoint: twice without one the job would end.
                if at == first + 6 and attempt < killed:
                    be_killed_soon(launch, attempt, rank, size)
                at += 1
                time.sleep(0.01)
            weights = session.run_step_fn(lambda step_context: step_context.session.run(state))
        digest = hashlib.blake2b(b"".join(x.tobytes() for x in weights), digest_size=8)
        print(f"weights {digest.hexdigest()} at {at}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
