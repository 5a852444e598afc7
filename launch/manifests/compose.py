"""A file for docker compose: containers that stand for hosts, on one machine.

They share a network of their own, which knows a service by its name, and a volume.
"""

from __future__ import annotations

from typing import Any

from collective.launch.manifests.cluster_job import ClusterJob
from collective.launch.manifests.loader_pods import loader_services
from collective.launch.manifests.yaml_text import Document, literal, yaml_text

_PORT = 29500


def compose_text(job: ClusterJob) -> str:
    comment = [
        f"{job.replicas} containers as {job.replicas} hosts of one job; they share a secret:",
        "  export COLLECTIVE_SECRET=$(openssl rand -hex 32)",
        "  docker compose --file THIS_FILE up",
    ]
    if job.loaders:
        comment.append("The loaders end by: docker compose --file THIS_FILE down")
    hosts = {_host(number): _service(job, number) for number in range(job.replicas)}
    document = {
        "name": job.name,
        "services": {**hosts, **loader_services(job)},
        "volumes": {job.volume.name: {}},
    }
    return yaml_text(comment, document)


def _host(number: int) -> str:
    return f"host-{number}"


def _service(job: ClusterJob, number: int) -> Document:
    service: dict[str, Any] = {
        "image": job.image,
        "hostname": _host(number),
        "init": True,
        "entrypoint": ["python", "-m", "collective.launch"],
        "command": [literal(word) for word in job.arguments],
        "environment": {
            "PET_NNODES": str(job.replicas),
            "PET_NPROC_PER_NODE": str(job.ranks),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": _host(0),
            "PET_MASTER_PORT": str(_PORT),
            "COLLECTIVE_SECRET": "${COLLECTIVE_SECRET:?export it first}",
            **{name: literal(value) for name, value in job.environment.items()},
        },
        "volumes": [f"{job.volume.name}:{job.volume.folder}"],
        "stop_grace_period": f"{job.seconds_to_stop}s",
    }
    if job.max_restarts:
        service["restart"] = f"on-failure:{job.max_restarts}"
    if job.gpus:
        service["shm_size"] = "1gb"  # NCCL's buffers
    resources = _resources(job, number)
    if resources:
        service["deploy"] = {"resources": resources}
    return service


def _resources(job: ClusterJob, number: int) -> dict[str, Any]:
    """Returns the limits of a container; each container gets its own GPUs of the machine."""
    resources: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if job.cpus:
        limits["cpus"] = str(job.cpus)
    if job.memory:
        limits["memory"] = f"{job.memory}m"
    if limits:
        resources["limits"] = limits
    if job.gpus:
        first = number * job.gpus
        device = {
            "driver": "nvidia",
            "device_ids": [str(index) for index in range(first, first + job.gpus)],
            "capabilities": ["gpu"],
        }
        resources["reservations"] = {"devices": [device]}
    return resources
