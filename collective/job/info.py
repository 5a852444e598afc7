"""Says what a process may know of its job: `collective.job_info()`.

It loads no TensorFlow, and needs no scope. Launcher, scheduler or nobody may have started the
process: there is always an answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from collective.job import job_file
from collective.job.schedulers import started_by

HYPERPARAMETERS = "COLLECTIVE_HYPERPARAMETERS"  # JSON: {name: value}
JOB_ID = "COLLECTIVE_JOB_ID"
HOSTS = "COLLECTIVE_HOSTS"
TEST_MODE = "COLLECTIVE_TEST_MODE"
# Kubeflow's OptimizationJob gives a trial its values by variables of these names.
OPTIMIZATION_PREFIX = "KUBEFLOW_TRAINER_OPT_"


@dataclasses.dataclass(frozen=True)
class JobInfo:
    """Describes the job that this process is a rank of.

    Attributes:
        rank: its number among all ranks, from 0.
        size: N, the number of ranks.
        local_rank: its number among the ranks of its host.
        local_size: how many ranks its host has.
        host: the name of its host.
        hosts: how many hosts the job has; without `collective launch`, if each has as many ranks.
        slots: the devices of this rank, as CUDA_VISIBLE_DEVICES names them; () on a CPU.
        restarts: how often the launcher has restarted the job.
        max_restarts: how often it may.
        job_id: COLLECTIVE_JOB_ID, or else the scheduler's; None if there is none.
        hyperparameters: those of COLLECTIVE_HYPERPARAMETERS, in JSON, as a job file's are; {} if
            there are none. In a trial of Kubeflow's OptimizationJob, its values take their places.
        config: the job file, resolved (`collective launch job.yaml`), without hyperparameters and
            environment; {} without one.
        test_mode: whether it only tries everything once (`collective launch --test-mode`).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    hosts: int
    slots: tuple[str, ...]
    restarts: int
    max_restarts: int
    job_id: str | None
    hyperparameters: dict[str, Any]
    config: dict[str, Any]
    test_mode: bool


def job_info(environment: Mapping[str, str] | None = None) -> JobInfo:
    """Returns what is known of this process's job; a process without one is a job of one rank.

        if collective.job_info().rank == 0:
            print(collective.job_info().hyperparameters.get("lr", 0.1))

    It works before a `CollectiveStrategy` is made, and without TensorFlow. It is
    `determined.get_cluster_info()`, but never None.

    Args:
        environment: where to look; None: the process's.

    Returns:
        The job.

    Raises:
        ValueError: the variables of the launcher, the hyperparameters or the job file aren't what
            they should be.
    """
    environment = os.environ if environment is None else environment
    place = _place(environment)
    devices = environment.get("CUDA_VISIBLE_DEVICES", "")
    return JobInfo(
        *place,
        host=environment.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        hosts=_number(environment, HOSTS, -(-place[1] // place[3])),
        slots=tuple(word.strip() for word in devices.split(",") if word.strip()),
        restarts=_number(environment, "COLLECTIVE_RESTART_COUNT", 0),
        max_restarts=_number(environment, "COLLECTIVE_MAX_RESTARTS", 0),
        job_id=_job_id(environment),
        hyperparameters={**_hyperparameters(environment), **_of_trial(environment)},
        config=job_file.read(environment),
        test_mode=environment.get(TEST_MODE, "") not in ("", "0"),
    )


def _place(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Returns rank, size, local rank and local size."""
    if not environment.get("HOROVOD_RANK"):
        scheduled = started_by(environment)
        if scheduled is not None:
            return scheduled.rank, scheduled.size, scheduled.local_rank, scheduled.local_size
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (
        _number(environment, f"HOROVOD_{name}", int("SIZE" in name)) for name in names
    )
    return rank, size, local_rank, local_size


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: it is a whole number.") from None


def _job_id(environment: Mapping[str, str]) -> str | None:
    for name in (JOB_ID, "SLURM_JOB_ID"):
        if environment.get(name):
            return environment[name]
    return None


def _hyperparameters(environment: Mapping[str, str]) -> dict[str, Any]:
    text = environment.get(HYPERPARAMETERS, "")
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{HYPERPARAMETERS} in the environment isn't JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(
            f'{HYPERPARAMETERS} in the environment is {text!r}; it is an object like {{"lr": 0.1}}.'
        )
    return values


def _of_trial(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the hyperparameters that Kubeflow's OptimizationJob has chosen for this trial.

    A value is a number or a text. A name is that in the job's file, whatever its case here.
    """
    known = {name.lower(): name for name in _hyperparameters(environment)}
    known |= {name.lower(): name for name in job_file.searched(job_file.read(environment))}
    found = {}
    for variable, text in environment.items():
        if variable.startswith(OPTIMIZATION_PREFIX) and variable != OPTIMIZATION_PREFIX:
            name = variable[len(OPTIMIZATION_PREFIX) :]
            found[known.get(name.lower(), name)] = _number_or_text(text)
    return found


def _number_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list)) or value is None else value
