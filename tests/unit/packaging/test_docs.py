"""The pages of the documentation are true: links, names, and messages that they quote."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "docs"))

import docs_checks
import docs_pages
import speed_pictures
from collective.compat.framework import find

ROOT = Path(__file__).resolve().parents[3]
PAGES = docs_pages.read_all(ROOT)
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^```text\n(.*?)\n```", TROUBLESHOOTING, re.MULTILINE | re.DOTALL)
VARIES = "\0"


def message_texts() -> Iterator[str]:
    """Yields the strings of the package, with VARIES where something is put in."""
    for folder in ("collective", "launch", "ops", "strategies"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    text = "".join(part if isinstance(part, str) else VARIES for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = re.sub(r"%[\d.]*[sdfr]|\{\w*[^{}]*\}", VARIES, node.value)
                else:
                    continue
                yield " ".join(text.split())
    for file in sorted((ROOT / "ops" / "native").rglob("*.cc")):
        for statement in file.read_text(encoding="utf-8").split(";"):
            literals = re.split(r'"((?:[^"\\\n]|\\.)*)"', statement)[1:-1]
            # Every second part lies between two literals.
            between = (VARIES if part.strip() else "" for part in literals[1::2])
            parts = [text for pair in zip(literals[::2], [*between, ""]) for text in pair]
            yield " ".join("".join(parts).split())


MESSAGES = list(message_texts())


def has_message(quoted: str) -> bool:
    parts = [re.escape(" ".join(part.split())) for part in quoted.split("…")]
    pattern = re.compile(".*".join(parts))
    return any(pattern.search(text) for text in MESSAGES)


def test_links_lead_somewhere():
    assert docs_pages.problems(ROOT, PAGES) == []


def test_names_and_variables_and_targets_are_there():
    assert docs_checks.unknown_names(ROOT, PAGES) == []


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: quoted[:40])
def test_a_message_is_one_of_the_package(quoted: str):
    assert has_message(quoted), f"no message of the package reads: {quoted}"


def test_many_messages_are_quoted_and_none_is_made_up():
    assert len(QUOTED) > 30
    assert not has_message("the table … has been eaten")


def test_what_is_wrong_is_named():
    """A page with every kind of mistake gets a line for each."""
    variable = "COLLECTIVE_" + "NOTHING"  # in two, since it is looked for here, too
    text = f"""# Wrong

[file](none.md), [heading](index.md#none), [source](build.py#line), [outside](../../x)
`collective.nothing`, `strategy.nothing()`, `scope(nothing=1)`, {variable}

    make nothing

```python
x = (
```
"""
    index = docs_pages.read("docs/index.md", "# First", [], {})
    page = docs_pages.read("docs/wrong.md", text, ["docs/index.md"], {})
    found = docs_pages.problems(ROOT, [index, page])
    assert [line for line in found if line.startswith("docs/wrong.md")] == [
        "docs/wrong.md: the link none.md: there is no such file",
        "docs/wrong.md: the link index.md#none: docs/index.md has no heading #none",
        "docs/wrong.md: the link build.py#line: only pages have headings",
        "docs/wrong.md: the link ../../x: there is no such file",
        "docs/wrong.md: no section of NAVIGATION lists it",
    ]
    names = docs_checks.unknown_names(ROOT, [page])
    assert [line.partition(": ")[2] for line in names[:5]] == [
        f"no program reads {variable}",
        "the Makefile has no target nothing",
        "there is no collective.nothing",
        "a strategy has no nothing",
        "scope() has no option nothing",
    ]
    assert "Python can't read" in names[5] and len(names) == 6


def test_a_site_is_checked_as_it_was_written(tmp_path: Path):
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">a</a> <a href="other.html#gone">b</a> <a href="none.html">c</a>'
        '<a href="https://example.org">d</a> <img src="https://example.org/x.png">'
    )
    (tmp_path / "other.html").write_text('<h2 id="here">Here</h2>')
    assert docs_checks.broken_links(tmp_path) == [
        "index.html: the link other.html#gone: other.html has no #gone",
        "index.html: the link none.html: there is no such file",
        "index.html: the link https://example.org/x.png: it is loaded from the network",
    ]


def test_a_page_links_to_pages_files_and_the_api():
    sources = ["docs/guides/a.md", "docs/index.md", "modelzoo/README.md"]
    text = "[b](../index.md#b) [zoo](../../modelzoo) [c](../../setup.py) `strategy.plan()`"
    api = {"strategy.plan": "api/collective.html#CollectiveStrategy.plan"}
    page = docs_pages.read("docs/guides/a.md", text, sources, api)
    assert re.findall(r'href="([^"]*)"', page.body) == [
        "../index.html#b",
        "../modelzoo/index.html",
        "../source/setup.py.html",
        "../api/collective.html#CollectiveStrategy.plan",
    ]


def test_lists_are_read_as_on_github():
    text = "- one:\n\n      code\n\n  more\n- two\n\n1. three\n\n   more"
    body = docs_pages.read("docs/a.md", text, [], {}).body
    assert body.count("<li>") == 3 and body.count("<p>more</p>") == 2 and "<code>code" in body


def test_numbers_and_options_stay_in_one_piece_and_names_break():
    text = "`run --hosts 2`\n\n|a|b|\n|-|-|\n|11.25|`a.long_name.of_some_length` `--network x`|"
    body = docs_pages.read("docs/a.md", text, [], {}).body.replace("<wbr></wbr>", "<wbr />")
    assert '<td class="whole">11.25</td>' in body
    assert "<code>a.<wbr />long_<wbr />name.<wbr />of_<wbr />some_<wbr />length</code>" in body
    assert '<code><span class="whole">--network</span> x</code>' in body
    assert '<code>run <span class="whole">--hosts</span> 2</code>' in body


def test_a_column_of_tests_folds_away():
    text = "| What | Gets | Tests |\n|-|-|-|\n| `x` | equal | test_a::test_b, test_c::test_d |"
    body = docs_pages.read("docs/a.md", text, [], {}).body
    assert body.count("<th>") == 2
    cell = body[body.index("<td>equal") : body.rindex("</td>")]
    cell = re.sub(r"<wbr />|<wbr></wbr>|\n", "", cell)
    assert cell == (
        "<td>equal<details><summary>tests</summary><p>test_a::test_b, test_c::test_d</p></details>"
    )


def test_code_of_a_list_is_code_and_what_tests_are_told_is_not_shown():
    comment = "  <!-- docs: python\n  y = 1\n  -->\n\n"
    code = "  ```python\n  x = [\n      2\n\n  ]\n  ```\n\n"
    text = f"- one:\n\n{comment}{code}  more\n- two"
    body = docs_pages.read("docs/a.md", text, [], {}).body
    shown = re.sub("<[^>]*>", "", body)
    assert "x = [\n    2\n\n]" in shown and "`" not in body and "docs:" not in body
    assert body.count("<li>") == 2 and '<div class="highlight">' in body and "<p>more</p>" in body


@pytest.mark.parametrize(
    "heading, anchor",
    [
        ("When sharding pays, and when it doesn't", "when-sharding-pays-and-when-it-doesnt"),
        ("2. One step, from ids to slot", "2-one-step-from-ids-to-slot"),
        ("A `Makefile` & more", "a-makefile--more"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str):
    assert docs_pages.anchor_of(heading) == anchor


def test_the_readme_has_what_a_visitor_needs_on_its_first_screen():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    seen = re.sub(r"^<!--.*?-->\n\n", "", page, flags=re.MULTILINE | re.DOTALL).splitlines()
    text = "\n".join(seen[:52])
    for needed in ("Limits", "tf.function", "One GPU has been tried", "One machine", "make train"):
        assert needed in text
    assert re.findall(r"  # (\d)", text) == [*"1234567"]
    assert "strategy.shard(" in text and "// strategy.world_size()" in text
    assert max(map(len, page.splitlines())) <= 100 and len(seen) <= 90


# What pages said is not supported, long after it was: a pattern, and what makes the sentence wrong.
THERE = {
    r"tables on SSD|storage on several tiers, in the host": "collective.TablePolicy(storage=)",
    r"best checkpoints?\b": "collective.checkpoint.keep_best",
    r"admission, and evict": "collective.TablePolicy(filter_freq=)",
    r"[Ii]ncremental checkpoints(?!; these are)": "collective.checkpoint.save_increment",
}


@pytest.mark.parametrize("pattern", THERE)
def test_a_list_of_what_is_missing_has_nothing_that_is_there(pattern: str):
    name, _, option = THERE[pattern].partition("(")
    thing = find(name)
    assert not option or option.rstrip("=)") in inspect.signature(thing).parameters
    for page in PAGES:
        rest = re.split(r"\n## What (?:isn't here|is not supported)\n", page.text)[1:]
        missing = "".join(rest).partition("\n## ")[0]
        assert not re.search(pattern, missing), f"{page.source}: there is {THERE[pattern]}"


def test_a_name_that_has_no_effect_is_not_said_to_have_the_same():
    """DeepRec's page has names in two tables: by topic, and all of them with their promises."""
    text = (ROOT / "docs" / "coming-from" / "deeprec.md").read_text(encoding="utf-8")
    by_topic, _, all_names = text.partition("## All names")
    for name in re.findall(r"^\| `(tf\.\w+)` \|[^|]*no effect", by_topic, re.MULTILINE):
        assert re.search(rf"^\| `{name}` .*\| no effect \|", all_names, re.MULTILINE), name


def test_figures_for_who_decides_are_measured_ones():
    page = (ROOT / "docs" / "how-fast.md").read_text(encoding="utf-8")
    log = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"\d{4}-\d\d-\d\d|\d[\d,]*\.\d+|\d+,\d{3}", page))
    assert len(figures) > 15
    assert {
        x for x in figures if not re.search(rf"(?<![\d.,]){re.escape(x)}(?![\d])", log)
    } == set()


def test_each_benchmark_is_in_the_list_of_them():
    folder = ROOT / "benchmarks"
    page = folder.joinpath("README.md").read_text(encoding="utf-8")
    programs = {
        file.name
        for file in folder.glob("*.py")
        if '__name__ == "__main__"' in file.read_text(encoding="utf-8")
    }
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+\.py)`", "\n".join(rows)))
    assert listed == {name for name in programs if not name.endswith("_program.py")}


@pytest.mark.parametrize("name", speed_pictures.PICTURED)
def test_pictures_show_what_was_measured(name: str):
    drawn = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert drawn == speed_pictures.PICTURED[name](), "run: python docs/speed_pictures.py"


def test_names_are_looked_up_without_a_change_of_the_process():
    """The pages name modules whose import is a script's wish to run as another framework's."""
    activating = {f"collective.compat.{name}" for name in ("deeprec", "horovod", "sok")}
    assert not activating & set(sys.modules)
