"""Data sets of tensorflow-datasets, prepared once for all ranks and all later runs.

tensorflow-datasets writes into a folder of another name and renames it at the end, so prepared data
is whole or not there. Ranks that start together take turns at a file lock: the first prepares, the
others find the data there. The system frees the lock of a process that dies, whatever killed it, so
the next one prepares again. Nothing here waits for a particular rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.resources
import importlib.util
import io
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import tensorflow_datasets as tfds
from absl import logging

# Most 4.9 releases, the last for Python 3.9 among them, first look for any data set in a bucket of
# Google's, for minutes where there is no network.
tfds.core.utils.gcs_utils._is_gcs_disabled = True

# 4.9.10 prepares its own data sets with a package that it doesn't require of Python 3.11, where the
# standard library has it.
if importlib.util.find_spec("importlib_resources") is None:
    sys.modules["importlib_resources"] = importlib.resources

# A builder of tensorflow-datasets, and whether its data is prepared.
Found = tuple[Any, bool]


class DownloadFailed(Exception):
    """The data's server could not be reached, or what it sent is not the data."""


def prepare_once(
    find: Callable[[], Found],
    prepare: Callable[[Any], None],
    announce: Callable[[Path], None],
) -> Any:
    """Returns a builder whose data is prepared, whichever process has done that.

    Args:
        find: makes a new builder, because a builder looks for prepared data only while it is made.
        prepare: downloads and prepares the data of a builder.
        announce: says that the data is going to be prepared in a folder.

    Raises:
        DownloadFailed: `prepare` has raised it, here or in another process of the job.
        OSError: the data can't be written or read.
    """
    builder, is_prepared = find()
    if is_prepared:
        return builder
    announce(Path(builder.data_path))
    home = Path(builder.data_path).parent  # of this data alone
    home.mkdir(parents=True, exist_ok=True)
    failure = home / "download-failed"
    with _locked(home / "lock"):
        builder, is_prepared = find()
        if is_prepared:
            return builder
        # The ranks of a job must agree whether there is data: what one of them has failed at since
        # this process started, this one doesn't try again.
        if failure.exists() and failure.stat().st_mtime >= psutil.Process().create_time():
            raise DownloadFailed(failure.read_text())
        for leftover in home.glob("*incomplete*"):  # of a preparation that was killed
            shutil.rmtree(leftover)
        try:
            prepare(builder)
        except DownloadFailed as error:
            failure.write_text(str(error))
            raise
    return find()[0]


@contextlib.contextmanager
def downloading(url: str) -> Iterator[None]:
    """Turns every failure of a download from `url` into `DownloadFailed`, and fails fast."""
    try:
        # Asked first, because tensorflow-datasets goes on trying for minutes where there is no
        # network.
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20).close()
        yield
    # Whatever it was (name service, proxy, status, digest), there is no data.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(f"{url}: {reason[:200]}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the progress bars and notes of tensorflow-datasets."""
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file frees the lock
