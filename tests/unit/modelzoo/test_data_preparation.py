"""Data that is prepared once for all ranks, and a download that fails."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from common import data_preparation


@pytest.mark.parametrize(
    "seconds_before, reason, attempts",
    [(3600, "no network", 1), (-3600, "the reason of another rank", 0)],
)
def test_a_failed_download_is_tried_again_but_not_by_the_ranks_of_the_same_job(
    tmp_path, seconds_before, reason, attempts
):
    """Else one rank might train on the data and another on generated rows."""
    stamp = tmp_path / "download-failed"
    stamp.write_text("the reason of another rank")
    os.utime(stamp, (time.time() - seconds_before,) * 2)
    attempted = []

    def prepare(builder):
        attempted.append(builder)
        raise data_preparation.DownloadFailed("no network")

    builder = SimpleNamespace(data_path=tmp_path / "1.0.0")
    with pytest.raises(data_preparation.DownloadFailed, match=reason):
        data_preparation.prepare_once(lambda: (builder, False), prepare, lambda path: None)
    assert len(attempted) == attempts
    assert stamp.read_text() == reason
