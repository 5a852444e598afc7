"""Imports tensorflow-datasets when it is needed, or says how to install it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def reader(module: str, instead: str, fail: Callable[[str], None]) -> Any:
    """Imports a module that reads a data set of tensorflow-datasets, which takes seconds.

    Args:
        module: its name.
        instead: the option that takes data which need no package.
        fail: gets what is wrong where it can't be imported, and doesn't return.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fail(
            f"the data are read by tensorflow-datasets, which can't be imported here ({error}): "
            "`make setup` installs it, or pip install '.[datasets]' in the checkout. "
            f"{instead} does without"
        )
        raise
