"""Compares the library with plain TensorFlow: one function builds both graphs."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf


def part(array, rank, size):
    """Returns this rank's contiguous share of a global batch that N divides."""
    step = len(array) // size
    return array[rank * step : (rank + 1) * step]


def uneven_part(array, rank, size):
    """Returns this rank's contiguous share of a global batch, of which rank 0 has the most."""
    ends = (np.linspace(0, 1, size + 1) ** 0.7 * len(array)).astype(int)
    return array[ends[rank] : ends[rank + 1]]


def plain(build, runs, initialize=True):
    """Builds and runs a model in plain TensorFlow on whole batches.

    Args:
        build: build(embedding_scope) -> fetches by name and placeholders by name, `(fetches,
            feeds)`.
        runs: [(names to fetch, {placeholder name: value})].

    Returns:
        The list of results, each a dictionary by name.
    """
    return _run(contextlib.nullcontext(), contextlib.nullcontext, build, runs)


def sharded(strategy, build, runs):
    """Builds and runs the same on this rank, tables sharded."""
    return _run(strategy.scope(), strategy.embedding_scope, build, runs)


def _run(scope, embedding_scope, build, runs):
    results = []
    with scope, tf.Graph().as_default():
        tf.set_random_seed(7)
        fetches, feeds = build(embedding_scope)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for names, values in runs:
                results.append(
                    session.run(
                        {name: fetches[name] for name in names},
                        {feeds[name]: value for name, value in values.items()},
                    )
                )
    return results


def table_values(rows, dim, seed=0):
    return np.random.default_rng([seed, rows, dim]).normal(0, 1, (rows, dim)).astype(np.float32)


def table(name, rows, dim, seed=0, **kwargs):
    return tf.get_variable(
        name,
        [rows, dim],
        initializer=tf.constant_initializer(table_values(rows, dim, seed)),
        **kwargs,
    )
