"""Chooses where the rows come from: the census or, with --data generated, the click log."""

from __future__ import annotations

import zipfile
from collections.abc import Callable

from census_income import adult_files, click_log
from census_income.columns import Rows
from census_income.options import Options
from common import datasets_package

Print = Callable[[str], None]


def load(options: Options, report: Print, fail: Print) -> tuple[Rows, Rows, str]:
    """Loads the training rows, the test rows and a line that says what AUC to compare with.

    `report` gets what happens on the way. `fail` gets what is wrong with the census data, and
    doesn't return.
    """
    if options.click_log:
        log = click_log.generate()
        best = f"the best possible AUC on these generated rows is {log.best_auc:.4f}"
        return log.train, log.test, best
    dataset = datasets_package.reader("census_income.dataset", "--data generated", fail)
    try:
        train, test = dataset.load(options.census_dir, report)
    except (adult_files.MalformedFile, OSError, zipfile.BadZipFile) as error:
        fail(f"the census data could not be prepared: {error}")
        raise
    return train, test, "PERSIA publishes 0.8929 on these rows"


def load_without_tensorflow(options: Options, fail: Print) -> tuple[Rows, Rows]:
    """Loads the same training and test rows, without TensorFlow, which a loader needs not."""
    if options.click_log:
        log = click_log.generate()
        return log.train, log.test
    try:
        return adult_files.load(options.census_dir)
    except (adult_files.MalformedFile, OSError, zipfile.BadZipFile) as error:
        fail(f"the census data could not be read: {error}")
        raise
