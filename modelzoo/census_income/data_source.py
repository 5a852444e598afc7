"""Chooses where the rows come from: the census or, where it can't be had, the click log."""

from __future__ import annotations

from collections.abc import Callable

from census_income import click_log
from census_income.columns import Rows
from census_income.options import Options

Print = Callable[[str], None]


def load(options: Options, report: Print, fail: Print) -> tuple[Rows, Rows, str]:
    """Loads the training rows, the test rows and a line that says what AUC to compare with.

    `report` gets what happens on the way. `fail` gets what is wrong with the census data, and
    doesn't return.
    """
    if not options.click_log:
        # Here, because tensorflow-datasets takes seconds to import.
        from census_income import dataset
        from common.data_preparation import DownloadFailed

        try:
            train, test = dataset.load(options.census_dir, report)
            return train, test, "PERSIA publishes 0.8929 on these rows"
        except DownloadFailed as failure:
            report(
                f"The census data could not be downloaded, so a generated click log of the same "
                f"columns takes its place ({failure})"
            )
        except (dataset.MalformedFile, OSError) as error:
            fail(f"the census data could not be prepared: {error}")
    log = click_log.generate()
    best = f"the best possible AUC on these generated rows is {log.best_auc:.4f}"
    return log.train, log.test, best
