"""Lists what is replaced of losses that leave positions of a batch out."""

from __future__ import annotations

import importlib

import tensorflow.compat.v1 as tf

from collective.interception.patching import Patch
from collective.tensorflow_internals.keras import losses_utils
from collective.wrappers import masked_means

OWN_NUMBER = "Each rank would divide by a number of its own, without a word."
# By this module the others find what is in tf.losses.
_losses_impl = importlib.import_module(tf.losses.compute_weighted_loss.__module__)
MASKED_MEANS = (
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
