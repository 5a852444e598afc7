"""Finds TensorFlow's file system for a path like `s3://…` if another package provides it."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import tensorflow.compat.v1 as tf

# The release of TensorFlow I/O that was built for this library's TensorFlow.
TENSORFLOW_IO = "tensorflow-io==0.36.0"


def check(path: Any) -> None:
    """Checks that a path has a file system; TensorFlow I/O, if installed, provides some.

    Args:
        path: a path of any kind, or None.

    Raises:
        ValueError: it has none; says what to install.
    """
    scheme, separator, _ = os.fsdecode(path or "").partition("://")
    if not separator or scheme in tf.io.gfile.get_registered_schemes():
        return
    reason = _import_tensorflow_io()
    if scheme not in tf.io.gfile.get_registered_schemes():
        raise ValueError(
            f"'{os.fsdecode(path)}': TensorFlow has no file system for {scheme}://, and {reason}. "
            f"For s3://, hdfs:// and others: pip install {TENSORFLOW_IO}. Nothing was written."
        )


@functools.cache
def _import_tensorflow_io() -> str:
    """Imports TensorFlow I/O, which registers its file systems; returns why that failed, or ''."""
    try:
        importlib.import_module("tensorflow_io")
    except ModuleNotFoundError:
        return "TensorFlow I/O, which adds some, is not installed"
    except Exception as error:  # It is made for one release of TensorFlow.
        return f"TensorFlow I/O can not be imported ({type(error).__name__}: {error})"
    return "TensorFlow I/O does not add it either"
