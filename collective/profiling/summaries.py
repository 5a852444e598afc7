"""Scalars for TensorBoard, written by rank 0."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from collective.profiling.breakdown import Split


def scalars(split: Split) -> dict[str, float]:
    """What is written of a split, by tag: milliseconds of phases are means over ranks."""
    found = {
        "collective/step_ms": sum(split.ms) / len(split.ms),
        "collective/bytes_per_step": split.bytes_per_step,
    }
    if split.samples_per_s is not None:
        found["collective/samples_per_s"] = split.samples_per_s
    if split.distinct_share is not None:
        found["collective/distinct_share"] = split.distinct_share
    found.update(
        {
            f"collective/ms/{re.sub('[^a-z]', '_', name)}": ms
            for name, ms in split.mean_phases().items()
        }
    )
    return found


class Writer:
    """Appends scalars to the events in `folder`."""

    def __init__(self, folder: str):
        with tf.Graph().as_default():  # a file writer is refused where operations run at once
            self._writer = tf.summary.FileWriter(folder)

    def add(self, split: Split, step: int) -> None:
        """The scalars of `split`, at the global step `step`."""
        self._writer.add_summary(
            tf.Summary(
                value=[
                    tf.Summary.Value(tag=tag, simple_value=value)
                    for tag, value in scalars(split).items()
                ]
            ),
            step,
        )
        self._writer.flush()
