"""Accepts session options that DeepRec's TensorFlow has and TensorFlow lacks."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow.compat.v1 as tf

from collective.compat.framework import Name

Message = tf.ConfigProto.__mro__[1]  # the base class of all protocol buffers
# The fields that the frameworks of this process add, by the message's name and their own name.
FIELDS: dict[tuple[str, str], Name] = {}


class Ignored:
    """Accepts any settings of a message that doesn't exist."""

    def __getattr__(self, name: str) -> Ignored:
        return self

    def __getitem__(self, index: Any) -> Ignored:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Ignored:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Does nothing."""

    def __bool__(self) -> bool:
        return False


class SessionConfig:
    """Replaces a `tf.ConfigProto`, or a message in one, and accepts FIELDS, too.

    A protocol buffer refuses unknown fields. `isinstance` and copies show the message itself.
    """

    def __init__(self, message: Any):
        object.__setattr__(self, "_message", message)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._message)

    def __getattr__(self, name: str) -> Any:
        added = _added(self._message, name)
        if added is not None:
            if added.kind == "no effect":
                added.use()
            return Ignored()
        value = getattr(self._message, name)
        return SessionConfig(value) if isinstance(value, Message) else value

    def __setattr__(self, name: str, value: Any) -> None:
        added = _added(self._message, name)
        if added is None:
            setattr(self._message, name, value)
        elif value:
            added.use()

    def __eq__(self, other: Any) -> bool:
        return bool(self._message == getattr(other, "_message", other))

    def __copy__(self) -> Any:
        return copy.copy(self._message)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._message, memo)

    def __repr__(self) -> str:
        return repr(self._message)

    __hash__ = None  # type: ignore[assignment]


def _added(message: Any, name: str) -> Name | None:
    return FIELDS.get((message.DESCRIPTOR.name, name))


def config_proto(*args: Any, **kwargs: Any) -> Any:
    """Makes a `tf.ConfigProto` that accepts FIELDS, also in the messages in it."""
    return SessionConfig(tf.ConfigProto(*args, **kwargs))
