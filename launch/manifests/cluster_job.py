"""A job for a scheduler, made from the launcher's options and those of `--emit`.

This file refuses what a scheduler would refuse minutes later, or what would make a pod fail.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from collective.job import streams
from collective.job.errors import UsageError
from collective.launch.manifests.options import (
    ManifestOptions,
    split_options,
    without_loaders,
    without_ranks,
)
from collective.launch.planning.environment import RESERVED

LOADER_PORT = 29600
# The time from the end of --grace, when the launcher kills what is left, to the end of its report.
_REPORT_SECONDS = 15
_MOST_NAME = 40  # a pod's name has the job's, its number and a few random letters: 63 in all
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_SIZE = re.compile(r"([1-9][0-9]*)(Mi|Gi|Ti)")
_MEBIBYTES = {"Mi": 1, "Gi": 1 << 10, "Ti": 1 << 20}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The options that the scheduler sets for each launcher, by their attributes.
_SCHEDULERS_OPTIONS = {
    "nodes": "--nnodes",
    "node": "--node-rank",
    "master": "--master-addr",
    "port": "--master-port",
    "standalone": "--standalone",
    "hosts": "-H",
    "hostfile": "--hostfile",
}
# The options that have no effect on a kind of manifest, and why.
_UNUSED = {
    "mpijob": {
        "data_loaders": "loaders in pods of their own need the job's secret, which its launcher "
        "keeps: --emit trainjob has them",
        "secret": "the launcher makes a secret by itself, and hands it over by ssh",
        "own_runtime": "a TrainJob's runtime",
    },
    "slurm": {
        "data_loaders": "start them by srun, and give ranks and loaders COLLECTIVE_LOADERS by "
        "--env",
        "image": "a job of Slurm runs in the environment that sbatch is called in",
        "volume": "a job of Slurm sees the hosts' own folders",
        "volume_size": "a job of Slurm sees the hosts' own folders",
        "secret": "the batch file makes a secret by itself",
        "own_runtime": "a TrainJob's runtime",
    },
    "optimizationjob": {
        "data_loaders": "each trial needs loaders of its own",
    },
    "compose": {
        "volume_size": "a volume of docker has no size",
        "secret": "compose takes the secret from COLLECTIVE_SECRET",
        "own_runtime": "a TrainJob's runtime",
    },
}


@dataclass(frozen=True)
class Volume:
    """Names a volume that all replicas see.

    Attributes:
        name: the name of the claim, or of docker's volume.
        folder: the folder where containers see it.
        size: the size of a claim that is to be made, as "100Gi"; "" for a claim that exists.
    """

    name: str
    folder: str
    size: str


@dataclass(frozen=True)
class Search:
    """Says what a search tries, and how it compares trials.

    Attributes:
        algorithm: 'random' or 'grid'.
        metric: the name of a metric.
        smaller_is_better: whether a smaller one is better.
        trials: how many trainings there are.
        parallel: how many at a time.
        seed: of the random choice; None for any.
        ranges: hyperparameters in Determined's words (launch/job_file/search_space.py).
    """

    algorithm: str
    metric: str
    smaller_is_better: bool
    trials: int
    parallel: int
    seed: int | None
    ranges: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ClusterJob:
    """Says what runs on which hosts.

    Attributes:
        name: a DNS label.
        image: the image of the containers; "" where there are none.
        arguments: the words after `collective launch`.
        replicas: how many hosts or pods there are.
        ranks: the number of ranks on each replica.
        gpus: the number of GPUs of each replica.
        cpus: the cores of each replica; 0 if not given.
        memory: the most MiB that each replica may use; 0 for no limit.
        volume: for checkpoints.
        secret: the name of Kubernetes' Secret.
        environment: more environment variables.
        max_restarts: how often the launcher starts the ranks again.
        time_to_save: seconds that ranks have to save and to end once the job is told to stop.
        stall_timeout: seconds without progress after which the launcher ends the job; 0 means
            never.
        own_runtime: whether a TrainJob brings its own runtime.
        search: what an OptimizationJob searches.
        loaders: how many loaders there are.
        loader_words: the words of a loader's command, without the interpreter.
    """

    name: str
    image: str
    arguments: tuple[str, ...]
    replicas: int = 1
    ranks: int = 1
    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    volume: Volume = Volume("checkpoints", "/out", "")
    secret: str = "secret"
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    time_to_save: float = 60.0
    stall_timeout: float = 600.0
    own_runtime: bool = False
    search: Search | None = None
    loaders: int = 0
    loader_words: tuple[str, ...] = ()

    @property
    def cores(self) -> int:
        """How many cores each replica asks for: at least one for each rank."""
        return self.cpus or self.ranks

    @property
    def seconds_to_stop(self) -> int:
        """How long it may take from TERM to the end of the launcher."""
        return math.ceil(self.time_to_save) + _REPORT_SECONDS


def cluster_job(
    options: ManifestOptions,
    launcher_words: Sequence[str],
    command: Sequence[str],
    *,
    ranks: int | str,
    device: str,
    max_restarts: int,
    time_to_save: float,
    stall_timeout: float,
    search: Search | None = None,
    loaders: int = 0,
    loader_words: Sequence[str] = (),
) -> ClusterJob:
    """Makes a cluster job from the options.

    Args:
        options: the launcher's options, with `emit`.
        launcher_words: all options as given, without the command.
        command: the words of the command.
        ranks: the value of -np: a number, "auto", "gpu" or "cpu".
        device: the value of --device.
        max_restarts, time_to_save, stall_timeout, search: as in `ClusterJob`.
        loaders, loader_words: likewise.

    Raises:
        UsageError: the options contradict each other, or a scheduler would refuse them.
    """
    if not command:
        raise UsageError(f"--emit {options.emit}: no script given, which the job would run")
    _check_use(options)
    if options.emit == "optimizationjob":
        _check_search(search)
    _check_encoding([*launcher_words, *command])
    replicas = _count("--replicas", options.replicas, 1, otherwise=1)
    gpus = _count("--gpus-per-replica", options.gpus_per_replica, 0, otherwise=0)
    cpus = _count("--cpus-per-replica", options.cpus_per_replica, 1, otherwise=0)
    name = _job_name(options.job_name, command)
    return ClusterJob(
        name=name,
        image=_image(options, gpus),
        arguments=_arguments(options, launcher_words, command),
        replicas=replicas,
        ranks=_ranks(ranks, device, gpus, cpus),
        gpus=gpus,
        cpus=cpus,
        memory=_mebibytes(options.memory_per_replica),
        volume=_volume(options, name),
        secret=_secret(options.secret, name),
        environment={**_loaders(options, name, loaders), **_environment(options.env or ())},
        max_restarts=max_restarts,
        time_to_save=time_to_save,
        stall_timeout=stall_timeout,
        own_runtime=bool(options.own_runtime),
        search=search,
        loaders=loaders,
        loader_words=tuple(loader_words),
    )


def _arguments(
    options: ManifestOptions, launcher_words: Sequence[str], command: Sequence[str]
) -> tuple[str, ...]:
    """Returns the command line after the launcher's name, on the hosts."""
    _, words = split_options(launcher_words)
    words = without_loaders(words)  # they have containers of their own
    if options.emit == "mpijob":
        words = without_ranks(words)  # the host file has the number; -np would mean all ranks
    # A script that looks like an option was given after a "--".
    unclear = command[0].startswith("-") and command[0] != "-m"
    return (*words, *(["--"] if unclear else []), *command)


def _loaders(options: ManifestOptions, name: str, count: int) -> dict[str, str]:
    """Returns the variable that says where the loaders listen; nothing without loaders."""
    if not count:
        return {}
    pattern = "loader-{}" if options.emit == "compose" else f"{name}-loader-{{}}.{name}-loader"
    addresses = [f"{pattern.format(number)}:{LOADER_PORT}" for number in range(count)]
    return {streams.LOADERS: ",".join(addresses)}


def _check_use(options: ManifestOptions) -> None:
    for name, option in _SCHEDULERS_OPTIONS.items():
        value = getattr(options, name)
        if value is not None and value is not False:
            raise UsageError(
                f"{option} with --emit {options.emit}: the scheduler says which hosts there are; "
                "leave it out, and give their number by --replicas"
            )
    for name, reason in _UNUSED.get(str(options.emit), {}).items():
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is of no use with --emit {options.emit} ({reason}): "
                "leave it out"
            )


def _check_search(search: Search | None) -> None:
    """Checks that there is something to search, which a file says.

    Raises:
        UsageError: there is nothing.
    """
    if search is None or not search.ranges:
        raise UsageError(
            "--emit optimizationjob prints a search: give a job file with `searcher: {name: "
            "random, metric: auc, max_trials: 20}` and a range in its hyperparameters, as `lr: "
            "{type: log, minval: -3, maxval: -1}`"
        )
    for name in search.ranges:
        if not _VARIABLE.fullmatch(name) or len(name) > 64:
            raise UsageError(
                f"--emit optimizationjob: hyperparameters.{name}: a name has letters, digits and "
                "_, and 64 characters at most"
            )


def _check_encoding(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"--emit: a manifest is UTF-8, and {os.fsencode(word)!r} isn't: give the job "
                "arguments in UTF-8"
            ) from None


def _count(option: str, value: int | None, least: int, otherwise: int) -> int:
    if value is None:
        return otherwise
    if value < least:
        raise UsageError(f"{option} {value}: give {least} or more")
    return value


def _ranks(ranks: int | str, device: str, gpus: int, cpus: int) -> int:
    """Returns how many ranks the launcher will start on a replica, by the rules for -np."""
    on_gpus = gpus if device != "cpu" else 0
    if device == "gpu" and not gpus:
        raise UsageError("--device gpu needs GPUs: give --gpus-per-replica, too, 1 or more")
    if ranks == "auto":
        return on_gpus or 1
    if ranks == "gpu":
        if not on_gpus:
            raise UsageError("-np gpu is one rank for each GPU: give --gpus-per-replica, 1 or more")
        return on_gpus
    if ranks == "cpu":
        if not cpus:
            raise UsageError("-np cpu is one rank for each core: give --cpus-per-replica, too")
        return cpus
    count = int(ranks)
    if count < 1:
        raise UsageError(f"-np {count}: give 1 rank or more for each replica")
    if on_gpus and count > on_gpus:
        raise UsageError(
            f"-np {count} ranks a replica, with --gpus-per-replica {gpus}: a rank has a GPU of its "
            "own; give no more ranks than GPUs, or --device cpu"
        )
    return count


def _job_name(given: str | None, command: Sequence[str]) -> str:
    name = _name_of_script(command) if given is None else given
    if not _NAME.fullmatch(name) or len(name) > _MOST_NAME:
        raise UsageError(
            f"--job-name {name!r}: give a DNS label, which begins with a small letter, has small "
            f"letters, digits and dashes, and {_MOST_NAME} characters at most"
        )
    return name


def label_of(name: str) -> str:
    """Returns a name's letters, digits and dashes, as a DNS label has them."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MOST_NAME].strip("-")
    return label if _NAME.fullmatch(label) else "collective"


def _name_of_script(command: Sequence[str]) -> str:
    """Returns a name made from the script or module: "train" for `models/Train.py --epochs 3`."""
    word = next((word for word in command if word.endswith(".py")), command[0])
    if "-m" in command[:-1]:
        word = command[command.index("-m") + 1].rpartition(".")[2]
    stem = PurePosixPath(word).name
    stem = stem[: -len(".py")] if stem.endswith(".py") else stem
    return label_of(stem)


def _image(options: ManifestOptions, gpus: int) -> str:
    if options.emit == "slurm":
        return ""
    if options.image is not None:
        if not _IMAGE.fullmatch(options.image):
            raise UsageError(
                f"--image {options.image!r}: give an image's name, as registry.example.com/name:tag"
            )
        return options.image
    if options.emit == "compose":
        return "collective:gpu" if gpus else "collective:cpu"
    target = "mpi" if options.emit == "mpijob" else "gpu" if gpus else "cpu"
    raise UsageError(
        f"--emit {options.emit} needs --image: the name by which the cluster pulls an image of "
        f"yours; docker/README.md tells how collective:{target} is built"
    )


def _mebibytes(size: str | None) -> int:
    if size is None:
        return 0
    match = _SIZE.fullmatch(size)
    if not match:
        raise UsageError(f"--memory-per-replica {size!r}: give a number with Mi, Gi or Ti, as 64Gi")
    return int(match[1]) * _MEBIBYTES[match[2]]


def _volume(options: ManifestOptions, job_name: str) -> Volume:
    size = options.volume_size
    if size is not None and not _SIZE.fullmatch(size):
        raise UsageError(f"--volume-size {size!r}: give a number with Mi, Gi or Ti, as 100Gi")
    if options.volume is None:
        return Volume(f"{job_name}-checkpoints", "/out", size or "100Gi")
    name, colon, folder = options.volume.partition(":")
    if not _CLAIM.fullmatch(name) or len(name) > 253:
        raise UsageError(
            f"--volume {options.volume!r}: {name!r} is no volume's name; give one of small "
            "letters, digits, dashes and dots, then perhaps a colon and the containers' folder"
        )
    if colon and (not folder.startswith("/") or folder == "/" or ":" in folder):
        raise UsageError(
            f"--volume {options.volume!r}: the folder {folder!r} isn't a path from the root, as "
            "/out"
        )
    return Volume(name, folder or "/out", size or "")


def _secret(given: str | None, job_name: str) -> str:
    name = f"{job_name}-secret" if given is None else given
    if not _CLAIM.fullmatch(name) or len(name) > 253:
        raise UsageError(
            f"--secret {name!r}: give the name of a Secret: small letters, digits, dashes and dots"
        )
    return name


def _environment(words: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env {word!r}: give NAME=VALUE")
        if RESERVED.fullmatch(name):
            raise UsageError(f"--env {name}: the launcher or the scheduler sets it; leave it out")
        variables[name] = value
    return variables
