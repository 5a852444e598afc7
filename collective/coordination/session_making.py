"""Stands in for what makes TensorFlow's sessions inside scope() (see `patches`).

`original` is always the function or method itself.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import barrier, common_folder
from collective.coordination.initial_broadcast import broadcast_initial_values
from collective.coordination.run_analysis import is_shared
from collective.coordination.session_state import state_of_session
from collective.ops import half_precision
from collective.ops.communication import collectives, membership
from collective.ops.graph import graphs
from collective.ops.kernel_device import TENSORFLOW_SHARE, chosen
from collective.ops.rows import file_systems
from collective.scope import SCOPES
from collective.tables.table import is_replicated
from collective.tensorflow_internals.graphs import context


def make_session(
    original: Any, session: Any, target: str = "", graph: Any = None, config: Any = None
) -> None:
    """Stands in for `Session.__init__`: a process of several on a host sees one GPU.

    The GPU's memory is allocated as needed, and some of it is left to CUDA's libraries. With
    scope(mixed_precision=…) the session computes in half precision.
    """
    if config is None:
        # The settings of `tf.config`, which name all GPUs that the process may see.
        merged = tf.ConfigProto()
        merged.CopyFrom(context.context().config)
        merged.gpu_options.MergeFrom(_options_of_own_gpu(merged.gpu_options))
        config = merged
    elif isinstance(config, tf.ConfigProto):
        # Its bytes: a script of another framework may bring what stands for a message.
        asked = tf.ConfigProto.FromString(config.SerializeToString())
        config = tf.ConfigProto(gpu_options=_options_of_own_gpu(asked.gpu_options))
        config.MergeFrom(asked)
    precision = SCOPES.options.mixed_precision
    if precision and isinstance(config, tf.ConfigProto):
        half_precision.rewrite(config, precision)
        half_precision.warn_if_not_rewritten(config, precision)
    state_of_session(session).handled_error = id(sys.exc_info()[1])
    original(session, target, graph, config)


def _options_of_own_gpu(asked: tf.GPUOptions) -> tf.GPUOptions:
    """Returns the options by which a session takes its rank's GPU, in addition to those that are
    `asked`.

    TensorFlow allows no share of a GPU's memory together with limits of virtual devices.
    """
    options = tf.GPUOptions(allow_growth=True)
    if chosen() == "gpu" and not asked.experimental.virtual_devices:
        options.per_process_gpu_memory_fraction = TENSORFLOW_SHARE
    if collectives.size() > 1 and len(tf2.config.list_physical_devices("GPU")) > 1:
        options.visible_device_list = str(membership.local_rank())
    return options


def without_agreement(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a `MonitoredTrainingSession`: each of several ranks is its own process's chief.

    That holds whatever the script says about rank 0. (A worker would wait for a chief to initialize
    variables that they don't share.) All ranks use rank 0's checkpoint_dir.

    Raises:
        RuntimeError: it is called eagerly: there is no graph to run.
        ValueError: TensorFlow knows no file system for checkpoint_dir.
    """
    graphs.refuse_eager("scope()", "MonitoredTrainingSession is opened")
    names = ("master", "is_chief", "checkpoint_dir")
    arguments = {**dict(zip(names, args)), **kwargs, "is_chief": True}
    file_systems.check(arguments.get("checkpoint_dir"))
    if collectives.size() == 1:
        return original(*args, **kwargs)
    if is_shared(tf.get_default_graph()):
        arguments["checkpoint_dir"] = common_folder.settle(
            "making a MonitoredTrainingSession",
            "checkpoint_dir",
            arguments.get("checkpoint_dir"),
            stacklevel=4,
        )
    positional = [arguments.pop(name) for name in names[: len(args)]]
    return original(*positional, *args[3:], **arguments)


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SessionManager.prepare_session`: makes replicated variables equal.

    An init_fn may have given them values of its own.
    """
    session = original(manager, *args, **kwargs)
    state_of_session(session).is_monitored = True
    graph = session.graph
    if collectives.size() == 1 or not is_shared(graph):
        return session
    has_init_fn = {"init_fn": kwargs.get("init_fn") is not None}
    payloads = barrier.exchange(session, "what a session starts from", has_init_fn)
    if any(payload["init_fn"] for payload in payloads):
        variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        replicated = [v for v in variables if is_replicated(v)]
        broadcast_initial_values(type(session).run, session, replicated)
    return session


def wait_for_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SessionManager.wait_for_session`: refuses it with several ranks.

    It waits for a chief to initialize variables, which this process doesn't share.
    """
    if collectives.size() == 1:
        return original(manager, *args, **kwargs)
    raise NotImplementedError(
        "A worker waits for a chief to initialize its variables, but each rank has its own. "
        "Use tf.train.MonitoredTrainingSession, or ChiefSessionCreator on every rank."
    )


def supervise(original: Any, supervisor: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Supervisor.__init__`: refuses it with several ranks.

    Its threads save and summarize by each rank's own clock.
    """
    if collectives.size() == 1:
        return original(supervisor, *args, **kwargs)
    raise NotImplementedError(
        "tf.train.Supervisor saves and summarizes in threads, by each rank's own clock, but ranks "
        "must do so together. Use tf.train.MonitoredTrainingSession."
    )
