"""Where the rows come from: the census data or, where they can't be had, the click log."""

from __future__ import annotations

from collections.abc import Callable

import click_log
import options
from columns import Rows


def load(chosen: options.Options, rank: int, say: Callable[[str], None]) -> tuple[Rows, Rows, str]:
    """Training rows, test rows and the line that says what AUC to compare with."""
    if not chosen.click_log:
        import prepared  # here, because tensorflow-datasets takes its time
        from dataset import DownloadFailed, MalformedFile

        try:
            return (*prepared.load(chosen.folder, say), "PERSIA publishes 0.8929 on these rows")
        except DownloadFailed as failure:
            say(
                "The census data could not be downloaded, so a generated click log of the same "
                "columns takes its place "
                f"({failure})"
            )
        except (MalformedFile, OSError) as error:
            options.parser(rank).error(f"the census data could not be prepared: {error}")
    log = click_log.generate()
    return (
        log.train,
        log.test,
        f"the best possible AUC on these generated rows is {log.best_auc:.4f}",
    )
