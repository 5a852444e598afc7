"""Imports pyarrow when it is needed, or says how to install it."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def module(name: str = "") -> Any:
    """Returns pyarrow, or its module `name`: 'parquet', 'csv', ….

    Raises:
        ImportError: pyarrow isn't installed, or doesn't import with the installed NumPy.
    """
    # Looked up for each column of each batch: an import that is done takes longer.
    known = sys.modules.get(f"pyarrow.{name}" if name else "pyarrow")
    if known is not None:
        return known
    try:
        return importlib.import_module(f"pyarrow.{name}" if name else "pyarrow")
    except ImportError as error:
        raise ImportError(
            f"reading and writing Parquet needs pyarrow, which can't be imported here ({error}). "
            "Install it: pip install 'collective-strategy[data]', or pip install "
            "'pyarrow>=14,<22' (later releases need a NumPy that TensorFlow 2.15 doesn't take)."
        ) from error
