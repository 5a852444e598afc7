"""Makes RunConfigs for ranks; each rank is the chief of its own process."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.saving import increments
from collective.coordination import barrier, common_folder
from collective.ops.communication import collectives
from collective.tensorflow_internals.estimators import run_config


class RunConfig(run_config.RunConfig):
    """Configures an Estimator's runs like `tf.estimator.RunConfig`, with options for increments.

        config = collective.RunConfig(save_checkpoints_secs=3600,
                                      save_incremental_checkpoint_secs=60)
        estimator = strategy.estimator(model_fn, 'model', config)

    Args:
        args, kwargs: those of `tf.estimator.RunConfig`.
        save_incremental_checkpoint_secs, save_incremental_checkpoint_steps: seconds, or global
            steps, between increments of checkpoints, which have the table rows that changed since
            the last save. Give at most one of them; the default is none.

    Raises:
        ValueError: both are given, or there are no checkpoints that increments could follow.
    """

    def __init__(
        self,
        *args: Any,
        save_incremental_checkpoint_secs: float | None = None,
        save_incremental_checkpoint_steps: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        secs, steps = save_incremental_checkpoint_secs, save_incremental_checkpoint_steps
        increments.check_interval("RunConfig", secs, steps)
        self.save_incremental_checkpoint_secs, self.save_incremental_checkpoint_steps = secs, steps


def increment_hooks(config: Any) -> list[tf.train.SessionRunHook]:
    """Returns the hook that saves increments in a run's model_dir, if `config` says when.

    Raises:
        ValueError: there are no checkpoints that they could follow.
    """
    secs = getattr(config, "save_incremental_checkpoint_secs", None)
    steps = getattr(config, "save_incremental_checkpoint_steps", None)
    if secs is None and steps is None:
        return []
    if not config.save_checkpoints_secs and not config.save_checkpoints_steps:
        raise ValueError(
            "RunConfig(save_incremental_checkpoint_…) saves what has changed since the last "
            "checkpoint: give save_checkpoints_secs or save_checkpoints_steps, too."
        )
    return [increments.IncrementHook(config.model_dir, secs, steps)]


def local_config(config: Any, model_dir: Any) -> Any:
    """Returns `config` without a cluster, and with the model_dir of all ranks.

    Args:
        config: a RunConfig, or None for TensorFlow's defaults.
        model_dir: the Estimator's argument; None: that of `config`, or else a temporary folder of
            rank 0. Rank 0's counts for all.

    Raises:
        ValueError: `config` has a `tf.distribute` strategy; or its model_dir isn't `model_dir`.
        RankError: rank 0 has no model_dir though another rank has one, or another rank's has a
            checkpoint and rank 0's has none.
        TypeError: `config` is no RunConfig.
    """
    config = run_config.RunConfig() if config is None else config
    if not isinstance(config, run_config.RunConfig):
        raise TypeError(f"config must be a tf.estimator.RunConfig, not {type(config).__name__}.")
    if (
        config.train_distribute
        or config.eval_distribute
        or getattr(config, "_distribute_coordinator_mode", None)
    ):
        raise ValueError(
            "RunConfig has a tf.distribute strategy, but CollectiveStrategy distributes the "
            "Estimator itself. Leave out train_distribute, eval_distribute and "
            "experimental_distribute."
        )
    config = config.replace(session_config=copy.deepcopy(config.session_config))
    ignored = []
    if (
        config.cluster_spec
        or config.task_type != run_config.TaskType.WORKER
        or config.master
        or config.evaluation_master
    ):
        ignored.append("the cluster in TF_CONFIG")
    # TensorFlow itself makes a config that of a single process in this way.
    config._init_distributed_setting_from_environment_var({})
    if config.session_config is not None and config.session_config.device_filters:
        ignored.append(f"device_filters {list(config.session_config.device_filters)}")
        del config.session_config.device_filters[:]
    if ignored:
        warnings.warn(
            f"Estimator: {' and '.join(ignored)} of RunConfig would make a parameter-server job "
            "and has no effect: every rank is the chief of its own process.",
            stacklevel=5,
        )
    return config.replace(model_dir=_common_model_dir(config, run_config.path_to_str(model_dir)))


def _common_model_dir(config: Any, model_dir: str | None) -> str:
    """Returns one folder for all ranks, a new temporary one if none is given."""
    if model_dir and config.model_dir and config.model_dir != model_dir:
        raise ValueError(
            f"model_dir is {model_dir!r}, but RunConfig has model_dir={config.model_dir!r}. Give "
            "one of them."
        )
    model_dir = common_folder.settle(
        "making an Estimator", "model_dir", model_dir or config.model_dir, stacklevel=6
    )
    if model_dir:
        return model_dir

    def make() -> str:
        return "" if collectives.rank() else tempfile.mkdtemp()

    temporary: str = barrier.run_on_all_ranks(None, "making a temporary model_dir", make)[0]
    tf.logging.warning("Using temporary folder as model directory: %s", temporary)
    return temporary
