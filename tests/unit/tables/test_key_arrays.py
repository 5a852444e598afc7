"""Keys are whole numbers of any integer type, within int64."""

from __future__ import annotations

import numpy as np
import pytest

from collective.tables.dynamic_table import int64_keys


@pytest.mark.parametrize(
    "given",
    [[1, -2], (1, -2), np.array([1, -2], np.int8), np.array([1, 2**63 - 1], np.uint64), [], [[3]]],
)
def test_whole_numbers_are_keys(given):
    keys = int64_keys(given, "t")
    assert keys.dtype == np.int64 and keys.tolist() == np.asarray(given).tolist()


@pytest.mark.parametrize(
    "given, words",
    [
        ([1.0], "not float64. Give whole numbers: keys.astype"),
        ([True], "not bool. Give whole"),
        ([None], "not object. Give whole"),
        (["a"], "not <U1. Hash strings as lookups do"),
        ([b"12"], r"not \|S2. Hash strings"),
        (np.array([b"a", "b"], object), "not object. Hash strings"),
        (np.array([3, 2**64 - 1], np.uint64), "not 18446744073709551615 of uint64. keys.view"),
    ],
)
def test_others_are_refused(given, words):
    with pytest.raises(ValueError, match=f"table 't': keys are .*{words}"):
        int64_keys(given, "t")
