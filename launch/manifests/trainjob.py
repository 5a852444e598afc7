"""A TrainJob of Kubeflow's trainer: `trainer.kubeflow.org/v1alpha1`.

The stock runtime, `torch-distributed`, runs any image: for PyTorch it only sets PET_NNODES,
PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, and the launcher reads
these. A job may change a runtime's volumes and time to stop, but not its probes or its restart
policy: these need the job's own runtime.
"""

from __future__ import annotations

from typing import Any

from collective.launch.manifests.cluster_job import ClusterJob
from collective.launch.manifests.loader_pods import loader_comment, loader_documents
from collective.launch.manifests.pod import (
    COMMAND,
    arguments,
    claim,
    environment,
    liveness_probe,
    pod_settings,
    resources,
    volume_comment,
    volume_mounts,
)
from collective.launch.manifests.yaml_text import Document, yaml_text

API = "trainer.kubeflow.org/v1alpha1"
_STOCK_RUNTIME = {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
_NODE = "node"  # the runtime's name for the pods, and for the container in each
_SECRET_FOLDER = "/etc/collective"


def trainjob_text(job: ClusterJob) -> str:
    trainjob = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": trainjob_spec(job),
    }
    comment = [*secret_comment(job), *loader_comment(job)]
    loaders = loader_documents(job, _secret_mount(), _secret_volume(job))
    return yaml_text(comment, *what_it_needs(job), *loaders, trainjob)


def _secret_volume(job: ClusterJob) -> Document:
    # Readable by the group: the container's user isn't the owner.
    return {"name": "secret", "secret": {"secretName": job.secret, "defaultMode": 0o440}}


def _secret_mount() -> Document:
    return {"name": "secret", "mountPath": _SECRET_FOLDER, "readOnly": True}


def secret_comment(job: ClusterJob) -> list[str]:
    """Returns the lines that say what to make before the manifest is applied."""
    return [
        "Before it is applied, make the secret by which launchers know each other:",
        f"  kubectl create secret generic {job.secret} \\",
        "      --from-literal=secret=$(openssl rand -hex 32)",
        *volume_comment(job),
    ]


def what_it_needs(job: ClusterJob) -> list[Document]:
    """Returns the documents of what a TrainJob refers to: a claim, and its own runtime."""
    return [*claim(job.volume), *([_runtime(job)] if job.own_runtime else [])]


def trainjob_spec(job: ClusterJob, *variables: Document) -> Document:
    """Returns the `spec` of a TrainJob.

    Args:
        job: the job.
        variables: environment variables in Kubernetes' words, besides the job's.
    """
    own = {"kind": "TrainingRuntime", "name": job.name}
    settings = pod_settings(job)
    pod: dict[str, Any] = {
        **settings,
        "volumes": [*settings["volumes"], _secret_volume(job)],
        "containers": [{"name": _NODE, "volumeMounts": [*volume_mounts(job), _secret_mount()]}],
    }
    patch = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "runtimeRef": own if job.own_runtime else dict(_STOCK_RUNTIME),
        "trainer": {
            "image": job.image,
            "command": list(COMMAND),
            "args": arguments(job),
            "env": [
                *environment(job, COLLECTIVE_SECRET_FILE=f"{_SECRET_FOLDER}/secret"),
                *variables,
            ],
            "numNodes": job.replicas,
            "numProcPerNode": job.ranks,
            "resourcesPerNode": resources(job),
        },
        "runtimePatches": [
            {
                "manager": "collective/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }


def _runtime(job: ClusterJob) -> Document:
    """Returns the stock runtime with a probe added; after the loss of a pod all pods start again.

    They start together, up to --max-restarts times: either way the ranks resume from their latest
    checkpoint.
    """
    pod = {
        "restartPolicy": "Never",
        "containers": [{"name": _NODE, "image": job.image, **liveness_probe(job)}],
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name},
        "spec": {
            "mlPolicy": {"numNodes": job.replicas, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [
                        {
                            "name": _NODE,
                            "template": {
                                "metadata": {
                                    "labels": {
                                        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
                                    }
                                },
                                "spec": {"backoffLimit": 0, "template": {"spec": pod}},
                            },
                        }
                    ],
                }
            },
        },
    }
