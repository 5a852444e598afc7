"""Reads the Adult (Census Income) data as a data set of tensorflow-datasets.

It has 32,561 training rows and 16,281 test rows. They come from the files in a folder, if the
configuration names one, else from the archive that comes along; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from census_income import adult_files, archive
from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
from common import data_preparation

CITATION = """\
@misc{adult,
  author = {Becker, Barry and Kohavi, Ronny},
  title = {{Adult}},
  year = {1996},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C5XW20},
  note = {Licence: CC BY 4.0}
}"""


@dataclasses.dataclass(eq=False)
class CensusConfig(tfds.core.BuilderConfig):
    """Names the source of the rows: a folder, or else the archive.

    Data prepared from different files, or from files that were edited, never share a folder.
    """

    folder: Path | None = None

    @classmethod
    def of_files(cls, folder: Path | None) -> CensusConfig:
        digest = hashlib.sha256()
        for name in adult_files.FILES.values():
            digest.update(adult_files.read(folder, name))
        return cls(
            name=f"local-{digest.hexdigest()[:12]}",
            description=f"of {folder}" if folder else "that come along",
            folder=folder,
        )


class CensusIncome(tfds.core.GeneratorBasedBuilder):
    """Does a person earn more than 50,000 dollars a year? From the US census of 1994."""

    name = "census_income"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {column: tfds.features.Text() for column in CATEGORICAL}
        features.update({column: tfds.features.Scalar(np.int32) for column in NUMERIC})
        features[LABEL] = tfds.features.ClassLabel(names=adult_files.LABELS)
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{type(self).__doc__}\n"
            "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
            homepage="https://archive.ics.uci.edu/dataset/2/adult",
            citation=CITATION,
            license="CC BY 4.0",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(name) for split, name in adult_files.FILES.items()}

    def _generate_examples(self, name):
        folder = self.builder_config.folder
        lines = io.TextIOWrapper(io.BytesIO(adult_files.read(folder, name)), encoding="utf-8")
        yield from enumerate(adult_files.parse(lines, (folder or archive.ARCHIVE) / name))


def as_rows(builder: CensusIncome, split: str) -> Rows:
    """Reads all rows of a prepared split, in the order of the file."""
    rows = {}
    for column, values in tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1)).items():
        if column in CATEGORICAL:
            rows[column] = np.char.decode(values.astype(np.bytes_), "utf-8")
        else:
            rows[column] = values.astype(np.int64)
    return rows


def load(folder: Path | None, report: Callable[[str], None] = print) -> tuple[Rows, Rows]:
    """Loads the training and test rows: of the files in `folder`, or of the archive without one.

    Raises:
        adult_files.MalformedFile: a line of the files isn't a row.
        OSError: the files can't be read, or the prepared data can't be written.
        zipfile.BadZipFile: the archive is damaged.
    """
    config = CensusConfig.of_files(folder)

    def find() -> data_preparation.Found:
        with data_preparation.quiet():
            builder = CensusIncome(config=config)
            return builder, builder.is_prepared()

    def prepare(builder: CensusIncome) -> None:
        with data_preparation.quiet():
            builder.download_and_prepare()

    def announce(path: Path) -> None:
        report(f"Preparing the census data {config.description} in {path} (once, some ten seconds)")

    builder = data_preparation.prepare_once(find, prepare, announce)
    return as_rows(builder, "train"), as_rows(builder, "test")
