"""scope(save_code=True) saves a script with what it needs, whole, and without secrets."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from collective import checkpoint
from collective.checkpoint.saving import saved_code


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Makes a script's folder, as if the script ran; returns it."""
    files = {
        "train.py": "import model\n",
        "model.py": "from layers.tower import SIZE\n",
        "layers/__init__.py": "",
        "layers/tower.py": "SIZE = 7\n",
        "conf/model.yaml": "size: 7\n",
        "data.csv": "1,2\n",
        ".git/hooks.py": "x",
        ".hidden.py": "x",
        "env/pyvenv.cfg": "home = /usr",
        "env/lib.py": "x",
        "venv/lib.py": "x",
        "__pycache__/model.py": "x",
        "ckpt/old.py": "x",
        "conf/api_token.json": "{}",
        "conf/account.json": '{"private_key": "-----BEGIN"}',
        "big.json": "1" * (saved_code.FILE_BYTES + 1),
    }
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.symlink(tmp_path, tmp_path / "job" / "loop")
    script = str(tmp_path / "job" / "train.py")
    monkeypatch.setattr(
        sys,
        "argv",
        [script, "--rate", "1", "--password", "p1", "--api-key=p2", "s3://me:p3@host/x", "--flag"],
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "p4")
    return tmp_path / "job"


def test_what_is_saved(job):
    folder = str(job / "ckpt")
    saved = saved_code.save(folder, {"check": 5, "carrier": None}, 2)
    code = checkpoint.load_code(f"{folder}/model.ckpt-3")
    assert (
        os.path.dirname(code.folder) == saved and Path(code.script).read_text() == "import model\n"
    )
    names = {"train.py", "model.py", "layers/__init__.py", "layers/tower.py", "conf/model.yaml"}
    assert set(code.manifest["files"]) == names
    on_disk = {str(p.relative_to(code.folder)) for p in Path(code.folder).rglob("*") if p.is_file()}
    assert on_disk == names
    assert set(code.manifest["left_out"]) == {
        "big.json",
        "conf/api_token.json",
        "conf/account.json",
    }
    assert code.manifest["arguments"] == [
        "--rate", "1", "--password", "***", "--api-key=***", "s3://me:***@host/x", "--flag",
    ]  # fmt: skip
    assert code.manifest["scope"] == {"check": 5, "carrier": None} and code.manifest["ranks"] == 2
    assert code.manifest["versions"]["python"].startswith("3.")
    text = json.dumps(code.manifest)
    assert not any(secret in text for secret in ("p1", "p2", "p3", "p4"))


def test_other_jobs_checkpoints_and_their_code_are_left_out(job):
    """Else each job would save what those before it have saved."""
    digests = set()
    for name in ("runs/one", "runs/two", "runs/three"):
        folder = job / name
        folder.mkdir(parents=True)
        (folder / "checkpoint").write_text('model_checkpoint_path: "m-1"\n')
        (folder / "options.json").write_text("{}")
        digests.add(os.path.basename(saved_code.save(str(folder), {}, 1)))
    assert len(digests) == 1
    # The script's own folder may have checkpoints; a package may have a file of that name.
    saved_code.save(str(job), {}, 1)
    (job / "layers/checkpoint").write_text("# saves\n")
    code = saved_code.SavedCode(saved_code.save(str(job), {}, 1))
    assert not any("runs" in name or "code" in name for name in code.manifest["files"])
    assert "layers/tower.py" in code.manifest["files"]
    left_out = saved_code.find_files(str(job / "train.py")).left_out
    assert {name for name, why in left_out.items() if "checkpoints" in why} == {
        "code",
        "runs/one",
        "runs/two",
        "runs/three",
    }


def test_the_same_code_is_saved_once_and_other_code_next_to_it(job):
    folder = str(job / "ckpt")
    first = saved_code.save(folder, {}, 1)
    assert saved_code.save(folder, {}, 1) == first
    (job / "model.py").write_text("SIZE = 8\n")
    second = saved_code.save(folder, {}, 1)
    assert second != first and checkpoint.load_code(folder).folder.startswith(second)
    assert sorted(os.listdir(f"{folder}/code")) == sorted(
        [os.path.basename(first), os.path.basename(second), "current"]
    )


def test_its_modules_are_imported_as_they_were(job):
    saved_code.save(str(job / "ckpt"), {}, 1)
    (job / "layers" / "tower.py").write_text("SIZE = 8\n")
    code = checkpoint.load_code(str(job / "ckpt"))
    assert code.module("model").SIZE == 7
    before = set(sys.modules)
    with code.importable():
        import model  # noqa: F401 (of the job)

        assert "layers.tower" in sys.modules
    assert set(sys.modules) == before and code.folder not in sys.path


def test_changed_files_are_an_error(job):
    saved_code.save(str(job / "ckpt"), {}, 1)
    code = checkpoint.load_code(str(job / "ckpt"))
    Path(code.script).write_text("import other\n")
    with pytest.raises(ValueError, match="train.py isn't what was saved"):
        checkpoint.load_code(str(job / "ckpt"))
    Path(code.script).unlink()
    with pytest.raises(ValueError, match="train.py is missing"):
        checkpoint.load_code(str(job / "ckpt"))
    with pytest.raises(ValueError, match=r"there is no code .* scope.save_code=True."):
        checkpoint.load_code(str(job))


def test_bounds(job, monkeypatch):
    monkeypatch.setattr(saved_code, "MOST_FILES", 2)
    found = saved_code.find_files(str(job / "train.py"))
    assert len(found.files) == 2 and found.files[0] == "train.py"
    assert "all files together are too many" in found.left_out.values()


def test_a_kill_leaves_nothing_that_is_taken_for_code(job, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    folder = str(job / "ckpt")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", killed)
        saved_code.save(folder, {}, 1)
    with pytest.raises(ValueError, match="there is no code"):
        checkpoint.load_code(folder)
    assert saved_code.save(folder, {}, 1)
