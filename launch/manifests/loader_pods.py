"""The loaders of a job in containers of their own: `--data-loaders` with `--emit`.

In Kubernetes they are the pods of an indexed Job, `batch/v1`, whose names a headless Service makes
known: pod 2 of job `ads` is `ads-loader-2.ads-loader`. The Job starts a pod again that ends or is
lost; the stream then goes on. It doesn't know when the ranks are done.
"""

from __future__ import annotations

from typing import Any

from collective.job import streams
from collective.launch.manifests.cluster_job import LOADER_PORT, ClusterJob
from collective.launch.manifests.pod import (
    environment,
    literal_words,
    pod_settings,
    volume_mounts,
)
from collective.launch.manifests.yaml_text import Document, literal

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MOST_RESTARTS = 1000  # of all loaders together: Kubernetes wants a number


def loader_comment(job: ClusterJob) -> list[str]:
    """Returns lines on the loaders' end; nothing for a job without loaders."""
    if not job.loaders:
        return []
    return [
        "After the job's end, the loaders end by:",
        f"  kubectl delete job/{job.name}-loader service/{job.name}-loader",
    ]


def loader_documents(job: ClusterJob, mount: Document, secret: Document) -> list[Document]:
    """Returns the Service and the Job of the loaders; nothing for a job without them.

    Args:
        job: the job.
        mount: where the volume of the secret is.
        secret: that volume. COLLECTIVE_SECRET_FILE is its file `secret`.
    """
    if not job.loaders:
        return []
    name = f"{job.name}-loader"
    settings = pod_settings(job)
    container: dict[str, Any] = {
        "name": "loader",
        "image": job.image,
        "command": ["python", *literal_words(job.loader_words)],
        "env": [
            *environment(job, COLLECTIVE_SECRET_FILE=f"{mount['mountPath']}/secret"),
            {"name": streams.LOADER, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        ],
        "ports": [{"containerPort": LOADER_PORT}],
        "resources": {"requests": {"cpu": "1"}},
        "volumeMounts": [*volume_mounts(job), mount],
    }
    pod = {
        **settings,
        "restartPolicy": "OnFailure",
        "subdomain": name,
        "volumes": [*settings["volumes"], secret],
        "containers": [container],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"port": LOADER_PORT}],
        },
    }
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.loaders,
            "parallelism": job.loaders,
            "backoffLimit": _MOST_RESTARTS,
            "template": {"spec": pod},
        },
    }
    return [service, indexed]


def loader_services(job: ClusterJob) -> dict[str, Document]:
    """Returns the loaders as services of docker compose, by their names."""
    return {
        f"loader-{number}": {
            "image": job.image,
            "hostname": f"loader-{number}",
            "init": True,
            "entrypoint": ["python"],
            "command": [literal(word) for word in job.loader_words],
            "environment": {
                "COLLECTIVE_SECRET": "${COLLECTIVE_SECRET:?export it first}",
                **{name: literal(value) for name, value in job.environment.items()},
                streams.LOADER: str(number),
            },
            "volumes": [f"{job.volume.name}:{job.volume.folder}"],
            "restart": "on-failure",
        }
        for number in range(job.loaders)
    }
