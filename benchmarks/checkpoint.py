"""MB/s of saving and restoring a table, beside `dd` of the same bytes on the same disk.

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
import tempfile
import time
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.coordination import barrier

DIM = 32


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=4M", *arguments], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--megabytes", type=int, default=1000, help="of the table and its slot together"
    )
    parser.add_argument(
        "--folder", default=".", help="on the disk in question, the same for all ranks"
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    strategy = CollectiveStrategy()
    rank, before = strategy.rank(), os.getloadavg()[0]
    rows = given.megabytes * 10**6 // (2 * DIM * 4)
    total = 2 * rows * DIM * 4
    made = tempfile.mkdtemp(dir=given.folder) if rank == 0 else ""
    folder = barrier.exchange(None, "a folder", {"path": os.path.abspath(made)})[0]["path"]
    times: dict[str, list[float]] = {"save": [], "restore": [], "dd write": [], "dd read": []}
    try:
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                table = tf.get_variable(
                    "t", [rows, DIM], initializer=tf.truncated_normal_initializer()
                )
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([0, 1], tf.int64)))
            train = tf.train.AdagradOptimizer(0.1).minimize(loss)
            saver = tf.train.Saver(max_to_keep=1)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                for i in range(given.rounds):
                    times["save"].append(
                        seconds(lambda i=i: saver.save(session, f"{folder}/m", global_step=i))
                    )
                    times["restore"].append(
                        seconds(lambda i=i: saver.restore(session, f"{folder}/m-{i}"))
                    )
                    if rank == 0:
                        times["dd write"].append(
                            seconds(
                                lambda: dd(
                                    "if=/dev/zero",
                                    f"of={folder}/dd",
                                    "conv=fsync",
                                    f"count={total // (4 << 20)}",
                                )
                            )
                        )
                        times["dd read"].append(
                            seconds(lambda: dd(f"if={folder}/dd", "of=/dev/null"))
                        )
                        os.remove(f"{folder}/dd")
                    barrier.exchange(session, "the next round", {})
    finally:
        if rank == 0:
            shutil.rmtree(folder)
    if rank == 0:
        load = os.getloadavg()[0]
        print(
            f"{total / 1e6:,.0f} MB on {strategy.world_size()} ranks, a table of {rows:,} rows "
            f"of {DIM} float32 and a slot"
        )
        print(
            f"load average {before:.1f} before, {load:.1f} after, {os.cpu_count()} processors, "
            f"{given.rounds} rounds"
        )
        print("\n|  | MB/s | least | most |")
        print("|---|---|---|---|")
        for what, took in times.items():
            rates = [
                total / 1e6 / seconds_
                for seconds_ in (statistics.median(took), max(took), min(took))
            ]
            print(f"| {what} |" + "".join(f" {rate:,.0f} |" for rate in rates))


if __name__ == "__main__":
    main()
