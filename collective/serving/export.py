"""Exports a SavedModel from a checkpoint, on all ranks: it appears whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.saved_model.model_utils import export_utils

from collective.checkpoint import saver
from collective.coordination.barrier import Steps
from collective.errors import RankError
from collective.ops import collectives
from collective.serving.exporter import Serving
from collective.tables.served_table import served_graph
from collective.tables.table import Sharded

# (folder, checkpoint, what the graph is served from) -> the SavedModel's path
Build = Callable[[str, str, Serving], Any]


def exported(base: Any, checkpoint: Any, find: Callable[[], str | None], build: Build) -> str:
    """Exports a SavedModel to a new folder of `base` that is named by the seconds since 1970.
    Called on every rank.

    `build` runs on every rank and writes a whole SavedModel, but for the values, of which each
    writes its part: on rank 0 into a folder beside the new one, which takes its name when all ranks
    are done; elsewhere into a temporary folder.

    Args:
        base: the folder that gets the new one.
        checkpoint: as the user gave it; for messages and to see that ranks agree.
        find: tells the checkpoint's prefix; rank 0's answer counts.
        build: makes a folder of the SavedModel in the one that it is given, and returns its path.

    Returns:
        The path of the new folder, on every rank.

    Raises:
        ValueError: no checkpoint, or one that doesn't fit to the graph.
        RankError: another rank failed, or gave other arguments.
    """
    rank = collectives.rank()
    with contextlib.ExitStack() as cleaning, Steps("the export of a SavedModel") as steps:
        given = [
            tf.compat.as_str(path) if path else None
            for path in map(os.fspath, (base, checkpoint or ""))
        ]
        prefix = find() if rank == 0 else None
        if rank == 0 and prefix is None:
            raise ValueError(
                "There is no checkpoint to export: "
                + (f"'{given[1]}' has none." if given[1] else "none was saved or restored before.")
            )
        told = steps.meet(
            {"given": given, "checkpoint": prefix and tf.compat.as_str(os.fspath(prefix))}
        )
        for r, text in enumerate(told):
            if text["given"] != given:
                raise RankError(
                    f"A SavedModel is exported to {given[0]!r} from checkpoint "
                    f"{given[1]!r} on rank {rank}, but to "
                    f"{text['given'][0]!r} from {text['given'][1]!r} on rank {r}. "
                    f"Give the same on every rank."
                )
        prefix = str(told[0]["checkpoint"])
        # What follows the last meeting is cleaned away after the next one: no rank writes there any
        # more.
        final = temporary = ""
        if rank == 0:
            final = tf.compat.as_str(export_utils.get_timestamped_export_dir(given[0]))
            temporary = tf.compat.as_str(export_utils.get_temp_export_dir(final))
            tf.io.gfile.makedirs(temporary)
            cleaning.callback(tf.io.gfile.rmtree, temporary)
        else:
            temporary = tempfile.mkdtemp(prefix="collective-export-")
            cleaning.callback(shutil.rmtree, temporary, ignore_errors=True)
        made = tf.compat.as_str(build(temporary, prefix, Serving(prefix, steps)))
        steps.meet({})
        if rank == 0:
            tf.io.gfile.rename(made, final)
        return str(steps.meet({"path": final})[0]["path"])


def add_graph(original: Any, builder: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """`SavedModelBuilder.add_meta_graph_and_variables`, which `simple_save` calls, too: of no graph
    that trains with tables.

    Raises:
        ValueError: TensorFlow alone could not load it.
    """
    graph = session.graph
    if served_graph(graph) is None and any(
        isinstance(v, Sharded) for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    ):
        raise ValueError(
            "A SavedModel of this graph would hold one part of its tables, and "
            "operations that TensorFlow alone "
            "can't run. strategy.export_saved_model(folder, checkpoint, "
            "signature_def_fn) makes one that serves "
            "anywhere; signature_def_fn builds the model for inference and returns "
            "its signatures."
        )
    return original(builder, session, *args, **kwargs)


def from_session_script(
    base: str,
    checkpoint: str | None,
    signature_def_fn: Callable[[], Any] | None,
    assets_extra: Mapping[str, str] | None,
    as_text: bool,
    clear_devices: bool,
    strip_default_attrs: bool,
) -> str:
    """`CollectiveStrategy.export_saved_model`; called inside scope()."""
    if not callable(signature_def_fn):
        raise TypeError(
            "export_saved_model needs signature_def_fn, a function without arguments "
            "that builds the graph to be "
            f"served and returns its SignatureDef or a dict of them; got "
            f"{signature_def_fn!r}."
        )

    def build(folder: str, prefix: str, serving: Serving) -> str:
        path = os.path.join(folder, "saved_model")
        builder = tf.saved_model.Builder(path)
        with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
            serving.bind(graph)
            signatures = _signatures(signature_def_fn())
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.tag_constants.SERVING],
                signatures,
                assets_collection=tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
                clear_devices=clear_devices,
                main_op=tf.train.Scaffold.default_local_init_op(),
                strip_default_attrs=strip_default_attrs,
                saver=tf.train.Saver(sharded=True, allow_empty=True),
            )
        builder.save(as_text)
        for name, source in (rank_0s(assets_extra) or {}).items():
            target = os.path.join(path, "assets.extra", name)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(source, target)
        return path

    return exported(base, checkpoint, lambda: _find(checkpoint), build)


def from_estimator(
    estimator: Any,
    export: Callable[..., Any],
    base: Any,
    receivers: Mapping[str, Any],
    assets_extra: Any,
    as_text: bool,
    checkpoint: Any,
    strip_default_attrs: bool,
) -> bytes:
    """`Estimator._export_all_saved_models` in the same way; called inside scope().

    Args:
        estimator: its `latest_checkpoint` is exported if `checkpoint` is None. While it builds a
            graph, its `serving` is set: it binds the graph to that before it makes the first
            variable.
        export: TensorFlow's own method.
    """
    modes = [mode for mode in receivers if mode != tf.estimator.ModeKeys.PREDICT]
    if modes:
        raise ValueError(
            f"A SavedModel for {', '.join(modes)} would hold the operations of "
            f"several ranks. Export one for "
            "tf.estimator.ModeKeys.PREDICT."
        )

    def build(folder: str, prefix: str, serving: Serving) -> Any:
        estimator.serving = serving
        try:
            return export(
                folder,
                receivers,
                assets_extra=rank_0s(assets_extra),
                as_text=as_text,
                checkpoint_path=prefix,
                strip_default_attrs=strip_default_attrs,
            )
        finally:
            estimator.serving = None

    return tf.compat.as_bytes(
        exported(base, checkpoint, lambda: checkpoint or _latest_of(estimator), build)
    )


def rank_0s(files: Any) -> Any:
    """`files` on rank 0, whose folder is kept."""
    return files if collectives.rank() == 0 else None


def _latest_of(estimator: Any) -> str | None:
    """The checkpoint that stock Estimator would export."""
    latest: str | None = estimator.latest_checkpoint()
    if latest is None and estimator._warm_start_settings:
        latest = _find(estimator._warm_start_settings.ckpt_to_initialize_from)
    if latest is None:
        raise ValueError(
            f"There is no checkpoint to export: '{estimator.model_dir}' has none. Train first."
        )
    return latest


def _find(checkpoint: str | None) -> str | None:
    """The prefix of a checkpoint, given so or as its folder; None: of the last one that this
    process saved or restored.
    """
    if checkpoint is None:
        return saver.last_checkpoint()
    found: str | None = (
        tf.train.latest_checkpoint(checkpoint) if tf.io.gfile.isdir(checkpoint) else checkpoint
    )
    return found


def _signatures(built: Any) -> dict[str, Any]:
    built = (
        {tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: built}
        if isinstance(built, meta_graph_pb2.SignatureDef)
        else built
    )
    if (
        not isinstance(built, Mapping)
        or not built
        or not all(
            isinstance(signature, meta_graph_pb2.SignatureDef) for signature in built.values()
        )
    ):
        raise TypeError(
            f"signature_def_fn must return a SignatureDef or a dict of them, not "
            f"{built!r}. "
            "tf.saved_model.predict_signature_def(inputs={…}, outputs={…}) makes one."
        )
    return dict(built)
