"""The options of `--emit`, which describe a job's hosts to a scheduler."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from collective.job.errors import UsageError

# -np in any of its forms: separate from its value, or joined with it.
_RANKS = re.compile(r"(?:-np?|--nproc[-_]per[-_]node)(?P<value>=.*)?|-np?(?P<glued>[^=-].*)")
KINDS = ("trainjob", "mpijob", "slurm", "compose", "optimizationjob")


class ManifestOptions(argparse.Namespace):
    """Holds these options as given; None for one that wasn't. `cluster_job` checks them."""

    emit: str | None
    job_name: str | None
    image: str | None
    replicas: int | None
    gpus_per_replica: int | None
    cpus_per_replica: int | None
    memory_per_replica: str | None
    volume: str | None
    volume_size: str | None
    secret: str | None
    own_runtime: bool | None
    env: list[str] | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the launcher's."""
    add = parser.add_argument_group("manifests for schedulers").add_argument
    add(
        "--emit",
        choices=KINDS,
        help="print a manifest that runs this command line on several hosts, and start nothing: a "
        "TrainJob of Kubeflow's trainer, an MPIJob of its MPI operator, a batch file for Slurm, "
        "a file for docker compose whose containers stand for hosts, or, of a job file with a "
        "searcher, an OptimizationJob of Kubeflow's trainer",
    )
    add(
        "--job-name",
        metavar="NAME",
        help="what the job and what belongs to it are called (default: after the script)",
    )
    add(
        "--image",
        help="the image of the containers (default: for compose collective:cpu, or collective:gpu "
        "with --gpus-per-replica; none for Kubernetes)",
    )
    add("--replicas", type=int, metavar="R", help="how many hosts or pods (default: 1)")
    add("--gpus-per-replica", type=int, metavar="G", help="of each host or pod (default: 0)")
    add(
        "--cpus-per-replica",
        type=int,
        metavar="C",
        help="cores that each host or pod asks for (default: one for each rank)",
    )
    add(
        "--memory-per-replica",
        metavar="SIZE",
        help="the most that each host or pod may use, as 64Gi (default: what the scheduler gives)",
    )
    add(
        "--volume",
        metavar="NAME[:FOLDER]",
        help="a volume that all replicas see, and where they see it: a claim that exists, in "
        "Kubernetes (default: a new one, NAME-checkpoints:/out)",
    )
    add(
        "--volume-size",
        metavar="SIZE",
        help="of a new volume in Kubernetes, which --volume then names (default: 100Gi)",
    )
    add(
        "--secret",
        metavar="NAME",
        help="Kubernetes' Secret with the job's secret (default: NAME-secret)",
    )
    add(
        "--own-runtime",
        action="store_const",
        const=True,
        help="for trainjob and optimizationjob: print a TrainingRuntime, too, with a probe and "
        "a restart policy, and use that instead of the stock torch-distributed",
    )
    add(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="an environment variable of the job; may be given several times",
    )


def check_unused(options: ManifestOptions) -> None:
    """Refuses these options for a job without --emit.

    Raises:
        UsageError: one of them is given, and would have no effect.
    """
    if options.emit is not None:
        return
    for name in ManifestOptions.__annotations__:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --emit: give that, too")


def split_options(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Splits the launcher's options into the manifest options, by name, and all others as given.

    Args:
        words: the options of a command line that has been parsed, without the command.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser)
    actions = parser._option_string_actions
    own: list[str] = []
    others: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        action = actions.get(word.partition("=")[0])
        length = 2 if action is not None and action.nargs != 0 and "=" not in word else 1
        (others if action is None else own).extend(words[position : position + length])
        position += length
    given = vars(parser.parse_args(own))
    return {name: value for name, value in given.items() if value is not None}, tuple(others)


def without_loaders(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the launcher's options without --data-loaders and its two values.

    Args:
        words: the options as given, without the manifest options.
    """
    others = list(words)
    while "--data-loaders" in others:
        position = others.index("--data-loaders")
        del others[position : position + 3]
    return tuple(others)


def without_ranks(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the launcher's options without -np.

    Args:
        words: the options as given, without the manifest options.
    """
    others: list[str] = []
    position = 0
    while position < len(words):
        match = _RANKS.fullmatch(words[position])
        if match is None:
            others.append(words[position])
            position += 1
        else:
            position += 1 if match["value"] or match["glued"] else 2
    return tuple(others)
