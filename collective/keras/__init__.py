"""Has layers and callbacks for models of Keras 2 (`tf.keras`) that train on sharded tables.

docs/guides/keras.md shows them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.keras import callbacks as callbacks
    from collective.keras import layers as layers

_SUBMODULES = frozenset({"callbacks", "layers"})

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
