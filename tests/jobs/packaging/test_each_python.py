"""tools/test_pythons.sh tests every supported Python that is there, and names the missing ones."""

from __future__ import annotations

from scratch_checkout import EVERY_STEP, Checkout

TESTS = ["tests", "job"]


def test_the_supported_pythons_are_listed(checkout: Checkout):
    newest = checkout.python("python3.11", "3.11.7")
    incomplete = checkout.python("python3.10", "3.10.13", missing="venv")
    unnamed = checkout.python("python3", "3.9.2")
    checkout.python("python3.12", "3.12.1")
    printed = checkout.setup("--pythons")
    assert printed == f"3.11 {newest}\n3.9 {unnamed}\n"
    assert str(incomplete) not in printed
    assert checkout.calls() == []
    assert not (checkout.root / ".venv").exists()


def test_each_python_has_an_environment_of_its_own(checkout: Checkout):
    for version in ("3.11.7", "3.10.13", "3.9.18"):
        checkout.python(f"python{version.rpartition('.')[0]}", version)
    printed = checkout.run("test_pythons.sh")
    assert "passed on Python 3.11 3.10 3.9" in printed
    assert "FAILED" not in printed and "lacks" not in printed
    assert checkout.calls() == [*EVERY_STEP, *TESTS] * 3
    for version in ("3.11", "3.10", "3.9"):
        assert (checkout.root / ".venvs" / version / "bin" / "python").exists()
    assert not (checkout.root / ".venv").exists()
    checkout.run("test_pythons.sh")
    assert checkout.calls() == TESTS * 3


def test_missing_pythons_are_named(checkout: Checkout):
    checkout.python("python3.10", "3.10.13")
    printed = checkout.run("test_pythons.sh")
    assert "passed on Python 3.10\n" in printed
    assert (
        "not tested on Python 3.11 3.9, which this machine lacks. To install: "
        "apt-get install python3.11 python3.11-venv python3.9 python3.9-venv"
    ) in printed
    assert checkout.calls() == [*EVERY_STEP, *TESTS]


def test_a_failure_on_one_python_does_not_hide_another(checkout: Checkout):
    for version in ("3.11.7", "3.10.13", "3.9.18"):
        checkout.python(f"python{version.rpartition('.')[0]}", version)
    printed = checkout.run("test_pythons.sh", expected=1, FAIL="3.10:job")
    assert "passed on Python 3.11 3.9\n" in printed
    assert "FAILED on Python 3.10: see above" in printed
    checkout.calls()
    printed = checkout.run("test_pythons.sh", expected=1, FAIL="tests")
    assert "passed" not in printed and "FAILED on Python 3.11 3.10 3.9" in printed
    assert checkout.calls() == ["tests"] * 3  # no job where the tests fail


def test_no_python_at_all_is_a_failure(checkout: Checkout):
    printed = checkout.run("test_pythons.sh", expected=1)
    assert "not tested on Python 3.11 3.10 3.9" in printed
    assert checkout.calls() == []
