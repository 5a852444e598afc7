"""Measures MB/s of saving and restoring a table, compared with `dd` of the same bytes on the same
disk, and how long an increment takes of 1 % of the rows.

    collective launch -np 2 --device cpu benchmarks/checkpoint.py [--megabytes 1000]
    [--folder .] [--rounds 3]

A save ends when everything is on the disk (fsync); so does `dd … conv=fsync`. Saves go past the
page cache; what was saved is read once before it is restored. So a restore reads what the page
cache holds, as `dd` to /dev/null does; both say what the software costs, not the disk. The median
of the rounds is printed, with the least and the most, since disks and machines are shared.
An increment has the rows that a step has trained since the last save, which are spread evenly over
the table, with their slots; a restore of it is one of the base and the increments.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import report
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, checkpoint
from collective.coordination import barrier
from collective.ops.counting import counted

INCREMENT = "increment of 1 %"
DIM = 32
BYTES_PER_ROW = 2 * DIM * 4  # with a slot
DD_BLOCK = 4 << 20


class Timer:
    """Collects the seconds of actions by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)


def dd(*arguments: str) -> None:
    subprocess.run(["dd", f"bs={DD_BLOCK}", *arguments], check=True, stderr=subprocess.DEVNULL)


def read_once(folder: Path) -> None:
    """Brings the files of a folder into the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            dd(f"if={path}", "of=/dev/null")


def run_rounds(strategy: CollectiveStrategy, rows: int, folder: Path, rounds: int) -> Timer:
    """Saves, restores and copies with dd; dd on rank 0 only, the others wait for the next save."""
    timer = Timer()
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [rows, DIM], initializer=tf.truncated_normal_initializer())
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver(max_to_keep=1)
        checkpoint.enable_increments(str(folder))
        # Each rank trains 1 % of its own rows: of N, rank r has r, r + N, …
        changed = np.arange(strategy.rank(), rows, strategy.world_size() * 100)
        prefix, copy = str(folder / "m"), folder / "dd"
        count = rows * BYTES_PER_ROW // DD_BLOCK
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: [0, 1]})
            for i in range(rounds):
                timer.time("save", lambda i=i: saver.save(session, prefix, global_step=i))
                read_once(folder)
                barrier.exchange(session, "all have read", {})
                timer.time("restore", lambda i=i: saver.restore(session, f"{prefix}-{i}"))
                saver.save(session, prefix, global_step=i)  # A restore changes all rows.
                session.run(train, {ids: changed})
                save_increment = functools.partial(checkpoint.save_increment, session, str(folder))
                timer.time(INCREMENT, save_increment)
                read_once(folder)
                barrier.exchange(session, "all have read", {})
                timer.time("restore with it", lambda i=i: saver.restore(session, f"{prefix}-{i}"))
                if strategy.rank() == 0:
                    write = ("if=/dev/zero", f"of={copy}", "conv=fsync", f"count={count}")
                    timer.time("dd write", lambda write=write: dd(*write))
                    timer.time("dd read", lambda: dd(f"if={copy}", "of=/dev/null"))
                    copy.unlink()
    return timer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=int, default=1000, help="of the table and its slot together")
    add("--folder", type=Path, default=".", help="on the disk in question, the same for all ranks")
    add("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    strategy = CollectiveStrategy()
    load_before = report.machine_load()
    rows = arguments.megabytes * 10**6 // BYTES_PER_ROW
    # All ranks know the name. Rank 0 has made the folder before any rank saves: they train first.
    folder = arguments.folder.resolve() / "checkpoint-benchmark"
    if strategy.rank() == 0:
        folder.mkdir()
    try:
        timer = run_rounds(strategy, rows, folder, arguments.rounds)
    finally:
        if strategy.rank() == 0:
            shutil.rmtree(folder)
    if strategy.rank() == 0:
        print_rates(timer, rows, strategy.world_size())
        print(f"\nbefore: {load_before}; after: {report.machine_load()}")


def print_rates(timer: Timer, rows: int, ranks: int) -> None:
    megabytes = rows * BYTES_PER_ROW / 1e6
    print(
        f"{megabytes:,.0f} MB on {counted(ranks, 'rank')}, "
        f"a table of {counted(rows, 'row')} of {DIM} float32 and a slot\n"
    )
    print(report.heading(["", "MB/s", "least", "most"]))
    seconds_by_name = dict(timer.seconds)
    of_increment = statistics.median(seconds_by_name.pop(INCREMENT))
    share = of_increment / statistics.median(seconds_by_name["save"])
    for name, seconds in seconds_by_name.items():
        rates = [megabytes / s for s in (statistics.median(seconds), max(seconds), min(seconds))]
        print(report.row([name, *(f"{rate:,.0f}" for rate in rates)]))
    print(f"\n{INCREMENT} of the rows: {of_increment:.3f} s, {share:.1%} of a whole save's time")


if __name__ == "__main__":
    main()
