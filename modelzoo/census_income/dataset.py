"""Reads the Adult (Census Income) data as a data set of tensorflow-datasets.

It has 32,561 training rows and 16,281 test rows. They come from local files, if the configuration
names a folder, else from UCI. Both forms of the files are read: UCI's own (no header, a comment as
the first line of adult.test, labels with a full stop there) and a plain CSV with a header.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
from common import data_preparation

FILES = {"train": "adult.data", "test": "adult.test"}  # checksums.tsv has their digests
URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
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
    """Names the source of the rows.

    Data prepared from different sources, or from files that were edited, never share a folder.
    """

    folder: Path | None = None

    @classmethod
    def of_files(cls, folder: Path) -> CensusConfig:
        digest = hashlib.sha256()
        for name in FILES.values():
            digest.update((folder / name).read_bytes())
        return cls(
            name=f"local-{digest.hexdigest()[:12]}", description="from local files", folder=folder
        )

    @classmethod
    def of_uci(cls) -> CensusConfig:
        return cls(name="uci", description="downloaded from UCI")


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
        if self.builder_config.folder:
            paths = {split: self.builder_config.folder / name for split, name in FILES.items()}
        else:
            paths = _download(dl_manager)
        return {split: self._generate_examples(path) for split, path in paths.items()}

    def _generate_examples(self, path):
        with open(path, encoding="utf-8") as lines:
            yield from enumerate(parse(lines, path))


def _download(dl_manager) -> dict:
    urls = {split: URL + name for split, name in FILES.items()}
    with data_preparation.downloading(urls["train"]):
        return dl_manager.download(urls)


def parse(lines: Iterable[str], path: object) -> Iterator[dict[str, object]]:
    """Yields the examples in a file's lines, in their order; errors call the file `path`."""
    empty = True
    for number, line in enumerate(lines, start=1):
        fields = [field.strip() for field in line.split(",")]
        if fields == [""] or line.startswith("|") or fields[0] == "age":
            continue
        if len(fields) != len(FILE_COLUMNS):
            raise MalformedFile(
                f"{path}, line {number}: {len(fields)} fields instead of {len(FILE_COLUMNS)}"
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
    """Loads the training and the test rows, from the files in `folder` or, without one, from UCI.

    Raises:
        DownloadFailed: in every process of a job, if in one.
        MalformedFile: a line of the files isn't a row.
        OSError: the prepared data can't be written.
    """
    config = CensusConfig.of_files(folder) if folder else CensusConfig.of_uci()

    def find() -> data_preparation.Found:
        with data_preparation.quiet():
            builder = CensusIncome(config=config)
            return builder, builder.is_prepared()

    def prepare(builder: CensusIncome) -> None:
        with data_preparation.quiet():
            builder.download_and_prepare()

    def announce(path: Path) -> None:
        report(
            f"Preparing the census data, {config.description}, in {path} (once, some ten seconds)"
        )

    builder = data_preparation.prepare_once(find, prepare, announce)
    return as_rows(builder, "train"), as_rows(builder, "test")
