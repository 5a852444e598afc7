"""collective.job_info() always has an answer, whoever has started the process."""

from __future__ import annotations

import socket

import pytest

import collective


def test_without_a_job():
    info = collective.job_info({})
    assert (info.rank, info.size, info.local_rank, info.local_size, info.hosts) == (0, 1, 0, 1, 1)
    assert (info.slots, info.restarts, info.max_restarts, info.job_id) == ((), 0, 0, None)
    assert (
        info.config == {}
        and info.hyperparameters == {}
        and not info.test_mode
        and info.host == socket.gethostname()
    )


def test_of_a_launchers_rank():
    info = collective.job_info(
        {
            "HOROVOD_RANK": "5",
            "HOROVOD_SIZE": "8",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_HOSTNAME": "b",
            "COLLECTIVE_HOSTS": "3",
            "CUDA_VISIBLE_DEVICES": "1",
            "COLLECTIVE_RESTART_COUNT": "2",
            "COLLECTIVE_MAX_RESTARTS": "5",
            "COLLECTIVE_JOB_ID": "ads-7",
            "COLLECTIVE_HYPERPARAMETERS": '{"lr": 0.1, "global_batch_size": 64}',
            "COLLECTIVE_TEST_MODE": "1",
            "COLLECTIVE_JOB_FILE": '{"name": "ads", "slots": 8}',
        }
    )
    assert (info.rank, info.size, info.local_rank, info.local_size) == (5, 8, 1, 2)
    assert (info.host, info.hosts, info.slots) == ("b", 3, ("1",))
    assert (info.restarts, info.max_restarts, info.job_id) == (2, 5, "ads-7")
    assert info.hyperparameters == {"lr": 0.1, "global_batch_size": 64} and info.test_mode
    assert info.config == {"name": "ads", "slots": 8}


@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_of_a_trial_of_kubeflows_optimization_job(case):
    """Its controller has written names as they are, and in capitals."""
    chosen = {"lr": "0.01", "Width": "64", "optimizer": "sgd", "wide": "true"}
    info = collective.job_info(
        {
            "COLLECTIVE_HYPERPARAMETERS": '{"lr": 0.5, "global_batch_size": 64}',
            "COLLECTIVE_JOB_FILE": '{"searcher": {"parameters": ["Width", "optimizer", "wide"]}}',
            **{f"KUBEFLOW_TRAINER_OPT_{case(name)}": text for name, text in chosen.items()},
        }
    )
    assert info.hyperparameters == {
        "global_batch_size": 64,
        "lr": 0.01,
        "Width": 64,
        "optimizer": "sgd",
        "wide": True,
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("COLLECTIVE_HYPERPARAMETERS", "lr=0.1"),
        ("COLLECTIVE_HYPERPARAMETERS", "[1]"),
        ("COLLECTIVE_JOB_FILE", "{"),
        ("COLLECTIVE_JOB_FILE", "[1]"),
        ("COLLECTIVE_RESTART_COUNT", "two"),
    ],
)
def test_what_cannot_be_read_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        collective.job_info({name: value})
