"""Describes PERSIA's global_config.yml, and what each of its keys is here."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from collective import yaml_file
from collective.policy import PolicyOption, TablePolicy, policy_of
from collective.yaml_file import Contradictions, Place, StrictModel

Count = Annotated[int, Field(ge=0)]
# `tf.estimator.ModeKeys` by PERSIA's words.
_MODES = {"Train": "train", "Eval": "eval", "Infer": "infer"}


class Metrics(StrictModel):
    """Describes PERSIA's metrics; see `GlobalConfig`."""

    enable_metrics: bool = True
    job_name: str = "persia_default_jobname"
    push_interval_seconds: Annotated[int, Field(ge=1)] = Field(
        default=10,
        validation_alias=pydantic.AliasChoices("push_interval_seconds", "push_interval_sec"),
    )


class Checkpointing(StrictModel):
    """Describes PERSIA's threads that write checkpoints; see `GlobalConfig`."""

    num_workers: Count = 4


class Inference(StrictModel):
    """Describes PERSIA's servers of answers; see `GlobalConfig`."""

    servers: list[str] = []
    embedding_checkpoint: str = ""


class Common(StrictModel):
    """Describes what PERSIA's roles have in common; see `GlobalConfig`."""

    metrics_config: Metrics = Metrics()
    job_type: Literal["Train", "Eval", "Infer"] = "Train"
    infer_config: Inference = Inference()
    checkpointing_config: Checkpointing = Checkpointing()


class ParameterServer(StrictModel):
    """Describes PERSIA's parameter servers; see `GlobalConfig`."""

    capacity: Annotated[int, Field(ge=1)] = 1_000_000_000
    num_hashmap_internal_shards: Count = 100
    enable_incremental_update: bool = False
    incremental_buffer_size: Count = 1_000_000
    incremental_dir: str = "/workspace/incremental_dir/"
    incremental_channel_capacity: Count = 1000


class Worker(StrictModel):
    """Describes PERSIA's embedding workers; see `GlobalConfig`."""

    forward_buffer_size: Count = 1000
    buffered_data_expired_sec: Count = 1000


# What the keys are that change nothing here, by their places. A dot stands between keys.
NO_EFFECT = {
    "common_config.metrics_config.job_name": "a checkpoint_dir tells jobs apart",
    "common_config.checkpointing_config.num_workers": "each rank writes its own part",
    "embedding_parameter_server_config.num_hashmap_internal_shards": "a rank has one map a table",
    "embedding_parameter_server_config.incremental_buffer_size": (
        "an increment has all rows that changed"
    ),
    "embedding_parameter_server_config.incremental_dir": (
        "increments are in checkpoint_dir, next to their checkpoint"
    ),
    "embedding_parameter_server_config.incremental_channel_capacity": (
        "PERSIA doesn't use it either"
    ),
    "embedding_worker_config.forward_buffer_size": "dataset.prefetch(n) is the script's",
    "embedding_worker_config.buffered_data_expired_sec": "no batch expires",
}


class GlobalConfig(StrictModel):
    """Describes a job as PERSIA's global_config.yml does.

    `mode`, `policy` and `session_options` are what its keys are here. Keys of servers that don't
    exist here have no effect; `without_effect` lists those that the file has. Servers of answers
    are refused.

    Attributes:
        common_config: `job_type` is `mode`; `metrics_config` a part of `session_options`.
        embedding_parameter_server_config: `capacity` is a part of `policy`,
            `enable_incremental_update` of `session_options`.
        embedding_worker_config: has no effect.
    """

    common_config: Common = Common()
    embedding_parameter_server_config: ParameterServer = ParameterServer()
    embedding_worker_config: Worker = Worker()

    @pydantic.model_validator(mode="after")
    def _check(self) -> GlobalConfig:
        refused = dict(self._refused())
        if refused:
            raise Contradictions(list(refused.items()))
        return self

    def _refused(self) -> Iterator[tuple[Place, str]]:
        at = ("common_config", "infer_config")
        if self.common_config.infer_config.servers:
            text = "no servers answer here. Export the model with strategy.export_saved_model."
            yield (*at, "servers"), text
        if self.common_config.infer_config.embedding_checkpoint:
            text = (
                "PERSIA's checkpoints can't be read. Export a trained model with "
                "strategy.export_saved_model, which has its embeddings."
            )
            yield (*at, "embedding_checkpoint"), text

    @property
    def mode(self) -> str:
        """Returns `job_type` as one of `tf.estimator.ModeKeys`: 'train', 'eval' or 'infer'."""
        return _MODES[self.common_config.job_type]

    def policy(
        self, embedding_config: TablePolicy | PolicyOption | None = None, servers: int = 1
    ) -> TablePolicy:
        """Returns the policy of the tables, with the capacity if the file gives one.

        A table then has at most `capacity` times `servers` rows, on all ranks together. In PERSIA,
        it is the tables together that have; the least recently used rows go in both.

        Args:
            embedding_config: what else the policy has: a `collective.TablePolicy` or
                `EmbeddingConfig`. Default: nothing.
            servers: how many parameter servers the job had.

        Raises:
            TypeError: `embedding_config` is neither.
        """
        policy = policy_of(embedding_config, "policy(embedding_config=…)") or TablePolicy()
        server = self.embedding_parameter_server_config
        if "capacity" not in server.model_fields_set:
            return policy
        return dataclasses.replace(policy, capacity=server.capacity * servers)

    def session_options(self, increment_secs: int = 60) -> dict[str, Any]:
        """Returns arguments for `tf.train.MonitoredTrainingSession`.

        Summaries for TensorBoard are written every `push_interval_seconds`, or never with
        `enable_metrics: false`. With `enable_incremental_update: true` there are increments of
        checkpoints.

        Args:
            increment_secs: seconds between increments. PERSIA has no such number: it makes one
                when its buffer is full.
        """
        metrics = self.common_config.metrics_config
        seconds = metrics.push_interval_seconds if metrics.enable_metrics else None
        options: dict[str, Any] = {"save_summaries_steps": None, "save_summaries_secs": seconds}
        if self.embedding_parameter_server_config.enable_incremental_update:
            options["save_incremental_checkpoint_secs"] = increment_secs
        return options

    def without_effect(self) -> dict[str, str]:
        """Returns the keys of the file that have no effect, and why."""
        return {place: why for place, why in NO_EFFECT.items() if self._has(place.split("."))}

    def _has(self, place: list[str]) -> bool:
        model: Any = self
        for key in place:
            if key not in model.model_fields_set:
                return False
            model = getattr(model, key)
        return True


def load_global(path: str | os.PathLike[str]) -> GlobalConfig:
    """Reads PERSIA's global_config.yml. A warning lists its keys that have no effect here, and why.

    Args:
        path: of the file.

    Raises:
        OSError: there is no such file.
        ValueError: as for `load`; or the file asks for servers of answers.
    """
    config = yaml_file.load(path, GlobalConfig)
    idle = [f"{place} ({why})" for place, why in config.without_effect().items()]
    if idle:
        warnings.warn(
            f"{os.fspath(path)}: without effect: {'; '.join(idle)}. Leave them out to silence "
            "this.",
            stacklevel=2,
        )
    return config
