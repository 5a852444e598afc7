"""tools/test_versions.sh tests every supported TensorFlow and Python, and names missing Pythons."""

from __future__ import annotations

import pytest
from scratch_checkout import EVERY_STEP, Checkout

TESTS = ["tests", "job"]


@pytest.fixture
def three(checkout: Checkout) -> Checkout:
    for version in ("3.12.3", "3.10.13", "3.9.18"):
        checkout.python(f"python{version.rpartition('.')[0]}", version)
    return checkout


def test_each_supported_version_is_listed(checkout: Checkout):
    newest = checkout.python("python3.11", "3.11.7")
    checkout.python("python3.10", "3.10.13", missing="venv")
    unnamed = checkout.python("python3", "3.9.2")
    checkout.python("python3.14", "3.14.1")
    assert checkout.setup("--versions").splitlines() == [
        "2.21 3.13 -",
        "2.21 3.12 -",
        f"2.21 3.11 {newest}",
        "2.21 3.10 -",
        f"2.15 3.11 {newest}",
        "2.15 3.10 -",
        f"2.15 3.9 {unnamed}",
    ]
    assert checkout.calls() == []
    assert not (checkout.root / ".venv").exists()


def test_each_version_has_an_environment_of_its_own(three: Checkout):
    printed = three.run("test_versions.sh")
    passed = "2.21 on 3.12, 2.21 on 3.10, 2.15 on 3.10, 2.15 on 3.9"
    assert f"passed: TensorFlow {passed}\n" in printed
    assert "FAILED" not in printed
    assert three.calls() == [*EVERY_STEP, *TESTS] * 4
    for name in ("2.21-3.12", "2.21-3.10", "2.15-3.10", "2.15-3.9"):
        assert (three.root / ".venvs" / name / "bin" / "python").exists()
    assert not (three.root / ".venv").exists()
    three.run("test_versions.sh")
    assert three.calls() == TESTS * 4


def test_missing_pythons_are_named(checkout: Checkout):
    checkout.python("python3.10", "3.10.13")
    printed = checkout.run("test_versions.sh")
    assert "passed: TensorFlow 2.21 on 3.10, 2.15 on 3.10\n" in printed
    assert (
        "not tested: Python 3.13, 3.12, 3.11, 3.9, which this machine lacks. To install: apt-get "
        "install python3.13 python3.13-venv python3.12 python3.12-venv python3.11 "
    ) in printed
    assert checkout.calls() == [*EVERY_STEP, *TESTS] * 2


def test_a_failure_on_one_version_does_not_hide_another(three: Checkout):
    printed = three.run("test_versions.sh", expected=1, FAIL="3.10:job")
    assert "passed: TensorFlow 2.21 on 3.12, 2.15 on 3.9\n" in printed
    assert "FAILED: TensorFlow 2.21 on 3.10, 2.15 on 3.10: see above" in printed
    three.calls()
    printed = three.run("test_versions.sh", expected=1, FAIL="tests")
    assert "passed:" not in printed and "FAILED: TensorFlow 2.21 on 3.12, 2.21 on" in printed
    assert three.calls() == ["tests"] * 4  # no job where the tests fail


def test_the_end_is_a_table(three: Checkout):
    printed = three.run("test_versions.sh", expected=1, FAIL="3.10:tests")
    assert table(printed) == [
        "| TensorFlow | Python | set-up | unit tests | a job of two ranks |",
        "|---|---|---|---|---|",
        "| 2.21 | 3.13 | not found | not run | not run |",
        "| 2.21 | 3.12 | passed | passed | passed |",
        "| 2.21 | 3.11 | not found | not run | not run |",
        "| 2.21 | 3.10 | passed | FAILED | not run |",
        "| 2.15 | 3.11 | not found | not run | not run |",
        "| 2.15 | 3.10 | passed | FAILED | not run |",
        "| 2.15 | 3.9 | passed | passed | passed |",
    ]


def table(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("|")]


def test_no_python_at_all_is_a_failure(checkout: Checkout):
    printed = checkout.run("test_versions.sh", expected=1)
    assert "not tested: Python 3.13, 3.12, 3.11, 3.10, 3.9, which this machine lacks" in printed
    assert checkout.calls() == []
