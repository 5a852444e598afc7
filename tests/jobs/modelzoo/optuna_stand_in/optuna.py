"""As much of Optuna as the search of the census job uses, where Optuna isn't installed.

It chooses at random. The names, arguments and attributes are those of Optuna 5.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any


class Trial:
    def __init__(self, number: int, generator: random.Random) -> None:
        self.number = number
        self.params: dict[str, float] = {}
        self._generator = generator

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        if log:
            value = math.exp(self._generator.uniform(math.log(low), math.log(high)))
        else:
            value = self._generator.uniform(low, high)
        return self.params.setdefault(name, value)

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return int(self.params.setdefault(name, self._generator.randint(low, high)))


class Study:
    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._ended: list[tuple[float, dict[str, float]]] = []

    def optimize(self, objective: Callable[[Trial], float], n_trials: int) -> None:
        generator = random.Random(1)
        for number in range(n_trials):
            trial = Trial(number, generator)
            self._ended.append((float(objective(trial)), trial.params))

    @property
    def best_value(self) -> float:
        return self._best[0]

    @property
    def best_params(self) -> dict[str, Any]:
        return self._best[1]

    @property
    def _best(self) -> tuple[float, dict[str, float]]:
        return max(self._ended, key=lambda ended: self._sign * ended[0])


def create_study(*, storage: str, study_name: str, direction: str, load_if_exists: bool) -> Study:
    assert storage.startswith("sqlite:///") and study_name and load_if_exists
    return Study({"maximize": 1, "minimize": -1}[direction])
