"""Trains the census model with each of a list of options of scope(), given as JSON.

    collective launch -np 2 tests/jobs/modelzoo/census_wire_types.py \\
        '[{}, {"wire_dtype": "float16"}]' --epochs 1

It prints the list of losses on the test rows, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "modelzoo"))

import numpy as np
import tensorflow.compat.v1 as tf

from census_income import batches, data_source, model, options
from census_income.columns import LABEL
from census_income.features import Encoder
from census_income.input_pipeline import next_batch
from collective import CollectiveStrategy
from common import optimizers

tf.logging.set_verbosity(tf.logging.ERROR)


def loss_after_training(strategy, chosen, encoder, train, test, **scope_options) -> float:
    """Returns the mean loss of all test rows."""
    rank, ranks = strategy.rank(), strategy.world_size()
    steps = chosen.total_steps(len(train))

    def training_batches():
        return batches.training(len(train), chosen.batch_size, steps, chosen.seed, rank, ranks)

    with strategy.scope(**scope_options), tf.Graph().as_default():
        tf.set_random_seed(chosen.seed)
        batch = next_batch(train, training_batches)
        all_test_rows = next_batch(test, lambda: [np.arange(len(test))])  # on every rank
        network = model.create(strategy, encoder, chosen.dim)
        optimizer = optimizers.create(chosen.optimizer, chosen.learning_rate)
        train_op = optimizer.minimize(model.mean_loss(batch["label"], network(batch)))
        loss = model.mean_loss(all_test_rows["label"], network(all_test_rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                session.run(train_op)
            return float(session.run(loss))


def main() -> None:
    list_of_options = json.loads(sys.argv[1])
    rank = int(os.environ.get("HOROVOD_RANK", 0))
    chosen = options.parse(sys.argv[2:], rank)
    strategy = CollectiveStrategy()
    fail = options.parser(rank).error
    train_rows, test_rows, _ = data_source.load(chosen, lambda _: None, fail)
    assert chosen.batch_size <= len(train_rows[LABEL])
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    losses = [
        loss_after_training(strategy, chosen, encoder, train, test, **scope_options)
        for scope_options in list_of_options
    ]
    if rank == 0:
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main()
