"""Reads the Adult (Census Income) data as a data set of tensorflow-datasets.

It has 32,561 training rows and 16,281 test rows. They come from the files in a folder, if the
configuration names one, else from the archive that comes along; nothing is downloaded. Both forms
of the files are read: UCI's own (no header, a comment as the first line of adult.test, labels with
a full stop there) and a plain CSV with a header.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from census_income import archive
from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
from common import data_preparation
from common.counting import counted

FILES = dict(zip(("train", "test"), archive.FILES))
FILE_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    LABEL,
)
LABELS = ("<=50K", ">50K")
CITATION = """\
@misc{adult,
  author = {Becker, Barry and Kohavi, Ronny},
  title = {{Adult}},
  year = {1996},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C5XW20},
  note = {Licence: CC BY 4.0}
}"""


class MalformedFile(Exception):
    """A line isn't a row of the Adult data."""


@dataclasses.dataclass(eq=False)
class CensusConfig(tfds.core.BuilderConfig):
    """Names the source of the rows: a folder, or else the archive.

    Data prepared from different files, or from files that were edited, never share a folder.
    """

    folder: Path | None = None

    @classmethod
    def of_files(cls, folder: Path | None) -> CensusConfig:
        digest = hashlib.sha256()
        for name in FILES.values():
            digest.update(read(folder, name))
        return cls(
            name=f"local-{digest.hexdigest()[:12]}",
            description=f"of {folder}" if folder else "that come along",
            folder=folder,
        )


def read(folder: Path | None, name: str) -> bytes:
    """Returns a file of `folder`, or of the archive without one."""
    return (folder / name).read_bytes() if folder else archive.read(name)


class CensusIncome(tfds.core.GeneratorBasedBuilder):
    """Does a person earn more than 50,000 dollars a year? From the US census of 1994."""

    name = "census_income"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {column: tfds.features.Text() for column in CATEGORICAL}
        features.update({column: tfds.features.Scalar(np.int32) for column in NUMERIC})
        features[LABEL] = tfds.features.ClassLabel(names=LABELS)
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
        return {split: self._generate_examples(name) for split, name in FILES.items()}

    def _generate_examples(self, name):
        folder = self.builder_config.folder
        lines = io.TextIOWrapper(io.BytesIO(read(folder, name)), encoding="utf-8")
        yield from enumerate(parse(lines, (folder or archive.ARCHIVE) / name))


def parse(lines: Iterable[str], path: object) -> Iterator[dict[str, object]]:
    """Yields the examples in a file's lines, in their order; errors call the file `path`."""
    empty = True
    for number, line in enumerate(lines, start=1):
        fields = [field.strip() for field in line.split(",")]
        if fields == [""] or line.startswith("|") or fields[0] == "age":
            continue
        if len(fields) != len(FILE_COLUMNS):
            raise MalformedFile(
                f"{path}, line {number}: {counted(len(fields), 'field')} instead of "
                f"{len(FILE_COLUMNS)}"
            )
        example: dict[str, object] = {
            column: fields[place] for place, column in enumerate(FILE_COLUMNS)
        }
        example[LABEL] = fields[-1].rstrip(".")
        if example[LABEL] not in LABELS:
            raise MalformedFile(
                f"{path}, line {number}: the label is {fields[-1]!r} instead of one of {LABELS}"
            )
        for column in NUMERIC:
            try:
                example[column] = int(example[column])
            except ValueError:
                raise MalformedFile(
                    f"{path}, line {number}: {column} is {example[column]!r} instead of a "
                    f"whole number"
                ) from None
        empty = False
        yield example
    if empty:
        raise MalformedFile(f"{path}: no rows in it")


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
        MalformedFile: a line of the files isn't a row.
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
