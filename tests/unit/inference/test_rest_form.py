"""Bodies of TensorFlow Serving's REST form are read and written; numbers stay the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from collective.inference.server.rest_form import PredictRequest


def asked(**body):
    return PredictRequest.of(json.dumps(body).encode())


@settings(deadline=None)
@given(arrays.arrays(st.sampled_from([np.float32, np.float64]), st.integers(1, 9)))
def test_numbers_are_read_back_as_they_were(values):
    answer = json.loads(PredictRequest(None, None).answer({"score": values}))
    back = np.array(answer["outputs"], values.dtype)
    np.testing.assert_array_equal(back, values)
    assert (np.signbit(back) == np.signbit(values))[~np.isnan(values)].all()


@settings(deadline=None)
@given(st.lists(st.floats() | st.integers(-(2**63), 2**64), min_size=1))
def test_numbers_of_a_request_are_those_that_python_reads(values):
    body = json.dumps({"inputs": values})
    got, want = PredictRequest.of(body.encode()).columns, json.loads(body)["inputs"]
    assert list(map(repr, got)) == list(map(repr, want))


def test_rows_and_columns_of_one_output_and_of_several():
    outputs = {"a": np.array([1, 2]), "b": np.array([[3.0], [4.0]])}
    rows, columns = asked(instances=[1, 2]), asked(inputs=[1, 2])
    assert json.loads(rows.answer({"a": outputs["a"]})) == {"predictions": [1, 2]}
    assert json.loads(columns.answer({"a": outputs["a"]})) == {"outputs": [1, 2]}
    assert json.loads(rows.answer(outputs)) == {
        "predictions": [{"a": 1, "b": [3.0]}, {"a": 2, "b": [4.0]}]
    }
    assert json.loads(columns.answer(outputs)) == {"outputs": {"a": [1, 2], "b": [[3.0], [4.0]]}}


@pytest.mark.parametrize("value", [np.array(3), np.array([1, 2, 3])])
def test_an_output_that_is_no_row_for_each_instance(value):
    with pytest.raises(ValueError, match="'a' isn't a value for each of the 2 instances"):
        asked(instances=[1, 2]).answer({"a": value})


def test_text_and_bytes_of_outputs():
    words = np.array([b"to", "schön".encode(), b"\xff"], object)
    answer = json.loads(PredictRequest(None, None).answer({"w": words, "w_bytes": words[:1]}))
    assert answer["outputs"] == {
        "w": ["to", "schön", {"b64": "/w=="}],
        "w_bytes": [{"b64": "dG8="}],
    }


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "isn't JSON"),
        (b"\xff", "isn't JSON"),
        (b"[" * 99999, "isn't JSON: recursion limit"),
        (b"[1]", "a JSON object with 'instances' or 'inputs'"),
        (b"{}", "either 'instances'"),
        (b'{"inputs": 1, "instances": [1]}', "either 'instances'"),
        (b'{"instance": [1]}', "has 'instance'; it takes signature_name, instances, inputs"),
        (b'{"instances": {}}', "a list of rows, and not empty"),
        (b'{"inputs": 1, "signature_name": 3}', "'signature_name' is text"),
    ],
)
def test_what_is_no_request(body, message):
    with pytest.raises(ValueError, match=message):
        PredictRequest.of(body)
