"""Tells how far a checkpoint's model has been trained."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def trained_steps(checkpoint: str | None) -> int:
    """Returns a checkpoint's global step; 0 without a checkpoint.

    Ranks that look before they make their session see the same checkpoint: only a session saves,
    and it starts on all ranks.
    """
    return int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP)) if checkpoint else 0
