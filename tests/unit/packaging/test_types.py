"""Type checkers find mistakes in a program that uses the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Each line with a comment is an error, whose message has the comment's words.
PROGRAM = """
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy, Table, checkpoint, get_embedding_variable
from collective import CounterFilter, EmbeddingConfig, EmbeddingVariableOption, TablePolicy
from collective import CollectivStrategy  # has no attribute "CollectivStrategy"

strategy = CollectiveStrategy()
with strategy.scope(wire_dtype="float16", local_steps=2, plan="quiet", check=True) as entered:
    entered.rank() + 1
    with strategy.embedding_scope(min_rows=10):
        table = get_embedding_variable("t", 8)
option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3))
get_embedding_variable("u", 8, ev_option=option)
get_embedding_variable("v", 8, ev_option=EmbeddingConfig(emb_initialization=(-0.1, 0.1)))
strategy.embedding_scope(policy=TablePolicy(weight_bound=10))
strategy.scope(wire_dtype=tf.bfloat16, gradient_wire_dtype=None, profile="folder")
first, rows = next(checkpoint.read_table("model", "t"))

strategy.scope(wire_type="float16")  # Unexpected keyword argument "wire_type" for "scope"
strategy.scope(wire_dtype="bf16")  # Argument "wire_dtype" to "scope"
strategy.scope(dense_compression="float16")  # Argument "dense_compression" to "scope"
strategy.scope(embedding_gradients="max")  # Argument "embedding_gradients" to "scope"
strategy.scope(missing_slots=None)  # Argument "missing_slots" to "scope"
strategy.scope(plan=True)  # Argument "plan" to "scope"
strategy.scope(local_steps="2")  # Argument "local_steps" to "scope"
strategy.scope(profile_steps=(1, 2, 3))  # Argument "profile_steps" to "scope"
strategy.scope("mean")  # Too many positional arguments for "scope"
strategy.embedding_scope(min_row=10)  # Unexpected keyword argument "min_row" for "embedding_scope"
strategy.estimator(print, shard_inputs=True)  # Unexpected keyword argument "shard_inputs"
strategy.world_sise()  # has no attribute "world_sise"
get_embedding_variable("t", "8")  # Argument 2 to "get_embedding_variable"
get_embedding_variable("t", 8, ev_option=3)  # Argument "ev_option" to "get_embedding_variable"
strategy.embedding_scope(policy="bound")  # Argument "policy" to "embedding_scope"
TablePolicy(weight_bound="10")  # Argument "weight_bound" to "TablePolicy"
TablePolicy(admission=3)  # Unexpected keyword argument "admission" for "TablePolicy"
"""


def expected() -> dict[int, str]:
    """Returns the words of each line's error, by the line's number."""
    lines = enumerate(PROGRAM.splitlines(), 1)
    return {number: line.split("  # ")[1] for number, line in lines if "  # " in line}


@pytest.mark.slow
def test_mistakes_in_a_program_are_found(tmp_path: Path):
    """In an environment that has this checkout's package, each is found in the program's own line.

    Nothing is said of the package itself, however strict the program's checks are.
    """
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # As tools/setup.sh installs it.
    (environment / "checkout").mkdir()
    (environment / "checkout" / "collective").symlink_to(ROOT / "collective")
    (site_packages / "collective_checkout.pth").write_text(str(environment / "checkout"))
    (tmp_path / "program.py").write_text(PROGRAM)
    # TensorFlow has no types, which mypy reports to its importers.
    (tmp_path / "mypy.ini").write_text("[mypy-tensorflow.*]\nignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "program.py"]
    command += ["--no-incremental", "--python-executable", str(environment / "bin" / "python")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "MYPYPATH": ""},
    )
    errors = re.findall(r"^(\S+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert {file for file, _, _ in errors} == {"program.py"}, done.stdout
    by_line = {int(number): message for _, number, message in errors}
    assert set(by_line) == set(expected()), done.stdout
    for number, words in expected().items():
        assert words in by_line[number], done.stdout
