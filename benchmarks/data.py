"""Counts the records a second that one process reads of Parquet, CSV and TFRecord files, by this
library and by plain tf.data.

    python benchmarks/data.py [--records 200000] [--batch 1024] [--rounds 3] [--folder DIR]

The same records, as Criteo's: a label, 13 whole numbers, 26 keys; a field in five is empty in the
text. Each reader gives batches of 40 tensors to a session that fetches the label alone, with one
batch prefetched; timed from opening the files to their end, in the second of two passes. Prints a
table: the median of the rounds, in which all readers take turns, a second and a second of processor
time (of all threads), the latter compared with tf.data's faster CSV; and how busy the machine was
before each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from collective import data  # noqa: E402
from collective.data.criteo_files import KEYS, LABEL, NUMBERS  # noqa: E402

tf.disable_v2_behavior()
COLUMNS = (LABEL, *NUMBERS, *KEYS)
Read = Callable[[], tf.data.Dataset]


def write_text(path: str, records: int) -> None:
    """Writes Criteo's kind of text, of random values."""
    random = np.random.default_rng(1)
    shape = (records, len(COLUMNS))
    values = random.integers(0, 2**32, shape) >> random.integers(0, 31, shape)
    values[:, 0] &= 1
    values[:, 1:14] &= 0xFFFF
    is_empty = random.random(shape) < 0.2
    is_empty[:, 0] = False
    with open(path, "w") as file:
        for row, empty in zip(values.tolist(), is_empty.tolist()):
            fields = [str(value) for value in row[:14]] + [f"{value:08x}" for value in row[14:]]
            file.write("\t".join("" if e else f for f, e in zip(fields, empty)) + "\n")


def write_plain(parquet: str, csv: str, records: str) -> None:
    """Writes what a Parquet file has as CSV of numbers, and as TFRecords of examples."""
    from pyarrow import parquet as files

    table = files.read_table(parquet)
    columns = [table.column(name).to_numpy() for name in COLUMNS]
    with open(csv, "w") as file, tf.python_io.TFRecordWriter(records) as writer:
        for row in zip(*(column.tolist() for column in columns)):
            file.write(",".join(map(str, row)) + "\n")
            feature = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                for name, value in zip(COLUMNS, row)
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def readers(parquet: str, csv: str, records: str, batch: int) -> dict[str, Read]:
    """Returns functions that make datasets of batches, by the words of the table."""
    features = {name: tf.io.FixedLenFeature([], tf.int64) for name in COLUMNS}

    def lines() -> tf.data.Dataset:
        def values(text: tf.Tensor) -> dict[str, tf.Tensor]:
            zeros = [tf.constant([0], tf.int64)] * len(COLUMNS)
            return dict(zip(COLUMNS, tf.io.decode_csv(text, zeros)))

        return tf.data.TextLineDataset(csv).batch(batch).map(values)

    def csv_dataset() -> tf.data.Dataset:
        parsed = tf.data.experimental.CsvDataset(csv, [tf.int64] * len(COLUMNS))
        return parsed.batch(batch).map(lambda *values: dict(zip(COLUMNS, values)))

    def examples() -> tf.data.Dataset:
        parsed = tf.data.TFRecordDataset(records).batch(batch)
        return parsed.map(lambda each: tf.io.parse_example(each, features))

    return {
        "tf.data, CSV (decode_csv of batches)": lines,
        "tf.data, CSV (CsvDataset)": csv_dataset,
        "tf.data, TFRecord (parse_example of batches)": examples,
        "collective.data.parquet": lambda: data.parquet(parquet, batch_size=batch),
        "collective.data.parquet, shuffled": lambda: data.parquet(
            parquet, batch_size=batch, shuffle=True
        ),
        "collective.data.parquet, 6 of 40 columns": lambda: data.parquet(
            parquet, [LABEL, *NUMBERS[:2], *KEYS[:3]], batch
        ),
    }


def rates_of(make: Read) -> tuple[float, float]:
    """Returns how many records a session reads in a second, and in one of processor time."""
    with tf.Graph().as_default(), tf.Session() as session:
        iterator = tf.data.make_initializable_iterator(make().prefetch(1))
        count = tf.size(iterator.get_next()[LABEL])
        for _ in range(2):  # The first pass prepares the graph, and isn't counted.
            begin, records = np.array([time.perf_counter(), time.process_time()]), 0
            session.run(iterator.initializer)
            while True:
                try:
                    records += session.run(count)
                except tf.errors.OutOfRangeError:
                    break
        end = np.array([time.perf_counter(), time.process_time()])
        wall, processor = records / (end - begin)
        return float(wall), float(processor)


def conversion(text: str, folder: str, records: int) -> tuple[str, float]:
    """Converts the text; returns the path, and records a second of processor time."""
    begin = time.process_time()
    (path,) = data.criteo(text, folder)
    return path, records / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where files are written; a temporary folder if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text, csv, records = (f"{folder}/{name}" for name in ("log.txt", "log.csv", "log.tfrecord"))
        write_text(text, options.records)
        parquet, converted = conversion(text, folder, options.records)
        write_plain(parquet, csv, records)
        rates: dict[str, list[tuple[float, float]]] = {}
        loads = []
        for _ in range(options.rounds):
            loads.append(os.getloadavg()[0])
            for name, make in readers(parquet, csv, records, options.batch).items():
                rates.setdefault(name, []).append(rates_of(make))
        sizes = [os.path.getsize(path) >> 20 for path in (text, csv, records, parquet)]
    medians = {name: [*map(statistics.median, zip(*both))] for name, both in rates.items()}
    csv_rate = max(processor for name, (_, processor) in medians.items() if "CSV" in name)
    print(f"{options.records} records of {len(COLUMNS)} columns, batches of {options.batch}; load ")
    print(f"average before each round: {', '.join(f'{load:.1f}' for load in loads)}.")
    print("MB of Criteo's text, CSV, TFRecord, Parquet: " + ", ".join(map(str, sizes)) + ".")
    print(f"collective.data.criteo converts {converted:,.0f} records a second of processor time.\n")
    print("| reader | records/s | records/s of processor time | ÷ tf.data's faster CSV |")
    print("|---|---|---|---|")
    for name, (wall, processor) in medians.items():
        print(f"| {name} | {wall:,.0f} | {processor:,.0f} | {processor / csv_rate:.1f} |")


if __name__ == "__main__":
    main()
