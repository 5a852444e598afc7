"""Measures a dynamic table's lookups, inserts and evictions by its size, and compares the key map
with TensorFlow's hash tables.

    python benchmarks/dynamic.py [--largest 10000000] [--dim 16] [--without-tensorflow-tables]
    python benchmarks/dynamic.py --storage FOLDER [--largest 10000000] [--dim 16]

Prints three tables in Markdown, and the machine's load before and after each. One rank, one
process. A lookup's time is the median of 100 batches, an insert's that of all keys once, and so is
that of an eviction. "The same reads" say what cache misses cost: NumPy reads as many random places
of arrays as large as the table's buckets, keys and rows, which is all that a lookup reads of a
table.

With --storage it prints one: Adagrad steps of a table whose rows go to a file in FOLDER, with
memory for a quarter of them, compared with those of one in memory, in turn. Ids come by Zipf's law
with exponent 1.05; each batch is new. A step's time is the median of 200, the ratio that of the
medians; the losses must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import report  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import collective  # noqa: E402
from collective.ops.rows.keymap import KeyMap  # noqa: E402
from collective.tables.policies import eviction  # noqa: E402

BATCH = 4096
BLOCK = 100_000  # keys inserted by one step

# (insert keys/s, find ns a key, bytes a key)
KeyMapFigures = tuple[float, float, float]


def sizes(largest: int) -> list[int]:
    return [10**n for n in range(4, 9) if 10**n <= largest]


def random_keys(count: int) -> np.ndarray:
    distinct = np.unique(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, count + 9))
    return np.random.default_rng(0).permutation(distinct)[:count]


def blocks(keys: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(keys), BLOCK):
        yield keys[first : first + BLOCK]


def median(run: Callable[[np.ndarray], Any], keys: np.ndarray, times: int = 100) -> float:
    """Returns the median seconds of `run` on a random batch of `keys`."""
    rng, seconds = np.random.default_rng(2), []
    for _ in range(times):
        batch = keys[rng.integers(0, len(keys), BATCH)]
        start = time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def same_reads(dim: int, keys: np.ndarray) -> float:
    """Returns the seconds to read a bucket (4 bytes), a key (8) and a row at random places.

    There are as many places as keys in a batch.
    """
    count = len(keys)
    places = np.random.default_rng(3).integers(0, count, count)
    arrays = [
        np.ones(count + count // 2, np.uint32),
        np.ones(count, np.int64),
        np.ones((count, dim), np.float32),
    ]
    return median(lambda batch: [array[batch] for array in arrays], places)


def measure_key_map(keys: np.ndarray) -> KeyMapFigures:
    key_map = KeyMap(2**32 - 2)
    start = time.perf_counter()
    for block in blocks(keys):
        key_map.find_or_insert(block)
    seconds = time.perf_counter() - start
    nanoseconds = median(key_map.find, keys) / BATCH * 1e9
    return len(keys) / seconds, nanoseconds, key_map.nbytes / len(keys)


def measure_tensorflow_table(make: Callable[[], Any], keys: np.ndarray) -> KeyMapFigures:
    """Measures one of TensorFlow's tables, whose values are the row numbers."""
    with tf.Graph().as_default(), tf.Session() as session:
        table = make()
        k, v = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        insert, values = table.insert(k, v), table.lookup(k)
        memory_before, seconds, inserted = psutil.Process().memory_info().rss, 0.0, 0
        for block in blocks(keys):
            rows = np.arange(inserted, inserted + len(block))
            start = time.perf_counter()
            session.run(insert, {k: block, v: rows})
            seconds += time.perf_counter() - start
            inserted += len(block)
        grown = psutil.Process().memory_info().rss - memory_before
        lookup = median(lambda batch: session.run(values.op, {k: batch}), keys)
    return len(keys) / seconds, lookup / BATCH * 1e9, grown / len(keys)


def measure_dynamic_table(dim: int, keys: np.ndarray) -> tuple[float, float, float]:
    """Returns (insert keys/s with their rows drawn, s of a lookup, s of a step with Adagrad)."""
    strategy = collective.CollectiveStrategy()
    with strategy.scope(), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", dim)
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table, ids)
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            store, seconds = table.store(session), 0.0
            for block in blocks(keys):
                start = time.perf_counter()
                store.rows(block, True)
                seconds += time.perf_counter() - start
            # The slots' rows are drawn now, so that no timed step draws any.
            for first in range(0, len(keys), 1_000_000):
                session.run(train, {ids: keys[first : first + 1_000_000]})
            lookup = median(lambda batch: session.run(rows.op, {ids: batch}), keys)
            step = median(lambda batch: session.run(train, {ids: batch}), keys)
    return len(keys) / seconds, lookup, step


def measure_eviction(dim: int, keys: np.ndarray) -> float:
    """Returns the seconds in which a tenth of the keys is evicted, with Adagrad's slot."""
    strategy, parts = collective.CollectiveStrategy(), np.array_split(keys, 10)
    policy = collective.TablePolicy(steps_to_live=len(parts) - 1)
    with strategy.scope(), tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        table = collective.get_embedding_variable("t", dim, ev_option=policy)
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table, ids)
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows), global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for part in parts:
                session.run(train, {ids: part})
            start = time.perf_counter()
            evicted = eviction.evict(session, [table])
            seconds = time.perf_counter() - start
    assert evicted == {"t": len(parts[0])}
    return seconds


def print_evictions(dim: int, keys: np.ndarray) -> None:
    print(report.heading(["keys", f"evicting a tenth, rows of {dim} and a slot (s)"]))
    for count in sizes(len(keys)):
        seconds = measure_eviction(dim, keys[:count])
        print(report.row([f"{count:,}", report.number(seconds)]), flush=True)


def zipf_batches(keys: np.ndarray, count: int) -> list[np.ndarray]:
    """Returns batches of keys, of which the i-th comes with a probability as 1 / i ** 1.05."""
    probabilities = np.cumsum(np.arange(1, len(keys) + 1) ** -1.05)
    drawn = np.random.default_rng(4).random((count, BATCH)) * probabilities[-1]
    return list(keys[np.searchsorted(probabilities, drawn)])


def storage_steps(session: Any, model: dict[str, Any], batches: Any) -> list[float]:
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        loss, _ = session.run([model["loss"], model["train"]], {model["ids"]: batch})
        seconds.append(time.perf_counter() - start)
        model["losses"].append(loss)
    return seconds


def measure_storage(folder: str, dim: int, keys: np.ndarray) -> tuple[float, float, float, float]:
    """Returns (s of a step in memory, s of one with a file, rows in memory, bytes of the file)."""
    strategy = collective.CollectiveStrategy()
    size = len(keys) * 2 * dim * 4 // 4
    policy = collective.TablePolicy(storage="dram_ssd", storage_path=folder, storage_size=size)
    with strategy.scope(plan="quiet"), contextlib.ExitStack() as stack:
        models, timed = [], [[], []]  # type: ignore[var-annotated]
        for option in (None, policy):
            with tf.Graph().as_default():
                table = collective.get_embedding_variable("t", dim, ev_option=option)
                ids = tf.placeholder(tf.int64, [None])
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
                train = tf.train.AdagradOptimizer(0.01).minimize(loss)
                session = stack.enter_context(tf.Session())
                session.run(tf.global_variables_initializer())
            model = {"table": table, "ids": ids, "loss": loss, "train": train, "losses": []}
            models.append((session, model))
            storage_steps(session, model, blocks(np.random.default_rng(5).permutation(keys)))
        batches = zipf_batches(keys, 400)
        for first in range(0, len(batches), 20):
            for (session, model), seconds in zip(models, timed):
                seconds += storage_steps(session, model, batches[first : first + 20])
        assert models[0][1]["losses"] == models[1][1]["losses"]
        store = table.store(session)
        in_memory, with_file = (float(np.median(seconds[200:])) for seconds in timed)
        return in_memory, with_file, store.count_in_memory, store.file_bytes


def print_storage(folder: str, dim: int, keys: np.ndarray) -> None:
    names = ["keys", f"Adagrad step of {BATCH} in memory (ms)", "with a file (ms)", "ratio"]
    print(report.heading([*names, "rows in memory", "file (MB)"]))
    for count in sizes(len(keys)):
        in_memory, with_file, rows, size = measure_storage(folder, dim, keys[:count])
        cells = [f"{count:,}", report.number(in_memory * 1e3), report.number(with_file * 1e3)]
        cells += [f"{with_file / in_memory:.2f}", f"{rows:,}", report.number(size / 1e6)]
        print(report.row(cells), flush=True)


def print_dynamic_tables(dim: int, keys: np.ndarray) -> None:
    names = ["keys", f"insert, with rows of {dim} drawn (M keys/s)", f"lookup of {BATCH} (ms)"]
    print(report.heading([*names, "the same reads (ms)", f"Adagrad step of {BATCH} (ms)"]))
    for count in sizes(len(keys)):
        rate, lookup, step = measure_dynamic_table(dim, keys[:count])
        reads = same_reads(dim, keys[:count])
        figures = (rate / 1e6, lookup * 1e3, reads * 1e3, step * 1e3)
        print(report.row([f"{count:,}", *map(report.number, figures)]), flush=True)


def print_key_maps(keys: np.ndarray, with_tensorflow: bool) -> None:
    def mutable() -> Any:
        return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def dense() -> Any:
        return tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.int64, -1, empty_key=-(2**63), deleted_key=-(2**63) + 1
        )

    maps: dict[str, Callable[[np.ndarray], KeyMapFigures]]
    maps = {"KeyMap (keymap.cc)": measure_key_map}
    if with_tensorflow:
        maps["MutableHashTable"] = lambda keys: measure_tensorflow_table(mutable, keys)
        maps["DenseHashTable"] = lambda keys: measure_tensorflow_table(dense, keys)
    names = ["key to row", "keys", "insert (M keys/s)", "find (ns a key)", "bytes a key"]
    print(report.heading(names))
    for name, measure in maps.items():
        for count in sizes(len(keys)):
            rate, find, size = measure(keys[:count])
            # Fewer keys take too little of a process's memory to tell.
            size_text = f"{size:.0f}" if count >= 10**6 else ""
            cells = [name, f"{count:,}", report.number(rate / 1e6), f"{find:.0f}", size_text]
            print(report.row(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--largest", type=int, default=10**7, help="the most keys")
    parser.add_argument("--dim", type=int, default=16, help="of the tables")
    parser.add_argument(
        "--without-tensorflow-tables", action="store_true", help="leave TensorFlow's tables out"
    )
    parser.add_argument("--storage", metavar="FOLDER", help="measure a table with a file there")
    arguments = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    keys = random_keys(arguments.largest)
    print(f"{report.machine_load()}\n")
    if arguments.storage:
        print_storage(arguments.storage, arguments.dim, keys)
        print(f"\n{report.machine_load()}")
        return
    print_dynamic_tables(arguments.dim, keys)
    print(f"\n{report.machine_load()}\n")
    print_evictions(arguments.dim, keys)
    print(f"\n{report.machine_load()}\n")
    print_key_maps(keys, not arguments.without_tensorflow_tables)
    print(f"\n{report.machine_load()}")


if __name__ == "__main__":
    main()
