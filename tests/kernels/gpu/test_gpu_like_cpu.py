"""GPU kernels and the compiled operations of the CPU lay out an exchange alike: ranks of both kinds
understand each other.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.exchange import embedding_bag
from collective.ops.gpu.distinct import distinct
from collective.ops.gpu.gather import gather
from collective.ops.gpu.partition import local_rows
from collective.ops.gpu.segments import DYNAMIC, ON_ONE_RANK, STATIC, Segments
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ask_hear_and_gather(ranks: int):
    """Five look-ups in four sections, what rank 0 is asked for, and the rows that it sends back to
    itself.
    """
    rng, kinds, dims, of = (
        np.random.default_rng(ranks),
        [STATIC, DYNAMIC, STATIC + ON_ONE_RANK, DYNAMIC + ON_ONE_RANK * ranks],
        [4, 3, 16, 2],
        [0, 1, 0, 2, 3],
    )
    ids = [rng.integers(0, 60, size) for size in (50, 40, 30, 20, 10)]
    shards = [rng.standard_normal((60, dim)).astype(np.float32) for dim in dims]
    sections = [embedding_bag.Section(table, dim) for table, dim in enumerate(dims)]
    members = [embedding_bag.BagMember(s, dims[s]) for s in of]
    with tf.Graph().as_default(), tf.Session() as session:
        asked = embedding_bag.request(
            [tf.constant(keys) for keys in ids], [], [], members, sections, kinds, ranks
        )
        message, splits, positions = session.run([asked.message, asked.splits, asked.positions])
        # What it would hear of ranks that ask for the same: here only the piece that it sends to
        # itself matters.
        keys = session.run(
            embedding_bag.respond(
                tf.constant(message), tf.constant(splits), sections, kinds, ranks
            ).keys
        )
    own = message[: splits[0]]
    counts = own[:8].reshape(4, 2)[:, 1]

    device = EmulatedDevice(ranks)
    workspace = Workspace(device)
    got = distinct(
        np.concatenate(ids), Segments.of([len(keys) for keys in ids], of), kinds, ranks, workspace
    )
    words = np.split(message, np.cumsum(splits)[:-1])
    np.testing.assert_array_equal(got.counts, [part[:8].reshape(4, 2)[:, 1] for part in words])
    np.testing.assert_array_equal(
        got.keys[: got.counts.sum()], np.concatenate([part[8:] for part in words])
    )
    # Where each row begins in what comes back, by the number of its key.
    starts = np.concatenate(
        [[0], np.cumsum(np.repeat(np.tile(dims, ranks), got.counts.reshape(-1)))]
    )
    np.testing.assert_array_equal(starts[got.inverse], np.concatenate(positions))

    received = Segments.of(counts, range(4))
    rows = local_rows(own[8:].copy(), received, kinds, ranks, workspace)
    first = np.cumsum(counts) - counts
    for table in range(4):
        np.testing.assert_array_equal(
            rows[first[table] : first[table] + counts[table]], keys[table][: counts[table]]
        )
    wanted = np.concatenate(
        [shards[table][keys[table][: counts[table]]].reshape(-1) for table in range(4)]
    )
    np.testing.assert_array_equal(gather(shards, rows, received, workspace), wanted)
