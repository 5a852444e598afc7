"""Measures what it costs to follow the batches that are dealt to ranks.

    python benchmarks/dealt_input.py [--columns 26] [--batch 512] [--batches 1000] [--repeat 5]

Each rank reads all global batches and takes its own; a digest of each is how ranks notice that they
deal from other orders (`collective.data.order_digest`). A dataset of columns in memory is read with
a digest and without, in turns, in one process. Prints the processor time of a batch in
microseconds, the median of the rounds: on N ranks a step costs N times the difference, in the
thread that reads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import report  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402
from argument_types import count  # noqa: E402

from collective.data.order_digest import with_digest  # noqa: E402
from collective.ops.communication import collectives  # noqa: E402

CACHED = 64  # batches, which are read again and again
WARM = 200


def microseconds(columns: dict[str, np.ndarray], batch: int, batches: int, follow: bool) -> float:
    """Returns the processor time of reading a batch."""
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_tensor_slices(columns).batch(batch).cache().repeat()
        if follow:
            dataset, _ = with_digest(dataset, "digest", True)
        iterator = tf.data.make_initializable_iterator(dataset)
        read = tf.group(*iterator.get_next().values())
        with tf.Session() as session:
            session.run(iterator.initializer)
            for _ in range(WARM):
                session.run(read)
            start = time.process_time()
            for _ in range(batches):
                session.run(read)
            return (time.process_time() - start) / batches * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--columns", type=count, default=26)
    parser.add_argument("--batch", type=count, default=512, help="records of a global batch")
    parser.add_argument("--batches", type=count, default=1000, help="of a round")
    parser.add_argument("--repeat", type=count, default=5, help="rounds")
    options = parser.parse_args(arguments)
    collectives.init()
    rng = np.random.default_rng(0)
    columns = {
        f"id{i}": rng.integers(0, 1000, options.batch * CACHED) for i in range(options.columns)
    }
    columns["dense"] = rng.random((options.batch * CACHED, 13), np.float32)
    rounds = [
        [microseconds(columns, options.batch, options.batches, follow) for follow in (False, True)]
        for _ in range(options.repeat)
    ]
    print(f"{report.machine_load()}, medians of {options.repeat} rounds\n")
    plain, followed = (statistics.median(each) for each in zip(*rounds))
    more = statistics.median(b - a for a, b in rounds)
    print(
        report.table(
            ["columns", "records", "plain µs", "followed µs", "more µs"],
            [
                [
                    str(options.columns + 1),
                    str(options.batch),
                    *(report.number(x, 0) for x in (plain, followed, more)),
                ]
            ],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
