"""`collective checkpoint` writes over nothing, and names what is missing of a chain.

The checkpoints are written by TensorFlow's own operation, in the form that one rank saves.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

import numpy as np
import pytest

from collective.checkpoint import __main__ as command
from collective.checkpoint.files.layout import (
    LAYOUT_ENTRY,
    CheckpointLayout,
    Increment,
    StoredTable,
)
from tests.foreign_checkpoints import deeprec

VALUES = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a command in a folder `job` with m-5, its increments 1 to 5, and m-9, the latest."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("job")
    for prefix, number in [
        ("m-5", 0),
        *((f"m-5.increment-{i}", i) for i in range(1, 6)),
        ("m-9", 0),
    ]:
        write(f"job/{prefix}", number)
    with open("job/checkpoint", "w") as file:
        file.write('model_checkpoint_path: "m-9"\n')

    def run(*arguments):
        code = command.main(list(arguments))
        return code, *capsys.readouterr()

    return run


def write(prefix, number):
    """Writes a whole checkpoint; with a number an increment in which row `number` is -number."""
    table = StoredTable("t", "static", 6, 2, "float32", 2, (6,))
    entries, slices = {"global_step": np.int64(number)}, {"t": (VALUES, 3)}
    increment = None
    if number:
        table = StoredTable("t", "static", 6, 2, "float32", 2, (1,), None, "t/rows", (False,))
        slices = {"t/part_0": (np.full((1, 2), -number, np.float32), 1)}
        entries["t/rows/part_0"] = np.int64([number])
        previous = f"id {number - 1}" if number > 1 else "id m-5"
        increment = Increment(number, "id m-5", previous)
    id = f"id {number}" if number else f"id {os.path.basename(prefix)}"
    layout = CheckpointLayout(1, {"t": table}, id=id, increment=increment)
    entries[LAYOUT_ENTRY] = np.array(layout.to_json())
    deeprec.write(prefix, entries, slices)


def remove(prefix):
    for path in [f"{prefix}.index", *glob.glob(f"{prefix}.data-*")]:
        os.remove(path)


def contents():
    return {
        str(path): None if path.is_dir() else path.read_bytes() for path in Path(".").rglob("*")
    }


@pytest.mark.parametrize(
    "target, words",
    [
        ("job", "'job' is a folder, and a new checkpoint needs a prefix: give a name inside"),
        ("job/", "'job/' is a folder"),
        ("new/", "'new/' is a folder"),
        ("job/m-9", "a checkpoint 'job/m-9' already: job/m-9.index and 1 more file. Nothing is"),
        ("job/m-5", "already: job/m-5.index and 6 more files. Nothing is overwritten: give an"),
        ("job/m-5.increment-9", "'job/m-5.increment-9' is the name of an increment"),
        ("cut", "are files of a checkpoint 'cut' already: cut.data-00000-of-00001. Nothing is"),
        ("headless", "are files of a checkpoint 'headless' already: headless.increment-1.index"),
    ],
)
def test_a_target_with_something_at_it_is_refused_and_left_as_it_is(run, target, words):
    for path in ("cut.data-00000-of-00001", "headless.increment-1.index"):
        with open(path, "w") as file:
            file.write("mine")
    before = contents()
    code, stdout, stderr = run("consolidate", "job/m-5.increment-5", target)
    assert (code, stdout) == (1, "") and stderr.count("\n") == 1
    assert words in stderr, stderr
    assert contents() == before


def test_the_same_result_is_refused_like_any_other(run):
    """Whether it is the same only reading both would tell."""
    assert run("consolidate", "job/m-9", "whole/m")[0] == 0
    before = contents()
    code, _, stderr = run("consolidate", "job/m-9", "whole/m")
    assert code == 1 and "There is a checkpoint 'whole/m' already" in stderr
    assert contents() == before


@pytest.mark.parametrize(
    "gone, named, restorable",
    [
        ((2,), "increment 2 of checkpoint 'job/m-5' is missing", 1),
        ((1,), "increment 1 of checkpoint 'job/m-5' is missing", 0),
        ((2, 3), "increments 2 to 3 of checkpoint 'job/m-5' are missing", 1),
        ((2, 4), "increment 2 of checkpoint 'job/m-5' is missing", 1),
    ],
)
def test_a_gap_is_named_and_what_can_be_restored(run, gone, named, restorable):
    for number in gone:
        remove(f"job/m-5.increment-{number}")
    for arguments in (
        ("verify", "job"),
        ("verify", "job/m-5.increment-5"),
        ("show", "job/m-5.increment-5"),
    ):
        code, stdout, stderr = run(*arguments)
        assert (code, stdout) == (1, "")
        path = f"job/m-5.increment-{gone[0]}.index, but increment 5 is there"
        assert f"{named}: there is no file {path}" in stderr
        assert (
            f"'job/m-5.increment-{restorable}' names the newest state that can be restored"
            in stderr
        )
        assert ("job/m-9: whole" in stderr) == (arguments[1] == "job")
    state = f"job/m-5.increment-{restorable}"
    assert run("verify", state)[0] == 0 and run("show", state)[0] == 0


def test_increments_without_their_base_are_named(run):
    assert run("verify", "job") == (0, "job/m-5 and 5 increments: whole\njob/m-9: whole\n", "")
    remove("job/m-5")
    for arguments in (
        ("verify", "job"),
        ("verify", "job/m-5.increment-2"),
        ("show", "job/m-5.increment-2"),
    ):
        code, stdout, stderr = run(*arguments)
        assert (code, stdout) == (1, "")
        assert (
            "checkpoint 'job/m-5' is missing, and 5 increments of it are there: there is no file "
            "job/m-5.index. Nothing of them can be restored without it." in stderr
        )
        assert ("job/m-9: whole" in stderr) == (arguments[1] == "job")
