"""Every option is used, or refused by name, in each kind of job: none is ignored without a word."""

from __future__ import annotations

import argparse

import pytest

from collective.launch import cli
from collective.launch.command_line.option_checks import check_used
from collective.launch.manifests.options import add_options

EACH = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1")
ONE_OF_ANY = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1")
LIST = ("-H", "localhost:2,192.0.2.1:2")
MODES = {"one": (), "standalone": ("--standalone",), "any": ONE_OF_ANY, "each": EACH, "list": LIST}
RESTARTS = ("--max-restarts", "1")

# Of each option: a value, and where it is refused, and where a note says that it has no effect.
ONE = {"one", "standalone"}
OPTIONS = {
    "--nproc-per-node": ("2", set(), set()),
    "--node-rank": ("0", {"list"}, set()),
    "--master-addr": ("127.0.0.1", {"list"}, ONE),
    "--master-port": ("2950", {"list"}, ONE),
    "--ssh-port": ("22", {*ONE, "any", "each"}, set()),
    "--ssh-identity-file": ("key", {*ONE, "any", "each"}, set()),
    "--standalone": (None, {"each", "list"}, set()),
    "--network-interface": ("lo", ONE, set()),
    "--start-timeout": ("5", ONE, set()),
    "--host-timeout": ("5", ONE, set()),
    "--secret-file": ("file", {*ONE, "list"}, set()),
    "--device": ("cpu", set(), set()),
    "--bind": ("none", set(), set()),
    "--log-dir": ("logs", set(), set()),
    "--tee": ("0", set(), set()),
    "--verbose": (None, set(), set()),
    "--no-python": (None, set(), set()),
    "--independent": (None, set(), set()),
    "--test-mode": (None, set(), set()),
    "--metrics-port": ("9400", set(), set()),
    "--data-loaders": (None, {"each", "list"}, set()),
    "--as": ("horovod", set(), set()),
    "--grace": ("5", set(), set()),
    "--preempt-signal": ("USR1", set(), set()),
    "--max-restarts": ("1", set(), set()),
    "--stall-timeout": ("5", set(), set()),
}
WITH_RESTARTS = {
    "--restart-pause": ("1", set(), set()),
    "--no-restart-after": ("out of memory", set(), set()),
    "--leave-out-host-after": ("ECC error", set(), set()),
    "--elastic": (None, {"each", "list"}, set()),
}
# What they are about must be there, whatever the mode; or they say what is to be done.
NEED_ANOTHER = {
    "--embedding-scope": "auto",
    "--min-np": "1",
    "--restart-pause": "1",
    "--no-restart-after": "out of memory",
    "--leave-out-host-after": "ECC error",
    "--set": "slots=2",
}
KINDS_OF_JOB = {"--nnodes", "--host", "--hostfile"}
PURPOSES = {"--dry-run", "--check", "--version", "--help", "--emit", "--job-schema"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a launcher that prints its plan; returns its exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("PET_NNODES", "PET_NODE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "s.py").write_text("")
    (tmp_path / "program").write_text("#!/bin/sh\n")
    (tmp_path / "program").chmod(0o755)

    def run(*words):
        command = "./program" if "--no-python" in words else "s.py"
        code = cli.main([*words, "--dry-run", command])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", [*OPTIONS, *WITH_RESTARTS])
def test_an_option_is_used_or_refused_by_name(run, mode, option):
    value, refused, noted = {**OPTIONS, **WITH_RESTARTS}[option]
    restarts = RESTARTS if option in WITH_RESTARTS else ()
    words = [option] if value is None else [option, value]
    if option == "--data-loaders":
        words = [option, "2", "s.py"]
    code, stderr = run("-np", "2", *MODES[mode], *restarts, *words)
    assert code == (2 if mode in refused else 0), stderr
    assert (option in stderr) == (mode in refused | noted), stderr
    assert stderr.count("\n") == (mode in refused | noted)


def test_the_table_has_all_options():
    parser = cli.launcher_parser("launch")
    manifests = argparse.ArgumentParser(add_help=False)
    add_options(manifests)
    of_manifests = set(manifests._option_string_actions)
    known = {*OPTIONS, *WITH_RESTARTS, *NEED_ANOTHER, *KINDS_OF_JOB, *PURPOSES}
    for action in parser._actions:
        names = set(action.option_strings)
        assert names & (known | of_manifests), f"{names}: in which jobs is it used?"


@pytest.mark.parametrize("option", NEED_ANOTHER)
def test_an_option_about_another_needs_that(run, option):
    code, stderr = run(option, NEED_ANOTHER[option])
    assert code == 2 and option in stderr and "give" in stderr


@pytest.mark.parametrize(
    "words", [("--check",), ("--emit", "slurm"), ("--check", "--emit", "slurm")]
)
def test_one_command_line_has_one_purpose(run, words):
    code, stderr = run(*words)
    assert code == 2 and "contradict: each prints, and starts nothing" in stderr


def test_a_variable_may_say_how_many_hosts_there_are(run, monkeypatch):
    """A scheduler's script for any number of hosts."""
    monkeypatch.setenv("PET_NNODES", "1")
    assert run("--start-timeout", "5", "--master-port", "2950") == (0, "")
    assert run("--standalone", "--start-timeout", "5")[0] == 2


@pytest.mark.parametrize(
    "kind, replicas, code", [("slurm", 2, 0), ("slurm", 1, 2), ("mpijob", 1, 0)]
)
def test_a_manifest_has_no_option_that_its_launchers_would_refuse(kind, replicas, code, capsys):
    words = ["--emit", kind, "--replicas", str(replicas), "--image", "i", "--start-timeout", "5"]
    words = [word for word in words if kind != "slurm" or word not in ("--image", "i")]
    assert cli.main([*words, "-np", "1", "--device", "cpu", "s.py"]) == code
    assert ("--start-timeout" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("words", [("-m", "nosuchmod"), ("nothere.py",), ("python3", "nothere.py")])
@pytest.mark.parametrize("options", [("--check",), ("--check", "-H", "localhost,192.0.2.1"), ()])
def test_what_is_not_there_is_an_error_before_anything_starts(words, options, capsys, monkeypatch):
    monkeypatch.setattr(
        "collective.launch.check.diagnostics.check", lambda *_: pytest.fail("it checks")
    )
    assert cli.main([*options, *words]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("collective launch: there is no ") and words[-1] in stderr
    assert stderr.count("\n") == 1


def test_no_mode_refuses_what_was_not_given():
    options = cli.parse_options(["s.py"])
    assert [check_used(options, {}, mode) for mode in ("one", "each", "list")] == [""] * 3
