"""Makes batches for grouped lookups, runs them both ways and counts a step's exchanges."""

import collections
import re

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication import collective_names
from collective.ops.graph import graph_analysis
from tests.ranks import reference

B = 12  # samples of a global batch: 1 to 4 ranks divide it


def both(strategy, rank, size, build, runs):
    """Runs plain TensorFlow on the whole batches, and this rank on its part of them.

    `runs` are as in `reference.plain`, with arrays of B samples for values. Returns both results.
    """
    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in values.items()})
        for names, values in runs
    ]
    return reference.plain(build, runs), reference.sharded(strategy, build, mine)


def same(got, want, rtol=2e-5, atol=1e-6):
    """Asserts that all arrays of two results, dictionaries of any depth, are close."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name in want:
            same(got[name], want[name], rtol, atol)
    else:
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def padded(rng, rows, most, least=1, samples=B):
    """Draws int64 [samples, most]: from `least` to `most` ids below `rows` a sample, then -1."""
    ids = rng.integers(0, rows, (samples, most))
    return np.where(np.arange(most) < rng.integers(least, most + 1, (samples, 1)), ids, -1)


def sparse(ids, values=None):
    """Makes sparse ids of a tensor [samples, most] in which -1 is none.

    With `values`, makes the sparse tensor of these at the places of the ids.
    """
    places = tf.where(ids >= 0)
    shape = tf.shape(ids, out_type=tf.int64)
    return tf.SparseTensor(places, tf.gather_nd(ids if values is None else values, places), shape)


def rows_of(tables):
    """Looks up all rows of static tables, as fetches by name."""
    return {
        name: tf.nn.embedding_lookup(table, tf.range(table.shape[0]))
        for name, table in tables.items()
    }


def counted(session, fetches, feed=None):
    """Runs, and counts how often operations of each type, or their stand-ins, were executed.

    Returns (the run's results, the counts).
    """
    out, operations = _traced(session, fetches, feed)
    return out, collections.Counter(kind for _, kind in operations)


def exchanged(session, fetches, feed=None):
    """Counts (all-to-alls, allreduces, allgathers) of a run.

    On several hosts an all-to-all is two, one of them among the ranks of a host: they count as one.
    """
    operations = _traced(session, fetches, feed)[1]
    names = [name.rpartition("/")[2] for name, kind in operations if kind == "Alltoall"]
    within_host = [name for name in names if collective_names.is_near(name)]
    assert set(within_host) <= {collective_names.near(name) for name in names}
    counts = collections.Counter(kind for _, kind in operations)
    return len(names) - len(within_host), counts["Allreduce"], counts["Allgather"]


def _traced(session, fetches, feed):
    """Runs; returns its results, and (name, type) of each operation that was executed."""
    metadata = tf.RunMetadata()
    out = session.run(
        fetches,
        feed,
        options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
        run_metadata=metadata,
    )
    labels = [
        node.timeline_label
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    ]
    found = [match for label in labels if (match := re.search(r"(\S*) = (\w+)\(", label))]
    return out, [
        (
            match.group(1),
            graph_analysis.collective_kind(match.group(2)),
        )
        for match in found
    ]


def everyone(value):
    """Returns the ranks' values."""
    return hvd.allgather_object(value)
