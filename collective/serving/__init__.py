"""Exports SavedModels that plain TensorFlow can serve, and follows their versions.

`strategy.export_saved_model` writes a version into a folder, which TensorFlow Serving watches. A
Python program follows the folder with `watch`, without ranks or Horovod:

    from collective import serving

    for path in serving.watch('served'):
        model = tf.saved_model.load(path)
        ...
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.serving.version_watch import VersionWatch

__all__ = ["VersionWatch", "watch"]


def watch(
    dir: str | os.PathLike[str], interval: float = 5.0, timeout: float | None = None
) -> VersionWatch:
    """Follows a folder of versions of a SavedModel: yields the newest complete version as versions
    appear.

        with serving.watch('served') as versions:
            model = load(versions.latest())       # what is there now; None: nothing
            for path in versions:                 # waits for the next one
                model = load(path)

    Versions are the folders whose names are numbers, as for TensorFlow Serving; everything else is
    skipped. A version that lacks a file, or has a file that is cut off or can't be parsed, is
    skipped with one warning. Of several new versions it yields the newest. If the current version
    is deleted to roll back, it yields the newest remaining one. The folder need not exist yet, and
    may be a remote one that `tf.io.gfile` reads.

    Args:
        dir: the folder.
        interval: seconds between two checks of the folder.
        timeout: seconds of waiting for a version after which the iteration ends; None: never.

    Returns:
        The watch, to be iterated over; `latest()` doesn't wait, and `close()` ends it, from any
        thread.

    Raises:
        ValueError: `interval` or `timeout` isn't a number of seconds.
    """
    from collective.serving import version_watch

    return version_watch.watch(dir, interval, timeout)


def __getattr__(name: str) -> Any:
    # It needs TensorFlow.
    if name == "VersionWatch":
        from collective.serving import version_watch

        return version_watch.VersionWatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
