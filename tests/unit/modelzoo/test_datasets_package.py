"""The examples on published data say how to get the package that reads them."""

from __future__ import annotations

import sys

import pytest

from census_income import data_source
from census_income import options as census_options
from movielens import options as movielens_options
from movielens import ratings


def refuse(sentence: str) -> None:
    raise SystemExit(sentence)


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        module = name.partition(".")[0]
        if module == "tensorflow_datasets" or name in (
            "census_income.dataset",
            "common.data_preparation",
            "movielens.movielens_100k",
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)


@pytest.mark.parametrize(
    "load, parse, instead",
    [
        (data_source.load, census_options.parse, "--data generated"),
        (ratings.load, movielens_options.parse, "--generated"),
    ],
    ids=["census", "movielens"],
)
def test_a_missing_package_is_a_sentence(without_the_package, load, parse, instead):
    with pytest.raises(SystemExit, match=r"pip install '\.\[datasets\]'") as caught:
        load(parse([]), print, refuse)
    sentence = str(caught.value)
    assert "read by tensorflow-datasets, which can't be imported here" in sentence
    assert sentence.endswith(f"{instead} does without")
