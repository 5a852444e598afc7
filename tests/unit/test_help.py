"""help(collective) begins with a page that says what it is, how to begin and where to read on."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

import collective

PAGE = collective.__doc__


def test_it_is_a_page():
    lines = PAGE.splitlines()
    assert lines[0].endswith(".") and len(lines) <= 50 and max(map(len, lines)) <= 100
    for line in range(1, 8):
        assert f"# {line}" in PAGE
    assert "collective launch -np 2 train.py" in PAGE
    assert "`collective launch --help all`" in PAGE and "docs/" in PAGE


def test_it_lists_the_public_names_with_a_word_on_each():
    listed = PAGE.partition("Public names, in short:")[2].partition("See also:")[0]
    described = re.findall(r"^    ([\w., ]+?)  +\S", listed, re.M)
    names = {name for names in described for name in names.split(", ")}
    modules = {f"collective.{name}" for name in (*collective._SUBMODULES, "launch", "options")}
    assert names == {*collective.__all__, *modules}


IDLE = {
    "CounterFilter": {"filter_option": collective.CounterFilter(3)},
    "CBFFilter": {"filter_option": collective.CBFFilter(3, 100, 0.01)},
    "GlobalStepEvict": {"evict_option": collective.GlobalStepEvict(5)},
    "L2WeightEvict": {"evict_option": collective.L2WeightEvict(0.5)},
    "InitializerOption": {"init_option": collective.InitializerOption(default_value_dim=8)},
    "StorageOption": {
        "storage_option": collective.StorageOption(collective.StorageType.DRAM_SSDHASH, "rows")
    },
    "CheckpointOption": {"ckpt": collective.CheckpointOption("model.ckpt-1")},
}


@pytest.mark.parametrize("name", IDLE)
def test_it_says_no_effect_of_what_has_none(name: str):
    (line,) = (line for line in PAGE.splitlines() if re.match(rf"    (\w+, )*{name}\b", line))
    option = collective.EmbeddingVariableOption(**IDLE[name])
    assert ("no effect" in line) == bool(option.without_effect())


def test_help_shows_it_and_no_class_in_full():
    """Tables inherit 3,000 lines of operators from TensorFlow."""
    text = pydoc.plain(pydoc.render_doc(collective))
    first, _, rest = PAGE.partition("\n")
    assert f"collective - {first[:-1]}" in text
    assert " ".join(rest.split()) in " ".join(text.split())
    assert len(text.splitlines()) <= 120
    assert "class CollectiveStrategy" not in text and "__radd__" not in text


def test_help_of_a_name_and_completion_have_it_all():
    assert "embedding_scope" in pydoc.plain(pydoc.render_doc(collective.CollectiveStrategy))
    assert "embedding_dim" in pydoc.plain(pydoc.render_doc(collective.get_embedding_variable))
    assert {*collective.__all__, *collective._SUBMODULES} <= {*dir(collective)}
    assert {*collective.__all__} <= {name for name, _ in inspect.getmembers(collective)}
