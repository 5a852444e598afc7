"""Writes scalars for TensorBoard, on rank 0."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from collective.profiling.breakdown import Breakdown
from collective.profiling.owner_balance import imbalances


def scalars(breakdown: Breakdown) -> dict[str, float]:
    """Returns the scalars of a breakdown, by tag; milliseconds of phases are means over ranks."""
    values = {
        "collective/step_ms": sum(breakdown.ms) / len(breakdown.ms),
        "collective/bytes_per_step": breakdown.bytes_per_step,
    }
    if breakdown.samples_per_s is not None:
        values["collective/samples_per_s"] = breakdown.samples_per_s
    if breakdown.distinct_share is not None:
        values["collective/distinct_share"] = breakdown.distinct_share
    for phase, ms in breakdown.mean_phases().items():
        values[f"collective/ms/{re.sub('[^a-z]', '_', phase)}"] = ms
    for table, ratio in imbalances(breakdown.keys_per_owner).items():
        values[f"collective/tables/{table}/keys_max_by_mean"] = ratio
    for table, counts in breakdown.table_counts.items():
        for name, count in counts.items():
            values[f"collective/tables/{table}/{name.replace(' ', '_')}"] = count
    for table, rates in breakdown.table_rates.items():
        for name, rate in rates.items():
            values[f"collective/tables/{table}/{name.replace(' ', '_')}_per_step"] = rate
    return values


class ScalarWriter:
    """Appends scalars to the events in `folder`."""

    def __init__(self, folder: str):
        with tf.Graph().as_default():  # a file writer is refused where operations run at once
            self._writer = tf.summary.FileWriter(folder)

    def add(self, breakdown: Breakdown, step: int) -> None:
        """Adds the scalars of `breakdown`, at the global step `step`."""
        values = [
            tf.Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(breakdown).items()
        ]
        self._writer.add_summary(tf.Summary(value=values), step)
        self._writer.flush()
