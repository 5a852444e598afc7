"""Rows, gradients and dense gradients that travel in 16 bits leave the census loss as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program_launch import launch

PROGRAM = Path(__file__).with_name("census_wire_types.py")
TYPES_OF_16_BITS = {
    "wire_dtype": ("float16", "bfloat16"),
    "gradient_wire_dtype": ("float16", "bfloat16"),
    "dense_compression": ("fp16", "bf16"),
}


def check(names, untrained: float, *options, **environment) -> None:
    """Trains with the defaults and with both types of 16 bits for each of `names`."""
    list_of_options: list[dict[str, str]] = [{}]
    for number in range(2):
        list_of_options.append({name: TYPES_OF_16_BITS[name][number] for name in names})
    completed = launch(PROGRAM, 2, json.dumps(list_of_options), *options, **environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    losses = next(line for line in completed.stdout.splitlines() if line.startswith("[0] ["))
    exact, *rounded = json.loads(losses[len("[0] ") :])
    assert exact < untrained - 0.05
    assert all(loss != exact and abs(loss - exact) < 1e-3 for loss in rounded), (exact, rounded)


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [*([name] for name in TYPES_OF_16_BITS), list(TYPES_OF_16_BITS)], ids="-".join
)
def test_an_epoch_of_the_census_data(census_data, names):
    check(names, 0.55, "--epochs", 1, **census_data)
