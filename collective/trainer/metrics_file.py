"""Writes the metrics of a training as lines of JSON: `<model_dir>/metrics.jsonl`.

    {"kind": "training", "step": 100, "time": 1790000000.5, "seconds": 12.3, "epochs": 0.5,
     "metrics": {"loss": 0.41, "samples_per_s": 81234.5}}
    {"kind": "validation", "step": 100, "time": 1790000001.2, "metrics": {"auc": 0.71, …}}

A line is complete or not there. A training that continues at a step drops the lines of later ones,
which it writes again. A number that isn't finite, which JSON lacks, is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit
from collective.monitoring.job_metrics import number_of

FILE = "metrics.jsonl"


class MetricsFile:
    """Appends lines to the file in a folder. Only rank 0 has one."""

    def __init__(self, folder: str):
        self._path = os.path.join(folder, FILE)

    def begin(self, step: int) -> None:
        """Drops the lines of steps after `step`, and what a job that was killed has cut off.

        Raises:
            tf.errors.OpError: the file can't be written.
        """
        if not tf.io.gfile.exists(self._path):
            return
        with tf.io.gfile.GFile(self._path) as file:
            text = file.read()
        kept = [line for line in text.splitlines(keepends=True) if _is_up_to(line, step)]
        if "".join(kept) != text:
            with tf.io.gfile.GFile(self._path + ".new", "w") as file:
                file.write("".join(kept))
            commit.move(self._path + ".new", self._path)

    def add(self, kind: str, metrics: Mapping[str, Any], **about: Any) -> None:
        """Appends a line.

        Args:
            kind: 'training' or 'validation'.
            metrics: by name; what isn't one number is left out.
            about: what else the line says, such as the step.

        Raises:
            tf.errors.OpError: the file can't be written.
        """
        found = {name: number_of(value) for name, value in metrics.items()}
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in found.items()
            if value is not None
        }
        line = json.dumps({"kind": kind, **about, "metrics": numbers})
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write(line + "\n")


def _is_up_to(line: str, step: int) -> bool:
    """Tells whether a line is complete, and of a step that is kept."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
