"""Makes a command line and an environment of a job file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from collective.job import info, job_file
from collective.job.errors import UsageError
from collective.launch.command_line.parser import JOB_FILES
from collective.launch.job_file import search_space, strategy_options
from collective.launch.job_file.model import JobFile, LaunchedJob, Length
from collective.launch.manifests.cluster_job import Search, label_of
from collective.yaml_file import Change, FileError, load, value_of

# What a job file may give, in this order, by this library's keys.
_PLACES = (
    "name",
    "entrypoint",
    "slots",
    "hosts",
    "data_loaders",
    "seed",
    "hyperparameters",
    "environment",
    "max_length",
    "records_per_epoch",
    *(f"checkpoints.{key}" for key in ("folder", "period", "policy", "keep", "start")),
    "checkpoints.continue_id",
    *(f"metrics.{key}" for key in ("port", "validation_period", "reporting_period")),
    "metrics.step_zero_validation",
    *(f"searcher.{key}" for key in ("name", "metric", "smaller_is_better")),
    *(f"searcher.{key}" for key in ("max_trials", "max_concurrent_trials")),
    "max_restarts",
    "log_policies",
    "strategy",
)
_FLAGS = {"cancel_retries": "--no-restart-after", "exclude_node": "--leave-out-host-after"}
_DETERMINED = re.compile(r"determined\.launch\.\w+")
_TRIAL = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Job:
    """Holds what a job file says.

    Attributes:
        path: the file's.
        file: what is in it, with the changes of --set.
        words: options of the launcher.
        command: the command of each rank.
        environment: environment variables of the ranks, in addition to the launcher's.
        notes: what the user should know.
    """

    path: str
    file: JobFile
    words: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def label(self) -> str | None:
        """Returns what a scheduler may call the job; None if the file doesn't name it."""
        return label_of(self.file.name) if self.file.has("name") else None

    def search(self) -> Search | None:
        """Returns what an OptimizationJob searches; None if the file has no search."""
        searcher = self.file.searcher
        if searcher.name == "single":
            return None
        return Search(
            algorithm=searcher.name,
            metric=searcher.metric,
            smaller_is_better=searcher.smaller_is_better,
            trials=searcher.max_trials,
            parallel=searcher.max_concurrent_trials,
            seed=self.file.get("seed") if self.file.is_given("seed") else None,
            ranges=search_space.ranges(self.file.hyperparameters),
        )

    def describe(self) -> str:
        """Returns the resolved job as a job file."""
        text = yaml.safe_dump(_resolved(self.file), sort_keys=False, allow_unicode=True, width=100)
        return f"job          {self.path}, resolved:\n" + "".join(
            f"  {line}\n" for line in text.splitlines()
        )


def read_job(
    path: str,
    settings: Sequence[str] = (),
    replicas: int | None = None,
    emits: str | None = None,
) -> Job:
    """Reads a job file.

    Args:
        path: of the file.
        settings: the values of --set, `key.key=value` each.
        replicas: on how many hosts a launcher of its own is started; None: this one starts all.
        emits: the kind of manifest to print, if one is.

    Raises:
        UsageError: the file can't be read, or isn't a job file. Every error has its line.
    """
    changes = [_change(text) for text in settings]
    searches = emits == "optimizationjob"
    model = JobFile if searches else LaunchedJob
    try:
        file = load(path, model, changes)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None
    except FileError as error:
        raise UsageError(str(error)) from None
    return Job(
        path=path,
        file=file,
        words=tuple(_words(path, file, replicas, emits)),
        command=_command(path, file),
        environment=_environment(file),
        notes=_notes(path, file),
    )


def schema() -> str:
    """Returns the JSON schema of job files, by which editors complete and check them."""
    described = JobFile.model_json_schema()
    described["properties"]["strategy"] |= strategy_options.schema()
    for name, field in described["properties"].items():
        # Values that stand for "not given" are no defaults.
        if "$ref" in field or name in ("name", "seed", "records_per_epoch"):
            field.pop("default", None)
    for defined in described["$defs"].values():
        for field in defined["properties"].values():
            if "$ref" in field or defined["title"] == "Length" or field.get("default") == "":
                field.pop("default", None)
    described["$defs"]["Checkpoints"]["properties"]["keep"].pop("default")
    described["title"] = "A job of `collective launch`"
    return json.dumps(described, indent=2)


def _change(text: str) -> Change:
    key, equals, value = text.partition("=")
    place = tuple(key.split("."))
    if not equals or not all(place):
        raise UsageError(f"--set {text}: give KEY=VALUE, as --set hyperparameters.lr=0.1")
    source = f"--set {text}"
    try:
        return Change(place, value_of(value, source), source)
    except FileError as error:
        raise UsageError(str(error)) from None


def _resolved(file: JobFile) -> dict[str, Any]:
    """Returns what a file gives, by this library's keys."""
    found: dict[str, Any] = {}
    for place in _PLACES:
        if not file.is_given(place):
            continue
        value = file.get(place)
        if isinstance(value, Length):
            value = value.plain()
        elif place == "data_loaders":
            value = value.model_dump()
        elif place == "log_policies":
            value = [policy.model_dump(exclude_unset=True) for policy in value]
        elif place == "hyperparameters":
            value = {**value, **search_space.settled(value)}
        elif place == "entrypoint":
            value = shlex.join(_command("", file))
        *above, key = place.split(".")
        inner = found
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return found


def _words(path: str, file: JobFile, replicas: int | None, emits: str | None) -> list[str]:
    """Returns the launcher's options that a file stands for."""
    words: list[str] = []
    slots, hosts = file.get("slots"), file.hosts
    if emits is not None and hosts:
        if replicas is None:
            words += ["--replicas", str(len(hosts))]
        hosts, replicas = [], replicas or len(file.hosts)
    if file.is_given("slots"):
        if isinstance(slots, int) and replicas is not None:
            if slots % replicas:
                raise UsageError(
                    f"{path}: slots: {slots} ranks can't be dealt evenly to {replicas} hosts: give "
                    f"a multiple of {replicas}, or -np, which is the number on each"
                )
            slots //= replicas
        words += ["-np", str(slots)]
    if hosts:
        words += ["-H", ",".join(hosts)]
    if file.has("data_loaders"):
        script = file.data_loaders.script
        text = script if isinstance(script, str) else shlex.join(script)
        words += ["--data-loaders", str(file.data_loaders.count), text]
    if file.max_restarts:
        words += ["--max-restarts", str(file.max_restarts)]
    if file.is_given("metrics.port"):
        words += ["--metrics-port", str(file.metrics.port)]
    for policy in file.log_policies:
        words.append(f"{_FLAGS[policy.action]}={policy.pattern}")
    return words


def _command(path: str, file: JobFile) -> tuple[str, ...]:
    """Returns the command of a rank, without the launcher that Determined's has.

    Raises:
        UsageError: it is no command here.
    """
    words: list[str] = []
    if isinstance(file.entrypoint, str):
        try:
            words = shlex.split(file.entrypoint)
        except ValueError as error:
            raise UsageError(f"{path}: entrypoint: {file.entrypoint!r}: {error}") from None
    else:
        words = list(file.entrypoint)
    place = next((at for at, word in enumerate(words) if _DETERMINED.fullmatch(word)), None)
    if place is not None and words[place - 1] == "-m":
        words = words[place + 1 :]
        if words[:1] == ["--"]:
            words = words[1:]
        if words and words[0].startswith("-") and words[0] != "--trial":
            raise UsageError(
                f"{path}: entrypoint: {words[0]} is an option of Determined's launcher, which "
                "`collective launch` replaces: leave it out"
            )
    if not words:
        raise UsageError(f"{path}: entrypoint: {file.entrypoint!r} names no script")
    if words[0] == "--trial" or (len(words) == 1 and _TRIAL.fullmatch(words[0])):
        raise UsageError(
            f"{path}: entrypoint: {words[-1]} is a Trial class of Determined's. Here a script "
            "makes a collective.Trainer, and the entrypoint is that script: train.py"
        )
    if words[0].lower().endswith(JOB_FILES):
        raise UsageError(f"{path}: entrypoint: {words[0]} is a job file, and no script")
    return tuple(words)


def _environment(file: JobFile) -> dict[str, str]:
    variables = {name: str(value) for name, value in file.environment.items()}
    if file.has("hyperparameters"):
        settled = search_space.settled(file.hyperparameters)
        variables[info.HYPERPARAMETERS] = json.dumps(settled)
    backend = file.strategy.get(strategy_options.BACKEND)
    if backend is not None:
        variables["COLLECTIVE_STRATEGY"] = backend
    resolved = _resolved(file)
    for key in ("environment", "hyperparameters"):  # they are variables of their own
        resolved.pop(key, None)
    searched = list(search_space.ranges(file.hyperparameters))
    if searched:
        resolved.setdefault("searcher", {})["parameters"] = searched
    variables[job_file.VARIABLE] = json.dumps(resolved)
    return variables


def _notes(path: str, file: JobFile) -> tuple[str, ...]:
    idle = [f"{key} ({why})" for key, why in file.idle().items()]
    if not idle:
        return ()
    return (f"{path}: without effect: {'; '.join(idle)}. Leave them out to silence this",)
