"""Options of the scopes and of estimator(): values, defaults, names of other libraries."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy, checkpoint
from collective.options import EmbeddingOptions, ScopeOptions, declaration, methods, scopes
from collective.options.declaration import INHERIT
from collective.options.scopes import WarmStart

GOOD: dict[str, list[Any]] = {
    "embedding_gradients": ["mean", "sum"],
    "missing_slots": ["error", "fresh"],
    "grouping": [True, False],
    "wire_dtype": [None, "float32", "float16", "bfloat16", tf.float16, tf.bfloat16],
    "gradient_wire_dtype": [None, "float32", "float16", "bfloat16", tf.float16, tf.bfloat16],
    "plan": ["print", "quiet", "full"],
    "profile": [None, "folder"],
    "profile_steps": [(1, 1), (11, 20), [2, 3]],
    "profile_every": [0, 100],
    "local_steps": [1, 16],
    "sync_batch_norm": [True, False],
    "dense_compression": ["none", "fp16", "bf16"],
    "mixed_precision": [None, "float16", "bfloat16"],
    "carrier": [None, "auto", "horovod", "shared_memory", "nccl"],
    "hierarchical": ["auto", True, False],
    "prefetch_keys": [False, True],
    "check": [False, True, 0, 50],
    "deterministic": [False, True],
    "save_code": [False, True],
    "warm_start": [None, "folder", WarmStart("a", {"x": None}), ["a", Path("b"), WarmStart("c")]],
    "checkpoint_blocking": [False, True],
    "checkpoint_buffer": [1, 1 << 30, 0.1, 1.0],
    "checkpoint_on_error": ["continue", "stop"],
}

BAD: dict[str, list[Any]] = {
    "embedding_gradients": ["max", None, 1],
    "missing_slots": ["new", None],
    "grouping": ["yes", None, 2],
    "wire_dtype": ["fp16", tf.float64, 16],
    "gradient_wire_dtype": ["half", tf.int8],
    "plan": [True, "loud"],
    "profile": ["", 5, True],
    "profile_steps": [11, (11,), (0, 5), (5, 4), (1, 2, 3), (1.0, 2), (True, 2), "12"],
    "profile_every": [-1, 1.5, True, None],
    "local_steps": [0, -2, 1.5, True, "2", None],
    "sync_batch_norm": ["yes", None, 2],
    "dense_compression": ["float16", None, True],
    "mixed_precision": ["fp16", True],
    "carrier": ["gloo", True],
    "hierarchical": [None, "flat", 2],
    "prefetch_keys": ["on", None],
    "check": [-1, 1.5, "100", None],
    "deterministic": ["yes", None],
    "save_code": ["yes", None],
    "warm_start": ["", 5, [5], {"a": "b"}],
    "checkpoint_blocking": ["no", None],
    "checkpoint_buffer": [0, -1, 0.0, 1.5, True, "10%", None],
    "checkpoint_on_error": ["warn", None, True],
}


def cases(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, listed in values.items() for value in listed]


def test_every_option_is_tried():
    assert set(GOOD) == set(BAD) == set(declaration.names(ScopeOptions))


@pytest.mark.parametrize("name, value", cases(GOOD))
def test_good_values_are_kept(name: str, value: Any):
    assert getattr(ScopeOptions(**{name: value}), name) == value


@pytest.mark.parametrize("name, value", cases(BAD))
def test_bad_values_are_named(name: str, value: Any):
    with pytest.raises(ValueError) as raised:
        ScopeOptions(**{name: value})
    assert f"scope({name}=…)" in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "10", None])
def test_bad_values_of_embedding_scope_are_named(value: Any):
    with pytest.raises(ValueError) as raised:
        EmbeddingOptions(min_rows=value)
    assert "embedding_scope(min_rows=…)" in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "", "1 QB", "MB", "-1 MB", [1]])
def test_bad_sizes_of_replicated_tables_are_named(value: Any):
    with pytest.raises(ValueError) as raised:
        EmbeddingOptions(replicate_below=value)
    assert "embedding_scope(replicate_below=…)" in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "value, count", [(0, 0), (7, 7), ("1 MB", 10**6), ("1.5kB", 1500), ("2MiB", 2 << 20), ("9", 9)]
)
def test_sizes_of_replicated_tables(value: Any, count: int):
    options = EmbeddingOptions(replicate_below=value)
    assert options.replicate_below == count
    assert dataclasses.replace(options, min_rows=3).replicate_below == count


@pytest.mark.parametrize(
    "value, way",
    [
        ("whole:", ""),
        ("whole:-1", ""),
        ("Whole", ""),
        ("columns", "tf.concat"),
        ("auto:", "'auto:FILE'"),
        ("automatic", "'auto'"),
        ("row", ""),
        (None, ""),
        (3, ""),
        (["rows"], ""),
    ],
)
def test_placements_that_there_are_not_are_named(value: Any, way: str):
    with pytest.raises(ValueError) as raised:
        EmbeddingOptions(placement=value)
    known = (
        "embedding_scope(placement=…) is 'rows' (each row on one rank), 'whole' (all rows on one"
    )
    assert known in str(raised.value)
    assert repr(value) in str(raised.value) and way in str(raised.value)


def test_the_environment_chooses_where_a_scope_does_not():
    assert EmbeddingOptions.by_default({}) == EmbeddingOptions()
    options = EmbeddingOptions.by_default({"COLLECTIVE_PLACEMENT": "auto:a file"})
    assert options.placement == "auto:a file" and options.is_automatic
    assert not EmbeddingOptions(placement="whole").is_automatic
    with pytest.raises(ValueError, match="COLLECTIVE_PLACEMENT in the environment: .*'column'"):
        EmbeddingOptions.by_default({"COLLECTIVE_PLACEMENT": "column"})


def test_checks_hold_for_options_that_replace_others():
    with pytest.raises(ValueError, match="local_steps"):
        dataclasses.replace(ScopeOptions(), local_steps=0)


def test_a_folder_may_be_a_path(tmp_path: Any):
    assert ScopeOptions(profile=tmp_path).profile == tmp_path


def test_checking_options_makes_no_folder(tmp_path: Any):
    ScopeOptions(profile=tmp_path / "profile")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("check, runs", [(False, 0), (0, 0), (True, 100), (1, 1), (7, 7)])
def test_how_often_replicas_are_compared(check: Any, runs: int):
    assert ScopeOptions(check=check).runs_between_checks == runs


def test_inherited_options_are_left_out():
    given = declaration.given(local_steps=2, profile=None, grouping=INHERIT, check=False)
    assert given == {"local_steps": 2, "profile": None, "check": False}
    assert repr(INHERIT) == "<inherited>"


def test_options_of_other_libraries_are_warned_of_once():
    others = {"use_hashtable": True, "emb_backend": "x", "comm_default": 1}
    with pytest.warns(UserWarning) as record:
        methods.tolerate_foreign("scope", ["check"], others)
    (warning,) = record
    assert str(warning.message).startswith(
        "scope(): comm_default, emb_backend, use_hashtable tune another library and have "
    )


@pytest.mark.parametrize("name", [*methods.FOREIGN_PREFIXES, *sorted(methods.FOREIGN)])
def test_every_option_of_another_library_is_tolerated(name: str):
    with pytest.warns(UserWarning, match=f"embedding_scope.. *: {name} .* no effect"):
        methods.tolerate_foreign("embedding_scope", ["min_rows"], {name: 1})


def test_one_option_of_another_library_is_singular():
    with pytest.warns(UserWarning, match="emb_backend tunes another library and has no.* leave it"):
        methods.tolerate_foreign("scope", ["check"], {"emb_backend": "x"})


def test_options_of_a_profile_need_a_folder():
    with pytest.warns(
        UserWarning, match=r"scope\(profile_steps=…\) has no effect without a fold"
    ) as w:
        CollectiveStrategy().scope(profile_steps=(1, 2))
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, around in (
            ({"profile_steps": (1, 2), "profile": "folder"}, None),
            ({"profile_every": 3, "profile": None}, None),
            ({"profile_every": 3}, "folder"),
            ({"local_steps": 3}, None),
        ):
            scopes.warn_of_idle(given, around)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError) as raised:
        methods.tolerate_foreign("scope", ["check", "plan"], {"chekc": 1, "emb_backend": "x"})
    assert str(raised.value) == (
        "scope() has no option chekc. Did you mean check? Its options: check, plan."
    )
    with pytest.raises(TypeError, match="no option palan, x, z. Did you mean plan. Its options: "):
        methods.tolerate_foreign("scope", ["check", "plan"], dict.fromkeys(("palan", "z", "x")))
    with pytest.raises(TypeError, match=r"no option unheard_of\. Its options: check, plan\.$"):
        methods.tolerate_foreign("scope", ["check", "plan"], {"unheard_of": 1})


def test_options_go_by_name():
    with pytest.raises(TypeError, match=r"by name, as in scope\(.*=…\), not 'sum', 2\.$"):
        CollectiveStrategy().scope("sum", 2)  # type: ignore[misc, arg-type]


def test_the_signature_of_scope_has_all_options():
    """`help` and editors show each option by name, with its type; what isn't given is inherited."""
    itself, *options = inspect.signature(CollectiveStrategy.scope).parameters.values()
    assert itself.name == "self"
    assert {option.name for option in options} == set(GOOD)
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert {repr(option.default) for option in options} == {"<inherited>"}
    assert all(option.annotation is not inspect.Parameter.empty for option in options)
    if sys.version_info < (3, 10):  # It can't evaluate `A | B`: types are as they are written.
        assert inspect.signature(CollectiveStrategy.scope).parameters["plan"].annotation
        return
    hints = typing.get_type_hints(CollectiveStrategy.scope)
    assert hints.keys() == set(GOOD) and hints["local_steps"] is int


def test_the_documentation_of_scope_has_all_options():
    """`help` tells the default and the text of each."""
    text = inspect.getdoc(CollectiveStrategy.scope)
    assert text
    words = " ".join(text.split())
    for field in dataclasses.fields(ScopeOptions):
        described = " ".join(field.metadata["text"].split())
        assert len(described) > 40
        assert f" {field.name} (default {field.default!r}): {described} " in words
    assert "{options}" not in text and "Options of checkpoints.\n\nArgs:\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_no_other_option_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methods.tolerate_foreign("scope", ["check"], {})


def test_the_call_that_was_given_an_option_is_named():
    with pytest.raises(
        ValueError, match=r"^Saver\(checkpoint_on_error=…\) is 'continue' or 'stop'"
    ):
        checkpoint.Saver(checkpoint_on_error="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^estimator\(checkpoint_buffer=…\) is a number of bytes"):
        CollectiveStrategy().estimator(lambda: None, checkpoint_buffer=0)
