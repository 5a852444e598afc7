"""Trains the census model with each of some options of scope(), and prints the loss on the test
rows after each as JSON.

    python -m collective.launch -np 2 tests/modelzoo/census_wire_types.py '[{}, {"wire_dtype":
    "float16"}]' --epochs 1
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "modelzoo" / "census_income"))

import batches  # noqa: E402
import model  # noqa: E402
import numpy as np  # noqa: E402
import options  # noqa: E402
import pipeline  # noqa: E402
import source  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402
from columns import LABEL  # noqa: E402
from features import Encoder  # noqa: E402

from collective import CollectiveStrategy  # noqa: E402

tf.logging.set_verbosity(tf.logging.ERROR)


def loss_after(strategy, chosen, encoder, train, test, **scope) -> float:
    """The mean loss of all test rows."""
    rank, ranks = strategy.rank(), strategy.world_size()
    steps = chosen.total_steps(len(train))
    with strategy.scope(**scope), tf.Graph().as_default():
        tf.set_random_seed(chosen.seed)
        batch = pipeline.next_batch(
            train,
            lambda: batches.training(
                len(train), chosen.batch_size, steps, chosen.seed, rank, ranks
            ),
        )
        whole = pipeline.next_batch(test, lambda: [np.arange(len(test))])  # on every rank
        network = model.create(strategy, encoder, chosen.dim)
        train_op = model.optimizer(chosen.optimizer, chosen.learning_rate).minimize(
            model.mean_loss(batch["label"], network(batch))
        )
        loss = model.mean_loss(whole["label"], network(whole))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                session.run(train_op)
            return float(session.run(loss))


def main() -> None:
    every = json.loads(sys.argv[1])
    rank = int(os.environ.get("HOROVOD_RANK", 0))
    chosen = options.parse(sys.argv[2:], rank)
    strategy = CollectiveStrategy()
    train_rows, test_rows, _ = source.load(chosen, rank, lambda _: None)
    assert chosen.batch_size <= len(train_rows[LABEL])
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    losses = [loss_after(strategy, chosen, encoder, train, test, **scope) for scope in every]
    if rank == 0:
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main()
