"""Measures MB/s of saving and restoring a table, beside `dd` of the same bytes on the same disk.

    python -m collective.launch -np 2 --device cpu benchmarks/checkpoint.py [--megabytes 1000]
    [--folder .] [--rounds 3]

A save ends when everything is on the disk (fsync); so does `dd … conv=fsync`. A restore reads what
the page cache holds, as `dd` to /dev/null does; both say what the software costs, not the disk. The
median of the rounds is printed, with the least and the most, since disks and machines are shared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import report
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.ops.counting import counted

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


def run_rounds(strategy: CollectiveStrategy, rows: int, folder: Path, rounds: int) -> Timer:
    """Saves, restores and copies with dd; dd on rank 0 only, the others wait for the next save."""
    timer = Timer()
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [rows, DIM], initializer=tf.truncated_normal_initializer())
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([0, 1], tf.int64)))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        saver = tf.train.Saver(max_to_keep=1)
        prefix, copy = str(folder / "m"), folder / "dd"
        count = rows * BYTES_PER_ROW // DD_BLOCK
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            for i in range(rounds):
                timer.time("save", lambda i=i: saver.save(session, prefix, global_step=i))
                timer.time("restore", lambda i=i: saver.restore(session, f"{prefix}-{i}"))
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
    for name, seconds in timer.seconds.items():
        rates = [megabytes / s for s in (statistics.median(seconds), max(seconds), min(seconds))]
        print(report.row([name, *(f"{rate:,.0f}" for rate in rates)]))


if __name__ == "__main__":
    main()
