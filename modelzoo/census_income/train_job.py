"""Trains the census model as a job: a slots file, a Trainer, an export, an answer.

    collective launch modelzoo/census_income/job.yaml [--set hyperparameters.learning_rate=0.1]

What the script leaves out (lengths, periods, the folder, the metric) is in job.yaml. `--data
generated` trains on generated rows instead of the census.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from census_income import data_source, model, options, serving
from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
from census_income.features import Encoder, Examples
from collective import estimator as estimators
from common import reporting

SLOTS = collective.features.load(str(Path(__file__).with_name("slots.yml")))
THRESHOLDS = 2000  # of the AUC


def model_fn(
    features: dict, labels: tf.Tensor | None, mode: str, params: dict
) -> estimators.EstimatorSpec:
    """Builds the model of train.py, with tables that grow, as the slots file has them."""
    embedded = collective.features.embeddings(
        SLOTS, {column: features[column] for column in CATEGORICAL}
    )
    width = int(features["numeric"].shape[1]) + sum(SLOTS.dimensions().values())
    values = [embedded[column] for column in CATEGORICAL]
    logits = model.Network(width).logits([*values, features["numeric"]])
    probability = tf.sigmoid(logits)
    if mode == estimators.ModeKeys.PREDICT:
        return estimators.EstimatorSpec(mode, predictions={"probability": probability})
    loss = model.mean_loss(labels, logits)
    optimizer = tf.train.AdagradOptimizer(params["learning_rate"])
    train = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    auc = tf.metrics.auc(labels, probability, num_thresholds=THRESHOLDS)
    return estimators.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops={"auc": auc})


def records(examples: Examples) -> tf.data.Dataset:
    """Returns the rows one by one."""
    features = {**examples.ids, "numeric": examples.numeric}
    return tf.data.Dataset.from_tensor_slices((features, examples.label))


def served_auc(folder: str, test: Rows) -> float:
    """Returns the AUC of what an exported model answers about rows as the census has them."""
    rows = {column: test[column].astype(object) for column in CATEGORICAL}
    rows.update({column: test[column].astype(np.int64) for column in NUMERIC})
    with collective.InferenceContext(folder) as served:
        probability = served.predict(rows)["probability"]
    with tf.Graph().as_default(), tf.Session() as session:
        auc = tf.metrics.auc(test[LABEL] > 0, probability, num_thresholds=THRESHOLDS)
        session.run(tf.local_variables_initializer())
        session.run(auc[1])
        return float(session.run(auc[0]))


def main() -> None:
    job = collective.job_info()
    chosen = options.parse(rank=job.rank)
    report = reporting.reporter(job.rank)
    fail = options.parser(job.rank).error
    if "checkpoints" not in job.config:
        fail("start it by its job file: collective launch modelzoo/census_income/job.yaml")
    train_rows, test_rows, reference = data_source.load(chosen, report, fail)
    encoder = Encoder(train_rows)
    train, test = encoder.encode(train_rows), encoder.encode(test_rows)

    trainer = collective.Trainer(model_fn)
    trainer.fit(lambda: records(train).shuffle(len(train), seed=chosen.seed), lambda: records(test))
    best = trainer.evaluate(lambda: records(test), checkpoint="best")
    report(f"test AUC {best['auc']:.4f} of the best checkpoint; {reference}")

    def serving_input() -> estimators.export.ServingInputReceiver:
        rows = serving.placeholders()
        encoded = serving.encode(encoder, rows)
        features = {**encoded["ids"], "numeric": encoded["numeric"]}
        return estimators.export.ServingInputReceiver(features, rows)

    folder = os.path.join(job.config["checkpoints"]["folder"], "served")
    exported = trainer.export(folder, serving_input, "best")
    if job.rank == 0:
        report(f"served AUC {served_auc(exported, test_rows):.4f}, by {exported}")


if __name__ == "__main__":
    sys.exit(main())
