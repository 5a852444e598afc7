"""`collective plan`: text, data and picture of a forecast, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from collective.__main__ import main
from collective.planner import search, tables_file
from collective.planner.machines import Machines
from collective.planner.published import DEVICES

TABLES = """
batch: 16384
tables:
  user: {rows: 300000001, dimension: 128}
  item: {rows: 1000000, dimension: 32, ids: 5}
  country: {rows: 200, dimension: 16, placement: replicated}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tables.yml"
    path.write_text(TABLES)
    return str(path)


def plan(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(["plan", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_text_says_what_was_chosen_and_where_numbers_come_from(file, capsys):
    code, out, err = plan(capsys, "--tables", file, "--devices", "64 x H100-80GB", "--hosts", "8")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "collective plan: 64 x H100-SXM-80GB on 8 hosts, 16,384 samples in a step"
    (user,) = [line for line in lines if line.startswith("user ")]
    # A 64th of the rows, rounded up, with Adagrad's slot: 4,687,501 * 1,024 bytes.
    assert " rows " in user and "4.8 GB" in user and "takes 307.2 GB of a rank: too much" in user
    (country,) = [line for line in lines if line.startswith("country ")]
    assert "replicated" in country and country.endswith("placement: replicated is given")
    assert any("published  https://www.nvidia.com/en-us/data-center/h100/" in x for x in lines)
    assert any("assumed" in line for line in lines)
    assert lines[-1].startswith("An estimate. ")


def test_data_is_the_forecasts(file, capsys):
    code, out, _ = plan(
        capsys, "--tables", file, "--devices", "8 x H100", "--batch", "2x", "--json"
    )
    (values,) = json.loads(out)
    workload = tables_file.load(file).workload()
    expected = search.forecast(type(workload)(workload.tables, 32768), Machines(DEVICES[0], 8))
    assert code == 0 and values["batch"] == 32768
    assert values["step_seconds"] == pytest.approx(expected.parts.seconds)
    assert sum(values["parts"].values()) == pytest.approx(values["step_seconds"])
    assert values["bytes"] == pytest.approx(expected.bytes)
    placements = {name: table["placement"] for name, table in values["tables"].items()}
    assert placements == expected.placements
    assert values["devices"]["figures"]["memory"]["origin"] == "published"


def test_given_rates_take_the_place_of_published_ones(file, capsys):
    words = ("--memory", "640 GB", "--within", "1 GB/s", "--between", "8 Gbit/s")
    code, out, _ = plan(
        capsys, "--tables", file, "--devices", "8 x H100", "--hosts", "2", *words, "--json"
    )
    figures = json.loads(out)[0]["devices"]["figures"]
    values = [figures[name]["value"] for name in ("memory", "within_rate", "between_rate")]
    assert values == [640e9, 1e9, 1e9] and figures["memory"]["origin"] == "given"


def test_whole_tables_are_on_their_rank(tmp_path, capsys):
    """In the text, with the next best placement, in the data, and in the picture."""
    file, target = tmp_path / "tables.yml", tmp_path / "plan.svg"
    entry = "{rows: 1000000, dimension: 64, ids: 10, imbalance: 3}"
    names = [f"uneven_{number}" for number in range(40)]
    file.write_text("tables:\n" + "".join(f"  {name}: {entry}\n" for name in names))
    words = ("--tables", str(file), "--devices", "40 x H100", "--hosts", "5")
    code, out, _ = plan(capsys, *words, "--full", "--svg", str(target))
    assert code == 0
    owners = set()
    for line in [line for line in out.splitlines() if line.startswith("uneven_")]:
        _, rows, _, _, placement, size, unit, _, more, why = line.split(maxsplit=9)
        assert (rows, size, unit, why[:8]) == ("1,000,000", "512", "MB", "'rows': "), line
        assert float(more) > 0
        owners.add(int(placement.removeprefix("whole:")))
    assert owners == set(range(40)) and "Memory of the fullest rank: " in out
    (values,) = json.loads(plan(capsys, *words, "--json")[1])
    placements = {table["placement"] for table in values["tables"].values()}
    assert placements == {f"whole:{rank}" for rank in range(40)}
    text = target.read_text()
    (where,) = {
        line.partition(" on rank ")[2].partition("<")[0]
        for line in text.splitlines()
        if "uneven_0: 512 MB on rank " in line
    }
    boxes = [line for line in text.splitlines() if ": uneven_0, 512 MB<" in line]
    assert len(boxes) == 1 and f"<title>rank {where}: " in boxes[0]


def test_batches_and_devices_are_compared(file, capsys):
    code, out, _ = plan(
        capsys,
        *("--tables", file, "--devices", "64 x H100", "--devices", "8 x T4"),
        *("--batch", "1x", "--batch", "2x"),
    )
    compared = out.partition("Compared:\n")[2].splitlines()
    assert code == 0
    assert [line.split("  ")[0] for line in compared[1:3]] == ["64 x H100-SXM-80GB on 8 hosts"] * 2
    assert "16,384" in compared[1] and "32,768" in compared[2]
    assert "doesn't fit" in compared[3] and "8 ranks can't hold these tables" in compared[5]


def test_the_smallest_cluster(file, capsys):
    code, out, _ = plan(capsys, "--tables", file, "--devices", "8 x H100", "--smallest")
    # 307 GB at 64 GB a rank.
    assert code == 0 and out.startswith("collective plan: 5 x H100-SXM-80GB on 1 host, ")


def test_the_picture_has_a_piece_for_each_table_on_each_rank(file, tmp_path, capsys):
    target = str(tmp_path / "plan.svg")
    code, _, _ = plan(
        capsys, "--tables", file, "--devices", "8 x H100", "--memory", "200 GB", "--svg", target
    )
    assert code == 0
    root = ElementTree.parse(target).getroot()
    name = "{http://www.w3.org/2000/svg}"
    pieces = [
        (box.find(f"{name}title").text, float(box.get("height")))
        for box in root.iter(f"{name}rect")
        if box.find(f"{name}title") is not None
    ]
    heights = {text.split(",")[0]: height for text, height in pieces}
    assert len(pieces) == 8 * 4
    # 300,000,001 rows of 1,024 bytes: 38.4 GB of 200 GB, on 300 pixels.
    assert heights["rank 7: user"] == pytest.approx(300 * 37500000 * 1024 / 200e9, abs=0.01)
    texts = [text.text for text in root.iter(f"{name}text")]
    assert "country: 25.6 kB on every rank" in texts and "200 GB" in texts


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("--devices", "8 x K80"), 2, "there is no device 'K80'."),
        (("--devices", "H100"), 2, "'H100' doesn't say how many devices there are"),
        (("--devices", "9 x H100", "--hosts", "2"), 2, "9 ranks on 2 hosts"),
        (("--devices", "8 x H100", "--memory", "many"), 2, "'many' is no size: write '80 GB'."),
        (("--devices", "8 x H100", "--batch", "0"), 1, "batch '0': write a number from 1"),
        (("--devices", "8 x H100", "--batch", "infx"), 1, "batch 'infx': write a number from 1"),
        (("--devices", "8 x H100", "--batch", "9" * 400), 1, "at most 2^63 - 1 samples"),
        (("--devices", "8 x H100", "--memory", f"{'9' * 400} GB"), 2, "is no size: write"),
        (("--devices", "1000000000 x H100"), 2, "x H100': a plan is for at most 1,000,000 devices"),
        (("--devices", f"{'9' * 5000} x H100"), 2, "a plan is for at most 1,000,000 devices"),
        (("--devices", "2 x H100"), 1, "The largest, 'user' [300,000,001, 128] with its slots"),
        (("--devices", "8 x H100", "--svg", "/no/such/folder/x"), 1, "No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(file, words, code, message, capsys):
    got, out, err = plan(capsys, "--tables", file, *words)
    assert (got, out) == (code, "")
    assert message in err


def test_a_wrong_file_is_named(tmp_path, capsys):
    missing = str(tmp_path / "none.yml")
    code, out, err = plan(capsys, "--tables", missing, "--devices", "8 x H100")
    assert (code, out) == (1, "") and "none.yml" in err


def test_a_reader_that_has_read_enough_is_told_no_error(file):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "collective.plan", "--tables", file, "--devices", "8 x H100"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
