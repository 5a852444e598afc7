"""Defines objects that do nothing, in place of those that tune another framework."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow.compat.v1 as tf


class ExecutorPolicy:
    """Names DeepRec's graph executors."""

    USE_NORMAL_EXECUTOR = 0
    USE_COST_MODEL_EXECUTOR = 1
    USE_INLINE_EXECUTOR = 2


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
    del args, kwargs


def first(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns its first argument."""
    del args, kwargs
    return value


def scope(*args: Any, **kwargs: Any) -> Any:
    """Returns a context that does nothing."""
    del args, kwargs
    return contextlib.nullcontext()


def hook(*args: Any, **kwargs: Any) -> tf.train.SessionRunHook:
    """Makes a hook that does nothing."""
    del args, kwargs
    return tf.train.SessionRunHook()
