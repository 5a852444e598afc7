"""Trains recommendation models on several ranks, with TensorFlow and sharded embedding tables.

    from collective import CollectiveStrategy

    strategy = CollectiveStrategy()
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable('user', [1000000, 16])
        ...

Importing this package loads no TensorFlow; the first use of a name does.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if os.path.isfile(f"{__path__[0]}/launch"):  # a link that git wrote as a text file
    from importlib.util import find_spec

    # An editable install of this checkout finds the folders without the links.
    _origin = getattr(find_spec("collective.launch"), "origin", None)
    if not _origin or not os.path.samefile(_origin, f"{__path__[0]}/../launch/__init__.py"):
        raise ImportError(
            f"launch, ops and strategies in {__path__[0]} are text files instead of links: git has "
            "checked them out with core.symlinks=false, so collective can't import its parts. "
            "Run `git config core.symlinks true` and `git checkout -- collective`, or install the "
            "package with `pip install .` and run programs outside of the checkout."
        )

if TYPE_CHECKING:
    from collective import checkpoint as checkpoint
    from collective import feature_column as feature_column
    from collective.embedding_variable import embedding_sizes, get_embedding_variable
    from collective.errors import RankError, ReplicaError, TableError
    from collective.group_embedding import group_embedding_lookup, group_embedding_lookup_sparse
    from collective.strategy import CollectiveStrategy
    from collective.tables.dynamic_table import DynamicTable
    from collective.tables.table import Table

__all__ = [
    "CollectiveStrategy",
    "DynamicTable",
    "RankError",
    "ReplicaError",
    "Table",
    "TableError",
    "embedding_sizes",
    "get_embedding_variable",
    "group_embedding_lookup",
    "group_embedding_lookup_sparse",
]
__version__ = "0.1.0"
_MODULES = {
    "CollectiveStrategy": "strategy",
    "DynamicTable": "tables.dynamic_table",
    "RankError": "errors",
    "ReplicaError": "errors",
    "Table": "tables.table",
    "TableError": "errors",
    "embedding_sizes": "embedding_variable",
    "get_embedding_variable": "embedding_variable",
    "group_embedding_lookup": "group_embedding",
    "group_embedding_lookup_sparse": "group_embedding",
}
_SUBMODULES = frozenset({"checkpoint", "feature_column"})


# Type checkers find the names above; with this function, they would take any other for one, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_SUBMODULES])
