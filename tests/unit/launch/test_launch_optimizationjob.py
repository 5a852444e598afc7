"""--emit optimizationjob: a search whose trials run the job of a job file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import collective
from collective.job.errors import UsageError
from collective.launch.cli import emitted, parse_options
from collective.trainer.job_arguments import JobArguments
from tests.manifest_schemas.checker import complaints, schemas

RANGES = {
    "lr": {"type": "log", "minval": -5, "maxval": -1},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "width": {"type": "int", "minval": 8, "maxval": 64},
    "optimizer": {"type": "categorical", "vals": ["sgd", 16, 1e-3, True]},
}
JOB: dict[str, Any] = {
    "name": "Tune It",
    "entrypoint": "train.py --title '$HOME'",
    "slots": 4,
    "seed": 3,
    "hyperparameters": {"global_batch_size": 64, **RANGES},
    "checkpoints": {"folder": "/out/tune"},
    "searcher": {
        "name": "random",
        "metric": "auc",
        "smaller_is_better": False,
        "max_trials": 20,
        "max_concurrent_trials": 4,
    },
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def emit(job: dict[str, Any], *words: str) -> list[dict[str, Any]]:
    Path("job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    options = ["--emit", "optimizationjob", "--image", "registry/collective:1", *words]
    return list(yaml.safe_load_all(emitted(parse_options(["job.yaml", *options]))))


def spec(job: dict[str, Any], *words: str) -> dict[str, Any]:
    [found] = [one for one in emit(job, *words) if one["kind"] == "OptimizationJob"]
    return found["spec"]


def spaces(job: dict[str, Any], *words: str) -> dict[str, Any]:
    return {each["name"]: each["searchSpace"] for each in spec(job, *words)["parameters"]}


@pytest.mark.parametrize("words", [[], ["--own-runtime"], ["--volume", "claim:/data"]])
def test_the_schemas_take_it(words):
    known = schemas("kubernetes.yaml")
    documents = emit(JOB, *words, "--replicas", "2")
    assert [one["kind"] for one in documents][-1] == "OptimizationJob"
    for document in documents:
        assert not list(complaints(document, known[document["kind"]]))


def test_what_is_searched():
    found = spec(JOB)
    assert found["objectives"] == [{"metric": "auc", "direction": "Maximize"}]
    assert found["searchAlgorithm"] == {"random": {"seed": 3}}
    assert (found["numTrials"], found["parallelTrials"]) == (20, 4)
    assert spaces(JOB) == {
        "lr": {"logUniform": {"min": "1e-05", "max": "0.1"}},
        "dropout": {"uniform": {"min": "0", "max": "0.5"}},
        "width": {"uniform": {"min": "8", "max": "64", "type": "Int"}},
        "optimizer": {"categorical": {"choices": ["sgd", "16", "0.001", "true"]}},
    }


def test_a_grid_has_lists():
    ranges = {
        "lr": {"type": "log", "minval": -2, "maxval": 0, "count": 3},
        "dropout": {"type": "double", "minval": 0, "maxval": 0.5, "count": 3},
        "width": {"type": "int", "minval": 1, "maxval": 4},
    }
    grid = {**JOB, "hyperparameters": ranges, "searcher": {"name": "grid", "max_trials": 36}}
    assert spec(grid)["searchAlgorithm"] == {"grid": {}}
    assert {name: each["categorical"]["choices"] for name, each in spaces(grid).items()} == {
        "lr": ["0.01", "0.1", "1.0"],
        "dropout": ["0.0", "0.25", "0.5"],
        "width": ["1", "2", "3", "4"],
    }
    ranges["dropout"].pop("count")
    with pytest.raises(UsageError, match="hyperparameters.dropout: a grid needs count"):
        emit({**grid, "hyperparameters": ranges})


def test_a_trial_gets_the_job_and_its_own_folder():
    trial = spec(JOB, "--replicas", "2")["trainJobTemplate"]["spec"]["trainer"]
    assert trial["args"] == ["-np", "2", "train.py", "--title", "$$HOME"]
    assert (trial["numNodes"], trial["numProcPerNode"]) == (2, 2)
    variables = {one["name"]: one for one in trial["env"]}
    job_id = variables["COLLECTIVE_JOB_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert job_id == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    given = {
        name: one["value"].replace("$$", "$")
        for name, one in variables.items()
        if len(one) == 2 and "value" in one
    }
    chosen = {"lr": "0.02", "dropout": "0.1", "width": "32", "optimizer": "sgd"}
    info = collective.job_info(
        {
            **given,
            "COLLECTIVE_JOB_ID": "tune-it-a1",
            **{f"KUBEFLOW_TRAINER_OPT_{name.upper()}": text for name, text in chosen.items()},
        }
    )
    assert info.hyperparameters == {
        "global_batch_size": 64,
        "lr": 0.02,
        "dropout": 0.1,
        "width": 32,
        "optimizer": "sgd",
    }
    assert JobArguments(info).folder(None) == "/out/tune/tune-it-a1"
    assert json.loads(given["COLLECTIVE_JOB_FILE"])["searcher"]["parameters"] == list(RANGES)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"searcher": {}}, "prints a search: give a job file with `searcher:"),
        ({"hyperparameters": {"lr": 1}}, "and a range in its hyperparameters"),
        ({"hyperparameters": {"a-b": RANGES["width"]}}, "hyperparameters.a-b: a name has letters"),
        ({"searcher": {"name": "adaptive_asha"}}, "'adaptive_asha' is a search"),
        (
            {"searcher": {"name": "random", "max_trials": 2, "max_concurrent_trials": 3}},
            "searcher.max_concurrent_trials: it is more than max_trials, 2",
        ),
    ],
)
def test_what_is_no_search_is_refused(changes, words):
    with pytest.raises(UsageError) as raised:
        emit({**JOB, **changes})
    assert words in str(raised.value)


def test_it_needs_a_job_file():
    Path("train.py").touch()
    words = ["--emit", "optimizationjob", "--image", "registry/collective:1", "train.py"]
    with pytest.raises(UsageError, match="prints a search: give a job file"):
        emitted(parse_options(words))


def test_other_manifests_take_one_training():
    Path("job.yaml").write_text(yaml.safe_dump(JOB))
    with pytest.raises(UsageError, match="searcher.name: 'random' is a search"):
        parse_options(["job.yaml", "--emit", "trainjob", "--image", "i"])
