"""Finds TensorFlow's file system for a path like `s3://…`, where another package brings it."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import tensorflow.compat.v1 as tf

# The release of TensorFlow I/O that was built for the TensorFlow that this library is for.
TENSORFLOW_IO = "tensorflow-io==0.36.0"


def check(path: Any) -> None:
    """Checks that there is a file system for a path; TensorFlow I/O, if installed, brings some.

    Args:
        path: a path of any kind, or None.

    Raises:
        ValueError: there is none. It says what to install.
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
    """Imports TensorFlow I/O, which registers its file systems; returns why there are no others."""
    try:
        importlib.import_module("tensorflow_io")
    except ModuleNotFoundError:
        return "TensorFlow I/O, which adds some, is not installed"
    except Exception as error:  # It is made for one release of TensorFlow.
        return f"TensorFlow I/O can not be imported ({type(error).__name__}: {error})"
    return "TensorFlow I/O does not add it either"
