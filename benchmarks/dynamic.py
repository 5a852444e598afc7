"""What a dynamic table's lookups and inserts cost, by its size; and the key map beside TensorFlow's
own hash tables.

    python benchmarks/dynamic.py [--largest 10000000] [--dim 16] [--without-tensorflow-tables]

Prints two tables in Markdown, and the machine's load before and after each. One rank, one process.
A lookup's time is the median of 100 batches, an insert's that of all keys once. "The same reads"
are what cache misses cost: NumPy reads as many random places of arrays as large as the table's
buckets, keys and rows, which is all that a lookup reads of a table.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import collective  # noqa: E402
from collective.ops.keymap import KeyMap  # noqa: E402

BATCH = 4096
BLOCK = 100_000  # keys inserted by one step


def sizes(largest: int) -> list[int]:
    return [10**n for n in range(4, 9) if 10**n <= largest]


def keys_of(count: int) -> np.ndarray:
    distinct = np.unique(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, count + 9))
    return np.random.default_rng(0).permutation(distinct)[:count]


def median(run: Callable[[np.ndarray], Any], keys: np.ndarray, times: int = 100) -> float:
    """Seconds of `run` on a random batch of `keys`."""
    rng, taken = np.random.default_rng(2), []
    for _ in range(times):
        batch = keys[rng.integers(0, len(keys), BATCH)]
        start = time.perf_counter()
        run(batch)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def same_reads(count: int, dim: int, keys: np.ndarray) -> float:
    """Seconds to read a bucket (4 bytes), a key (8) and a row for each of a batch of keys, at
    random places.
    """
    places = np.random.default_rng(3).integers(0, count, len(keys))
    arrays = [
        np.ones(count + count // 2, np.uint32),
        np.ones(count, np.int64),
        np.ones((count, dim), np.float32),
    ]
    return median(lambda at: [array[at] for array in arrays], places)


def key_map(count: int, keys: np.ndarray) -> tuple[float, float, float]:
    """(insert keys/s, find ns a key, bytes a key)."""
    made, start = KeyMap(2**32 - 2), time.perf_counter()
    for first in range(0, count, BLOCK):
        made.find_or_insert(keys[first : first + BLOCK])
    taken = time.perf_counter() - start
    return count / taken, median(made.find, keys) / BATCH * 1e9, made.nbytes / count


def tensorflow_table(
    make: Callable[[], Any], count: int, keys: np.ndarray
) -> tuple[float, float, float]:
    """The same of one of TensorFlow's, whose values are the row numbers."""
    with tf.Graph().as_default(), tf.Session() as session:
        table = make()
        k, v = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        insert, found = table.insert(k, v), table.lookup(k)
        start_memory, taken = psutil.Process().memory_info().rss, 0.0
        for first in range(0, count, BLOCK):
            some = keys[first : first + BLOCK]
            start = time.perf_counter()
            session.run(insert, {k: some, v: np.arange(first, first + len(some))})
            taken += time.perf_counter() - start
        grown = psutil.Process().memory_info().rss - start_memory
        return (
            count / taken,
            median(lambda b: session.run(found.op, {k: b}), keys) / BATCH * 1e9,
            grown / count,
        )


def whole_table(count: int, dim: int, keys: np.ndarray) -> tuple[float, float, float]:
    """(insert keys/s with their rows drawn, s of a lookup, s of a training step with Adagrad) of a
    table of `count` keys.
    """
    strategy = collective.CollectiveStrategy()
    with strategy.scope(), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", dim)
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table, ids)
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            store, taken = table.store(session), 0.0
            for first in range(0, count, BLOCK):
                some = keys[first : first + BLOCK]
                start = time.perf_counter()
                store.rows(some, True)
                taken += time.perf_counter() - start
            for first in range(0, count, 1_000_000):  # the slots, too, once
                session.run(train, {ids: keys[first : first + 1_000_000]})
            lookup = median(lambda b: session.run(rows.op, {ids: b}), keys)
            return count / taken, lookup, median(lambda b: session.run(train, {ids: b}), keys)


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--largest", type=int, default=10**7, help="the most keys")
    arguments.add_argument("--dim", type=int, default=16, help="D")
    arguments.add_argument(
        "--without-tensorflow-tables", action="store_true", help="leave TensorFlow's tables out"
    )
    options = arguments.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    everything = keys_of(options.largest)

    print(load())
    print(
        f"\n| keys | insert, with rows of {options.dim} drawn (M keys/s) | lookup of {BATCH} "
        f"(ms) | the same reads (ms) | "
        f"Adagrad step of {BATCH} (ms) |"
    )
    print("|---|---|---|---|---|")
    for count in sizes(options.largest):
        rate, lookup, step = whole_table(count, options.dim, everything[:count])
        reads = same_reads(count, options.dim, everything[:count])
        print(
            f"| {count:,} | {rate / 1e6:.2f} | {lookup * 1e3:.2f} | {reads * 1e3:.2f} | "
            f"{step * 1e3:.2f} |",
            flush=True,
        )
    print("\n" + load())

    maps: dict[str, Callable[[int, np.ndarray], tuple[float, float, float]]] = {
        "KeyMap (keymap.cc)": key_map
    }
    if not options.without_tensorflow_tables:
        maps["MutableHashTable"] = lambda count, keys: tensorflow_table(
            lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1), count, keys
        )
        maps["DenseHashTable"] = lambda count, keys: tensorflow_table(
            lambda: tf.lookup.experimental.DenseHashTable(
                tf.int64, tf.int64, -1, empty_key=-(2**63), deleted_key=-(2**63) + 1
            ),
            count,
            keys,
        )
    print("\n| key to row | keys | insert (M keys/s) | find (ns a key) | bytes a key |")
    print("|---|---|---|---|---|")
    for name, measure in maps.items():
        for count in sizes(options.largest):
            rate, find, size = measure(count, everything[:count])
            # of a process's memory, too little to tell
            bytes_ = f"{size:.0f}" if count >= 10**6 else ""
            print(f"| {name} | {count:,} | {rate / 1e6:.2f} | {find:.0f} | {bytes_} |", flush=True)
    print("\n" + load())


if __name__ == "__main__":
    main()
