"""Replaces functions of other libraries, and restores them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

_ABSENT = object()


def always() -> bool:
    """The condition of a patch that is always needed."""
    return True


class Patch(NamedTuple):
    """Describes the replacement of a function.

    Attributes:
        owner: the class or module that has the attribute.
        name: the attribute's name as readers know it; the part after the last dot is the attribute
            itself.
        replacement: a function that is called with the original and then with the caller's
            arguments; or, in a `ReplacedValue`, the attribute's new value.
        why: what would go wrong without it.
        when: tells, when the patch is applied, whether it is needed.
    """

    owner: Any
    name: str
    replacement: Any
    why: str
    when: Callable[[], bool] = always

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    def value(self) -> Any:
        """Returns the new value of the attribute."""
        original, replacement = getattr(self.owner, self.attribute), self.replacement

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return replaced


class OperationPatch(Patch):
    """Describes the replacement of a generated function that makes one operation.

    AutoGraph finds no source code for it, and would warn about that in each `tf.function` that
    calls it.
    """

    def value(self) -> Any:
        return tf.autograph.experimental.do_not_convert(super().value())


class ReplacedValue(Patch):
    """Describes an attribute that is replaced by a value that doesn't use the original."""

    def value(self) -> Any:
        return self.replacement


class Patches:
    """Applies patches together, and restores what they replaced."""

    def __init__(self, patches: Iterable[Patch]):
        self._patches = patches
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        try:
            for patch in self._patches:
                if patch.when():
                    self._put(patch.owner, patch.attribute, patch.value())
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _put(self, owner: Any, attribute: str, value: Any) -> None:
        own = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, value)

        def undo() -> None:
            if own is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)

        self._undo.append(undo)
