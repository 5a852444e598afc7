"""Measures what training steps lose during a background save, compared with the time of a blocking
save.

    collective launch -np 2 --device cpu benchmarks/background_save.py [--megabytes 400]
    [--folder .] [--rounds 3] [--ids 4096]

Each step trains --ids random rows on each rank. What steps lose is the time of the save's call, of
the steps until it is written, and of its end, less that of as many steps before. `dd` writes the
same bytes, with fsync. The median of the rounds is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import report
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, checkpoint
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session

DIM = 32
BYTES_PER_ROW = 2 * DIM * 4  # with a slot
STEPS = 10  # between two looks at whether a save goes on


def run_rounds(
    strategy: CollectiveStrategy, rows: int, folder: Path, rounds: int, ids: int
) -> list[dict[str, float]]:
    """Returns a blocking save's seconds and what steps lose during a background one, by round."""
    random, results = np.random.RandomState(strategy.rank()), []
    with strategy.scope(checkpoint_blocking=False, plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [rows, DIM], initializer=tf.truncated_normal_initializer())
        keys = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver(max_to_keep=1)

        def steps(session: Any) -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                session.run(train, {keys: random.randint(0, rows, ids)})
            return time.perf_counter() - start

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i in range(rounds):
                usual = statistics.median(steps(session) for _ in range(5))
                start = time.perf_counter()
                with strategy.scope(checkpoint_blocking=True):
                    saver.save(session, str(folder / "blocking"), global_step=i)
                blocking = time.perf_counter() - start
                start, blocks, goes_on = time.perf_counter(), 0, True
                saver.save(session, str(folder / "background"), global_step=i)
                work: Any = state_of_session(session).background_save
                while goes_on:
                    steps(session)
                    blocks += 1
                    looks = barrier.exchange(session, "is it over", {"over": work.is_over})
                    goes_on = not all(look["over"] for look in looks)
                checkpoint.wait()
                background = time.perf_counter() - start
                results.append(
                    {
                        "blocking": blocking,
                        "background": background,
                        "steps": blocks * STEPS,
                        "lost": background - blocks * usual,
                        "step": usual / STEPS,
                        "waited": work.room.waited,
                    }
                )
    return results


def dd(folder: Path, size: int) -> float:
    """Returns the seconds in which `dd` writes so many bytes to the disk."""
    start = time.perf_counter()
    arguments = ["dd", "bs=4M", "if=/dev/zero", f"of={folder / 'dd'}", "conv=fsync"]
    subprocess.run([*arguments, f"count={size >> 22}"], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=int, default=400, help="of the table and its slot together")
    add("--folder", type=Path, default=".", help="on the disk in question, the same for all ranks")
    add("--rounds", type=int, default=3)
    add("--ids", type=int, default=4096, help="of a step, on each rank")
    arguments = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    strategy, load_before = CollectiveStrategy(), report.machine_load()
    rows = arguments.megabytes * 10**6 // BYTES_PER_ROW
    folder = arguments.folder.resolve() / "background-save-benchmark"
    if strategy.rank() == 0:
        folder.mkdir()
    try:
        results = run_rounds(strategy, rows, folder, arguments.rounds, arguments.ids)
        if strategy.rank() == 0:
            of_dd = dd(folder, rows * BYTES_PER_ROW)
            median = {key: statistics.median(r[key] for r in results) for key in results[0]}
            print(
                f"{arguments.megabytes} MB on {strategy.world_size()} ranks: a blocking save takes "
                f"{median['blocking']:.2f} s ({of_dd / median['blocking']:.2f} of dd's rate); "
                f"{median['steps']:.0f} steps during one of {median['background']:.2f} s lose "
                f"{median['lost']:.2f} s, {median['lost'] / median['blocking']:.0%} of it; a step "
                f"takes {median['step'] * 1e3:.1f} ms else; waited for room: "
                f"{median['waited']:.2f} s\nbefore: {load_before}; after: {report.machine_load()}"
            )
    finally:
        if strategy.rank() == 0:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
