"""Reading the Adult files, and preparing them once however many processes ask at the same time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program_launch import MODELZOO, NO_NETWORK, environ

from census_income import adult_files, archive, click_log, dataset
from tests.unit.modelzoo import census_files

LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from census_income import dataset
train, test = dataset.load(Path(sys.argv[2]) if sys.argv[2:] else None)
print(len(train['age']), len(test['age']), train['income'].sum(), *train['workclass'][:3])
"""


def parsed(path: Path) -> list[dict]:
    with open(path) as lines:
        return list(adult_files.parse(lines, path))


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
    with pytest.raises(adult_files.MalformedFile, match=complaint):
        list(adult_files.parse([census_files.HEADER, line], "adult.data"))


def test_a_file_without_rows_is_an_error():
    with pytest.raises(adult_files.MalformedFile, match="adult.test: no rows in it"):
        list(adult_files.parse(["|1x3 Cross validator", ""], "adult.test"))


def test_edited_files_and_other_sources_are_prepared_apart(tmp_path):
    folder = census_files.with_header(tmp_path)
    before = dataset.CensusConfig.of_files(folder).name
    assert before == dataset.CensusConfig.of_files(folder).name
    assert before != dataset.CensusConfig.of_files(None).name
    with open(folder / "adult.test", "a") as file:
        file.write(census_files.TEST[0] + "\n")
    assert dataset.CensusConfig.of_files(folder).name != before


def test_the_rows_that_come_along_are_the_census():
    """The counts are those that UCI publishes: 24,720 and 7,841; 12,435 and 3,846."""
    counts = []
    for name in archive.FILES:
        text = archive.read(name).decode()
        labels = [row["income"] for row in adult_files.parse(text.splitlines(), name)]
        counts.append([labels.count(label) for label in adult_files.LABELS])
    assert counts == [[24720, 7841], [12435, 3846]]
    assert archive.ARCHIVE.stat().st_size < 900_000


def test_the_archive_is_made_of_the_census_files(census_data, tmp_path):
    """And says whose they are, under which licence."""
    folder = Path(census_data["COLLECTIVE_DATA_DIR"]) / "census-income"
    for name in archive.FILES:
        assert archive.read(name) == (folder / name).read_bytes()
    notice = archive.read("NOTICE.md").decode()
    assert notice == archive.NOTICE.read_text()
    assert "CC BY 4.0" in notice and "https://doi.org/10.24432/C5XW20" in notice
    first, second = tmp_path / "first.zip", tmp_path / "second.zip"
    archive.make(folder, first)
    time.sleep(0.01)
    archive.make(folder, second)
    assert first.read_bytes() == second.read_bytes()


def start(home: Path, *arguments: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(MODELZOO), *map(str, arguments)],
        text=True,
        env=environ(TFDS_DATA_DIR=str(home), TF_CPP_MIN_LOG_LEVEL="3", **NO_NETWORK),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.long
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
