"""Small Adult files, made up, in both of the forms that the data set reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HEADER = (
    "age, workclass, fnlwgt, education, education-num, marital-status, occupation, relationship, "
    "race, sex, capital-gain, capital-loss, hours-per-week, native-country, classification"
)
TRAIN = [
    "39, State-gov, 77516, Masters, 14, Never-married, Sales, Own-child, White, Male, 2174, 0, "
    "40, Cuba, <=50K",
    "50, ?, 83311, Bachelors, 13, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, "
    "0, 13, Cuba, >50K",
    "38, Private, 215646, HS-grad, 9, Divorced, Handlers-cleaners, Not-in-family, Black, Female, "
    "0, 1902, 40, ?, <=50K",
]
TEST = [
    "25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40, Peru, "
    "<=50K",
    "44, ?, 160323, HS-grad, 9, Divorced, Sales, Husband, White, Male, 7688, 0, 40, Cuba, >50K",
]


def with_header(folder: Path) -> Path:
    return _write(folder, [HEADER, *TRAIN], [HEADER, *TEST])


def as_uci_has_them(folder: Path) -> Path:
    return _write(folder, [*TRAIN, ""], ["|1x3 Cross validator", *(row + "." for row in TEST), ""])


def from_rows(folder: Path, train: dict, test: dict) -> Path:
    """Writes rows in memory (of the click log, say) as files."""
    from census_income.adult_files import FILE_COLUMNS, LABEL, LABELS

    def lines(rows):
        rows = {**rows, LABEL: np.array(LABELS)[rows[LABEL]]}
        columns = [rows[column].astype(str) for column in FILE_COLUMNS]
        return [", ".join(row) for row in zip(*columns)]

    return _write(folder, [HEADER, *lines(train)], [HEADER, *lines(test)])


def _write(folder: Path, train: list[str], test: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adult.data").write_text("\n".join(train) + "\n")
    (folder / "adult.test").write_text("\n".join(test) + "\n")
    return folder
