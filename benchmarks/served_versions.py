"""Counts the bytes of a new SavedModel version that are written, by how many rows have changed.

    python benchmarks/served_versions.py

A table of 1,000,000 rows of 16 float32 is exported, ids are drawn and their rows trained, and it is
exported again with `base=`. Ids follow Zipf's law; where they lie in the table is one of

    by frequency    id i is the ith most frequent one, as in a vocabulary that is sorted by counts
    hashed          they are spread over the table, as hashed ids are
    newest          the draws are of the last 1 % of the ids, as for new items
    new keys        a dynamic table of random keys, to which others come; no old one is drawn

It counts bytes, so that it doesn't matter what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, get_embedding_variable

ROWS, DIM, EXPONENT = 1_000_000, 16, 1.05
PLACES = ("by frequency", "hashed", "newest", "new keys")


def drawn_ids(place: str, draws: int, random: np.random.Generator) -> np.ndarray:
    """Returns the distinct ids of so many draws."""
    if place == "new keys":
        return np.unique(random.integers(0, 1 << 62, draws))
    count = ROWS // 100 if place == "newest" else ROWS
    weights = np.arange(1, count + 1) ** -EXPONENT
    ids = np.unique(random.choice(count, draws, p=weights / weights.sum()))
    if place == "hashed":
        return np.random.default_rng(0).permutation(ROWS)[ids]
    return ROWS - 1 - ids if place == "newest" else ids


def table_of(strategy: CollectiveStrategy, place: str) -> tf.Tensor:
    """Builds the table."""
    if place == "new keys":
        return get_embedding_variable("t", DIM, initializer=tf.ones_initializer())
    with strategy.embedding_scope():
        return tf.get_variable("t", [ROWS, DIM], initializer=tf.ones_initializer())


def shares(strategy: CollectiveStrategy, place: str, all_draws: list[int], folder: str) -> None:
    """Prints the share of rows that change, and that of the bytes that are written."""
    random, export = np.random.default_rng(1), os.path.join(folder, "export")

    def serving() -> object:
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(table_of(strategy, place), ids)
        return tf.saved_model.predict_signature_def({"ids": ids}, {"rows": rows})

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids = tf.placeholder(tf.int64, [None])
        # Each row gets a value of its own: files of equal rows would be the same file.
        size = tf.cast(tf.range(tf.size(ids)), tf.float32)[:, None]
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table_of(strategy, place), ids) * size)
        train, saver = tf.train.GradientDescentOptimizer(0.1).minimize(loss), tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            first = np.random.default_rng(2)
            is_dynamic = place == "new keys"
            session.run(
                train,
                {ids: first.integers(0, 1 << 62, ROWS) if is_dynamic else first.permutation(ROWS)},
            )
            for number, draws in enumerate([0, *all_draws]):
                changed = drawn_ids(place, draws, random) if draws else np.zeros(0, np.int64)
                if draws:
                    session.run(train, {ids: changed})
                prefix = saver.save(session, os.path.join(folder, "model"), number)
                path = strategy.export_saved_model(export, prefix, serving, base=export)
                if draws:
                    with open(os.path.join(path, "saved_model.collective.json")) as file:
                        record = json.load(file)
                    total = record["bytes_linked"] + record["bytes_written"]
                    print(
                        f"| {place} | {draws:,} | {100 * len(changed) / ROWS:.3f} % "
                        f"| {100 * record['bytes_written'] / total:.1f} % |",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    arguments = parser.parse_args()
    strategy = CollectiveStrategy()
    print("| ids | draws | rows that changed | bytes written |\n| --- | ---: | ---: | ---: |")
    for place in arguments.places:
        with tempfile.TemporaryDirectory() as folder:
            shares(strategy, place, arguments.draws, folder)


if __name__ == "__main__":
    main()
