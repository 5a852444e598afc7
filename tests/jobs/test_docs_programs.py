"""The programs that README and pages of docs/ print run as they stand, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.jobs.pool import launch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.matrix


def write_program(page: str, script: Path) -> Path:
    """Writes the one whole program that a page has."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if "CollectiveStrategy()" in block)
    script.write_text(program, encoding="utf-8")
    return script


def test_the_example_of_the_readme_takes_the_steps_of_plain_tensorflow(tmp_path: Path):
    """Without its numbered lines it is a script for one process, which prints the same loss."""
    script = write_program("README.md", tmp_path / "train.py")
    done = launch("-np", 2, script, cwd=tmp_path)
    assert done.returncode == 0
    assert "the plan of 2 ranks" in done.stdout
    assert "every rank trains on the same records" not in done.stdout
    losses = re.findall(r"\[[01]\] step 100: this rank's loss is ([\d.]+)", done.stdout)
    assert len(losses) == 2

    plain = script.read_text(encoding="utf-8")
    for ours, plain_line in (
        ("from collective import CollectiveStrategy  # 1\n", ""),
        ("strategy = CollectiveStrategy()  # 2\n", ""),
        ("with strategy.scope(), tf.Graph()", "with tf.Graph()"),
        (
            "strategy.shard(tf.data.Dataset.from_tensor_slices(data))",
            "tf.data.Dataset.from_tensor_slices(data)",
        ),
        ("BATCH // strategy.world_size()", "BATCH"),
        ("with strategy.embedding_scope():", "if True:"),
    ):
        assert plain.count(ours) == 1
        plain = plain.replace(ours, plain_line)
    assert "strategy" not in plain
    printed = subprocess.run(
        [sys.executable, "-c", plain], stdout=subprocess.PIPE, encoding="utf-8", check=True
    ).stdout
    (alone,) = re.findall(r"^step 100: this rank's loss is ([\d.]+)$", printed, re.MULTILINE)
    # Each is printed with four digits.
    assert abs(sum(map(float, losses)) / 2 - float(alone)) <= 1.01e-4


@pytest.mark.long
def test_the_program_of_the_quick_start(tmp_path: Path):
    script = write_program("docs/quick-start.md", tmp_path / "likes.py")
    done = launch("-np", 2, script, cwd=tmp_path)
    assert done.returncode == 0
    losses = [float(x) for x in re.findall(r"\[0\] \d+ steps: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < 0.3 < losses[0]
    (model,) = (tmp_path / "served").iterdir()
    likes = tf.saved_model.load(str(model)).signatures["serving_default"]
    user, item = tf.constant([9, 9, 0, 0], tf.int64), tf.constant([9, 0, 9, 0], tf.int64)
    scores = likes(user=user, item=item)["likes"].numpy()
    # Users and items whose last digits make ten or more go together.
    assert scores[0] > 0.9 and scores[3] < 0.1


def test_the_program_for_those_who_know_torchrec(tmp_path: Path):
    script = write_program("docs/coming-from/torchrec.md", tmp_path / "train.py")
    done = launch("-np", 2, script, cwd=tmp_path)
    assert done.returncode == 0
    assert "2 tables" in done.stdout
    for rank in (0, 1):
        assert re.search(rf"\[{rank}\] step 100: this rank's loss is 0\.\d+", done.stdout)


@pytest.mark.long
def test_the_program_that_goes_on_with_its_data(tmp_path: Path):
    script = write_program("docs/guides/data.md", tmp_path / "train.py")
    for ranks, steps in ((2, 8), (1, 8), (3, 4)):
        done = launch("-np", ranks, script, cwd=tmp_path)
        assert done.returncode == 0
        # The output of one rank alone has no number in front.
        said = re.findall(r"^(?:\[0\] )?\d+ records from user \d+ on", done.stdout, re.MULTILINE)
        assert len(said) == steps
    assert tf.train.load_variable(str(tmp_path / "clicks"), "clicks/position") == 20
