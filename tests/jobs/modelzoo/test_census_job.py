"""The census as a job file: trained by a Trainer on slots, exported, answered, and searched."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from program_launch import CENSUS_INCOME, ROOT, environ, launch

import collective

pytestmark = pytest.mark.matrix
REPORTED = re.compile(r"(test|served) AUC (\d\.\d+)")


def trained(folder: Path, ranks: int, *options: object) -> list[dict]:
    """Trains three epochs; returns the lines of metrics.jsonl."""
    changes = ("--set", "max_length.epochs=3", "--set", f"checkpoints.folder={folder}")
    done = launch(CENSUS_INCOME / "job.yaml", ranks, *options, *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = dict(REPORTED.findall(done.stdout))
    assert reported["served"] == reported["test"] and float(reported["test"]) > 0.905, done.stdout
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_what_is_served_is_what_was_trained_whoever_makes_the_batches(tmp_path):
    """On one rank from the rows, on two by a stream of two loaders: the same numbers."""
    loaders = ("--data-loaders", 2, CENSUS_INCOME / "loader.py")
    of_rows = trained(tmp_path / "rows", 1)
    of_loaders = trained(tmp_path / "stream", 2, *loaders)
    assert [(line["kind"], line["step"]) for line in of_rows] == [
        (line["kind"], line["step"]) for line in of_loaders
    ]
    values = [
        [
            line["metrics"][name]
            for line in lines
            for name in ("loss", "auc")
            if name in line["metrics"]
        ]
        for lines in (of_rows, of_loaders)
    ]
    # Validations deal whole batches to ranks: the mean of the batches' losses is another one.
    np.testing.assert_allclose(*values, rtol=1e-4)
    losses = [
        [line["metrics"]["loss"] for line in lines if line["kind"] == "training"]
        for lines in (of_rows, of_loaders)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    root = ElementTree.parse(tmp_path / "stream" / "curves.svg").getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_finds_the_best_trial(tmp_path):
    """With Optuna where it is installed, else with as much of it as the program uses."""
    environment = environ()
    try:
        import optuna  # noqa: F401
    except ImportError:
        environment["PYTHONPATH"] += f":{Path(__file__).with_name('optuna_stand_in')}"
    options = ("--trials", 2, "--folder", tmp_path, "-np", 1, "--device", "cpu")
    changes = ("--set", "max_length={batches: 40}", "--tee", "none")
    done = subprocess.run(
        [sys.executable, CENSUS_INCOME / "search.py", *map(str, (*options, *changes))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [best] = re.findall(r"^best AUC (\S+) with {'learning_rate': ", done.stdout, re.M)
    aucs = [collective.load(str(tmp_path / each / "best")).metrics["auc"] for each in "01"]
    assert f"{max(aucs):.4f}" == best and aucs[0] != aucs[1]
