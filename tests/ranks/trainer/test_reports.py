"""What a Trainer reports is in all places the same, of all ranks, and goes on after a restart."""

import glob
import json
import os
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.integrations import kubeflow
from collective.job.metrics_address import VARIABLE
from collective.monitoring import job_metrics, metrics_endpoint, step_meter
from collective.trainer import Batch
from collective.trainer.metrics_file import FILE
from tests.ranks.estimators import told
from tests.ranks.trainer.test_trainer import TEST, B, shuffled, trainer_in

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3), pytest.mark.backends("hb")]


def lines_in(folder):
    told()
    with open(os.path.join(folder, FILE)) as file:
        return [json.loads(line) for line in file]


def scalars_in(folder):
    """Returns what TensorBoard shows: {tag: [(step, value)]}."""
    told()
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "events.out.tfevents.*"))):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.mark.long
def test_the_file_and_tensorboard_have_the_reports_and_validations(strategy, folder):
    validated = []
    training = trainer_in(strategy, folder, records_per_epoch=50).fit(
        shuffled,
        TEST,
        max_length=Batch(7),
        validation_period=Batch(4),
        reporting_period=Batch(3),
        on_validation=lambda step, metrics: validated.append((step, metrics)),
    )
    lines = lines_in(folder)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("training", 3),
        ("validation", 4),
        ("training", 6),
        ("validation", 7),
        ("training", 7),
    ]
    reports = [line for line in lines if line["kind"] == "training"]
    for line, report in zip(reports, training.reports):
        names = ("loss", "samples_per_s")
        assert line["metrics"] == pytest.approx({name: report[name] for name in names})
        assert (line["seconds"], line["epochs"]) == (report["seconds"], report["epochs"])
    for line, (_, metrics) in zip(lines[1::2], validated):
        expected = {name: pytest.approx(float(value)) for name, value in metrics.items()}
        assert line["metrics"] == expected
    shown = scalars_in(folder)
    for name in ("loss", "samples_per_s"):
        values = [(report["step"], pytest.approx(report[name])) for report in training.reports]
        assert shown[f"trainer/{name}"] == values
    of_validation = scalars_in(os.path.join(folder, "eval"))
    assert [step for step, _ in of_validation["auc"]] == [4, 7]
    everyone = told(reports=list(training.reports))
    assert all(each["reports"] == everyone[0]["reports"] for each in everyone)


@pytest.mark.slow
def test_a_rate_is_that_of_all_ranks(strategy, folder):
    """A step that takes 50 ms on one rank takes as long on all."""

    class Slow(tf.train.SessionRunHook):
        def before_run(self, context):
            if strategy.rank() == strategy.world_size() - 1:
                time.sleep(0.05)

    training = trainer_in(strategy, folder).fit(
        shuffled, max_length=Batch(12), reporting_period=Batch(6), hooks=[Slow()]
    )
    for report in training.reports:
        assert B / 0.05 / 4 < report["samples_per_s"] <= B / 0.05 * 1.2


@pytest.mark.long
def test_a_training_that_continues_writes_no_step_twice(strategy, folder, rank):
    """The first job died after step 8, its last checkpoint is that of step 4."""

    class Dies(tf.train.SessionRunHook):
        runs = 0

        def after_run(self, context, values):
            self.runs += 1
            if self.runs == 9:
                raise KeyError("died")

    fit = {"train": shuffled, "max_length": Batch(12), "reporting_period": Batch(2)}
    fit["checkpoint_period"] = Batch([4])
    with pytest.raises(KeyError):
        trainer_in(strategy, folder).fit(hooks=[Dies()], **fit)
    assert [line["step"] for line in lines_in(folder)] == [2, 4, 6, 8]
    trainer_in(strategy, folder).fit(**fit)
    lines = lines_in(folder)
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    times = [line["time"] for line in lines]
    assert times == sorted(times)


@pytest.mark.long
def test_prometheus_and_kubeflow_are_told(strategy, folder, rank, monkeypatch):
    statuses, closed = [], []

    class Status:
        def tell(self, share, remaining, metrics):
            statuses.append((share, remaining, dict(metrics)))

        def close(self):
            closed.append(True)

    monkeypatch.setenv(VARIABLE, "127.0.0.1:0")
    for module, name in ((step_meter, "_meters"), (job_metrics, "_metrics")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(metrics_endpoint, "_served", {})
    monkeypatch.setattr(kubeflow, "trainer_status", Status)
    training = trainer_in(strategy, folder).fit(
        shuffled, TEST, max_length=Batch(12), validation_period=Batch(6), reporting_period=Batch(4)
    )
    if rank > 0:
        assert statuses == closed == []
        return
    metrics = job_metrics.metrics()
    assert metrics.loss == training.reports[-1]["loss"]
    assert metrics.samples == 10 * B  # the tenth run was measured
    assert metrics.evaluations["", "auc"] == pytest.approx(float(training.metrics["auc"]))
    # The beginning, three reports and two validations.
    assert [share for share, _, _ in statuses] == [s / 12 for s in (0, 4, 6, 8, 12, 12)]
    assert statuses[0][1:] == (None, {})
    assert statuses[3][1] > 0 and statuses[-1][1] == 0 and closed == [True]
    last = statuses[-1][2]
    assert last.pop("training_loss") == training.reports[-1]["loss"]
    assert last.pop("samples_per_s") > 0
    for name, value in last.items():
        np.testing.assert_allclose(value, training.metrics[name], err_msg=name)
    assert set(last) == {*training.metrics} - {"global_step"}
