"""Reads movie_lens/100k-ratings of tensorflow-datasets, from a folder or downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from common import data_preparation
from movielens.options import CONFIG, HANDLES

COLUMNS = ("movie_id", "user_id", "user_rating")


def load(data_dir: Path | None, report: Callable[[str], None] = print) -> list[np.ndarray]:
    """Loads `COLUMNS` of all ratings, [R] each, in the order of the prepared files.

    Args:
        data_dir: a data directory that holds the ratings; None: the usual one of
            tensorflow-datasets, where they are prepared if they are missing.
        report: gets a line before they are prepared.

    Raises:
        DownloadFailed: in every process of a job, if in one.
        OSError: the data can't be written or read.
    """
    builder, is_prepared = _find(data_dir)
    if not is_prepared:

        def announce(path: Path) -> None:
            report(f"Preparing movie_lens/{CONFIG} in {path} (once)")

        builder = data_preparation.prepare_once(lambda: _find(None), _prepare, announce)
    decoders = tfds.decode.PartialDecoding(dict.fromkeys(COLUMNS, True))
    with data_preparation.quiet():
        dataset = builder.as_dataset(split="train", batch_size=-1, decoders=decoders)
        columns = tfds.as_numpy(dataset)
    return [
        np.asarray(columns[name], np.float32 if name == "user_rating" else np.bytes_)
        for name in COLUMNS
    ]


def _find(data_dir: Path | None) -> data_preparation.Found:
    """Looks for the ratings under either name."""
    with data_preparation.quiet():
        builders = [tfds.builder(f"{handle}/{CONFIG}", data_dir=data_dir) for handle in HANDLES]
        for builder in builders:
            if builder.is_prepared():
                return builder, True
        return builders[0], False


def _prepare(builder: Any) -> None:
    with data_preparation.downloading(builder.builder_config.download_url):
        with data_preparation.quiet():
            builder.download_and_prepare()
