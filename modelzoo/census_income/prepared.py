"""The census data, prepared once for all ranks and all later runs.

tensorflow-datasets writes into a folder of another name and renames it at the end, so prepared data
is whole or not there. Ranks that start together take turns at a file lock: the first prepares, the
others find the data there. The system frees the lock of a process that dies, whatever killed it, so
the next one prepares anew. Nothing here waits for a particular rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import tensorflow_datasets as tfds
from absl import logging
from columns import Rows
from dataset import CensusIncome, DownloadFailed, Source, as_rows

# Most 4.9 releases, the last for Python 3.9 among them, first look for any dataset in a bucket of
# Google's, for minutes where there is no network.
tfds.core.utils.gcs_utils._is_gcs_disabled = True


def load(folder: Path | None, say: Callable[[str], None] = print) -> tuple[Rows, Rows]:
    """The training and the test rows, from the files in `folder` or, without one, from UCI.

    Raises `DownloadFailed` (in every process of a job, if in one), `MalformedFile`, and `OSError`
    where the prepared data can't be written.
    """
    source = Source.local(folder) if folder else Source.uci()
    builder, is_prepared = _look(source)
    if not is_prepared:
        say(
            f"Preparing the census data, {source.description}, in {builder.data_path} (once, some "
            f"ten seconds)"
        )
        _prepare(source)
        builder, _ = _look(source)
    return as_rows(builder, "train"), as_rows(builder, "test")


def _look(source: Source) -> tuple[CensusIncome, bool]:
    """A new builder, because it looks for prepared data only while it is made, and whether there is
    any.
    """
    with _quiet():
        builder = CensusIncome(config=source)
        return builder, builder.is_prepared()


def _prepare(source: Source) -> None:
    home = Path(_look(source)[0].data_path).parent  # of this source alone
    home.mkdir(parents=True, exist_ok=True)
    failure = home / "download-failed"
    with _locked(home / "lock"):
        builder, is_prepared = _look(source)
        if is_prepared:
            return
        # The ranks of a job must agree whether there is census data: what one of them has failed at
        # since this process started, this one doesn't try again.
        if failure.exists() and failure.stat().st_mtime >= psutil.Process().create_time():
            raise DownloadFailed(failure.read_text())
        for leftover in home.glob("*incomplete*"):  # of a preparation that was killed
            shutil.rmtree(leftover)
        try:
            with _quiet():
                builder.download_and_prepare()
        except DownloadFailed as error:
            failure.write_text(str(error))
            raise


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
