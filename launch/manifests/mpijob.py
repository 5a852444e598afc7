"""An MPIJob of Kubeflow's MPI operator: `kubeflow.org/v2beta1`.

There is no MPI in it. The operator gives all pods keys for ssh, and gives the launcher's pod a list
of the workers in /etc/mpi/hostfile. The launcher reads that list, starts launchers in the workers'
pods over ssh, and sends them the job's secret the same way. The image needs an ssh server: it is
the stage `mpi` of docker/Dockerfile.
"""

from __future__ import annotations

from typing import Any

from collective.launch.manifests.cluster_job import ClusterJob
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

_SSH_SERVER = ("tini", "--", "python", "/opt/collective/docker/ssh_server.py")
_SSH_PORT = 2222  # of docker/sshd_config
_SSH_KEYS = "/home/collective/.ssh"


def mpijob_text(job: ClusterJob) -> str:
    return yaml_text(volume_comment(job), *claim(job.volume), _mpijob(job))


def _mpijob(job: ClusterJob) -> Document:
    launcher = {
        "name": "launcher",
        "image": job.image,
        "command": list(COMMAND),
        "args": arguments(job),
        "env": environment(job),
        "resources": {"requests": {"cpu": "1"}},
        "volumeMounts": volume_mounts(job),
    }
    worker = {
        "name": "worker",
        "image": job.image,
        "command": list(_SSH_SERVER),
        "env": environment(job),
        "resources": resources(job),
        "volumeMounts": volume_mounts(job),
        # The launcher starts when all workers can be reached. A probe that continued after the
        # start would fill the ssh server's log.
        "startupProbe": {"tcpSocket": {"port": _SSH_PORT}, "periodSeconds": 5},
        **liveness_probe(job),
    }
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": job.name},
        "spec": {
            "mpiImplementation": "OpenMPI",  # the launcher reads this form of the hostfile
            "slotsPerWorker": job.ranks,
            "sshAuthMountPath": _SSH_KEYS,
            "launcherCreationPolicy": "WaitForWorkersReady",
            # A launcher that gives up is a failed pod; one that is lost gets another pod.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
            "mpiReplicaSpecs": {
                "Launcher": _replicas(job, 1, "Never", launcher),
                "Worker": _replicas(job, job.replicas, "OnFailure", worker),
            },
        },
    }


def _replicas(job: ClusterJob, count: int, restart: str, container: Document) -> dict[str, Any]:
    return {
        "replicas": count,
        "restartPolicy": restart,
        "template": {"spec": {**pod_settings(job), "containers": [container]}},
    }
