"""Leaves output that would be the same on all ranks to rank 0: event files, info and
deprecations."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives


class SilentEventWriter:
    """Replaces `EventFileWriter`, and writes nothing."""

    def __init__(self, logdir: str, *args: Any, **kwargs: Any):
        self._logdir = logdir

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Any) -> None:
        pass

    reopen = flush = close = lambda self: None


class RepeatedMessages(logging.Filter):
    """Lets warnings and errors through, except for deprecations, which rank 0 reports."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and not str(record.msg).startswith("From %s")


_filter = RepeatedMessages()


def is_silent() -> bool:
    """Tells whether this rank leaves its output to rank 0."""
    return collectives.rank() > 0


def quieten() -> None:
    """Filters TensorFlow's log messages on all ranks but 0, until `restore`."""
    if is_silent():
        tf.get_logger().addFilter(_filter)


def restore() -> None:
    """Lets TensorFlow log as before."""
    tf.get_logger().removeFilter(_filter)
