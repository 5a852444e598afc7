"""Checks what is found of ids and samples before anything moves, compared with NumPy: also of so
many that threads share them.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.exchange import embedding_bag

PART = 65536  # of an array, that one thread takes
SIZES = (0, 1, PART - 1, PART, PART + 1, 3 * PART + 7)


def falls(samples: np.ndarray) -> int:
    return int((np.diff(samples, prepend=0) < 0).sum())


@pytest.mark.parametrize("threads", [1, 4])
def test_bounds(threads: int):
    rng = np.random.default_rng(0)
    ids = [rng.integers(-(2**62), 2**62, size) for size in SIZES]
    ids[-1][2 * PART] = -(2**63)
    limits = np.iinfo(np.int64)
    wanted = [[of.min(initial=limits.max), of.max(initial=limits.min)] for of in ids]
    with tf.Graph().as_default(), tf.Session(config=config(threads)) as session:
        got = session.run(embedding_bag.bounds([tf.constant(of) for of in ids]))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("threads", [1, 4])
def test_samples_out_of_order_are_counted(threads: int):
    """Those at the border of two parts once."""
    samples = [np.arange(size) // 3 for size in SIZES]
    for at in (1, PART - 2, PART, PART + 2, 2 * PART):
        samples[-1][at] -= 5
    samples[1][0] = -1
    samples[2][:] = -1
    assert [falls(of) for of in samples][1:3] == [1, 1] and falls(samples[-1]) == 5
    ids = [np.zeros(len(of) + place, np.int64) for place, of in enumerate(samples)]
    weights = [np.zeros(4, np.float32)]
    wanted = [x for of, its in zip(samples, ids) for x in (len(of) - len(its), falls(of))]
    wanted.append(4 - len(ids[1]))
    with tf.Graph().as_default(), tf.Session(config=config(threads)) as session:
        arrays = [[tf.constant(x) for x in given] for given in (ids, samples, weights)]
        got = session.run(embedding_bag.mismatches(*arrays, weighted=[1]))
    np.testing.assert_array_equal(got, wanted)


def config(threads: int) -> tf.ConfigProto:
    return tf.ConfigProto(intra_op_parallelism_threads=threads)
