"""Exports SavedModels from checkpoints, on all ranks: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, chain_names, commit
from collective.checkpoint.files.layout import STATIC
from collective.checkpoint.files.storage import StorageFailure
from collective.checkpoint.reading import consolidate
from collective.checkpoint.saving import background, saver
from collective.coordination import barrier
from collective.coordination.barrier import Steps
from collective.coordination.session_state import last_open_session, state_of_session
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.rows import file_systems
from collective.scope import SCOPES
from collective.serving import unfinished, variable_files
from collective.serving.base_version import BaseVersion, find_base
from collective.serving.export_record import (
    RECORD,
    ExportedFile,
    ExportRecord,
    described,
    files_in,
)
from collective.serving.served_checkpoint import ServedCheckpoint
from collective.tables.served_table import served_graph
from collective.tables.table import Sharded
from collective.tensorflow_internals.saved_models import (
    EstimatorModeKeys,
    export_utils,
    meta_graph_pb2,
)

# (folder, checkpoint, what the graph is served from) -> the SavedModel's path
BuildSavedModel = Callable[[str, str, ServedCheckpoint], Any]


def export(
    folder: Any,
    checkpoint: Any,
    base: Any,
    find_prefix: Callable[[], str | None],
    build: BuildSavedModel,
) -> str:
    """Exports a SavedModel to a new folder in `folder` that is named by the seconds since 1970.

    Every rank calls it. `build` runs on every rank and writes a whole SavedModel, but each rank
    writes only its part of the values: on rank 0 into a folder next to the new one, which takes its
    name when all ranks are done and everything is on the disk; elsewhere into a temporary folder.

    Rank 0 says where it is, instead of TensorFlow, which would name the temporary folder.

    Args:
        folder: gets the new one.
        checkpoint: as the user gave it; for messages, and for ranks to compare.
        base: the version whose files are linked where they are the same, or the folder that it is
            the newest in; None: all files are written.
        find_prefix: returns the checkpoint's prefix; rank 0's answer counts.
        build: makes a folder of the SavedModel in the folder that it is given, and returns its
            path.

    Returns:
        The path of the new folder, on every rank.

    Raises:
        ValueError: there is no checkpoint, or it doesn't fit the graph; there is no version at
            `base`, or it is of another model; TensorFlow has no file system for `folder`.
        RankError: another rank failed, or gave other arguments.
    """
    rank = collectives.rank()
    with contextlib.ExitStack() as cleaning, Steps("the export of a SavedModel") as steps:
        given = [_path(os.fspath(folder)), _path(checkpoint), _path(base)]
        folder, checkpoint, base = given
        file_systems.check(folder)
        prefix = find_prefix() if rank == 0 else None
        if rank == 0 and prefix is None:
            reason = (
                f"'{checkpoint}' has none" if checkpoint else "none was saved or restored before"
            )
            raise ValueError(f"There is no checkpoint to export: {reason}.")
        prefix = prefix and tf.compat.as_str(os.fspath(prefix))
        messages = steps.meet({"given": given, "checkpoint": prefix})
        for r, message in enumerate(messages):
            if message["given"] != given:
                raise RankError(
                    f"A SavedModel is exported {_told(given)} on rank {rank}, but "
                    f"{_told(message['given'])} on rank {r}. Give the same on every rank."
                )
        prefix, found = str(messages[0]["checkpoint"]), None
        # The folders are removed only after the ranks have met once more: nobody writes there then.
        final = temporary = ""
        if rank == 0:
            found = base and find_base(base, folder)
            unfinished.remove_abandoned(folder)
            final = tf.compat.as_str(export_utils.get_timestamped_export_dir(folder))
            temporary = tf.compat.as_str(export_utils.get_temp_export_dir(final))
            cleaning.callback(_remove, temporary)
            unfinished.make(temporary)
            prefix = _without_increments(prefix, temporary)
        else:
            temporary = tempfile.mkdtemp(prefix="collective-export-")
            cleaning.callback(shutil.rmtree, temporary, ignore_errors=True)
        payload = {"checkpoint": prefix, "base": found and found.to_json()}
        of_rank_0 = steps.meet(payload)[0]
        prefix = str(of_rank_0["checkpoint"])
        version = of_rank_0["base"] and BaseVersion.from_json(of_rank_0["base"])
        served = ServedCheckpoint(prefix, steps, version)
        with _unnamed_folder():
            built = tf.compat.as_str(build(temporary, prefix, served))
        steps.meet({})
        if rank == 0:
            record = _complete(built, version, served)
            tf.io.gfile.rename(built, final)
            commit.sync(folder)
            if "://" in final and not commit.becomes_visible(os.path.join(final, RECORD)):
                raise StorageFailure(f"'{built}' was moved to '{final}', but doesn't exist there")
        path = str(steps.meet({"path": final})[0]["path"])
        if rank == 0:
            problem = served.copied.problem if served.copied else ""
            _tell(path, record, problem)
        return path


def _path(path: Any) -> str | None:
    text: str | None = tf.compat.as_str(os.fspath(path)) if path else None
    return text


def _told(given: Sequence[str | None]) -> str:
    folder, checkpoint, base = given
    based = f", with base {base!r}" if base else ""
    return f"to {folder!r} from checkpoint {checkpoint!r}{based}"


def _remove(folder: str) -> None:
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)


def _without_increments(prefix: str, folder: str) -> str:
    """Returns the prefix of a checkpoint that has what `prefix` names, also with increments.

    Args:
        prefix: as `Saver.restore` takes it.
        folder: in which one is made if it needs to be, for as long as the export takes.
    """
    whole, number = chain_names.split(prefix)
    if number is None:
        number = chain.newest(whole)
    if not number:
        return whole
    folder = os.path.join(folder, "consolidated")
    tf.io.gfile.makedirs(folder)
    target = os.path.join(folder, os.path.basename(whole))
    consolidate.consolidate(chain_names.increment_prefix(whole, number), target)
    return target


def _complete(built: str, base: BaseVersion | None, served: ServedCheckpoint) -> ExportRecord:
    """Links the files that aren't variables', writes the record, and syncs the SavedModel."""
    files, copied = {}, served.copied
    for name in files_in(built):
        path = os.path.join(built, name)
        known = copied and copied.data_files.get(name)
        files[name] = known or _linked_if_same(path, base)
    most = copied.most if copied else variable_files.LEAST_FILE_BYTES
    record = ExportRecord(None if base is None else base.path, most, files, served.tables)
    record.write(built)
    for parent, _, names in tf.io.gfile.walk(built):
        for path in (*(os.path.join(parent, name) for name in names), parent):
            commit.sync(path)
    return record


def _linked_if_same(path: str, base: BaseVersion | None) -> ExportedFile:
    """Describes a file, in whose place a link to the base's is put if that has the same content."""
    file, link = described(path), f"{path}.link"
    if base is None or not base.link(file.digest, link):
        return file
    tf.io.gfile.rename(link, path, overwrite=True)
    return dataclasses.replace(file, linked=True)


def _tell(path: str, record: ExportRecord, problem: str) -> None:
    """Says where a SavedModel is: as TensorFlow does if it logs such things, else on stderr."""
    shared = "" if record.base is None else _shared(record, problem)
    if tf.logging.get_verbosity() <= tf.logging.INFO:
        tf.logging.info("SavedModel written to: %s%s", path, shared)
    elif SCOPES.options.plan != "quiet":
        print(f"collective: exported a SavedModel to {path}{shared}", file=sys.stderr, flush=True)


def _shared(record: ExportRecord, problem: str) -> str:
    """Says how much of a SavedModel is its base's."""
    linked, written = record.size(linked=True), record.size(linked=False)
    count = sum(file.linked for file in record.files.values())
    because = f" (nothing more could be linked: {problem})" if problem else ""
    return (
        f": linked {counted(count, 'file')}, {linked:,} bytes, from {record.base}, and wrote "
        f"{len(record.files) - count:,}, {written:,} bytes{because}"
    )


@contextlib.contextmanager
def _unnamed_folder() -> Iterator[None]:
    """Keeps TensorFlow from logging a folder that is gone after the export."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("SavedModel written to")

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def add_graph(original: Any, builder: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SavedModelBuilder.add_meta_graph_and_variables` (and `simple_save`).

    Raises:
        ValueError: the graph trains with tables: TensorFlow alone could not load it.
    """
    variables = session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    has_tables = any(isinstance(v, Sharded) for v in variables)
    if has_tables and served_graph(session.graph) is None:
        raise ValueError(
            "A SavedModel of this graph would hold one part of its tables, and operations that "
            "TensorFlow alone can't run. strategy.export_saved_model(folder, checkpoint, "
            "signature_def_fn) makes one that serves anywhere; signature_def_fn builds the model "
            "for inference and returns its signatures."
        )
    return original(builder, session, *args, **kwargs)


def from_session_script(
    folder: str,
    checkpoint: str | None,
    signature_def_fn: Callable[[], Any] | None,
    assets_extra: Mapping[str, str] | None,
    as_text: bool,
    clear_devices: bool,
    strip_default_attrs: bool,
    base: str | None,
) -> str:
    """Exports for `CollectiveStrategy.export_saved_model`; called inside scope()."""
    if not callable(signature_def_fn):
        raise TypeError(
            "export_saved_model needs signature_def_fn, a function without arguments that builds "
            "the graph to be served and returns its SignatureDef or a dict of them; got "
            f"{signature_def_fn!r}."
        )

    def build(inside: str, prefix: str, served: ServedCheckpoint) -> str:
        path = os.path.join(inside, "saved_model")
        _build_saved_model(
            path,
            served,
            lambda: _signatures(signature_def_fn()),
            as_text,
            clear_devices=clear_devices,
            strip_default_attrs=strip_default_attrs,
        )
        for name, source in (_on_rank_0(assets_extra) or {}).items():
            target = os.path.join(path, "assets.extra", name)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(source, target)
        return path

    with contextlib.ExitStack() as saving:
        prefix = None if checkpoint else saving.enter_context(_of_open_session(folder))
        return export(folder, checkpoint, base, lambda: prefix or _find_prefix(checkpoint), build)


def of_tables(folder: str, checkpoint: str, base: str | None) -> str:
    """Exports the tables of a checkpoint without a model; called inside scope().

    What an unknown key of a dynamic table reads isn't in a checkpoint: here it is zeros.
    """

    def build(inside: str, prefix: str, served: ServedCheckpoint) -> str:
        def make_tables() -> dict[str, Any]:
            for name, stored in sorted(served.bundle.layout.tables.items()):
                if stored.slot_of is None:
                    rows = stored.rows if stored.kind == STATIC else None
                    dtype = tf.as_dtype(stored.dtype)
                    served.table(name, rows, stored.dim, dtype, trainable=False)
            return {}

        path = os.path.join(inside, "saved_model")
        _build_saved_model(path, served, make_tables)
        return path

    return export(folder, checkpoint, base, lambda: checkpoint, build)


def _build_saved_model(
    path: str,
    served: ServedCheckpoint,
    make_signatures: Callable[[], dict[str, Any]],
    as_text: bool = False,
    **options: bool,
) -> None:
    """Builds a graph by `make_signatures`, and writes it as a SavedModel."""
    builder = tf.saved_model.Builder(path)
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        state_of_session(session).is_librarys = True
        served.bind(graph)
        signatures = make_signatures()
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.tag_constants.SERVING],
            signatures,
            assets_collection=tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
            main_op=tf.train.Scaffold.default_local_init_op(),
            saver=tf.train.Saver(sharded=True, allow_empty=True),
            **options,
        )
    builder.save(as_text)


@contextlib.contextmanager
def _of_open_session(folder: str) -> Iterator[str | None]:
    """Saves the open session in a temporary checkpoint, where there is no other checkpoint.

    Args:
        folder: is to have the SavedModel, and has the checkpoint as long as this is entered.

    Yields:
        The checkpoint's prefix; None where there is another one, or no session.
    """
    session, number = last_open_session(), None
    if session is not None and saver.last_checkpoint() is None:
        number = 0 if collectives.size() == 1 else state_of_session(session).number
    numbers = {told["session"] for told in barrier.exchange(None, "export", {"session": number})}
    if None in numbers or len(numbers) > 1:
        yield None
        return
    temporary = os.path.join(folder, "collective-temporary-checkpoint")
    with session.graph.as_default():
        savers = tf.get_collection(tf.GraphKeys.SAVERS)  # as a finalized graph has one
        whole = savers[0] if savers else tf.train.Saver()
    path = os.path.join(temporary, "model.ckpt")
    if collectives.rank() == 0:
        tf.io.gfile.makedirs(temporary)
    try:
        with saver.without_notes():
            prefix = whole.save(session, path, write_meta_graph=False, write_state=False)
            background.settle(session)
        yield prefix
    finally:
        if collectives.rank() == 0:
            _remove(temporary)


def from_estimator(
    estimator: Any,
    export_plainly: Callable[..., Any],
    folder: Any,
    receivers: Mapping[str, Any],
    assets_extra: Any,
    as_text: bool,
    checkpoint: Any,
    strip_default_attrs: bool,
    base: Any,
) -> bytes:
    """Exports for `Estimator._export_all_saved_models`; called inside scope().

    Args:
        estimator: its `latest_checkpoint` is exported if `checkpoint` is None. While it builds a
            graph, its `served_checkpoint` is set: it binds the graph to that before it makes the
            first variable.
        export_plainly: TensorFlow's own method.
    """
    modes = [mode for mode in receivers if mode != EstimatorModeKeys.PREDICT]
    if modes:
        raise ValueError(
            f"A SavedModel for {', '.join(modes)} would hold the operations of several ranks. "
            "Export one for tf.estimator.ModeKeys.PREDICT."
        )

    def build(inside: str, prefix: str, served: ServedCheckpoint) -> Any:
        estimator.served_checkpoint = served
        try:
            return export_plainly(
                inside,
                receivers,
                assets_extra=_on_rank_0(assets_extra),
                as_text=as_text,
                checkpoint_path=prefix,
                strip_default_attrs=strip_default_attrs,
            )
        finally:
            estimator.served_checkpoint = None

    return tf.compat.as_bytes(
        export(folder, checkpoint, base, lambda: checkpoint or _latest_of(estimator), build)
    )


def _on_rank_0(files: Any) -> Any:
    """Returns `files` on rank 0, whose folder is kept, and None on the others."""
    return files if collectives.rank() == 0 else None


def _latest_of(estimator: Any) -> str | None:
    """Returns the checkpoint that stock Estimator would export."""
    latest: str | None = estimator.latest_checkpoint()
    if latest is None and estimator._warm_start_settings:
        latest = _find_prefix(estimator._warm_start_settings.ckpt_to_initialize_from)
    if latest is None:
        raise ValueError(
            f"There is no checkpoint to export: '{estimator.model_dir}' has none. Train first."
        )
    return latest


def _find_prefix(checkpoint: str | None) -> str | None:
    """Returns the prefix of a checkpoint that is given by its prefix or its folder.

    None stands for the checkpoint that this process saved or restored last.
    """
    if checkpoint is None:
        return saver.last_checkpoint()
    if not tf.io.gfile.isdir(checkpoint):
        return checkpoint
    latest: str | None = tf.train.latest_checkpoint(checkpoint)
    return latest


def _signatures(built: Any) -> dict[str, Any]:
    """Returns the signatures that signature_def_fn built, by their names."""
    if isinstance(built, meta_graph_pb2.SignatureDef):
        return {tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: built}
    is_map = isinstance(built, Mapping) and len(built) > 0
    if not is_map or not all(isinstance(x, meta_graph_pb2.SignatureDef) for x in built.values()):
        raise TypeError(
            f"signature_def_fn must return a SignatureDef or a dict of them, not {built!r}. "
            "tf.saved_model.predict_signature_def(inputs={…}, outputs={…}) makes one."
        )
    return dict(built)
