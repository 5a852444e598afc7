"""Checks a table that grows: a variable in reserved memory, which TensorFlow and kernels update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import collectives, dispatch, native_library
from collective.ops.gpu import device_key_map
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.rules import SGD

CAPACITY, DIM, STEPS = 2**22, 24, 6
BATCH = 200  # keys of the first step; of each later one four times as many


class Growing:
    """A table, as `collective.ops.dispatch.bridge` has memory for it."""

    def __init__(self) -> None:
        self._bridge = dispatch.bridge()
        with self._bridge.call():
            self._memory = self._bridge.reserve(CAPACITY * DIM * 4)
        self._keys = device_key_map.DeviceKeyMap("growing", CAPACITY - 1, self._bridge)
        self._reach()
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[None, DIM], shared_name=collectives.unique_name("growing")
        )
        with tf.device(self._bridge.placed):
            given = native_library.library().collective_memory(
                tf.constant(self._memory.address, tf.int64),
                tf.constant(0, tf.int64),
                dtype=tf.float32,
                shape=[CAPACITY, DIM],
            )
            self.start = tf.raw_ops.AssignVariableOp(resource=handle, value=given)
            self.keys = tf.placeholder(tf.int64, [None])
            rows = dispatch.operations().collective_find(
                self._find, [tf.constant(0, tf.int64)], [self.keys], tf.constant(True)
            )[0]
            ones = tf.ones([tf.size(rows), DIM])
            added = tf.raw_ops.ResourceScatterAdd(resource=handle, indices=rows, updates=ones)
            with tf.control_dependencies([added]):
                distinct = tf.unique(rows)[0]
                updated = dispatch.operations().collective_update(
                    SGD,
                    [tf.constant(0.5)],
                    [handle],
                    [[]],
                    [tf.ones([tf.size(distinct), DIM])],
                    [distinct],
                )
            with tf.control_dependencies([updated]):
                self.rows = tf.raw_ops.ResourceGather(
                    resource=handle, indices=rows, dtype=tf.float32
                )

    def _reach(self) -> None:
        with self._bridge.call():
            before = self._memory.taken
            self._memory.grow((len(self._keys) + 1) * DIM * 4)
            self._bridge.within(
                self._memory, (self._memory.taken - before,), np.uint8, before
            ).fill(0)

    def _find(self, kernels: Kernels, _: Any, keys: Any, sizes: Sequence[int], insert: bool) -> Any:
        rows = device_key_map.rows(kernels, [self._keys], keys, sizes, insert)
        self._reach()
        return rows


def check(seed: int, config: tf.ConfigProto) -> list[str]:
    """Returns what is wrong on this rank."""
    rank, wrong = collectives.rank(), []
    rng, wanted = np.random.default_rng([seed, rank]), {0: 0.0}
    with tf.Graph().as_default():
        table = Growing()
        with tf.Session(config=config) as session:
            session.run(table.start)
            for step in range(STEPS):
                keys = rng.integers(0, 4**step * BATCH, 4**step * BATCH)
                distinct, counts = np.unique(keys, return_counts=True)
                for key, count in zip(distinct.tolist(), counts.tolist()):
                    wanted[key] = wanted.get(key, 0.0) + count - 0.5
                got = session.run(table.rows, {table.keys: keys})
                truth = np.array([wanted[key] for key in keys.tolist()], np.float32)
                if not np.array_equal(got, np.tile(truth[:, None], (1, DIM))):
                    differ = int((got != truth[:, None]).any(1).sum())
                    wrong.append(
                        f"rank {rank}: {differ} of {len(keys)} rows of a table that grows, in step "
                        f"{step}"
                    )
    return wrong
