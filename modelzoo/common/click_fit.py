"""Trains and evaluates models of clicks by Keras's `fit`: the other programs' data and options.

The lines marked with (*) are those that a script for one process doesn't have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v2 as tf

from collective import CollectiveStrategy
from common import click_options, click_report, click_source, optimizers, reporting
from common.click_model import INITIAL, ClickModel
from common.counting import counted

EVALUATION_BATCH = 4096  # of all ranks together, about


def first_rows() -> Any:
    """Returns what fills new rows of tables."""
    return tf.keras.initializers.RandomUniform(-INITIAL, INITIAL)


def row_numbers(categorical: Any, column: int, table_rows: tuple[int, ...]) -> Any:
    """Returns the rows [B] of a column's ids: what remains of hashes, and other ids as is."""
    return tf.math.floormod(categorical[:, column], table_rows[column])


def embedded(categorical: Any, columns: range, table_rows: tuple[int, ...], dim: int) -> list[Any]:
    """Looks up columns of ids [B, C] in a table each; returns [B, dim] for each."""
    return [
        tf.keras.layers.Embedding(table_rows[column], dim, first_rows(), name=f"C{column + 1}")(
            row_numbers(categorical, column, table_rows)
        )
        for column in columns
    ]


def network(values: Any, units: tuple[int, ...], name: str) -> Any:
    for number, size in enumerate(units):
        values = tf.keras.layers.Dense(size, "elu", name=f"{name}_{number}")(values)
    return values


def main(
    program: type[ClickModel],
    make_model: Callable[[Any, tuple[int, ...]], Any],
    compiled: dict[str, Any],
    arguments: list[str] | None = None,
) -> None:
    """Trains a model and prints its scores on the test rows.

    Args:
        program: the model by a session, whose data and options these are.
        make_model: makes Keras's model, by the options and the tables' numbers of rows.
        compiled: more for `compile`; the metrics are 'auc' and 'log_loss'.
        arguments: the command line; None: that of the process.
    """
    rank = int(os.environ.get("HOROVOD_RANK", 0))
    options = click_options.parse(program.defaults, arguments, rank)
    command_line = click_options.parser(program.defaults, rank)
    if options.mode != "train" or options.checkpoint_dir or options.losses:
        command_line.error("fit.py trains and evaluates: train.py has --mode and saves")
    strategy = CollectiveStrategy()  # (*)
    rank, ranks = strategy.rank(), strategy.world_size()  # (*)
    report = reporting.reporter(rank)
    command_line.check_batch_size(options.batch_size, ranks)
    source = program.source(options, command_line.error)
    rows = source.count("train")
    command_line.check_full_batch(options.batch_size, rows)
    tables = f"{counted(len(source.table_rows), 'column')} of dimension {options.dim}"
    report(reporting.summary(options, rows, "rows", ranks, tables))

    def batches(split: str, records: Any, size: int, whole: bool) -> Any:
        share = strategy.shard(records)  # (*)
        made = click_source.batches(source, split, share, max(1, size // ranks), whole)  # (*)
        return made.map(lambda batch: (batch, batch.pop("label")))

    with strategy.scope():  # (*)
        tf.keras.utils.set_random_seed(options.seed)
        with strategy.embedding_scope():  # (*) tables are sharded, everything else replicated
            model = make_model(options, source.table_rows)
        optimizer = optimizers.create_keras(options.optimizer, options.learning_rate)
        model.compile(optimizer, **compiled)
        records = click_source.training(source, options.batch_size, options.seed, 0)
        model.fit(
            batches("train", records, options.batch_size, True),
            epochs=1 if options.steps else options.epochs,
            steps_per_epoch=options.steps or options.steps_per_epoch(rows),
            verbose=2,  # on rank 0
        )
        test = batches("test", source.records("test"), EVALUATION_BATCH, False)
        scores = model.evaluate(test, verbose=0, return_dict=True)
    step = int(optimizer.iterations.numpy())
    report(click_report.scores(scores["auc"], scores["log_loss"], source, step))
