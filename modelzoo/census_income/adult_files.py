"""Reads the Adult (Census Income) files: those in a folder, or those that come along.

Both forms are read: UCI's own (no header, a comment as the first line of adult.test, labels with a
full stop there) and a plain CSV with a header. It loads no TensorFlow.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from census_income import archive
from census_income.columns import CATEGORICAL, LABEL, NUMERIC, Rows
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


class MalformedFile(Exception):
    """A line isn't a row of the Adult data."""


def read(folder: Path | None, name: str) -> bytes:
    """Returns a file of `folder`, or of the archive without one."""
    return (folder / name).read_bytes() if folder else archive.read(name)


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


def load(folder: Path | None) -> tuple[Rows, Rows]:
    """Returns the training and the test rows of the files in `folder`, or of those that come along.

    Raises:
        MalformedFile: a line of the files isn't a row.
        OSError: the files can't be read.
        zipfile.BadZipFile: the archive is damaged.
    """
    train, test = (_rows(folder, name) for name in FILES.values())
    return train, test


def _rows(folder: Path | None, name: str) -> Rows:
    lines = io.TextIOWrapper(io.BytesIO(read(folder, name)), encoding="utf-8")
    examples = list(parse(lines, (folder or archive.ARCHIVE) / name))
    rows = {column: np.array([row[column] for row in examples]) for column in CATEGORICAL}
    for column in NUMERIC:
        rows[column] = np.array([row[column] for row in examples], np.int64)
    rows[LABEL] = np.array([LABELS.index(str(row[LABEL])) for row in examples], np.int64)
    return rows
