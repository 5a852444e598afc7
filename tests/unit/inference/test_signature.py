"""Values become tensors of the input's type unchanged, or an error names the input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collective
from collective.data.batches.ragged_ids import RaggedIds
from tests import saved_models

RIGHT = {
    "id": [1, -(2**63)],
    "few": [[1, 2], [3, -4]],
    "number": [0.5, 3],
    "double": [0.1, 1e300],
    "flag": [True, False],
    "word": ["to", b"\xff\xfe"],
    "list": [[], [5, 6, 7]],
    "sparse": [[0.5], [0.25, 4]],
}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    path = saved_models.write_types(tmp_path_factory.mktemp("types"))
    with collective.InferenceContext(path) as context:
        yield context


def test_every_form_and_type_comes_as_it_was_given(context):
    got = context.predict(RIGHT)
    for name in ("id", "few", "double", "flag", "word"):
        want = [b"to", b"\xff\xfe"] if name == "word" else RIGHT[name]
        assert got[name].tolist() == want, name
    assert got["number"].dtype == np.float32
    assert got["list"].to_list() == RIGHT["list"] and got["length"].tolist() == [0, 3]
    assert got["total"].tolist() == [0.5, 4.25]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("id", [1.0, 2.0], "'id' takes int64; these are numbers with a fraction"),
        ("id", [True, False], "'id' takes int64; these are booleans"),
        ("id", ["1", "2"], "'id' takes int64; these are text"),
        ("id", [None, 1], "'id' takes int64; no array"),
        ("id", [2**64, 1], "'id' takes int64; no array"),
        ("id", 5, r"'id' has shape \[\]; the signature takes \[any\]"),
        ("id", [1, 2, 3], "input 'id' has 3 samples|'id' 3 samples"),
        ("few", [[1, 2, 3], [1, 2, 3]], r"'few' has shape \[2, 3\]; the signature takes \[any, 2"),
        ("few", [[1, 2], [2**31, 0]], "'few' takes int32, which has no 2147483648"),
        ("number", [{"a": 1}, 2], "'number' takes float32; no array"),
        ("flag", [0, 1], "'flag' takes bool; these are int64"),
        ("word", [1, "a"], "'word' takes text; one value is of type int"),
        ("word", ["\ud800", "a"], "'word': .* is no text of Unicode"),
        ("list", [1, 2], "'list': sample 0 is a list, not of type int"),
        ("list", 3, "'list' is a list of a list for each sample"),
        ("list", [[1], [[2]]], "'list'"),
        ("list", [[1.5], []], "'list' takes int64"),
        ("sparse", [["a"], []], "'sparse' takes float32"),
    ],
)
def test_a_wrong_value_is_named(context, name, value, message):
    with pytest.raises(ValueError, match=message):
        context.predict({**RIGHT, name: value})


def test_an_unknown_input_is_named_with_the_nearest(context):
    with pytest.raises(ValueError, match="no input 'numbr'. Did you mean 'number'"):
        context.predict({**RIGHT, "numbr": [1, 2]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(RIGHT)), value=JSON)
def test_whatever_comes_is_an_answer_or_a_named_error(context, name, value):
    try:
        context.predict({**RIGHT, name: value})
    except ValueError as error:
        assert repr(name) in str(error)


LISTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=5)


@settings(deadline=None)
@given(rows=LISTS)
def test_lists_of_any_length(context, rows):
    """As lists, and as the ids of a Batch."""
    splits = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    ids = RaggedIds(np.array([x for row in rows for x in row], np.int64), splits)
    count = len(rows)
    same = {"id": [0], "few": [[0, 0]], "number": [0], "double": [0], "flag": [True], "word": [""]}
    rest = {name: value * count for name, value in same.items()}
    for given_rows in (rows, ids):
        got = context.predict({**rest, "list": given_rows, "sparse": [[1.0]] * count})
        assert got["list"].to_list() == rows
