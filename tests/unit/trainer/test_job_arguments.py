"""A Trainer's arguments come from its script or from the job file, never from both."""

from __future__ import annotations

import json
import re
import threading
import warnings

import pytest

import collective
from collective.job import job_file
from collective.scope import ScopeStack
from collective.trainer import Batch, Epoch, Record, Seconds
from collective.trainer.job_arguments import JobArguments


def arguments(config=None, hyperparameters=None, **variables: str) -> JobArguments:
    environment = dict(variables)
    if config is not None:
        environment["COLLECTIVE_JOB_FILE"] = json.dumps(config)
    if hyperparameters is not None:
        environment["COLLECTIVE_HYPERPARAMETERS"] = json.dumps(hyperparameters)
    return JobArguments(collective.job_info(environment))


@pytest.mark.parametrize(
    "plain, unit",
    [
        ({"batches": 5}, Batch(5)),
        ({"batches": [2, 5]}, Batch([2, 5])),
        ({"records": 5}, Record(5)),
        ({"epochs": 2}, Epoch(2)),
        ({"seconds": 1.5}, Seconds(1.5)),
    ],
)
def test_lengths(plain, unit):
    assert arguments({"max_length": plain}).of_fit("max_length", None) == unit


def test_one_of_two_places():
    file = arguments({"checkpoints": {"policy": "all", "period": {"batches": 3}}})
    assert file.of_fit("checkpoint_policy", None) == "all"
    assert file.of_fit("checkpoint_period", Batch(3)) == Batch(3)
    assert file.of_fit("validation_period", Epoch(1)) == Epoch(1)
    assert file.of_fit("continue_id", None) is None
    with pytest.raises(ValueError) as raised:
        file.of_fit("checkpoint_period", Batch(4))
    words = "fit(checkpoint_period)=Batch(value=4), but the job file has checkpoints.period: "
    assert str(raised.value).startswith(words + "{'batches': 3}. Leave the argument out")
    with pytest.raises(ValueError, match="Epoch"):
        file.of_fit("checkpoint_period", Epoch(3))


def test_a_default_counts_as_left_out():
    file = arguments({"metrics": {"reporting_period": {"batches": 7}}})
    usual = Batch(100)
    assert file.of_fit("reporting_period", usual, usual) == Batch(7)
    assert arguments().of_fit("reporting_period", usual, usual) is usual
    assert arguments().of_fit("reporting_period", None, usual) is None
    with pytest.raises(ValueError, match="metrics.reporting_period"):
        file.of_fit("reporting_period", Batch(8), usual)
    with pytest.raises(ValueError, match="fit.reporting_period.=None, but the job file has"):
        file.of_fit("reporting_period", None, usual)


def test_hyperparameters():
    file = arguments({"name": "x"}, {"lr": 0.5, "layers": [8, 4]})
    assert file.params(None) == {"lr": 0.5, "layers": [8, 4]}
    assert file.params({"other": 1, "layers": (8, 4)}) == {"other": 1, "layers": (8, 4)}
    with pytest.raises(ValueError, match=re.escape("lr=0.1, but the job file has hyperparameters")):
        file.params({"lr": 0.1})
    assert arguments(None, {"lr": 0.5}).params({"lr": 0.1}) == {"lr": 0.1}  # no job file


def test_each_trial_has_a_folder():
    config = {"checkpoints": {"folder": "out"}, "searcher": {"parameters": ["lr"]}}
    assert arguments(config, COLLECTIVE_JOB_ID="t-1").folder(None) == "out/t-1"
    with pytest.raises(ValueError, match="COLLECTIVE_JOB_ID, the folder's name, isn't set"):
        arguments(config).folder(None)
    assert arguments({"checkpoints": {"folder": "out"}}).folder(None) == "out"


def test_options_of_scope(monkeypatch):
    monkeypatch.setenv("COLLECTIVE_JOB_FILE", '{"strategy": {"backend": "hb", "local_steps": 4}}')
    stack = ScopeStack()
    stack.enter({"plan": "quiet"})
    assert (stack.options.local_steps, stack.options.plan) == (4, "quiet")
    stack.enter({"local_steps": 1})  # an inner scope says what it wants
    assert stack.options.local_steps == 1
    stack.leave()
    stack.leave()
    stack.enter({"local_steps": 4})
    stack.leave()
    with pytest.raises(ValueError, match="scope\\(local_steps=2\\), but the job file has strategy"):
        stack.enter({"local_steps": 2})
    assert not stack.is_open


def test_keys_that_only_a_trainer_follows(monkeypatch):
    monkeypatch.setattr(job_file, "_followed", threading.Event())
    job = {
        "name": "x",
        "seed": 1,
        "searcher": {"name": "single", "metric": "auc", "parameters": ["lr"]},
        "checkpoints": {"folder": "m"},
        "strategy": {"plan": "quiet"},
    }
    environment = {"COLLECTIVE_JOB_FILE": json.dumps(job)}
    with pytest.warns(UserWarning, match="of the job file, seed, checkpoints.folder, searcher.met"):
        job_file.warn_unless_followed(environment)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job_file.warn_unless_followed({"COLLECTIVE_JOB_FILE": '{"name": "x", "slots": 2}'})
        job_file.warn_unless_followed({})
        job_file.follow()
        job_file.warn_unless_followed(environment)
