"""Builds the program `wire` of step.py: the collectives of a step alone, with as many bytes as its
data need.

    agreement (allgather of seven integers) ──► keys ──► rows ──► gradients (three all-to-alls)
                                                          └───► dense gradients (allreduce)

The bytes come from buffers that exist before the step, and nothing reads them. The bytes that a
rank sends to itself go through the all-to-all as well, as in any use of it. The collectives are the
library's, and so is what carries them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from training_step.workload import Setting

# Collectives of a run that ranks agree on wait for a gate, a zero.
GATE = 0


class Wire:
    """Holds the graph.

    Attributes:
        fetches: run them for a step.
    """

    def __init__(self, setting: Setting, folder: Path, rank: int):
        # [pool, asker, owner, (words, rows)]
        traffic = np.load(folder / "traffic.npy").astype(np.int32)
        row_type = tf.as_dtype(setting.scope.get("wire_dtype", "float32"))
        gradient_type = tf.as_dtype(setting.scope.get("gradient_wire_dtype", "float32"))
        sizes = [setting.ranks]
        self._words = tf.placeholder(tf.int32, sizes)  # that this rank sends, by owner
        self._due = tf.placeholder(tf.int32, sizes)  # rows that it gets, by owner
        self._owed = tf.placeholder(tf.int32, sizes)  # rows that it sends, by asker
        self._header = tf.placeholder(tf.int64, [1, 7])
        self._feeds = [
            {
                self._words: batch[rank, :, 0],
                self._due: batch[rank, :, 1],
                self._owed: batch[:, rank, 1],
                self._header: np.zeros([1, 7], np.int64),
            }
            for batch in traffic
        ]
        self._expected = [
            (batch[:, rank, 0].sum(), batch[rank, :, 1].sum(), batch[:, rank, 1].sum())
            for batch in traffic
        ]

        # The sum, a zero, is used: TensorFlow drops an operation whose values nobody uses, whatever
        # its control dependencies are.
        headers = collectives.allgather(self._header, _name("agreement"), GATE)
        words = self._words + tf.cast(tf.reduce_sum(headers), tf.int32)
        keys = _alltoall(
            _buffer("words", [traffic[:, rank, :, 0].sum(1).max()], tf.int64, words), words, "keys"
        )
        with tf.control_dependencies([keys]):
            owed, due = tf.identity(self._owed), tf.identity(self._due)
        rows = _alltoall(
            _buffer("rows", [traffic[:, :, rank, 1].sum(1).max(), setting.dim], row_type, owed),
            owed,
            "rows",
        )
        with tf.control_dependencies([rows]):
            due = tf.identity(due)
            zero = tf.zeros([], tf.float32)
        most = traffic[:, rank, :, 1].sum(1).max()
        gradients = _alltoall(
            _buffer("gradients", [most, setting.dim], gradient_type, due), due, "gradients"
        )
        received = tf.stack([tf.shape(x)[0] for x in (keys, rows, gradients)])
        self.fetches: list[Any] = [received, gradients.op]
        if setting.dense_parameters():
            size = [setting.dense_parameters()]
            dense = tf.get_variable(
                "dense", size, use_resource=True, initializer=tf.zeros_initializer()
            )
            sums = collectives.allreduce_sum([dense + zero], _name("dense"), GATE)
            self.fetches.append(sums[0].op)

    def feed(self, step: int) -> dict[Any, Any]:
        return self._feeds[step % len(self._feeds)]

    def check(self, step: int, fetched: list[Any]) -> float:
        """Checks that all bytes have arrived; there is no loss."""
        expected = self._expected[step % len(self._expected)]
        if tuple(fetched[0]) != expected:
            raise RuntimeError(
                f"step {step}: (keys, rows, gradients) should be {expected}, but "
                f"{tuple(fetched[0])} arrived."
            )
        return 0.0


def _buffer(name: str, shape: list[Any], dtype: tf.DType, splits: tf.Tensor) -> tf.Tensor:
    """Returns the first sum(splits) rows of a variable of `shape`, without a copy."""
    buffer = tf.get_variable(name, shape, dtype, tf.zeros_initializer(), use_resource=True)
    return buffer.read_value()[: tf.reduce_sum(splits)]


def _alltoall(x: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
    return collectives.alltoall(x, splits, _name(name), GATE)[0]


def _name(name: str) -> str:
    return collectives.unique_name(f"wire/{name}")
