"""Runs sessions as TensorFlow does, without what `scope()` adds to `session.run`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.tensorflow_internals.sessions import session as session_lib


def run_unpatched(session: Any, fetches: Any, feed_dict: Any = None, options: Any = None) -> Any:
    """Runs `fetches` on this rank alone: no other rank is asked, and the run counts as no step.

    `scope()` replaces `session.run`, and keeps TensorFlow's own as its `__wrapped__`.
    """
    # A subclass may have its own `run`, which ends in the replaced one.
    kind = (
        session_lib.BaseSession if isinstance(session, session_lib.BaseSession) else type(session)
    )
    run = kind.run
    return getattr(run, "__wrapped__", run)(session, fetches, feed_dict, options)


@contextlib.contextmanager
def session_before_scripts() -> Iterator[tf.Session]:
    """Opens a session on the CPU that leaves the number of threads to the script's own sessions.

    A process's first session decides for all sessions with its ConfigProto: about threads that run
    operations, unless the session has its own; and about threads within operations, unless
    TensorFlow has been told before that every session has its own.
    """
    variable = "TF_OVERRIDE_GLOBAL_THREADPOOL"
    is_set = variable in os.environ
    os.environ.setdefault(variable, "1")
    config = tf.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
    try:
        with tf.Session(config=config) as session:
            yield session
    finally:
        if not is_set:
            os.environ.pop(variable, None)


@contextlib.contextmanager
def errors_without_stacks() -> Iterator[None]:
    """Inside, reduces TensorFlow's errors of runs to their first line, shown once.

    TensorFlow raises each twice, with the stack that made its operation: a page that says nothing
    if the trouble is a file. The error's class stays.
    """
    try:
        yield
    except tf.errors.OpError as error:
        first = error.__context__ if isinstance(error.__context__, tf.errors.OpError) else error
        kind = type(error)
        if kind is tf.errors.OpError:  # its constructor is different
            raise
        raise kind(None, None, first.message.partition("\n")[0]) from None


def raw_session(session: Any) -> Any:
    """Returns the `tf.Session` inside a monitored session, or `session` itself."""
    while not isinstance(session, tf.Session) and hasattr(session, "_sess"):
        session = session._sess
    return session
