"""Rows, gradients and dense gradients that travel in 16 bits: the census model's loss stays what it is."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from zoo_launch import launch

PROGRAM = Path(__file__).with_name('census_wire_types.py')
OPTIONS: list[dict[str, str]] = [
    {}, *({name: value} for name in ('wire_dtype', 'gradient_wire_dtype') for value in ('float16', 'bfloat16')),
    {'dense_compression': 'fp16'}, {'dense_compression': 'bf16'},
    {'wire_dtype': 'float16', 'gradient_wire_dtype': 'float16', 'dense_compression': 'fp16'},
    {'wire_dtype': 'bfloat16', 'gradient_wire_dtype': 'bfloat16', 'dense_compression': 'bf16'}]


def losses(*options, **environment) -> list[float]:
    completed = launch(PROGRAM, 2, json.dumps(OPTIONS), *options, **environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    found = next(line for line in completed.stdout.splitlines() if line.startswith('[0] ['))
    return json.loads(found[4:])


def check(found: list[float], untrained: float) -> None:
    exact = found[0]
    assert exact < untrained - 0.05
    assert len(found) == len(OPTIONS) and len(set(found)) > 1       # something was rounded
    far = {str(options): loss for options, loss in zip(OPTIONS, found) if abs(loss - exact) > 1e-3}
    assert not far, f'float32: {exact}'


def test_a_few_steps_on_the_click_log():
    check(losses('--click-log', '--steps', 15), untrained=0.69)


@pytest.mark.long
def test_an_epoch_of_the_census_data(census_data):
    check(losses('--epochs', 1, **census_data), untrained=0.55)
