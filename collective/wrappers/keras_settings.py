"""Compares what ranks train a Keras model by: settings of optimizers, loss and layers.

A learning rate, a decay or a clip norm that one rank alone has makes its replicas drift apart, and
its rows of tables; another loss on one rank is another model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v2 as tf2

# Numbers that ranks may draw for themselves, and what is counted in a process.
_OWN = ("seed", "name")
# Longer lists are data: vocabularies, weights.
_LONGEST = 100


def of_optimizer(model: Any) -> dict[str, Any]:
    """Returns the settings of the optimizer that a model is compiled with, by their names."""
    return dict(_settings("optimizer", _config(getattr(model, "optimizer", None))))


def of_model(model: Any) -> dict[str, Any]:
    """Returns the settings of a compiled model: values of optimizer and loss, digests of layers."""
    found = of_optimizer(model)
    losses = tf2.nest.flatten(getattr(model, "loss", None))
    for place, loss in enumerate(losses):
        name = f"loss {place}" if losses[1:] else "loss"
        found[name] = getattr(loss, "__name__", type(loss).__name__)
        if isinstance(loss, str):
            found[name] = loss
        found.update(_settings(name, _config(loss)))
    for layer in model._flatten_layers(include_self=False):
        settings = dict(_settings("", _config(layer)))
        content = json.dumps([type(layer).__name__, settings], sort_keys=True).encode()
        found[f"the layer '{layer.name}'"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return found


def compare(name: str, said: Sequence[dict[str, Any]], advice: str) -> None:
    """Compares what the ranks say.

    Args:
        name: says what they do.
        said: the settings of ranks 0, 1, ….
        advice: what to do where they differ.

    Raises:
        ValueError: a rank has another setting; on every rank.
    """
    for rank, each in enumerate(said):
        for what, value in said[0].items():
            if what in each and repr(each[what]) != repr(value):  # NaN is equal to itself
                other = f"{value} on rank 0, and {each[what]} on rank {rank}"
                if what.startswith("the layer"):
                    other = f"made with other arguments on rank {rank} than on rank 0"
                raise ValueError(f"{name}: {what} is {other}. {advice}")


def _config(given: Any) -> Any:
    """Returns what a Keras object is made with; nothing of another one, or if it can't tell."""
    try:
        return given.get_config()
    except Exception:  # whatever a script's own class raises
        return {}


def _settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers and words of a configuration, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _OWN:
                yield from _settings(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)) and len(value) <= _LONGEST:
        for place, inner in enumerate(value):
            yield from _settings(f"{name}[{place}]", inner)
    elif isinstance(value, np.generic):
        yield from _settings(name, value.item())
    elif isinstance(value, (bool, int, float)) or (
        isinstance(value, str) and " at 0x" not in value
    ):
        yield name, value
