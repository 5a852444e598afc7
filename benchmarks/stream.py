"""Counts the records a second that a process takes of a loader over loopback, and reads of Parquet.

    python benchmarks/stream.py [--records 400000] [--batch 1024] [--rounds 3] [--folder DIR]

The same records, as Criteo's: a label, 13 whole numbers, 26 keys, which are 40 columns. Both give
batches of them to a session that fetches the label alone, with one batch prefetched; timed from the
first batch on to the end. The loader, in a process of its own, has its batches in memory: what is
measured is the stream. "from Parquet" is a loader that reads the same file, one batch after the
other. Prints a table: the median of the rounds, in which all take turns, and the ratio to Parquet;
and how busy the machine was before each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COLLECTIVE_STREAM_KEY", "of a benchmark")

import numpy as np  # noqa: E402
from report import machine_load, table  # noqa: E402

from collective import data  # noqa: E402
from collective.data.streams.loader import LoaderServer  # noqa: E402
from collective.job import streams  # noqa: E402

NUMBERS = [f"I{i}" for i in range(1, 14)]
KEYS = [f"C{i}" for i in range(1, 27)]
IN_MEMORY = 16  # batches, which come again and again


def write_parquet(path: str, records: int) -> None:
    """Writes random records."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(1)
    columns = {"label": random.integers(0, 2, records).astype(np.int32)}
    for name in NUMBERS:
        columns[name] = random.integers(0, 1 << 16, records).astype(np.int32)
    for name in KEYS:
        columns[name] = random.integers(0, 1 << 32, records) >> random.integers(0, 31, records)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=100_000)


def serve(path: str, batch: int, records: int, reads: bool) -> None:
    """Runs a loader of this file's records."""

    def of_file(first: int) -> Iterator[data.Batch]:
        found = data.Batch.from_parquet(path, batch, ids=KEYS, dense=NUMBERS, labels=["label"])
        for number, each in enumerate(found):
            if number >= first:
                yield each

    kept = [] if reads else [each for each, _ in zip(of_file(0), range(IN_MEMORY))]

    def batches(stream: int, streams: int, first: int) -> Iterator[data.Batch]:
        if reads:
            yield from of_file(first)
        for number in range(first, 0 if reads else records // batch):
            yield kept[number % len(kept)]

    key = streams.stream_key(os.environ)
    with LoaderServer({"data": batches}, "127.0.0.1:0", key) as server:
        print(server.address, flush=True)
        sys.stdin.read()  # until the benchmark ends


def rate(make: Callable[[], object], label: Callable[[object], object]) -> float:
    """Returns records a second from the first batch on."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        element = tf.data.make_one_shot_iterator(make().prefetch(1)).get_next()  # type: ignore[attr-defined]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(label(element))
            began, count = time.monotonic(), 0
            try:
                while True:
                    count += len(session.run(label(element)))
            except tf.errors.OutOfRangeError:
                return count / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--serve", choices=("memory", "parquet"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(options.folder or folder, "records.parquet")
        if options.serve:
            serve(path, options.batch, options.records, options.serve == "parquet")
            return
        with tempfile.TemporaryDirectory(dir=options.folder) as own:
            measure(options, own)


def measure(options: argparse.Namespace, folder: str) -> None:
    """Starts the loaders, and prints the table."""
    path = os.path.join(folder, "records.parquet")
    write_parquet(path, options.records)
    sizes = ["--records", options.records, "--batch", options.batch, "--folder", folder]
    loaders = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ("memory", "parquet")
    ]
    addresses = [loader.stdout.readline().strip() for loader in loaders]  # type: ignore[union-attr]
    readers = {
        "Parquet": (
            lambda: data.parquet(path, batch_size=options.batch),
            lambda batch: batch["label"],
        ),
        "a stream": (lambda: data.stream(addresses[:1]), lambda e: e["labels"]["label"]),
        "a stream from Parquet": (
            lambda: data.stream(addresses[1:]),
            lambda e: e["labels"]["label"],
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    try:
        for _ in range(options.rounds):
            print(machine_load(), file=sys.stderr)
            for name, (make, label) in readers.items():
                rates[name].append(rate(make, label))
    finally:
        for loader in loaders:
            loader.terminate()
            loader.wait(20)
    parquet = statistics.median(rates["Parquet"])
    rows = []
    for name, found in rates.items():
        median = statistics.median(found)
        rows.append([name, f"{median:,.0f}", f"{median / parquet:.2f}"])
    print(table(["reader", "records/s", "of Parquet"], rows))


if __name__ == "__main__":
    main()
