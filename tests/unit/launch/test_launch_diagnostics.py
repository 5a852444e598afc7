"""`--check` names the compiled operations, and what to do where they are missing."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from collective.launch.check import diagnostics
from collective.launch.check.host_facts import local_facts
from collective.launch.command_line.host_options import HostOptions


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the packages that can't be imported, and why; by default all can."""
    problems: dict[str, str] = {}

    def facts_of_import(source: str) -> tuple[dict[str, object], str]:
        problem = next((why for name, why in problems.items() if name in source), "")
        return ({}, problem) if problem else ({"version": "1.0", "gloo": True, "nccl": True}, "")

    monkeypatch.setattr(diagnostics, "_facts_of_import", facts_of_import)
    return problems


def test_nothing_is_missing(packages: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert diagnostics.check() == 0
    printed = capsys.readouterr().out
    assert "\noperations  1.0" in printed and "missing" not in printed


def test_missing_operations_are_named_and_no_obstacle(
    packages: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    packages["native_library"] = "ImportError: they were not built"
    assert diagnostics.check() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "operations  none: ImportError: they were not built" in lines
    assert [line for line in lines if line.startswith("missing: ")] == [
        "missing: the compiled operations, without which steps are slower; "
        "`make setup` in a checkout builds them, or `pip install .`"
    ]


def test_without_tensorflow_only_that_is_named(
    packages: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    packages["tensorflow as module"] = "ModuleNotFoundError: No module named 'tensorflow'"
    assert diagnostics.check() == 1
    printed = capsys.readouterr().out
    assert "operations" not in printed and "missing: TensorFlow" in printed


def test_a_missing_horovod_has_a_command(
    packages: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    packages["horovod as module"] = "ModuleNotFoundError: No module named 'horovod'"
    assert diagnostics.check() == 0  # the ranks of one host need none
    assert "`collective build-horovod` builds it" in capsys.readouterr().out


def test_an_installed_package_that_fails_at_its_import_is_named(
    packages: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    """A pyarrow for NumPy 2 together with NumPy 1: nothing else says so before a job needs it."""
    packages["pyarrow as module"] = "ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4"
    assert diagnostics.check() == 0
    printed = capsys.readouterr().out
    assert "none: ImportError: pyarrow requires NumPy 2.0" in printed
    assert "missing: a pyarrow that can be imported" in printed
    assert "pip install 'pyarrow>=14,<22' installs one" in printed


@pytest.mark.parametrize("has_cuda", [True, False])
def test_cuda_is_said_of_the_package_not_of_the_machine(has_cuda, capsys, monkeypatch, tmp_path):
    """Read as "CUDA yes" it promised a GPU to a machine without one."""
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"__version__ = '2.15.1'\nclass test:\n    is_built_with_cuda = lambda: {has_cuda}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts, problem = diagnostics._facts_of_import(diagnostics._TENSORFLOW)
    expected = "2.15.1 (built with CUDA)" if has_cuda else "2.15.1 (built without CUDA)"
    assert diagnostics._summary(facts, problem) == expected


def of_two_hosts(monkeypatch, tmp_path, node=0, port=1, **fields):
    """Runs the check of one host of two, whose first one is this machine's loopback."""
    monkeypatch.setattr(diagnostics, "local_facts", lambda: replace(FACTS, **fields))
    secret = str(tmp_path / "secret")
    job = diagnostics.CheckedJob(
        ranks=2, hosts=HostOptions(2, node, "127.0.0.1", port, secret_file=secret)
    )
    return diagnostics.check(job, {})


FACTS = local_facts()


def test_a_port_that_is_taken_is_an_obstacle(packages, capsys, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("long enough to be a secret")
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert of_two_hosts(monkeypatch, tmp_path, port=port) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("problem")] == [
        f"problem: --master-port {port} at 127.0.0.1 can't be listened at: Address already in use; "
        "if another job has it, choose another for all hosts"
    ]
    assert of_two_hosts(monkeypatch, tmp_path, port=port) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("problem") for line in lines)
    assert any("is this host's loopback, 127.0.0.1, which no other" in line for line in lines)


def test_a_secret_that_is_missing_is_not_made(packages, capsys, monkeypatch, tmp_path):
    assert of_two_hosts(monkeypatch, tmp_path, node=1) == 0
    assert f"note: the job's secret {tmp_path}/secret does not exist" in capsys.readouterr().out
    assert not (tmp_path / "secret").exists()
    (tmp_path / "secret").write_text("short")
    (tmp_path / "secret").chmod(0o600)
    assert of_two_hosts(monkeypatch, tmp_path, node=1) == 1
    assert "secret has 5 characters" in capsys.readouterr().out


def test_too_few_open_files_are_an_obstacle(packages, capsys, monkeypatch, tmp_path):
    assert of_two_hosts(monkeypatch, tmp_path, node=1, open_files=100) == 1
    assert "a process may open 100 files (ulimit -n), a job of 4 ranks" in capsys.readouterr().out
