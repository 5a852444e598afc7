"""Criteo's text files become Parquet: each line once, empty fields 0, whole files or none."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pyarrow.parquet
import pytest

from collective import data
from collective.__main__ import main
from collective.data import criteo_files


def line(label=1, numbers=(), keys=()):
    """Returns a line as Criteo's; fields that aren't given are empty."""
    numbers = [*numbers, *[""] * (13 - len(numbers))]
    keys = [*keys, *[""] * (26 - len(keys))]
    return "\t".join(map(str, [label, *numbers, *keys])) + "\n"


LINES = [
    line(0, [1, -3, "", 2147483647], ["68fd1e64", "", "ffffffff"]),
    line(1, ["", 5], ["00000000", "80e26c9b", "0A"[::-1] + "bcDEF0"[:6]]),
    line(0),
]


def read(path):
    return pyarrow.parquet.read_table(path)


@pytest.mark.parametrize("name", ["train.txt", "day_0", "day_1.gz"])
def test_a_file_is_converted(tmp_path, name):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wt") as file:
        file.writelines(LINES)
    (path,) = data.criteo(tmp_path / name, str(tmp_path / "out"))
    assert path == str(tmp_path / "out" / (name.split(".")[0] + ".parquet"))
    table = read(path)
    assert table.column_names == ["label", *criteo_files.NUMBERS, *criteo_files.KEYS]
    assert {str(field.type) for field in table.schema} == {"int32", "int64"}
    assert table["label"].to_pylist() == [0, 1, 0]
    assert table["I1"].to_pylist() == [1, 0, 0] and table["I2"].to_pylist() == [-3, 5, 0]
    assert table["I4"].to_pylist() == [2147483647, 0, 0]
    assert table["C1"].to_pylist() == [0x68FD1E64, 0, 0]
    assert table["C2"].to_pylist() == [0, 0x80E26C9B, 0]
    assert table["C3"].to_pylist() == [0xFFFFFFFF, 0xA0BCDEF0, 0]
    assert table["C26"].to_pylist() == [0, 0, 0]
    assert os.listdir(tmp_path / "out") == [os.path.basename(path)]


def test_keys_of_a_slice_are_its_own(tmp_path, monkeypatch):
    """Many blocks and row groups: all lines, in their order."""
    monkeypatch.setattr(criteo_files, "_BLOCK", 4096)
    monkeypatch.setattr(criteo_files, "ROWS_OF_A_GROUP", 64)
    lines = [line(i % 2, [i], [f"{i:08x}" if i % 3 else ""]) for i in range(1000)]
    (tmp_path / "day").write_text("".join(lines))
    (path,) = data.criteo(tmp_path / "day")
    table = read(path)
    assert table["I1"].to_pylist() == list(range(1000))
    np.testing.assert_array_equal(table["C1"], [i if i % 3 else 0 for i in range(1000)])
    metadata = pyarrow.parquet.read_metadata(path)
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert rows == [64] * 15 + [40]


def test_lines_without_a_label(tmp_path):
    (tmp_path / "test.txt").write_text("".join(text.split("\t", 1)[1] for text in LINES))
    (path,) = data.criteo(tmp_path / "test.txt")
    assert read(path).column_names == [*criteo_files.NUMBERS, *criteo_files.KEYS]
    assert read(path)["I1"].to_pylist() == [1, 0, 0]


def test_what_is_there_already_stays(tmp_path):
    source = tmp_path / "day"
    source.write_text("".join(LINES))
    (path,) = data.criteo(source)
    made = os.stat(path).st_mtime_ns
    assert data.criteo([source]) == [path] and os.stat(path).st_mtime_ns == made
    source.write_text("".join(LINES[:1]))
    os.utime(source, (made // 10**9 + 10,) * 2)
    data.criteo(source)
    assert read(path).num_rows == 1


BAD = {
    "a key": (LINES[0] + line(1, [1], ["68fd1e6x"]), "column C1: '68fd1e6x' isn't a key of 8"),
    "a short key": (LINES[0] + line(1, [1], ["", "68fd"]), "column C2: '68fd' isn't a key of 8"),
    "fields": (LINES[0] + "1\t2\n", "Expected 40 columns, got 2"),
    "a number": (LINES[0] + line(1, ["x"]), "I1|conversion error to int32"),
    "other files": ("a,b,c\n1,2,3\n", "the first line has 1 field between tabs: Criteo's have 40"),
    "nothing": ("", "the first line has 1 field"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_and_no_part_of_a_file_is_left(tmp_path, case, capsys):
    text, message = BAD[case]
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        data.criteo(tmp_path / "bad")
    assert str(error.value).startswith(f"{tmp_path}/bad: ")
    assert os.listdir(tmp_path) == ["bad"]
    assert main(["data", "criteo", str(tmp_path / "bad")]) == 1
    assert f"collective data: {tmp_path}/bad: " in capsys.readouterr().err


def test_a_cut_off_archive_is_named(tmp_path):
    whole = gzip.compress("".join(LINES * 1000).encode())
    (tmp_path / "day.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"day\.gz: "):
        data.criteo(tmp_path / "day.gz")
    assert os.listdir(tmp_path) == ["day.gz"]


def test_the_command_prints_the_new_files(tmp_path, capsys):
    for day in "01":
        (tmp_path / f"day_{day}").write_text(LINES[0])
    output = tmp_path / "out"
    assert main(["data", "criteo", f"{tmp_path}/day_*", "--output", str(output)]) == 0
    assert capsys.readouterr().out.split() == [f"{output}/day_{day}.parquet" for day in "01"]
    assert main(["data", "criteo", f"{tmp_path}/week"]) == 1
    assert "week: there is no such file" in capsys.readouterr().err
