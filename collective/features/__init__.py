"""Reads PERSIA's configuration files: makes tables of slots, and looks their features up.

    load              reads embedding_config.yml
    load_global       reads global_config.yml
    tables            makes the tables of slots
    embeddings        looks up the embeddings of features
    Slots, GlobalConfig   what the two files have
    RawEmbedding      the embeddings of single ids, and a mask

`python -m collective.features schema slots` (or `global`) prints a JSON schema for editors. The
guide is docs/guides/features.md.

Importing this package loads neither TensorFlow nor pydantic; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.features.global_config import GlobalConfig, load_global
    from collective.features.lookup import RawEmbedding, embeddings, tables
    from collective.features.slots import Slots, load

__all__ = [
    "GlobalConfig",
    "RawEmbedding",
    "Slots",
    "embeddings",
    "load",
    "load_global",
    "tables",
]
_MODULES = {
    "GlobalConfig": "global_config",
    "RawEmbedding": "lookup",
    "Slots": "slots",
    "embeddings": "lookup",
    "load": "slots",
    "load_global": "global_config",
    "tables": "lookup",
}

# Type checkers find the names above; with this function, they would accept any other name, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
