"""Lists what is replaced of losses."""

from __future__ import annotations

import importlib

import tensorflow.compat.v1 as tf

from collective.interception.patching import Patch
from collective.tensorflow_internals.keras import GraphModel, LossesContainer, losses_utils
from collective.wrappers import keras_losses, masked_means

PART_OF_SUM = "A loss would count 1/N on each rank, whatever it adds up and of how many records."
OWN_NUMBER = "Each rank would divide by a number of its own, without a word."
# By this module the others find what is in tf.losses.
_losses_impl = importlib.import_module(tf.losses.compute_weighted_loss.__module__)
LOSSES = (
    Patch(
        LossesContainer,
        "keras.LossesContainer.__call__",
        keras_losses.compiled_loss,
        PART_OF_SUM,
    ),
    Patch(
        GraphModel,
        "tf.keras.Model._prepare_total_loss",
        keras_losses.prepare_total_loss,
        PART_OF_SUM,
    ),
    Patch(
        losses_utils,
        "keras.losses_utils.apply_valid_mask",
        masked_means.apply_valid_mask,
        OWN_NUMBER,
    ),
    Patch(_losses_impl, "losses_impl._safe_mean", masked_means.safe_mean, OWN_NUMBER),
    *(
        Patch(
            owner, f"{name}.compute_weighted_loss", masked_means.compute_weighted_loss, OWN_NUMBER
        )
        for owner, name in ((tf.losses, "tf.losses"), (_losses_impl, "losses_impl"))
    ),
)
