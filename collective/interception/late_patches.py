"""Lists what is replaced of libraries that a script may import at any time, or never.

They are replaced once they are there: when scope() opens, and when a function is traced in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from collective.interception.patching import Patch, Patches
from collective.wrappers import recommenders


class LatePatch(NamedTuple):
    """Describes the replacement of a method of a class that may be imported later.

    Attributes:
        module: the name of the module that has the class.
        name: the class and its method.
        replacement, why: as for `Patch`.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    why: str

    def present(self) -> Patch | None:
        """Returns the patch; None if the script hasn't imported the module."""
        module = sys.modules.get(self.module)
        path = self.name.split(".")[:-1]
        if not hasattr(module, path[0]):
            return None
        owner = functools.reduce(getattr, path, module)
        return Patch(owner, f"{self.module}.{self.name}", self.replacement, self.why)


LATE_PATCHES = (
    LatePatch(
        "tensorflow_recommenders.tasks.retrieval",
        "Retrieval.__call__",
        recommenders.retrieve,
        "Candidates would be those of a rank's own batch, and a step 1/N of one process's.",
    ),
)


class LatePatches:
    """Applies patches as soon as what they replace is imported, and restores it."""

    def __init__(self) -> None:
        self._applied: dict[LatePatch, Patches] = {}

    def apply_present(self) -> None:
        for late in LATE_PATCHES:
            patch = None if late in self._applied else late.present()
            if patch is not None:
                self._applied[late] = Patches([patch])
                self._applied[late].apply()

    def restore(self) -> None:
        while self._applied:
            self._applied.popitem()[1].restore()


LATE = LatePatches()
