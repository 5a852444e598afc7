"""The console command: which commands there are, and what is said of others."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import collective
from collective.__main__ import COMMANDS, main
from collective.checkpoint.reading import consolidate

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command.name} " in text and command.summary in text
    assert max(map(len, text.splitlines())) <= 100


def test_without_a_command_the_help_goes_to_stderr(capsys):
    assert main([]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("usage: collective ")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"collective {collective.__version__}\n"


@pytest.mark.parametrize(
    "word, hint",
    [
        ("lanch", "there is no command lanch, perhaps you mean launch; the commands are launch, "),
        ("train.py", "there is no command train.py; to start a script: collective launch train.py"),
        ("-np", "there is no command -np; the commands are "),
    ],
)
def test_an_unknown_command_is_one_sentence(word, hint, capsys):
    assert main([word, "2"]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith(f"collective: {hint}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_has_help_under_its_own_name(command, capsys):
    assert callable(importlib.import_module(command.module).main)
    with pytest.raises(SystemExit) as end:
        main([command.name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: collective {command.name} ")


def test_a_command_runs_the_module(capsys):
    assert main(["launch", "missing.py"]) == 2
    assert "there is no script missing.py" in capsys.readouterr().err


def test_the_installed_program_is_this_one():
    text = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    scripts = text.partition("[project.scripts]\n")[2].partition("\n\n")[0]
    assert re.findall(r'^(\S+) = "(.*)"$', scripts, re.MULTILINE) == [
        ("collective", "collective.__main__:main")
    ]


def test_python_runs_it_as_a_module():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "collective", "launch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("usage: collective launch [options] {script.py")
    assert not re.search(r"\| +(tensorflow|numpy|horovod)$", result.stderr, re.MULTILINE)


@pytest.mark.parametrize("given, in_force", [(None, "3"), ("1", "1")])
def test_the_checkpoint_command_keeps_tensorflow_quiet(given, in_force):
    """TensorFlow reads the level once, when it is imported. The user's own counts."""
    source = (
        "import os, sys, collective.checkpoint.__main__\n"
        "print(os.environ['TF_CPP_MIN_LOG_LEVEL'], 'tensorflow' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    if given:
        environment["TF_CPP_MIN_LOG_LEVEL"] = given
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout == f"{in_force} False\n", result.stderr


@pytest.mark.parametrize(
    "source, target, is_hinted",
    [
        ("job", "job/model.ckpt", True),
        ("job/model.ckpt-3", "job/plain", True),
        ("job", "other/model.ckpt", False),
        ("job/model.ckpt-3", "plain", False),
    ],
)
def test_a_consolidated_checkpoint_among_the_jobs_own_is_hinted_at(
    capsys, monkeypatch, tmp_path, source, target, is_hinted
):
    monkeypatch.chdir(tmp_path)
    for folder in ("job", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(consolidate, "consolidate", lambda source, target: None)
    monkeypatch.setattr(consolidate, "description", lambda target: "tables")
    assert main(["checkpoint", "consolidate", source, target]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "tables\n" and stderr.count("\n") == is_hinted
    assert ("lies among the job's own checkpoints" in stderr) == is_hinted
