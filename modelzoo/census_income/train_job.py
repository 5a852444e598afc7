"""Trains the census model as a job: a slots file, a Trainer, an export, an answer, a picture.

    collective launch modelzoo/census_income/job.yaml [--set hyperparameters.learning_rate=0.1]

What the script leaves out (lengths, periods, the folder, the metric) is in job.yaml. `--data
generated` trains on generated rows instead of the census. With `--data-loaders 2
modelzoo/census_income/loader.py` other processes make the batches, the same ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import numpy as np
import tensorflow.compat.v1 as tf

import collective
import loss_curve
from census_income import data_source, job_data, model, options, serving
from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
from census_income.features import Encoder
from collective import estimator as estimators
from common import reporting

SLOTS = collective.features.load(str(Path(__file__).with_name("slots.yml")))
CURVES = ("loss", "auc")
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
    test = encoder.encode(test_rows)

    def training_data() -> tf.data.Dataset:
        if job_data.has_loaders():
            return job_data.of_loaders(job.hyperparameters["global_batch_size"])
        return job_data.of_epochs(encoder.encode(train_rows), job.config.get("seed", 0))

    def test_data() -> tf.data.Dataset:
        return job_data.in_order(test)

    trainer = collective.Trainer(model_fn, records_per_epoch=len(train_rows[LABEL]))
    trainer.fit(training_data, test_data)
    best = trainer.evaluate(test_data, checkpoint="best")
    report(f"test AUC {best['auc']:.4f} of the best checkpoint; {reference}")

    def serving_input() -> estimators.export.ServingInputReceiver:
        rows = serving.placeholders()
        encoded = serving.encode(encoder, rows)
        features = {**encoded["ids"], "numeric": encoded["numeric"]}
        return estimators.export.ServingInputReceiver(features, rows)

    folder = Path(job.config["checkpoints"]["folder"])
    trained = folder / "test_mode" if job.test_mode else folder
    exported = trainer.export(str(folder / "served"), serving_input, "best")
    if job.rank == 0:
        report(f"served AUC {served_auc(exported, test_rows):.4f}, by {exported}")
        drawn = loss_curve.draw_metrics({"census": trained / "metrics.jsonl"}, CURVES)
        (folder / "curves.svg").write_text(drawn, encoding="utf-8")
        report(f"loss and AUC are drawn in {folder / 'curves.svg'}")


if __name__ == "__main__":
    sys.exit(main())
