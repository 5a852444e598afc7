"""Prints what a scheduler needs to run a job on its hosts: `--emit KIND`, instead of starting it.

A *cluster job* is the job that the options describe, for any scheduler: the launcher's command
line, run on a number of *replicas* (hosts, or pods that stand for them) with so many ranks, GPUs
and cores each. Each kind of manifest is a pure function of the cluster job, in its own file.
"""

from __future__ import annotations

from collective.launch.manifests.cluster_job import ClusterJob, cluster_job
from collective.launch.manifests.compose import compose_text
from collective.launch.manifests.mpijob import mpijob_text
from collective.launch.manifests.optimizationjob import optimizationjob_text
from collective.launch.manifests.options import KINDS, ManifestOptions, add_options, split_options
from collective.launch.manifests.slurm import slurm_text
from collective.launch.manifests.trainjob import trainjob_text

__all__ = ["ManifestOptions", "add_options", "cluster_job", "manifest", "split_options"]

_TEXTS = dict(
    zip(KINDS, (trainjob_text, mpijob_text, slurm_text, compose_text, optimizationjob_text))
)


def manifest(job: ClusterJob, kind: str) -> str:
    """Returns the text for a scheduler.

    Args:
        job: the job.
        kind: the kind of manifest, one of KINDS.
    """
    return _TEXTS[kind](job)
