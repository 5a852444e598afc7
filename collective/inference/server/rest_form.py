"""Reads and writes the bodies of TensorFlow Serving's REST interface.

    {"signature_name": …, "instances": [row, …]}        rows: objects by input, or bare values
    {"signature_name": …, "inputs": {name: column}}     columns, or a bare one
    {"predictions": [row, …]}   {"outputs": {name: column}}

Numbers are written so that they are read back as the same float32 or float64. See
https://www.tensorflow.org/tfx/serving/api_rest.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic_core
import tensorflow.compat.v1 as tf

from collective.inference.signature import Signature
from collective.ops.counting import counted

_KEYS = ("signature_name", "instances", "inputs")


@dataclasses.dataclass(frozen=True)
class PredictRequest:
    """Holds what the body of a request says.

    Attributes:
        signature: the name of the signature; None: the default one.
        rows: `instances`, as they came; None if there are `inputs`.
        columns: `inputs`, as they came; None if there are `instances`.
    """

    signature: str | None
    rows: list[Any] | None
    columns: Any = None

    @staticmethod
    def of(body: bytes) -> PredictRequest:
        """Reads a body.

        Raises:
            ValueError: it isn't JSON, or not of this form.
        """
        try:
            parsed = pydantic_core.from_json(body)  # in a third of the time of `json`
        except ValueError as error:
            raise ValueError(f"the body isn't JSON: {error}.") from None
        if not isinstance(parsed, dict):
            raise ValueError("the body is a JSON object with 'instances' or 'inputs'.")
        if unknown := [key for key in parsed if key not in _KEYS]:
            raise ValueError(f"the body has {unknown[0]!r}; it takes {', '.join(_KEYS)}.")
        if ("instances" in parsed) == ("inputs" in parsed):
            raise ValueError("the body has either 'instances' (rows) or 'inputs' (columns).")
        signature = parsed.get("signature_name")
        if signature is not None and not isinstance(signature, str):
            raise ValueError("'signature_name' is text.")
        if "inputs" in parsed:
            return PredictRequest(signature or None, None, parsed["inputs"])
        rows = parsed["instances"]
        if not isinstance(rows, list) or not rows:
            raise ValueError("'instances' is a list of rows, and not empty.")
        return PredictRequest(signature or None, rows)

    def values(self, signature: Signature) -> dict[str, Any]:
        """Returns the values of the inputs by name, as `Signature.feed` takes them.

        Raises:
            ValueError: rows have different inputs, or bytes aren't Base64.
        """
        columns = self._columns(signature)
        for name, tensor in signature.inputs.items():
            if tensor.dtype == tf.string and name in columns:
                columns[name] = _decoded(name, columns[name])
        return columns

    def _columns(self, signature: Signature) -> dict[str, Any]:
        names = list(signature.inputs)
        if self.rows is None:
            if isinstance(self.columns, dict) and not _is_base64(self.columns):
                return dict(self.columns)
            return {self._only(names, "'inputs'"): self.columns}
        first = self.rows[0]
        if not isinstance(first, dict) or _is_base64(first):
            return {self._only(names, "'instances'"): self.rows}
        keys = first.keys()
        for number, row in enumerate(self.rows):
            if not isinstance(row, dict) or row.keys() != keys:
                raise ValueError(
                    f"row {number} of 'instances' doesn't have the inputs of row 0, which are "
                    f"{', '.join(map(str, keys)) or 'none'}."
                )
        return {key: [row[key] for row in self.rows] for key in keys}

    def _only(self, names: list[str], what: str) -> str:
        if len(names) != 1:
            raise ValueError(
                f"{what}: values without a name are for a signature of one input, and this has "
                f"{counted(len(names), 'input')}: {', '.join(names)}."
            )
        return names[0]

    def answer(self, outputs: Mapping[str, Any]) -> bytes:
        """Writes the outputs in the form of the request.

        Raises:
            ValueError: there are rows, and an output that isn't one value for each of them.
        """
        columns = {name: _listed(name, value) for name, value in outputs.items()}
        if self.rows is None:
            bare = next(iter(columns.values())) if len(columns) == 1 else columns
            return _text({"outputs": bare})
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != len(self.rows):
                raise ValueError(
                    f"output {name!r} isn't a value for each of the "
                    f"{counted(len(self.rows), 'instance')}: ask by 'inputs' instead."
                )
        if len(columns) == 1:
            return _text({"predictions": next(iter(columns.values()))})
        names = list(columns)
        return _text({"predictions": [dict(zip(names, row)) for row in zip(*columns.values())]})


def error(message: str) -> bytes:
    """Writes the body of an error."""
    return _text({"error": message})


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"}


def _decoded(name: str, value: Any) -> Any:
    """Returns nested lists with bytes in place of `{"b64": …}`."""
    if isinstance(value, list):
        return [_decoded(name, each) for each in value]
    if not _is_base64(value):
        return value
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, TypeError, ValueError) as problem:
        raise ValueError(f"input {name!r}: a 'b64' isn't Base64: {problem}.") from None


def _listed(name: str, value: Any) -> Any:
    """Returns nested lists; of strings text, and `{"b64": …}` if the name ends with `_bytes`."""
    if hasattr(value, "to_list"):  # ragged
        value = value.to_list()
    elif hasattr(value, "dense_shape"):  # sparse
        rows: list[list[Any]] = [[] for _ in range(int(value.dense_shape[0]))]
        for (row, *_), each in zip(value.indices.tolist(), value.values.tolist()):
            rows[row].append(each)
        value = rows
    else:
        array = np.asarray(value)
        if array.dtype.kind == "V":  # bfloat16
            array = array.astype(np.float32)
        value = array.tolist()
    return _with_text(value, name.endswith("_bytes"))


def _with_text(value: Any, as_base64: bool) -> Any:
    if isinstance(value, list):
        if value and isinstance(value[0], (float, int)):  # nothing to do, quickly
            return value
        return [_with_text(each, as_base64) for each in value]
    if not isinstance(value, bytes):
        return value
    try:
        if not as_base64:
            return value.decode()
    except UnicodeDecodeError:
        pass
    return {"b64": base64.b64encode(value).decode()}
