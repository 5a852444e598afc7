"""Finds TensorFlow's file system for a path like `s3://…`; fsspec, if installed, provides some."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.rows import remote_files

# What fsspec has file systems for, by other packages; TensorFlow may know some itself.
SCHEMES = ("s3", "s3a", "gs", "gcs", "hdfs", "webhdfs", "abfs", "abfss", "az")


def register_in_scope() -> None:
    """Registers the usual remote schemes if fsspec is installed; TensorFlow's own stay.

    TensorFlow I/O can't be imported any more once its schemes are taken, so where it is installed
    they are left to it, unless `check` needs one.
    """
    # It imports neither package: most jobs have local files.
    if "tensorflow_io" in sys.modules or importlib.util.find_spec("tensorflow_io") is None:
        _register_known()


def _register_known() -> None:
    if importlib.util.find_spec("fsspec") is None or native_library.missing() is not None:
        return
    with contextlib.suppress(ImportError):  # `check` says why, where a path has a scheme.
        for scheme in SCHEMES:
            remote_files.register(scheme)


def register_filesystem(scheme: str, **storage_options: Any) -> None:
    """Lets TensorFlow, checkpoints, exports and datasets use a file system of fsspec.

    The usual ones (s3, gs, hdfs, abfs, …) are registered by `scope()`; call this for others, or to
    give them options. fsspec also reads options from its configuration files and from environment
    variables such as `FSSPEC_S3_ENDPOINT_URL`. Call it on all ranks.

    Args:
        scheme: as in paths, without `://`.
        storage_options: what fsspec's file system of this scheme takes.

    Raises:
        ImportError: fsspec is not installed, or the compiled operations can't be used here.
        ValueError: fsspec does not know the scheme, or TensorFlow has a file system of its own for
            it.

    Source: https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration
    """
    try:
        registry = importlib.import_module("fsspec.registry")
    except ImportError as error:
        raise ImportError(f"{scheme}:// needs fsspec: pip install fsspec") from error
    if scheme not in {*registry.registry, *registry.known_implementations}:
        raise ValueError(
            f"fsspec has no file system for {scheme}://: call fsspec.register_implementation first."
        )
    if not remote_files.register(scheme, storage_options):
        raise ValueError(
            f"TensorFlow has a file system of its own for {scheme}://, which is used as it is."
        )


def check(path: Any) -> None:
    """Checks that TensorFlow has a file system for a path; fsspec, if installed, provides some.

    Args:
        path: a path of any kind, or None.

    Raises:
        ValueError: it has none; says what to install.
    """
    scheme, separator, _ = os.fsdecode(path or "").partition("://")
    if not separator:
        return
    if scheme not in tf.io.gfile.get_registered_schemes():
        _register_known()
    if scheme in tf.io.gfile.get_registered_schemes():
        try:
            remote_files.check(scheme)
        except ImportError as error:
            raise ValueError(f"'{os.fsdecode(path)}': {error}.") from error
        return
    raise ValueError(
        f"'{os.fsdecode(path)}': TensorFlow has no file system for {scheme}://. {_fix(scheme)}."
    )


def _fix(scheme: str) -> str:
    if importlib.util.find_spec("fsspec") is None:
        return "Fsspec, which adds some, is not installed. For s3://: pip install fsspec s3fs"
    try:
        remote_files.load()
    except ImportError as error:
        return f"fsspec, which adds some, can't be used: {error}"
    return f"If fsspec has one: collective.data.register_filesystem({scheme!r})"


def fsspec_file_system(path: str) -> tuple[Any, str] | None:
    """Returns fsspec's file system of a path, and the path in it; None where it has none here.

    It has none if its package (s3fs for `s3://…`) is not installed, or if TensorFlow itself has the
    scheme.
    """
    if "://" not in path:
        return None
    _register_known()
    try:
        return remote_files.of_path(path)
    except ImportError:
        return None
