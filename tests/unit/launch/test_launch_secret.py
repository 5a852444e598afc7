"""Tests the secret of a job: where it comes from, and that errors don't tell it."""

from __future__ import annotations

import pytest

from collective.job.errors import UsageError
from collective.job.secret import job_secret

LONG = "0123456789abcdef0123456789abcdef"


def test_the_environment_has_it(tmp_path):
    assert job_secret({"COLLECTIVE_SECRET": LONG}, None) == LONG.encode()


def test_a_file_is_made_once_for_its_owner(tmp_path):
    file = tmp_path / "folder" / "secret"
    first = job_secret({"COLLECTIVE_SECRET": LONG}, str(file))
    assert len(first) == 64 and first != LONG.encode()
    assert file.stat().st_mode & 0o777 == 0o600
    assert job_secret({"COLLECTIVE_SECRET_FILE": str(file)}, None) == first
    assert list(file.parent.iterdir()) == [file]


def test_the_home_folder_has_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert job_secret({}, None) == (tmp_path / ".collective/secret").read_bytes().strip()


def test_a_file_has_the_bytes_of_the_environment(tmp_path):
    keys = []
    for number, text in enumerate(
        ["\u043f\u0430\u0440\u043e\u043b\u044c" * 4, "\u0442\u0435\u0441\u0442" * 6, "\udcff" * 32]
    ):
        file = tmp_path / str(number)
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        file.chmod(0o600)
        keys.append(job_secret({}, str(file)))
        assert keys[-1] == job_secret({"COLLECTIVE_SECRET": text}, None)
    assert len(set(keys)) == 3


@pytest.mark.parametrize("secret", ["too short", "x" * 5000])
def test_a_bad_one_is_refused_untold(secret):
    with pytest.raises(UsageError, match=f"has {len(secret)} characters") as caught:
        job_secret({"COLLECTIVE_SECRET": secret}, None)
    assert secret not in str(caught.value)


def test_one_that_others_may_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text(LONG)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="mode 644.*chmod 600") as caught:
        job_secret({}, str(file))
    assert LONG not in str(caught.value)


def test_one_that_can_not_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be read or made.*COLLECTIVE_SECRET"):
        job_secret({}, str(tmp_path / "file" / "secret"))
