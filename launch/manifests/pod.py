"""The parts of a pod that both Kubernetes job kinds share.

The image's user is number 1000: `fsGroup` lets it write to the volume, and read secrets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from collective.launch.manifests.cluster_job import ClusterJob, Volume
from collective.launch.manifests.yaml_text import Document, literal

COMMAND = ("python", "-m", "collective.launch")
_GROUP = 1000
_HEALTH_CHECK = ("python", "/opt/collective/docker/health_check.py")
_PROBE_PERIOD = 60


def claim(volume: Volume) -> list[Document]:
    """Returns the claim for a volume that is to be made; nothing for one that exists."""
    if not volume.size:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": volume.name},
            "spec": {
                # Every pod writes its shards.
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": volume.size}},
            },
        }
    ]


def volume_comment(job: ClusterJob) -> list[str]:
    """Returns a line that says what the claim needs; nothing for a claim that exists."""
    if not job.volume.size:
        return []
    return ["The storage class has to offer ReadWriteMany; storageClassName chooses one."]


def arguments(job: ClusterJob) -> list[str]:
    """Returns the launcher's arguments, escaped so that Kubernetes leaves them unchanged."""
    return literal_words(job.arguments)


def literal_words(words: Sequence[str]) -> list[str]:
    """Returns words, escaped so that Kubernetes leaves them unchanged."""
    return [literal(word) for word in words]


def environment(job: ClusterJob, **more: str) -> list[Document]:
    """Returns the variables of a container: `more`, and those that the user has given."""
    variables = {**more, **{name: literal(value) for name, value in job.environment.items()}}
    return [{"name": name, "value": value} for name, value in variables.items()]


def resources(job: ClusterJob) -> Document:
    """Returns a pod's requests and limits. Cores have no limit, which would throttle the pod."""
    requests: dict[str, Any] = {"cpu": str(job.cores)}
    limits: dict[str, Any] = {}
    if job.memory:
        requests["memory"] = limits["memory"] = f"{job.memory}Mi"
    if job.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(job.gpus)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def pod_settings(job: ClusterJob) -> dict[str, Any]:
    """Returns the time that a pod has to stop, its rights and its volumes."""
    volumes: list[Document] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": job.volume.name}},
    ]
    if job.gpus:  # NCCL's buffers; CPU ranks share memory that is in no folder
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    return {
        "terminationGracePeriodSeconds": job.seconds_to_stop,
        "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "volumes": volumes,
    }


def volume_mounts(job: ClusterJob) -> list[Document]:
    mounts: list[Document] = [
        {"name": "checkpoints", "mountPath": job.volume.folder},
    ]
    if job.gpus:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return mounts


def liveness_probe(job: ClusterJob) -> Mapping[str, Document]:
    """Returns the probe that ends a pod whose launcher should have ended the job but didn't.

    The launcher's own --stall-timeout comes first, and reports who was missing.
    """
    if not job.stall_timeout:
        return {}
    patience = job.stall_timeout + job.seconds_to_stop
    probe = {
        "exec": {"command": list(_HEALTH_CHECK)},
        "periodSeconds": _PROBE_PERIOD,
        "timeoutSeconds": 30,
        "failureThreshold": math.ceil(patience / _PROBE_PERIOD) + 1,
    }
    return {"livenessProbe": probe}
