"""Reading the Adult files, and preparing them once however many processes ask at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program_launch import MODELZOO, NO_NETWORK, environ

from census_income import click_log, dataset
from tests.unit.modelzoo import census_files

LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from census_income import dataset
from common.data_preparation import DownloadFailed
try:
    train, test = dataset.load(Path(sys.argv[2]) if sys.argv[2:] else None)
    print(len(train['age']), len(test['age']), train['income'].sum(), *train['workclass'][:3])
except DownloadFailed as error:
    print('download failed', error)
"""


def parsed(path: Path) -> list[dict]:
    with open(path) as lines:
        return list(dataset.parse(lines, path))


def test_both_forms_of_the_files_hold_the_same_rows(tmp_path):
    plain = census_files.with_header(tmp_path / "plain")
    uci = census_files.as_uci_has_them(tmp_path / "uci")
    for name, count in (("adult.data", 3), ("adult.test", 2)):
        rows = parsed(plain / name)
        assert rows == parsed(uci / name)
        assert len(rows) == count
    assert rows[1] == {
        "age": 44,
        "workclass": "?",
        "fnlwgt": 160323,
        "education": "HS-grad",
        "education_num": 9,
        "marital_status": "Divorced",
        "occupation": "Sales",
        "relationship": "Husband",
        "race": "White",
        "sex": "Male",
        "capital_gain": 7688,
        "capital_loss": 0,
        "hours_per_week": 40,
        "native_country": "Cuba",
        "income": ">50K",
    }


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("1, 2, 3", "adult.data, line 2: 3 fields instead of 15"),
        (
            census_files.TRAIN[0].replace("39", "old"),
            "line 2: age is 'old' instead of a whole number",
        ),
        (census_files.TRAIN[0].replace("<=50K", "rich"), "line 2: the label is 'rich'"),
    ],
)
def test_a_malformed_line_is_named(line, complaint):
    with pytest.raises(dataset.MalformedFile, match=complaint):
        list(dataset.parse([census_files.HEADER, line], "adult.data"))


def test_a_file_without_rows_is_an_error():
    with pytest.raises(dataset.MalformedFile, match="adult.test: no rows in it"):
        list(dataset.parse(["|1x3 Cross validator", ""], "adult.test"))


def test_edited_files_and_other_sources_are_prepared_apart(tmp_path):
    folder = census_files.with_header(tmp_path)
    before = dataset.CensusConfig.of_files(folder).name
    assert before == dataset.CensusConfig.of_files(folder).name
    assert before != dataset.CensusConfig.of_uci().name
    with open(folder / "adult.test", "a") as file:
        file.write(census_files.TEST[0] + "\n")
    assert dataset.CensusConfig.of_files(folder).name != before


def test_the_digests_of_the_files_are_known():
    assert set(dataset.CensusIncome.url_infos) == {
        dataset.URL + name for name in dataset.FILES.values()
    }


def start(home: Path, *arguments: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(MODELZOO), *map(str, arguments)],
        text=True,
        env=environ(TFDS_DATA_DIR=str(home), TF_CPP_MIN_LOG_LEVEL="3", **NO_NETWORK),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_killed_preparation_is_redone_and_only_one_of_several_processes_prepares(tmp_path):
    log = click_log.generate(train_rows=12000, test_rows=6000)
    files = census_files.from_rows(tmp_path / "files", log.train, log.test)
    home = tmp_path / "tfds"

    victim = start(home, files)
    deadline = time.monotonic() + 60
    while not list(home.glob("census_income/*/*incomplete*")):
        assert victim.poll() is None, victim.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert list(home.glob("census_income/*/*incomplete*")), "killed too late to be of use"

    outputs = [
        process.communicate(timeout=120) for process in [start(home, files), start(home, files)]
    ]
    expected = " ".join(
        map(str, [12000, 6000, log.train["income"].sum(), *log.train["workclass"][:3]])
    )
    for output, errors in outputs:
        assert output.splitlines()[-1:] == [expected], errors
    assert not list(home.glob("census_income/*/*incomplete*"))
    assert len(list(home.glob("census_income/local-*/1.0.0"))) == 1


@pytest.mark.parametrize(
    "seconds_before, reason",
    [(3600, "https://archive.ics.uci.edu/"), (-3600, "the reason of another rank")],
)
def test_a_failed_download_is_tried_again_but_not_by_the_ranks_of_the_same_job(
    tmp_path, seconds_before, reason
):
    """Else one rank might train on the census and another on the click log."""
    stamp = tmp_path / "census_income" / "uci" / "download-failed"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("the reason of another rank")
    os.utime(stamp, (time.time() - seconds_before,) * 2)
    output, errors = start(tmp_path).communicate(timeout=60)
    assert output.splitlines()[-1].startswith(f"download failed {reason}"), errors
    assert stamp.read_text().startswith(reason)
