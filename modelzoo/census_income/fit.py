"""Trains the model of census income by Keras's `fit`, and prints its test AUC.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/census_income/fit.py

Without the launcher it is one rank. The lines marked with (*) are those that a script for one
process doesn't have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow as tf

from census_income import batches, data_source, options
from census_income.columns import CATEGORICAL, LABEL
from census_income.features import Encoder, Examples
from census_income.model import HIDDEN_UNITS
from collective import CollectiveStrategy  # (*) before tf.keras is used, which is Keras 2 then
from collective.keras.callbacks import Checkpoint
from common import optimizers, reporting

EVALUATION_BATCH = 4096


def make_model(encoder: Encoder, dim: int) -> tf.keras.Model:
    """Builds the network of `model.Network`, on a table for each categorical column."""
    inputs = {column: tf.keras.Input([], dtype=tf.int64, name=column) for column in CATEGORICAL}
    numeric = tf.keras.Input([encoder.width], name="numeric")
    rows = [
        tf.keras.layers.Embedding(encoder.table_rows(column), dim, name=f"{column}_table")(ids)
        for column, ids in inputs.items()
    ]
    hidden = tf.keras.layers.Concatenate()([*rows, numeric])
    for number, units in enumerate(HIDDEN_UNITS):
        hidden = tf.keras.layers.Dense(units, "elu", name=f"dense_{number}")(hidden)
    probability = tf.keras.layers.Dense(1, "sigmoid", name="probability")(hidden)
    return tf.keras.Model({**inputs, "numeric": numeric}, probability)


def pipeline(examples: Examples, rows: tf.data.Dataset) -> tf.data.Dataset:
    """Makes (features, labels) of batches of row numbers."""

    def take(rows: tf.Tensor) -> tuple:
        features = {"numeric": examples.numeric, **examples.ids}
        return {name: tf.gather(x, rows) for name, x in features.items()}, tf.gather(
            examples.label, rows
        )

    return rows.map(take).prefetch(2)


def main() -> None:
    chosen = options.parse(rank=int(os.environ.get("HOROVOD_RANK", 0)))
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line = options.parser(rank)
    command_line.check_batch_size(chosen.batch_size, ranks)

    train_rows, test_rows, reference = data_source.load(chosen, report, command_line.error)
    command_line.check_full_batch(chosen.batch_size, len(train_rows[LABEL]))
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)
    tables = f"{len(train.ids)} tables of dimension {chosen.dim}"
    report(reporting.summary(chosen, len(train), "rows", ranks, tables))

    # Each epoch takes the rows in the same order, so that one that was interrupted can go on.
    order = tf.data.Dataset.from_tensor_slices(batches.order_of_epoch(len(train), chosen.seed, 0))
    # (*) this rank's share of each batch, and of the test rows
    order = strategy.shard(order).batch(chosen.batch_size // ranks, drop_remainder=True)
    test_order = strategy.shard(tf.data.Dataset.range(len(test))).batch(EVALUATION_BATCH)
    if chosen.steps:
        order = order.repeat().take(chosen.steps)

    with strategy.scope():  # (*)
        tf.keras.utils.set_random_seed(chosen.seed)
        with strategy.embedding_scope():  # (*) the tables are sharded, everything else replicated
            model = make_model(encoder, chosen.dim)
        model.compile(
            optimizers.create_keras(chosen.optimizer, chosen.learning_rate),
            "binary_crossentropy",
            metrics=[tf.keras.metrics.AUC(2000, name="auc"), "accuracy"],
        )
        callbacks = []
        if chosen.checkpoint_dir:
            callbacks.append(
                Checkpoint(chosen.checkpoint_dir, save_freq=chosen.save_steps, continue_id="census")
            )
        model.fit(
            pipeline(train, order),
            epochs=1 if chosen.steps else chosen.epochs,
            callbacks=callbacks,
            verbose=2,  # on rank 0
        )
        scores = model.evaluate(pipeline(test, test_order), verbose=0, return_dict=True)
        report(
            f"test AUC {scores['auc']:.4f}  accuracy {scores['accuracy']:.4f}  ({len(test)} rows)"
        )
        report(reference)
        if chosen.export_dir:
            strategy.export_saved_model(chosen.export_dir, model=model)  # (*)


if __name__ == "__main__":
    sys.exit(main())
