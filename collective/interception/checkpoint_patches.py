"""Lists what scope() replaces in TensorFlow's checkpoints and SavedModels, and why.

It is a part of `collective.interception.patches`.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.checkpoint.functions import object_checkpoints
from collective.checkpoint.reading import whole_reads
from collective.checkpoint.restoring import model_start, restores, vocabulary, warm_start
from collective.checkpoint.saving import saver, saver_hook, saves
from collective.interception.patching import OperationPatch, Patch
from collective.serving import export, freezing
from collective.tables.table import Sharded
from collective.tensorflow_internals.checkpoints import (
    checkpoint_management,
    checkpoint_utils,
    gen_checkpoint_ops,
    io_ops,
    py_checkpoint_reader,
    warm_starting_util,
)
from collective.tensorflow_internals.graphs import convert_to_constants
from collective.tensorflow_internals.keras import Metric, WorkerTrainingState
from collective.tensorflow_internals.sessions import training_util
from collective.tensorflow_internals.variables import BaseResourceVariable
from collective.wrappers import keras_saving

# Every rank saves and restores its shards, and all agree on the latest checkpoint.
ONE_SHARD_SAVED = "One rank's shard would be saved as if it were the table."
MISSING_SHARDS = "The shards of the other ranks would be missing from the checkpoint."
NOT_RESTORED = "Tables would not be restored, nor the same checkpoint by all ranks."
GOES_ON = "A full disk would end training, or a job would end without its last checkpoint."
OTHER_LATEST = "Ranks could take different checkpoints for the latest."
NOT_STARTED = "scope(warm_start=…) would have no effect."
WHOLE_ROWS = "A shard would be assigned the rows of a whole table."
PARTITIONED = "A table would be mistaken for a partitioned variable, and its name not be found."
ALL_WRITE_GRAPH = "Every rank would write the graph."
NOT_SERVABLE = "A SavedModel would have one rank's shards, and operations of this library."
NO_ENTRY = "A table in parts would not be found by name, and its parts would look like variables."
ALL_WRITE_OBJECTS = "Every rank would write the same files, and none would wait for another."
RESTORED_ALONE = "A rank could restore its shards alone, and train with the others' first values."
COUNTED_TWICE = "Each rank would add its records to the states of all."
READER = py_checkpoint_reader.CheckpointReader
SAVER_HOOK = tf.train.CheckpointSaverHook
CHECKPOINTS = (
    Patch(tf.train.Saver, "tf.train.Saver._build", saver.build, ONE_SHARD_SAVED),
    Patch(tf.train.Saver, "tf.train.Saver.save", saves.save, MISSING_SHARDS),
    Patch(tf.train.Saver, "tf.train.Saver.restore", restores.restore, NOT_RESTORED),
    Patch(SAVER_HOOK, "tf.train.CheckpointSaverHook._save", saver_hook.save, GOES_ON),
    Patch(SAVER_HOOK, "tf.train.CheckpointSaverHook.end", saver_hook.end, GOES_ON),
    Patch(
        tf.train.SessionManager,
        "tf.train.SessionManager._restore_checkpoint",
        saver.restore_latest,
        OTHER_LATEST,
    ),
    Patch(
        tf.train.SessionManager,
        "tf.train.SessionManager.prepare_session",
        model_start.prepare_session,
        NOT_STARTED,
    ),
    Patch(
        checkpoint_utils,
        "checkpoint_utils._init_from_checkpoint",
        warm_start.init_from_checkpoint,
        WHOLE_ROWS,
    ),
    Patch(
        warm_starting_util, "warm_starting_util._infer_var_name", warm_start.infer_name, PARTITIONED
    ),
    Patch(
        warm_starting_util,
        "warm_starting_util._warm_start_var_with_vocab",
        vocabulary.start_from_words,
        WHOLE_ROWS,
    ),
    *(
        Patch(READER, f"CheckpointReader.{method.__name__}", method, NO_ENTRY)
        for method in (
            whole_reads.has_tensor,
            whole_reads.get_tensor,
            whole_reads.get_variable_to_shape_map,
            whole_reads.get_variable_to_dtype_map,
        )
    ),
    *(
        OperationPatch(owner, name, replacement, NO_ENTRY)
        for owner, name, replacement in (
            (io_ops, "io_ops.restore_v2", whole_reads.restore),
            (tf.raw_ops, "tf.raw_ops.RestoreV2", whole_reads.restore),
            (
                gen_checkpoint_ops,
                "gen_checkpoint_ops.load_and_remap_matrix",
                whole_reads.remap_matrix,
            ),
            (tf.raw_ops, "tf.raw_ops.LoadAndRemapMatrix", whole_reads.remap_matrix),
        )
    ),
    *(
        Patch(tf2.train.Checkpoint, f"tf.train.Checkpoint.{method}", replacement, why)
        for method, replacement, why in (
            ("_write", object_checkpoints.write, ALL_WRITE_OBJECTS),
            ("_async_checkpointer", object_checkpoints.refuse_threads, ALL_WRITE_OBJECTS),
            ("read", object_checkpoints.read, RESTORED_ALONE),
        )
    ),
    *(
        Patch(
            checkpoint_management,
            f"checkpoint_management.{name}",
            object_checkpoints.change_files,
            ALL_WRITE_OBJECTS,
        )
        for name in ("update_checkpoint_state_internal", "_delete_file_if_exists")
    ),
    Patch(
        Sharded,
        "Sharded._restore_from_tensors",
        object_checkpoints.restore_table,
        RESTORED_ALONE,
    ),
    Patch(
        BaseResourceVariable,
        "BaseResourceVariable._restore_from_tensors",
        object_checkpoints.restore_state,
        COUNTED_TWICE,
    ),
    Patch(
        Metric, "tf.keras.metrics.Metric.add_weight", object_checkpoints.make_state, COUNTED_TWICE
    ),
    *(
        Patch(
            WorkerTrainingState,
            f"keras.worker_training_state.WorkerTrainingState.{method}",
            replacement,
            ALL_WRITE_OBJECTS,
        )
        for method, replacement in (
            ("back_up", keras_saving.back_up),
            ("restore", keras_saving.back_up),
            ("delete_backup", keras_saving.delete_backup),
        )
    ),
    Patch(training_util, "training_util.write_graph", saver.write_graph, ALL_WRITE_GRAPH),
    Patch(
        tf.saved_model.Builder,
        "tf.saved_model.Builder.add_meta_graph_and_variables",
        export.add_graph,
        NOT_SERVABLE,
    ),
    Patch(
        convert_to_constants,
        "convert_to_constants.convert_variables_to_constants_from_session_graph",
        freezing.freeze,
        NOT_SERVABLE,
    ),
)
