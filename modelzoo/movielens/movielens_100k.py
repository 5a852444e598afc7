"""movie_lens/100k-ratings of tensorflow-datasets: read from a data directory, or downloaded and
prepared once for all ranks.

tensorflow-datasets writes into a folder of another name and renames it at the end, so prepared data
is whole or not there. Ranks that start together take turns at a file lock: the first prepares, the
others find the data there. The system frees the lock of a process that dies. Nothing here waits for
a particular rank.
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

import numpy as np
import psutil
import tensorflow_datasets as tfds
from absl import logging
from arguments import CONFIG, HANDLES

COLUMNS = ("movie_id", "user_id", "user_rating")

# Most 4.9 releases, the last for Python 3.9 among them, first look for any dataset in a bucket of
# Google's, for minutes where there is no network.
tfds.core.utils.gcs_utils._is_gcs_disabled = True

# 4.9.10 prepares its own data sets with a package that it doesn't require of Python 3.11, where the
# standard library has it.
if importlib.util.find_spec("importlib_resources") is None:
    sys.modules["importlib_resources"] = importlib.resources


class DownloadFailed(Exception):
    """GroupLens could not be reached, or what it sent is not the data."""


def load(folder: Path | None, say: Callable[[str], None] = print) -> list[np.ndarray]:
    """`COLUMNS` of all ratings, [R] each, in the order of the prepared files.

    Args:
        folder: a data directory that holds the ratings; None: the usual one of tensorflow-datasets,
            where they are prepared if they aren't there.

    Raises:
        DownloadFailed: in every process of a job, if in one.
        OSError: the data can't be written or read.
    """
    builder, is_prepared = _look(folder)
    if not is_prepared:
        say(f"Preparing movie_lens/{CONFIG} in {builder.data_path} (once)")
        _prepare()
        builder, _ = _look(None)
    with _quiet():
        columns = tfds.as_numpy(
            builder.as_dataset(
                split="train",
                batch_size=-1,
                decoders=tfds.decode.PartialDecoding(dict.fromkeys(COLUMNS, True)),
            )
        )
    return [
        np.asarray(columns[name], np.float32 if name == "user_rating" else np.bytes_)
        for name in COLUMNS
    ]


def _look(folder: Path | None) -> tuple[Any, bool]:
    """A new builder, because it looks for prepared data only while it is made, and whether there is
    any: under either name.
    """
    with _quiet():
        builders = [tfds.builder(f"{handle}/{CONFIG}", data_dir=folder) for handle in HANDLES]
        return next(
            ((builder, True) for builder in builders if builder.is_prepared()), (builders[0], False)
        )


def _prepare() -> None:
    home = Path(_look(None)[0].data_path).parent  # of these ratings alone
    home.mkdir(parents=True, exist_ok=True)
    failure = home / "download-failed"
    with _locked(home / "lock"):
        builder, is_prepared = _look(None)
        if is_prepared:
            return
        # The ranks of a job must agree whether there are ratings: what one of them has failed at
        # since this process started, this one doesn't try again.
        if failure.exists() and failure.stat().st_mtime >= psutil.Process().create_time():
            raise DownloadFailed(failure.read_text())
        for leftover in home.glob("*incomplete*"):  # of a preparation that was killed
            shutil.rmtree(leftover)
        try:
            _download(builder)
        except DownloadFailed as error:
            failure.write_text(str(error))
            raise


def _download(builder: Any) -> None:
    url = builder.builder_config.download_url
    try:
        # Asked first, because tensorflow-datasets goes on trying for minutes where there is no
        # network.
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20).close()
        with _quiet():
            builder.download_and_prepare()
    # whatever it was (name service, proxy, status, digest), there is no data
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(f"{url}: {reason[:200]}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file frees the lock


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Whichever rank prepares, only `say` speaks: no progress bars, no notes of
    tensorflow-datasets.
    """
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
