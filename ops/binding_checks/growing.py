"""Checks a table that grows: its variable is in reserved memory; TensorFlow and kernels update it.

Its keys know when they were last used, and some are removed at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.communication import collectives
from collective.ops.exchange import dispatch
from collective.ops.gpu import device_key_map
from collective.ops.gpu.kernel_api import Kernels

CAPACITY, DIM, STEPS = 2**22, 24, 6
BATCH = 200  # keys in the first step; each later step has four times as many


class Growing:
    """A table, as `collective.ops.exchange.dispatch.bridge` has memory for it."""

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
            self.step = tf.placeholder(tf.int64, [])
            rows = dispatch.operations().collective_find_rows(
                self._find,
                [tf.constant(0, tf.int64)],
                [handle],
                [self.keys],
                tf.constant(True),
                [self.step],
            )[0]
            ones = tf.ones([tf.size(rows), DIM])
            added = tf.raw_ops.ResourceScatterAdd(resource=handle, indices=rows, updates=ones)
            with tf.control_dependencies([added]):
                distinct = tf.unique(rows)[0]
                updated = dispatch.operations().collective_sparse_update(
                    [handle],
                    [],
                    [tf.constant(0.5)],
                    [],
                    [tf.ones([tf.size(distinct), DIM])],
                    [distinct],
                    rule="SGD",
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

    def _find(
        self,
        kernels: Kernels,
        _: Any,
        keys: Any,
        sizes: Sequence[int],
        steps: Sequence[int] | None,
    ) -> Any:
        rows = device_key_map.rows(kernels, [self._keys], keys, sizes, steps)
        self._reach()
        return rows

    def wrong_uses(self, last_uses: dict[int, int]) -> int:
        """Counts the keys whose last use is unknown or differs from `last_uses`."""
        keys = self._keys.keys(1, len(self._keys) + 1).tolist()
        wanted = np.array([last_uses.get(key, 0) for key in keys])
        differ = int((self._keys.steps() != wanted).sum())
        return differ + abs(len(keys) - len(last_uses))

    def wrong_rows_after_removal(self) -> int:
        """Removes every third key; counts the keys that then have a wrong row."""
        count = len(self._keys)
        keys = self._keys.keys(1, count + 1).copy()
        gone = np.arange(1, count + 1, 3)
        from_, to = self._keys.remove(gone)
        rows = np.arange(1, count + 1)
        rows[gone - 1] = 0
        rows[from_ - 1] = to
        return int((self._keys.find(keys) != rows).sum())


def check(seed: int, config: tf.ConfigProto) -> list[str]:
    """Returns the errors on this rank."""
    rank, wrong = collectives.rank(), []
    rng, wanted = np.random.default_rng([seed, rank]), {0: 0.0}
    last_uses: dict[int, int] = {}
    with tf.Graph().as_default():
        table = Growing()
        with tf.Session(config=config) as session:
            session.run(table.start)
            for step in range(STEPS):
                keys = rng.integers(0, 4**step * BATCH, 4**step * BATCH)
                distinct, counts = np.unique(keys, return_counts=True)
                for key, count in zip(distinct.tolist(), counts.tolist()):
                    wanted[key] = wanted.get(key, 0.0) + count - 0.5
                    last_uses[key] = step + 1
                got = session.run(table.rows, {table.keys: keys, table.step: step + 1})
                truth = np.array([wanted[key] for key in keys.tolist()], np.float32)
                if not np.array_equal(got, np.tile(truth[:, None], (1, DIM))):
                    differ = int((got != truth[:, None]).any(1).sum())
                    wrong.append(
                        f"rank {rank}: {differ} of {len(keys)} rows of a table that grows, in step "
                        f"{step}"
                    )
            for differ, what in (
                (table.wrong_uses(last_uses), "last uses"),
                (table.wrong_rows_after_removal(), "rows after a removal"),
            ):
                if differ:
                    wrong.append(f"rank {rank}: {differ} {what} of a table that grows")
    return wrong
