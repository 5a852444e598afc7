"""Makes the training batches of train_job.py in processes of their own, as a stream.

    collective launch --data-loaders 2 modelzoo/census_income/loader.py \
        modelzoo/census_income/job.yaml

They are the same that train_job.py makes itself without loaders. Arguments go into quotes:
`--data-loaders 2 "modelzoo/census_income/loader.py --data generated"`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import numpy as np

import collective
from census_income import batches, data_source, options
from census_income.columns import LABEL
from census_income.features import Encoder, Examples
from collective import data

Batches = Callable[[int, int, int], Iterator[data.Batch]]  # of a stream, of so many, from a number


def batch_of(examples: Examples, rows: np.ndarray) -> data.Batch:
    """Returns the rows of these numbers, as train_job.py takes them."""
    taken = examples.take(rows)
    return data.Batch(
        ids=taken["ids"], dense={"numeric": taken["numeric"]}, labels={LABEL: taken["label"]}
    )


def training(examples: Examples, batch: int, seed: int) -> Batches:
    """Returns the function that makes the training batches of a stream, which doesn't end.

    Stream s of S has the global batches s, s + S, s + 2 S and so on.
    """

    def make(stream: int, streams: int, first: int) -> Iterator[data.Batch]:
        number = first * streams + stream
        ordered = batches.without_gaps(len(examples), batch, seed, number)
        for rows in itertools.islice(ordered, 0, None, streams):
            yield batch_of(examples, rows)

    return make


def main() -> None:
    job = collective.job_info()
    chosen = options.parse()
    fail = options.parser(0).error
    if "global_batch_size" not in job.hyperparameters:
        fail("it is a loader of a job: collective launch --data-loaders 2 loader.py job.yaml")
    batch, seed = job.hyperparameters["global_batch_size"], job.config.get("seed", 0)
    rows, _ = data_source.load_without_tensorflow(chosen, fail)
    train = Encoder(rows).encode(rows)
    data.serve_stream({"train": training(train, batch, seed)})


if __name__ == "__main__":
    main()
