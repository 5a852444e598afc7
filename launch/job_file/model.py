"""Describes what a job file may have, in this library's words and in Determined's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, Field, WithJsonSchema

from collective.job import metrics_address
from collective.launch.job_file import search_space, strategy_options
from collective.launch.planning.environment import RESERVED
from collective.yaml_file import Contradictions, Place, StrictModel

RECIPE = (
    "a launch trains once, and a library searches better. Say 'name: single', and let Optuna call "
    "`collective launch FILE --set hyperparameters.NAME=VALUE` (docs/guides/jobs.md names a "
    "program); or print `--emit optimizationjob`."
)
_HOST = re.compile(r"[^\s:,]+(:[1-9][0-9]*)?|\[[^\s,]+\](:[1-9][0-9]*)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Count = Annotated[int, Field(ge=1)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _amount(value: Any) -> Any:
    if not _is_count(value) and not (
        isinstance(value, list) and value and all(map(_is_count, value))
    ):
        raise ValueError("should be a whole number from 1, or a list of them")
    return value


def _slots(value: Any) -> Any:
    if not _is_count(value) and value not in ("auto", "gpu", "cpu"):
        raise ValueError("should be a whole number from 1, or auto, gpu or cpu")
    return value


def _words(value: Any) -> Any:
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if not value or not (is_list or isinstance(value, str)):
        raise ValueError("should be a command, or a list of its words")
    return value


def _port(value: Any) -> Any:
    try:
        metrics_address.parse(str(value))
    except ValueError:
        raise ValueError("should be a port from 0 to 65535, or ADDRESS:PORT") from None
    return value


# Of several types: pydantic's unions would name each in every message.
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_MANY: dict[str, Any] = {"type": "array", "minItems": 1}
_ACTION: dict[str, Any] = {"enum": ["cancel_retries", "exclude_node"]}
Amount = Annotated[
    Any, AfterValidator(_amount), WithJsonSchema({"anyOf": [_COUNT, {**_MANY, "items": _COUNT}]})
]
Slots = Annotated[
    Any,
    AfterValidator(_slots),
    WithJsonSchema({"anyOf": [_COUNT, {"enum": ["auto", "gpu", "cpu"]}]}),
]
Port = Annotated[
    Any,
    AfterValidator(_port),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 65535}, {"type": "string"}]}
    ),
]
Words = Annotated[
    Any,
    AfterValidator(_words),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_MANY, "items": {"type": "string"}}]}),
]


class Length(StrictModel):
    """Says how long, or how often: one number of one unit; or a list of positions.

    Attributes:
        batches: global batches, which are steps.
        records: records, of all ranks together.
        epochs: passes over the training data.
        seconds: seconds of training.
    """

    model_config = pydantic.ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})
    batches: Amount = 0
    records: Amount = 0
    epochs: Amount = 0
    seconds: Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)] = 0.0

    @pydantic.model_validator(mode="after")
    def _check(self) -> Length:
        if len(self.model_fields_set) != 1:
            text = "one unit belongs here: {batches: 100}, or records, epochs, seconds."
            raise Contradictions([((), text)])
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the unit and its number, as in the file."""
        return self.model_dump(exclude_unset=True)


# Stands for a length that isn't given.
NO_LENGTH = Length.model_construct(set())


class Checkpoints(StrictModel):
    """Says where checkpoints are, when they are saved, and which stay.

    Attributes:
        folder: `Trainer(model_dir=…)`.
        period: `fit(checkpoint_period=…)`.
        policy: `fit(checkpoint_policy=…)`.
        keep: how many of the latest stay: `RunConfig(keep_checkpoint_max=…)`.
        start: `fit(latest_checkpoint=…)`: a checkpoint elsewhere, or its folder.
        continue_id: `fit(continue_id=…)`.
    """

    folder: Annotated[str, Field(min_length=1)] = ""
    period: Length = NO_LENGTH
    policy: Literal["best", "all", "none"] = "best"
    keep: Count = 1
    start: Annotated[str, Field(min_length=1)] = ""
    continue_id: Annotated[str, Field(min_length=1)] = ""


class Metrics(StrictModel):
    """Says when there are metrics, and where.

    Attributes:
        port: `--metrics-port`.
        validation_period: `fit(validation_period=…)`.
        reporting_period: `fit(reporting_period=…)`.
        step_zero_validation: `fit(step_zero_validation=…)`.
    """

    port: Port = 0
    validation_period: Length = NO_LENGTH
    reporting_period: Length = NO_LENGTH
    step_zero_validation: bool = False


class Searcher(StrictModel):
    """Says by which metric the best checkpoint is chosen; and what an OptimizationJob searches.

    Attributes:
        name: 'single' to launch; 'random' and 'grid' for `--emit optimizationjob`.
        metric: `Trainer(metric=…)`.
        smaller_is_better: `Trainer(smaller_is_better=…)`.
        max_length: Determined's place of the job's `max_length`.
        max_trials: with 'random' and 'grid': how many trainings there are.
        max_concurrent_trials: likewise: how many at a time.
    """

    name: Annotated[str, WithJsonSchema({"enum": ["single", "random", "grid"]})] = "single"
    metric: Annotated[str, Field(min_length=1)] = "loss"
    smaller_is_better: bool = True
    max_length: Length = NO_LENGTH
    max_trials: Annotated[int, Field(ge=1, le=100)] = 1
    max_concurrent_trials: Annotated[int, Field(ge=1, le=100)] = 1


class LogPolicy(StrictModel):
    """Says what follows if a rank writes a line and the job then fails.

    Attributes:
        name: for the reader.
        pattern: a regular expression, searched for in each line.
        action: 'cancel_retries': no restart. 'exclude_node': the restart leaves out the host.
    """

    name: str = ""
    pattern: Annotated[str, Field(min_length=1)]
    action: Annotated[
        Literal["cancel_retries", "exclude_node"],
        WithJsonSchema({"anyOf": [_ACTION, {"type": "object", "properties": {"type": _ACTION}}]}),
    ]

    @pydantic.field_validator("action", mode="before")
    @classmethod
    def _type_of(cls, value: Any) -> Any:
        """Understands Determined's older form, `action: {type: cancel_retries}`."""
        return value["type"] if isinstance(value, dict) and list(value) == ["type"] else value

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiled(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"should be a regular expression ({error})") from None
        return value


class DataLoaders(StrictModel):
    """Says which processes make the batches of `collective.data.stream`: `--data-loaders`.

    Attributes:
        count: how many there are, each with a stream.
        script: what each runs, as `loader.py --flag`, or a list of words.
    """

    count: Count = 1
    script: Words


class Resources(StrictModel):
    """Is Determined's place of the job's `slots`."""

    slots_per_trial: Count = 1


class Reproducibility(StrictModel):
    """Is Determined's place of the job's `seed`."""

    experiment_seed: Annotated[int, Field(ge=0)] = 0


class Storage(StrictModel):
    """Is Determined's place of `checkpoints.folder` and `checkpoints.keep`."""

    type: Literal["shared_fs", "directory"]
    host_path: str = ""
    storage_path: str = ""
    container_path: str = ""
    save_experiment_best: Annotated[int, Field(ge=0)] = 0
    save_trial_best: Annotated[int, Field(ge=0)] = 1
    save_trial_latest: Annotated[int, Field(ge=0)] = 1

    @property
    def folder(self) -> str:
        """Returns the folder; one below `host_path` if `storage_path` is relative."""
        import os

        return self.container_path or os.path.join(self.host_path, self.storage_path)


# Determined's keys for its cluster. Its own pages call them metadata, or they are for its master.
WITHOUT_EFFECT = {
    "description": "it is for Determined's web page",
    "labels": "they are for Determined's web page",
    "workspace": "there are no workspaces",
    "project": "there are no projects",
    "scheduling_unit": "ranks learn of a preemption at each step",
}


class JobFile(StrictModel):
    """Describes a job: what is trained, where, and how it is looked after.

    Attributes:
        name: of the job.
        entrypoint: the command of each rank, without the launcher: `train.py --flag`, or a list of
            words.
        slots: how many ranks there are, on all hosts: `-np`.
        hosts: where they are, with how many ranks: `[h1:8, h2:8]`.
        data_loaders: processes that make batches for the ranks.
        seed: `RunConfig(tf_random_seed=…)` of a Trainer.
        hyperparameters: `collective.job_info().hyperparameters`; those of a Trainer.
        environment: environment variables of the ranks.
        max_length: `fit(max_length=…)`.
        records_per_epoch: `Trainer(records_per_epoch=…)`.
        checkpoints: where, when and which.
        metrics: when they are computed and reported, and where they are served.
        searcher: the metric by which a checkpoint is the best.
        max_restarts: `--max-restarts`.
        log_policies: lines after which there is no restart, or none on that host.
        strategy: options of `strategy.scope()`, and `backend`: 'hb' or 'sok'.
    """

    name: Annotated[str, Field(min_length=1)] = "job"
    entrypoint: Words
    slots: Slots = "auto"
    hosts: list[str] = []
    data_loaders: DataLoaders = DataLoaders.model_construct(set())
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    hyperparameters: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    max_length: Length = NO_LENGTH
    records_per_epoch: Count = 1
    checkpoints: Checkpoints = Checkpoints()
    metrics: Metrics = Metrics()
    searcher: Searcher = Searcher()
    max_restarts: Annotated[int, Field(ge=0)] = 0
    log_policies: list[LogPolicy] = []
    strategy: dict[str, Any] = {}
    # Determined's other spellings.
    resources: Resources = Resources()
    reproducibility: Reproducibility = Reproducibility()
    checkpoint_storage: Storage = Storage.model_construct(set())
    checkpoint_policy: Literal["best", "all", "none"] = "best"
    min_checkpoint_period: Length = NO_LENGTH
    min_validation_period: Length = NO_LENGTH
    perform_initial_validation: bool = False
    description: Any = None
    labels: Any = None
    workspace: Any = None
    project: Any = None
    scheduling_unit: Any = None

    SEARCHERS: ClassVar[tuple[str, ...]] = ("single", "random", "grid")
    # This library's place of a value, and Determined's.
    PLACES: ClassVar[tuple[tuple[str, str], ...]] = (
        ("slots", "resources.slots_per_trial"),
        ("seed", "reproducibility.experiment_seed"),
        ("max_length", "searcher.max_length"),
        ("checkpoints.folder", "checkpoint_storage"),
        ("checkpoints.keep", "checkpoint_storage.save_trial_latest"),
        ("checkpoints.policy", "checkpoint_policy"),
        ("checkpoints.period", "min_checkpoint_period"),
        ("metrics.validation_period", "min_validation_period"),
        ("metrics.step_zero_validation", "perform_initial_validation"),
    )

    @pydantic.field_validator("environment", mode="before")
    @classmethod
    def _variables(cls, value: Any) -> Any:
        """Understands Determined's list, `environment_variables: [NAME=VALUE]`."""
        if not isinstance(value, dict) or not isinstance(value.get("environment_variables"), list):
            return value
        others = {name: each for name, each in value.items() if name != "environment_variables"}
        listed = [str(each).partition("=") for each in value["environment_variables"]]
        return {**others, **{name: each for name, _, each in listed}}

    @pydantic.model_validator(mode="after")
    def _check(self) -> JobFile:
        found = [
            *self._twice(),
            *self._bad_hosts(),
            *self._bad_variables(),
            *self._bad_values(),
            *self._bad_ranges(),
            *self._bad_policies(),
            *self._bad_lengths(),
            *self._bad_storage(),
            *strategy_options.complaints(self.strategy, ("strategy",)),
        ]
        if found:
            raise Contradictions(found)
        return self

    def has(self, place: str) -> bool:
        """Tells whether the file gives a value, by its keys with dots."""
        model: Any = self
        for key in place.split("."):
            if not isinstance(model, StrictModel) or key not in model.model_fields_set:
                return False
            model = getattr(model, key)
        return True

    def get(self, place: str) -> Any:
        """Returns a value, or its default, by this library's keys, however it is spelt."""
        for own, other in self.PLACES:
            if own == place and not self.has(own) and self.has(other):
                place = other
        model: Any = self
        for key in place.split("."):
            model = getattr(model, key)
        return model.folder if isinstance(model, Storage) else model

    def is_given(self, place: str) -> bool:
        """Tells whether the file gives a value, by this library's keys, however it is spelt."""
        return self.has(place) or any(
            own == place and self.has(other) for own, other in self.PLACES
        )

    def idle(self) -> dict[str, str]:
        """Returns the keys of the file that have no effect, and why."""
        known = dict(WITHOUT_EFFECT)
        if self.searcher.name == "single":
            for key in ("searcher.max_trials", "searcher.max_concurrent_trials"):
                known[key] = "'single' has one trial"
        return {key: why for key, why in known.items() if self.has(key)}

    # -- what contradicts, or can't be

    def _twice(self) -> Iterator[tuple[Place, str]]:
        for own, other in self.PLACES:
            if self.has(own) and self.has(other):
                yield tuple(other.split(".")), f"it is Determined's {own}, which is there, too."

    def _bad_hosts(self) -> Iterator[tuple[Place, str]]:
        for number, host in enumerate(self.hosts):
            if not _HOST.fullmatch(host):
                text = f"a host is a name, or a name and how many ranks, as h1:8; not {host!r}."
                yield ("hosts", number), text

    def _bad_variables(self) -> Iterator[tuple[Place, str]]:
        for name, value in self.environment.items():
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                text = f"a variable's value is a text or a number, not {value!r}."
                hint = " Quote it." if isinstance(value, bool) else ""
                if name == "image":
                    hint = " An image is for --emit: give --image there."
                yield ("environment", name), text + hint
            elif RESERVED.fullmatch(name):
                yield ("environment", name), "the launcher sets it. Leave it out."
            elif name == "image" or not _VARIABLE.fullmatch(name):
                text = f"{name!r} names no environment variable."
                if name == "image":
                    text = "it is Determined's: give --image NAME with --emit instead."
                yield ("environment", name), text

    def _bad_values(self) -> Iterator[tuple[Place, str]]:
        yield from search_space.complaints(self.hyperparameters, ("hyperparameters",))
        size = self.hyperparameters.get("global_batch_size", 1)
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not isinstance(size, dict) and not (is_whole and size >= 1):
            text = f"it is a whole number from 1, of records of all ranks together, not {size!r}."
            yield ("hyperparameters", "global_batch_size"), text
        if self.searcher.name not in self.SEARCHERS:
            yield ("searcher", "name"), f"'{self.searcher.name}' is a search: {RECIPE}"
        if self.searcher.max_concurrent_trials > self.searcher.max_trials:
            text = f"it is more than max_trials, {self.searcher.max_trials}."
            yield ("searcher", "max_concurrent_trials"), text

    def _bad_ranges(self) -> Iterator[tuple[Place, str]]:
        """Yields nothing: a search has ranges."""
        yield from ()

    def _bad_policies(self) -> Iterator[tuple[Place, str]]:
        if self.log_policies and not self.max_restarts:
            yield ("log_policies",), "they are about restarts: give max_restarts, too, 1 or more."

    def _bad_lengths(self) -> Iterator[tuple[Place, str]]:
        for place in ("max_length", "searcher.max_length"):
            if any(isinstance(each, list) for each in self.get(place).plain().values()):
                yield tuple(place.split(".")), "it is one number, not positions."

    def _bad_storage(self) -> Iterator[tuple[Place, str]]:
        if not self.has("checkpoint_storage"):
            return
        if not self.checkpoint_storage.folder:
            text = "it names no folder: give host_path (shared_fs) or container_path (directory)."
            yield ("checkpoint_storage",), text
        if self.has("checkpoint_storage.save_experiment_best"):
            text = "a job is no experiment of several trials. Leave it out."
            yield ("checkpoint_storage", "save_experiment_best"), text
        if self.checkpoint_storage.save_trial_latest < 1:
            text = "the latest checkpoint stays: a restart continues from it. Give 1 or more."
            yield ("checkpoint_storage", "save_trial_latest"), text
        if self.checkpoint_storage.save_trial_best > 1:
            text = "one best checkpoint stays. Give 1, or checkpoints.policy: all."
            yield ("checkpoint_storage", "save_trial_best"), text


class LaunchedJob(JobFile):
    __doc__ = JobFile.__doc__
    SEARCHERS: ClassVar[tuple[str, ...]] = ("single",)

    def _bad_ranges(self) -> Iterator[tuple[Place, str]]:
        """Yields the ranges: one training needs values."""
        for name in search_space.ranges(self.hyperparameters):
            text = f"it is a range. Give one value, as --set hyperparameters.{name}=VALUE does."
            yield ("hyperparameters", name), text
