"""Runs past a replaced `session.run`, and sessions inside of monitored ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_lib

from collective.ops.sessions import raw_session, run_unpatched


class SubclassedSession(tf.Session):
    """Has a `run` of its own, which ends in the replaced one."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, **kwargs)


@pytest.mark.parametrize("kind", [tf.Session, SubclassedSession])
def test_a_replaced_run_is_passed_by(kind: type, monkeypatch: pytest.MonkeyPatch):
    original = session_lib.BaseSession.run

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the replaced run was called")

    monkeypatch.setattr(session_lib.BaseSession, "run", refuse)
    with tf.Graph().as_default(), kind() as session:
        fed = tf.placeholder(tf.int32, [])
        assert run_unpatched(session, fed + 1, {fed: 2}) == 3


def test_the_session_inside_a_monitored_one():
    with tf.Graph().as_default():
        tf.train.create_global_step()
        with tf.train.MonitoredSession() as session:
            assert isinstance(raw_session(session), tf.Session)
            assert raw_session(raw_session(session)) is raw_session(session)
