"""An OptimizationJob of Kubeflow's trainer: `trainer.kubeflow.org/v1alpha1`.

Its controller makes a TrainJob for each trial, with the chosen hyperparameters in variables
KUBEFLOW_TRAINER_OPT_NAME, which `collective.job_info().hyperparameters` has. It compares trials by
the metric that a TrainJob's status has at its end.

Each trial has a folder of checkpoints of its own, named after its TrainJob: the folder's name is
COLLECTIVE_JOB_ID, which comes from a label of the pod.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from collective.job import info
from collective.job.errors import UsageError
from collective.launch.manifests.cluster_job import ClusterJob, Search
from collective.launch.manifests.trainjob import API, secret_comment, trainjob_spec, what_it_needs
from collective.launch.manifests.yaml_text import Document, yaml_text

_JOB_NAME = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"  # that of the TrainJob
_MOST_CHOICES = 100


def optimizationjob_text(job: ClusterJob) -> str:
    search = job.search
    assert search is not None  # `cluster_job` has refused it
    name = {"name": info.JOB_ID, "valueFrom": {"fieldRef": {"fieldPath": _JOB_NAME}}}
    algorithm: dict[str, Any] = {}
    if search.seed is not None and search.algorithm == "random":
        algorithm["seed"] = search.seed
    document = {
        "apiVersion": API,
        "kind": "OptimizationJob",
        "metadata": {"name": job.name},
        "spec": {
            "objectives": [
                {
                    "metric": search.metric,
                    "direction": "Minimize" if search.smaller_is_better else "Maximize",
                }
            ],
            "searchAlgorithm": {search.algorithm: algorithm},
            "parameters": [
                {"name": parameter, "searchSpace": _space(search, parameter, values)}
                for parameter, values in search.ranges.items()
            ],
            "numTrials": search.trials,
            "parallelTrials": search.parallel,
            "trainJobTemplate": {"spec": trainjob_spec(job, name)},
        },
    }
    return yaml_text(secret_comment(job), *what_it_needs(job), document)


def _space(search: Search, name: str, values: Mapping[str, Any]) -> Document:
    """Returns a range in Kubeflow's words; those of a grid are lists."""
    kind = values["type"]
    if kind == "categorical":
        return _choices(name, values["vals"])
    low, high = values["minval"], values["maxval"]
    if search.algorithm == "grid":
        return _choices(name, _points(name, values))
    if kind == "log":
        base = values.get("base", 10)
        return {"logUniform": {"min": _number(base**low), "max": _number(base**high)}}
    limits = {"min": _number(low), "max": _number(high)}
    return {"uniform": {**limits, "type": "Int"} if kind == "int" else limits}


def _points(name: str, values: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a range that a grid tries: `count` of them, ends included."""
    low, high, count = values["minval"], values["maxval"], values.get("count")
    if values["type"] == "int" and count is None:
        count = high - low + 1
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise UsageError(
            f"--emit optimizationjob: hyperparameters.{name}: a grid needs count, from 2, how many "
            "values of the range it tries"
        )
    points = [low + (high - low) * i / (count - 1) for i in range(count)]
    if values["type"] == "int":
        return sorted({round(point) for point in points})
    if values["type"] == "log":
        return [values.get("base", 10) ** point for point in points]
    return points


def _choices(name: str, values: list[Any]) -> Document:
    texts = list(dict.fromkeys(_number(value) for value in values))
    if len(texts) > _MOST_CHOICES or any(len(text) > 64 for text in texts):
        raise UsageError(
            f"--emit optimizationjob: hyperparameters.{name}: a list has {_MOST_CHOICES} values at "
            "most, of 64 characters at most"
        )
    return {"categorical": {"choices": texts}}


def _number(value: Any) -> str:
    """Returns a value as the API's text: numbers in full precision, without a plus sign."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
