"""Exports a Keras model that eager code trained: a copy of it, in a graph, is served.

The copy has the model's layers, and its variables their names. So it is served like any graph: from
a checkpoint, here a temporary one that the ranks make of the model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.functions.entries import Entry, check_names
from collective.checkpoint.functions.saves import ModelSaver
from collective.checkpoint.saving import saver
from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.tables.table import Table
from collective.tensorflow_internals.keras import package
from collective.wrappers import keras_names

TEMPORARY = "collective-temporary-checkpoint"


@contextlib.contextmanager
def checkpoint_of(model: Any, folder: str) -> Iterator[str]:
    """Saves a model's weights in a temporary checkpoint. All ranks call it.

    Args:
        model: a functional or sequential Keras model that was made eagerly.
        folder: has the checkpoint as long as this is entered.

    Yields:
        The checkpoint's prefix.

    Raises:
        ValueError: two of its weights have the same name.
    """
    entries = weights_of(model)
    temporary = os.path.join(folder, TEMPORARY)

    def make() -> None:
        if collectives.rank() == 0:
            tf.io.gfile.makedirs(temporary)

    barrier.run_on_all_ranks(None, "making the temporary folder of an export", make)
    saved = ModelSaver(os.path.join(temporary, "model.ckpt"))
    try:
        with saver.without_notes():
            yield saved.save(entries, 0, {keras_names.GLOBAL_STEP: np.int64(0)}, evicts=False)
    finally:
        saved.release()
        if collectives.rank() == 0 and tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)


def weights_of(model: Any) -> list[Entry]:
    """Returns a model's weights, with their names in checkpoints."""
    entries = [e for e in keras_names.entries_of(model) if not e.is_optimizers]
    check_names(entries)
    return entries


def signatures_of(model: Any, embedding_scope: Callable[..., Any]) -> Callable[[], Any]:
    """Returns a function that copies a model into a graph, and returns what it answers.

    Inputs and outputs have the names of those of the model.

    Args:
        model: a functional or sequential Keras model that was made eagerly.
        embedding_scope: opens the scope in which layers make tables.

    Raises:
        TypeError: it is another kind of model.
    """
    if not isinstance(model, package.Model) or not getattr(model, "_is_graph_network", False):
        raise TypeError(
            "export_saved_model(model=…) takes a functional or sequential Keras model with known "
            f"inputs, not {type(model).__name__}. For others, pass checkpoint_dir, with a "
            "checkpoint of collective.keras.callbacks.Checkpoint, and signature_def_fn, a function "
            "that builds the model in a graph."
        )

    def copied(layer: Any) -> Any:
        """Makes a layer again; in embedding_scope() if its weights are tables."""
        made = type(layer).from_config(layer.get_config())
        tables = [v for v in layer.variables if isinstance(v, Table)]
        if tables:
            build = made.build

            def build_tables(shape: Any) -> None:
                with embedding_scope(policy=tables[0].policy):
                    build(shape)

            made.build = build_tables
        return made

    def build_model() -> Any:
        copy = package.models.clone_model(model, clone_function=copied)
        inputs = dict(zip(model.input_names, copy.inputs))
        outputs = dict(zip(model.output_names, copy.outputs))
        return tf.saved_model.predict_signature_def(inputs, outputs)

    return build_model


def keep_eager(model: Any) -> None:
    """Gives the classes of a model's layers back what they are in eager code.

    Keras replaces the base of a layer's class when it makes a layer in a graph, and again when it
    makes one eagerly. In between, no layer of that class works that was made eagerly.
    """
    classes: set[Any] = {type(layer) for layer in model._flatten_layers()}
    for each in classes:
        each.__new__(each)
