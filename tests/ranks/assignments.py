"""Gives batches to scripts that assign variables, and catches the warnings about ranks."""

import contextlib
import logging

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ranks import grouped

V, D = 11, 3
RNG = np.random.default_rng(6)
BATCHES = [
    {"ids": RNG.integers(0, V, grouped.B), "x": RNG.normal(size=(grouped.B, D))} for _ in range(3)
]


@contextlib.contextmanager
def warnings(words="each rank"):
    """Catches the warnings with some words that TensorFlow's logger is given."""
    said, logger, level = [], tf.get_logger(), tf.get_logger().level
    handler = logging.Handler()
    handler.addFilter(lambda record: words in record.getMessage())
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
