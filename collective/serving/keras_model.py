"""Exports a Keras model that eager code trained: a copy of it, in a graph, is served.

The copy has the model's layers, and its variables their names. So it is served like any graph: from
a checkpoint, here a temporary one that the ranks make of the model.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
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
    if not _is_network(model):
        raise TypeError(
            "export_saved_model(model=…) takes a functional or sequential Keras model with known "
            f"inputs, not {type(model).__name__}. For others, pass checkpoint_dir, with a "
            "checkpoint of collective.keras.callbacks.Checkpoint, and signature_def_fn, a function "
            "that builds the model in a graph."
        )

    def copied(layer: Any, copies: dict[int, Any]) -> Any:
        """Makes a layer again, once."""
        if id(layer) not in copies:
            if _is_network(layer):
                copies[id(layer)] = clone(layer, copies)
            else:
                copies[id(layer)] = made = type(layer).from_config(layer.get_config())
                build_alike(layer, made)
        return copies[id(layer)]

    def build_alike(layer: Any, made: Any) -> None:
        """Lets `made`, when it is built, have variables of the names and tables of `layer`.

        A graph would give a layer another name whose name an input has. So do the layers inside.
        """
        own = [*layer._trainable_weights, *layer._non_trainable_weights]
        policies = [v.policy for v in own if isinstance(v, Table)]
        inner, inner_made = _layers_in(layer), _layers_in(made)
        for each in zip(inner, inner_made):
            build_alike(*each)
        build, later = made.build, len(inner_made)
        if not own and len(inner) == later:
            return

        def build_named(shape: Any) -> None:
            with contextlib.ExitStack() as opened:
                if scope := _scope_of(layer, own):
                    opened.enter_context(tf.name_scope(f"{scope}/"))
                if policies:
                    opened.enter_context(embedding_scope(policy=policies[0]))
                build(shape)
            for each in zip(inner[later:], _layers_in(made)[later:]):  # made by build
                build_alike(*each)

        made.build = build_named

    def clone(network: Any, copies: dict[int, Any]) -> Any:
        copy_layer = functools.partial(copied, copies=copies)
        return package.models.clone_model(network, clone_function=copy_layer)

    def build_model() -> Any:
        copy = clone(model, {})
        inputs = dict(zip(model.input_names, copy.inputs))
        outputs = dict(zip(model.output_names, copy.outputs))
        return tf.saved_model.predict_signature_def(inputs, outputs)

    return build_model


def _scope_of(layer: Any, variables: Sequence[Any]) -> str:
    """Returns the name scope of a layer, by the names of its variables; '' if it isn't in them."""
    path = str(variables[0].name).split("/")[:-1] if variables else []
    while path and path[-1] != layer.name:  # scopes that the layer opens itself
        path.pop()
    return "/".join(path)


def _layers_in(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(recursive=False, include_self=False))


def _is_network(layer: Any) -> bool:
    """Tells whether a layer is a functional or sequential model with known inputs."""
    return isinstance(layer, package.Model) and bool(getattr(layer, "_is_graph_network", False))


def keep_eager(model: Any) -> None:
    """Gives the classes of a model's layers back what they are in eager code.

    Keras replaces the base of a layer's class when it makes a layer in a graph, and again when it
    makes one eagerly. In between, no layer of that class works that was made eagerly.
    """
    classes: set[Any] = {type(layer) for layer in model._flatten_layers()}
    for each in classes:
        each.__new__(each)
