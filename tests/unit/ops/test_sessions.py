"""Runs past a replaced `session.run`, and sessions inside of monitored ones."""

from __future__ import annotations

import functools
import pathlib
import traceback
from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_lib

from collective.ops.graph.sessions import errors_without_stacks, raw_session, run_unpatched


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


def test_an_error_of_a_file_has_one_line_and_no_stack(tmp_path: pathlib.Path):
    with tf.Graph().as_default(), tf.Session() as session:
        (tmp_path / "file").touch()
        save = tf.raw_ops.SaveV2(
            prefix=f"{tmp_path}/file/x", tensor_names=["a"], shape_and_slices=[""], tensors=[[1.0]]
        )
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            with errors_without_stacks():
                session.run(save)
    text = "".join(traceback.format_exception(*caught._excinfo))
    assert caught.value.message.endswith("; Not a directory")
    assert text.count("Traceback") == 1 and "Original stack" not in text
