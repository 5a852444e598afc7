"""Every public name is documented, and the docs build says so where one isn't."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_build() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.mark.parametrize("name", build.PUBLIC_MODULES)
def test_public_names_are_documented(name: str):
    assert list(build.undocumented(importlib.import_module(name))) == []


def test_what_is_not_documented_is_named():
    module = types.ModuleType("example", "An example.")

    def bare(x):
        pass

    def half(x, rows):
        """Takes x."""

    class Thing:
        def method(self):
            """Does it."""

    module.bare, module.half, module.Thing = bare, half, Thing
    module.__all__ = ["bare", "half", "Thing"]
    assert list(build.undocumented(module)) == [
        "example.bare: no docstring",
        "example.half: the docstring doesn't name the parameter rows",
        "example.Thing: no docstring",
    ]


def test_the_build_stops_at_an_undocumented_name(monkeypatch):
    module = types.ModuleType("undocumented_example", None)
    monkeypatch.setitem(sys.modules, "undocumented_example", module)
    monkeypatch.setattr(build, "PUBLIC_MODULES", ("undocumented_example",))
    with pytest.raises(SystemExit, match="undocumented_example: no docstring"):
        build.main()


@pytest.mark.matrix
def test_the_site_is_built(tmp_path: Path):
    subprocess.run([sys.executable, "docs/build.py", tmp_path], cwd=ROOT, check=True)
    assert "sharding.svg" in (tmp_path / "index.html").read_text(encoding="utf-8")
    api = (tmp_path / "api" / "collective.html").read_text(encoding="utf-8")
    assert 'id="CollectiveStrategy.scope"' in api
