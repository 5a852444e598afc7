"""Runs sessions as TensorFlow does, past what `scope()` puts in the place of `session.run`."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_lib


def run_unpatched(session: Any, fetches: Any, feed_dict: Any = None) -> Any:
    """Runs `fetches` on this rank alone: no other rank is asked, and the run counts as no step.

    `scope()` replaces `session.run`, and leaves TensorFlow's own as its `__wrapped__`.
    """
    # A subclass may have a `run` of its own, which ends in the replaced one.
    kind = (
        session_lib.BaseSession if isinstance(session, session_lib.BaseSession) else type(session)
    )
    run = kind.run
    return getattr(run, "__wrapped__", run)(session, fetches, feed_dict)


def raw_session(session: Any) -> Any:
    """Returns the `tf.Session` inside of a monitored session, or `session` itself."""
    while not isinstance(session, tf.Session) and hasattr(session, "_sess"):
        session = session._sess
    return session
