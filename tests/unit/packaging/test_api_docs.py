"""Every public name is documented, and the docs build says so where one isn't."""

from __future__ import annotations

import html
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.unit.profiling import browser

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "docs"))

import build  # noqa: E402
import docs_api  # noqa: E402
import docs_pages  # noqa: E402
import docs_search  # noqa: E402


@pytest.mark.parametrize("name", docs_pages.PUBLIC_MODULES)
def test_public_names_are_documented(name: str):
    assert list(docs_api.undocumented(importlib.import_module(name))) == []


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
    assert list(docs_api.undocumented(module)) == [
        "example.bare: no docstring",
        "example.half: the docstring doesn't name the parameter rows",
        "example.Thing: no docstring",
    ]


def test_the_build_stops_at_an_undocumented_name(monkeypatch):
    module = types.ModuleType("undocumented_example", None)
    monkeypatch.setitem(sys.modules, "undocumented_example", module)
    monkeypatch.setattr(docs_pages, "PUBLIC_MODULES", ("undocumented_example",))
    with pytest.raises(SystemExit, match="undocumented_example: no docstring"):
        build.main()


@pytest.mark.parametrize("owner", docs_api.FOR_THE_LIBRARY)
def test_what_is_left_out_is_there(owner: str):
    module, _, name = owner.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    missing = [x for x in docs_api.FOR_THE_LIBRARY[owner] if x not in vars(kind)]
    assert not missing, f"docs/docs_api.py leaves {missing} of {owner} out, which has none"


def test_a_page_is_searched_by_its_sections():
    text = (
        "Before.\n\n# One `page`\n\nFirst.\n\n## Two\n\n```python\nx = 1\n```\n\n|a|\n|---|\n|b_c|"
    )
    body = docs_pages.read("docs/a.md", text, [], {}).body
    assert list(docs_search.sections(body)) == [
        ("", "", "Before."),
        ("one-page", "One page", "First."),
        ("two", "Two", "x = 1 a b_c"),
    ]
    body = '<section id="A">class A: <div id="A.f" class="part">def f <p>Does.</p></div></section>'
    assert list(docs_search.sections(body)) == [
        ("A", "A", "class A:"),
        ("A.f", "A.f", "def f Does."),
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "docs/build.py", folder], cwd=ROOT, check=True)
    return folder


@pytest.mark.matrix
def test_the_site_is_built(site: Path):
    assert "sharding.svg" in (site / "index.html").read_text(encoding="utf-8")
    api = (site / "api" / "collective.html").read_text(encoding="utf-8")
    assert 'id="CollectiveStrategy.scope"' in api and 'id="DynamicTable.export"' in api
    assert "new_store" not in api and "takes_foreign" not in api
    # It has the frame of all pages.
    assert 'href="../guides/tables.html"' in api and 'id="search"' in api


@pytest.mark.matrix
@browser.needed
@pytest.mark.parametrize(
    "words, first",
    [
        ("keep_best", "api/collective/checkpoint.html#keep_best"),
        ("coming from keras", "coming-from/keras.html"),
        (
            "ValueError: -np 4 asks for 4 ranks, but 1 GPU is visible",
            "troubleshooting.html#np-asks-for-ranks-but",
        ),
    ],
)
def test_the_site_is_searched_in_a_browser(words: str, first: str, site: Path, tmp_path: Path):
    query = words.replace(" ", "+")
    page = browser.shown(f"{(site / 'guides' / 'data.html').as_uri()}?search={query}", tmp_path)
    found = re.search(r'<ol id="found">(.*?)</ol>', page, re.DOTALL)
    assert found, "the list of what was found isn't shown"
    links = [html.unescape(link) for link in re.findall(r'href="([^"]*)"', found[1])]
    assert any(link.startswith(f"../{first}") for link in links[:3]), links
    assert "<mark>" in found[1]
